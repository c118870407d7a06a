"""Pipeline schedules: idle time and activations in flight, against the passes that PyTorch's schedules make."""

import numpy as np
import pytest

from ironlaw.model.config import ModelConfig
from ironlaw.plan.cluster.candidates import candidates_of
from ironlaw.plan.cluster.layout_table import code
from ironlaw.plan.cluster.memory import in_flight
from ironlaw.plan.cluster.stages import stage_layers
from ironlaw.plan.cluster.timeline import bubble_share
from ironlaw.workload.layout import Layout
from ironlaw.workload.schedule import fewer_layers_at_ends, passes, pytorch_passes

GPT = ModelConfig.named("gpt2-xl").model_copy(update={"layers": 64})
SPEEDS = [(1.0, 1.0, 1.0), (1.0, 1.2, 0.9), (1.0, 1.5, 0.8), (1.0, 1.0, 0.5), (1.0, 2.0, 1.0)]


def played(schedule, ranks, micro_batches, chunks, seconds):
    """(idle seconds, most activations held by each rank in rank equivalents) of a schedule of PyTorch.

    Passes are timed here, each as soon as its rank and its inputs are ready; `seconds` of a rank's whole share.
    """
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    kinds = schedules._ComputationType
    total = ranks * chunks

    class Stage:
        is_first, is_last, group_rank, group, submod, device = True, False, 0, None, None, "cpu"
        has_backward, num_stages, group_size, stage_index_to_group_rank = True, total, ranks, {}

        def __init__(self, index):
            self.stage_index = index

    v_shaped = "V" in schedule
    held = [Stage(0), Stage(total - 1)] if v_shaped else [Stage(index * ranks) for index in range(chunks)]
    orders = getattr(schedules, schedule)(held, micro_batches, loss_fn=None).pipeline_order
    forward, inputs, weights = (part / chunks for part in seconds)
    cost = {kinds.FORWARD: forward, kinds.BACKWARD_INPUT: inputs, kinds.BACKWARD_WEIGHT: weights}
    cost[kinds.FULL_BACKWARD] = inputs + weights
    done, clock, position = {}, dict.fromkeys(orders, 0.0), dict.fromkeys(orders, 0)
    alive, most = dict.fromkeys(orders, 0), dict.fromkeys(orders, 0)

    def ready(action):
        stage, batch = action.stage_index, action.microbatch_index
        if action.computation_type is kinds.FORWARD:
            return 0.0 if stage == 0 else done.get(("forward", stage - 1, batch))
        if action.computation_type is kinds.BACKWARD_WEIGHT:
            return done.get(("inputs", stage, batch))
        after = [done.get(("forward", stage, batch))]
        after += [] if stage == total - 1 else [done.get(("inputs", stage + 1, batch))]
        return None if None in after else max(after)

    moved = True
    while moved:
        moved = False
        for rank, order in orders.items():
            while position[rank] < len(order):
                action = order[position[rank]]
                parts = [] if action is None else (getattr(action, "sub_actions", None) or [action])
                starts = [ready(part) for part in parts]
                if None in starts:
                    break
                for part in parts:
                    kind = part.computation_type
                    clock[rank] = max(clock[rank], ready(part)) + cost[kind]
                    word = {kinds.FORWARD: "forward", kinds.BACKWARD_WEIGHT: "weights"}.get(kind, "inputs")
                    done[word, part.stage_index, part.microbatch_index] = clock[rank]
                    alive[rank] += kind is kinds.FORWARD
                    most[rank] = max(most[rank], alive[rank])
                    alive[rank] -= kind in (kinds.FULL_BACKWARD, kinds.BACKWARD_WEIGHT)
                position[rank] += 1
                moved = True
    assert all(position[rank] == len(order) for rank, order in orders.items())
    return max(clock.values()) - micro_batches * sum(seconds), [most[rank] / chunks for rank in sorted(most)]


def planned_idle(schedule, ranks, chunks, seconds):
    forward, inputs, weights = (np.array([part]) for part in seconds)
    share = bubble_share(np.array([code("schedule", schedule)]), np.array([float(chunks)]), forward, inputs, weights)
    return float(share[0]) * (ranks - 1) * sum(seconds)


def held(schedule, ranks, chunks, micro_batches):
    layout = Layout(dp=1, pp=ranks, virtual_stages=chunks, schedule=schedule)
    candidates = candidates_of(GPT, [layout], sequence=1024, global_batch=micro_batches)
    return [float(in_flight(candidates, stage)[0]) for stage in range(ranks)]


