"""Memory and traffic of 8- and 4-bit training: by the library that runs the linear layers."""

from dataclasses import replace

import pytest

from ironlaw.catalog.formats import computing_formats, number_format
from ironlaw.catalog.nodes import parse_cluster
from ironlaw.errors import UserError
from ironlaw.ledger import Phase
from ironlaw.model.config import ModelConfig
from ironlaw.plan.cluster.candidates import candidates_of
from ironlaw.plan.cluster.estimate import ClusterRequest, plan_candidates, plan_cluster
from ironlaw.plan.cluster.memory import layer_activation_bytes, peak_memory
from ironlaw.plan.cluster.step_costs import operation_costs, step_costs
from ironlaw.plan.cluster.system import system_of
from ironlaw.plan.engines.low_precision import storage_by
from ironlaw.plan.engines.named import engine
from ironlaw.workload.conventions import Casts
from ironlaw.workload.layout import parse_layout

LLAMA = ModelConfig.named("llama3-8b")
MATRICES = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336  # of a block
TOKENS = 8192


def where(name, precision, cluster="8xh100-sxm-80gb"):
    return system_of(parse_cluster(cluster), engine(name), precision)


def job(layout="dp=8 zero=1", model=LLAMA):
    return candidates_of(model, [parse_layout(layout)], sequence=TOKENS, global_batch=64)


def block(name, precision, model=LLAMA, cluster="8xh100-sxm-80gb"):
    return layer_activation_bytes(job(model=model), where(name, precision, cluster).engine)[0][0]


def test_transformer_engine_keeps_inputs_of_linear_layers_in_8_bits():
    """Two norms' outputs and the gated product lose a byte; under delayed scaling attention's output gains one."""
    saved = block("megatron-core", "bf16") - block("megatron-core", "fp8")
    assert saved == TOKENS * (2 * 4096 + 14336 - 4096)
    scales = TOKENS * (2 * 4096 + 14336) / 32
    saved = block("megatron-core", "bf16") - block("megatron-core", "mxfp8", cluster="8xb200-sxm")
    assert saved == TOKENS * (2 * 4096 + 14336) - scales
    saved = block("megatron-core", "bf16") - block("megatron-core", "nvfp4", cluster="8xb200-sxm")
    assert saved == TOKENS * (2 * 4096 + 14336) * (2 - 0.5 - 1 / 16)


def test_experts_keep_their_rows_in_8_bits():
    model = ModelConfig.named("mixtral-8x7b")
    saved = block("megatron-core", "bf16", model) - block("megatron-core", "mxfp8", model, "8xb200-sxm")
    inputs = 2 * 4096 + 2 * (4096 + 14336)  # norms; two rows per token, in and between up and down
    assert saved == pytest.approx(TOKENS * inputs * (1 - 1 / 32))


@pytest.mark.parametrize(
    ("name", "precision", "cluster", "per_weight"),
    [
        ("megatron-core", "fp8", "8xh100-sxm-80gb", 2),  # rows and columns, beside the 16-bit weights
        ("megatron-core", "fp8", "8xb200-sxm", 1),
        ("megatron-core", "mxfp8", "8xb200-sxm", 2 * 33 / 32),
        ("nemo", "fp8", "8xh100-sxm-80gb", 0),  # in place of them
        ("nemo", "fp8", "8xb200-sxm", -1),
        ("nemo", "nvfp4", "8xb200-sxm", 2 * 9 / 16 - 2),
        ("torchtitan", "fp8", "8xh100-sxm-80gb", 0),
        ("generic", "fp8", "8xh100-sxm-80gb", 0),
    ],
)
def test_quantised_weights(name, precision, cluster, per_weight):
    wide, narrow = (peak_memory(job(), where(name, p, cluster).engine).weights[0] for p in ("bf16", precision))
    norms = 2 * 4096
    assert narrow - wide == pytest.approx(per_weight * 32 * (MATRICES + norms))


def test_torchaos_peak_is_that_of_bf16_as_measured():
    """Llama 3.1 8B on 8 H100: 47.65 GB in bf16, 47.77 in float8 (torchtitan's own measurements)."""
    peaks = [peak_memory(job("dp=8 zero=3"), where("torchtitan-2025", p).engine).total[0] for p in ("bf16", "fp8")]
    assert peaks[0] == peaks[1]
    assert peaks[1] / peaks[0] == pytest.approx(47.77 / 47.65, rel=0.01)


def test_parameters_stored_in_8_bits_are_gathered_in_8_bits():
    """ZeRO-1 gathers weights once per step: half of the bytes under NeMo's recipe, all under Megatron's default."""
    cluster = "64xh100-sxm-80gb"
    gather = {}
    for name in ("nemo", "megatron-core"):
        for precision in ("bf16", "fp8"):
            system = where(name, precision, cluster)
            gather[name, precision] = step_costs(job("dp=64 zero=1"), system).dp_gather[0]
    assert gather["nemo", "fp8"] < 0.6 * gather["nemo", "bf16"]
    assert gather["megatron-core", "fp8"] == gather["megatron-core", "bf16"]