@pytest.mark.parametrize("seconds", SPEEDS)
@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize(
    ("schedule", "pytorch", "chunks"),
    [
        ("1f1b", "ScheduleInterleaved1F1B", 1),
        ("1f1b", "ScheduleInterleaved1F1B", 2),
        ("zb", "ScheduleInterleavedZeroBubble", 1),
        ("zb", "ScheduleInterleavedZeroBubble", 2),
        ("zbv", "ScheduleZBVZeroBubble", 2),
    ],
)
def test_idle_time_is_that_of_the_order_of_passes(schedule, pytorch, chunks, ranks, seconds):
    idle, _ = played(pytorch, ranks, 4 * ranks, chunks, seconds)
    assert planned_idle(schedule, ranks, chunks, seconds) == pytest.approx(idle, rel=1e-9)


@pytest.mark.parametrize("seconds", SPEEDS)
def test_dualpipe_is_planned_within_a_sixth_and_never_faster_than_it_is(seconds):
    idle, _ = played("ScheduleDualPipeV", 8, 32, 2, seconds)
    assert idle <= planned_idle("dualpipe", 8, 2, seconds) * (1 + 1e-9) <= 1.17 * idle


@pytest.mark.parametrize(
    ("schedule", "pytorch", "chunks"),
    [
        ("zb", "ScheduleInterleavedZeroBubble", 1),
        ("zbv", "ScheduleZBVZeroBubble", 2),
        ("dualpipe", "ScheduleDualPipeV", 2),
    ],
)
def test_activations_in_flight_are_those_of_the_order_of_passes(schedule, pytorch, chunks):
    _, most = played(pytorch, 8, 32, chunks, (1.0, 1.0, 1.0))
    assert held(schedule, 8, chunks, 32) == most


def test_gpipe_holds_every_micro_batch_and_idles_like_1f1b():
    assert held("gpipe", 4, 1, 32) == [32.0] * 4
    assert held("1f1b", 4, 1, 32) == [4.0, 3.0, 2.0, 1.0]
    assert planned_idle("gpipe", 4, 1, (1, 1, 1)) == planned_idle("1f1b", 4, 1, (1, 1, 1))


def test_the_ends_hold_one_layer_less_where_that_makes_it_even():
    """126 layers on 16 stages: 7, 8 x 14, 7, as Llama 3 405B was trained (arXiv 2407.21783, section 3.3.2)."""
    model = GPT.model_copy(update={"layers": 126})

    def counts(**layout):
        candidates = candidates_of(model, [Layout(**layout)], sequence=1024, global_batch=64)
        return [int(n) for n in stage_layers(candidates).counts[0]]

    assert counts(pp=16) == [7, *[8] * 14, 7]
    assert counts(pp=16, virtual_stages=8) == [7, *[8] * 14, 7]
    assert counts(pp=4, virtual_stages=2, schedule="zbv") == [30, 32, 32, 32]  # both ends are on the first rank
    assert counts(pp=5) == [25, 26, 25, 25, 25]
    assert [fewer_layers_at_ends(n, 128) for n in (125, 126, 127)] == [None, (1, 1), (0, 1)]


def test_virtual_stages_that_do_not_divide_the_layers_are_as_equal_as_can_be():
    """61 layers on 16 ranks of two stages each (DeepSeek-V3, arXiv 2412.19437, section 3.2): at most 4 on a rank."""
    model = GPT.model_copy(update={"layers": 61})
    for schedule, held in (("1f1b", [3, *[4] * 13, 3, 3]), ("dualpipe", [2, 3, *[4] * 14])):
        layout = Layout(pp=16, virtual_stages=2, schedule=schedule)
        assert layout.reason_invalid(model, sequence=1024, global_batch=64) is None
        candidates = candidates_of(model, [layout], sequence=1024, global_batch=64)
        assert [int(n) for n in stage_layers(candidates).counts[0]] == held and sum(held) == 61
    too_many = Layout(pp=16, virtual_stages=4).reason_invalid(model, sequence=1024, global_batch=64)
    assert too_many == "61 layers are fewer than pp 16 x virtual_stages 4"


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("1f1b", 2), ("1f1b", 3), ("zb", 1), ("zb", 3), ("zbv", 2), ("dualpipe", 2)]
)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(4, 2), (4, 12), (3, 6)])
def test_orders_written_here_are_those_that_pytorch_runs(schedule, chunks, ranks, micro_batches):
    if schedule == "dualpipe":
        micro_batches += 2 * ranks  # it wants as many as stages
    order = pytorch_passes(schedule, ranks, chunks, micro_batches)
    assert passes(schedule, ranks, chunks, micro_batches) == [list(one) for one in order]