def test_wide_precisions_and_unknown_software_are_as_before():
    for precision in ("bf16", "fp16"):
        assert storage_by("transformer-engine", precision, "hopper", True) == storage_by("", precision, "hopper", False)
    for precision in [name for name in computing_formats() if number_format(name).narrow]:
        assert "not known" in storage_by("", precision, "hopper", False).description
        assert block("generic", precision, cluster="8xb200-sxm") == block("generic", "bf16", cluster="8xb200-sxm")


def test_the_plan_says_what_it_holds():
    ledger = plan_cluster(
        ClusterRequest(
            LLAMA,
            parse_cluster("8xh100-sxm-80gb"),
            sequence=TOKENS,
            global_batch=64,
            precision="fp8",
            engine="megatron-core",
        ),
        parse_layout("dp=8 zero=1"),
    ).ledger
    assert "2 B beside their 16-bit ones" in ledger.facts["low_precision"]
    assert ledger.facts["low_precision_products"].startswith("all blocks, its default")
    assert "timed as fp8/trtllm" in ledger.facts["low_precision_products"]
    weights = next(line for line in ledger.memory if line.component == "weights")
    assert weights.note == ledger.facts["low_precision"]
    assert sum(line.bytes for line in ledger.memory) == pytest.approx(ledger.totals["peak_bytes"].value)


def test_a_tensor_is_cast_once_by_one_library_and_in_every_pass_by_the_other():
    """Bytes per element, read 2, written in 8 bits: Transformer Engine's two arrangements on Hopper are 2 + 1 + 1."""
    engine_of = {name: engine(name).computing_in("fp8", "hopper") for name in ("nemo", "torchtitan")}
    assert engine_of["nemo"].casts == Casts(inputs=4.0, gradients=4.0)
    assert set(vars(engine_of["torchtitan"].casts).values()) == {5.0}
    # One arrangement, and the maximum of this step's tensor read first: 2 + 2 + 1.
    assert engine("nemo").computing_in("fp8", "blackwell").casts.inputs == 5.0
    assert engine("nemo").computing_in("mxfp8", "blackwell").casts.inputs == pytest.approx(2 + 2 * 33 / 32)
    assert set(vars(engine("nemo").computing_in("bf16", "hopper").casts).values()) == {0.0}
    candidates = candidates_of(LLAMA, [parse_layout("dp=8 zero=1")], sequence=8192, global_batch=8)
    casting = where("nemo", "fp8")
    bare = replace(casting, engine=replace(casting.engine, casts=Casts()))
    with_casts, without = (products_of(candidates, w, "ffn_down") for w in (casting, bare))
    moved = 4 * 8192 * 14336, 4 * 8192 * 4096
    for there, plain, size in zip(with_casts, without, moved, strict=True):
        assert there - plain == pytest.approx(size / 3.35e12, rel=0.3)


def products_of(candidates, where, name):
    """Seconds of a linear layer with what it casts: forward, backward."""
    names = (name, f"{name}_cast")
    costs = [c for c in operation_costs(candidates, where) if c.operation.name in names]
    return [sum(float(c.seconds[0]) for c in costs if c.operation.phase is p) for p in (Phase.FORWARD, Phase.BACKWARD)]


def test_four_bits_without_measured_kernels_are_planned_by_those_of_eight():
    """Energy goes with the bytes of operands. MI355X has the format, and `plan` offered it only to refuse it."""
    times = {
        name: step_costs(job(), where("generic", name, "8xmi355x")).block["matmul", Phase.FORWARD][0]
        for name in ("mxfp8", "mxfp4")
    }
    assert 0.5 < times["mxfp4"] / times["mxfp8"] < 0.75


@pytest.mark.parametrize("precision", ["bf16", "fp8", "nvfp4"])
def test_of_our_trainer_no_walk_falls_below_its_closed_form(precision):
    """By which a search rules layouts out; and nvfp4 leaves the last blocks in 16 bits."""
    asked = ClusterRequest(ModelConfig.named("llama3-1b"), parse_cluster("1xb200-sxm"), 4096, 4, precision, "ironlaw")
    layout = parse_layout("dp=1")
    plan = plan_cluster(asked, layout)
    assert plan_candidates(asked.candidates([layout]), asked.system).peak.total[0] <= plan.peak_bytes
    of_layers = sum(p["share_of_layers"] for p in plan.ledger.facts["products"] if p["name"] == "qkv")
    wide = sum(
        p["share_of_layers"] for p in plan.ledger.facts["products"] if (p["name"], p["precision"]) == ("qkv", "bf16")
    )
    assert of_layers == pytest.approx(1) and wide == pytest.approx({"bf16": 1, "fp8": 0, "nvfp4": 3 / 16}[precision])


@pytest.mark.parametrize(("model", "cluster"), [("llama3-8b", "8xb200-sxm"), ("mixtral-8x7b", "1xb200-sxm")])
def test_what_our_trainer_does_not_train_in_few_bits_is_refused(model, cluster):
    asked = ClusterRequest(ModelConfig.named(model), parse_cluster(cluster), 4096, 64, "fp8", "ironlaw")
    with pytest.raises(UserError, match="use precision bf16"):
        plan_cluster(asked, parse_layout(f"dp={asked.cluster.count} zero=3"))
