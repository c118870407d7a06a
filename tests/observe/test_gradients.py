"""What a loop computes for nothing, or in the wrong mode: seen in a few steps, with the line of code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ironlaw
from ironlaw.ledger import Ledger, Phase
from ironlaw.observe.gradients import GradientUse
from ironlaw.observe.habits import Habits
from ironlaw.observe.inputs import padding
from ironlaw.observe.operation_checks import CountedCall, OperationChecks, unused_rows
from ironlaw.observe.other_programs import OtherPrograms
from ironlaw.observe.partition import Partition
from ironlaw.observe.recording import LoopRecording
from ironlaw.observe.trials import ModuleCall
from ironlaw.observe.user_code import clipping_line, padding_line


def facts_of(folder: Path) -> dict[str, Any]:
    return Ledger.load(folder / "ledger.json").facts


def line(place: str) -> str:
    file, _, number = place.rpartition(":")
    return Path(file).read_text(encoding="utf-8").splitlines()[int(number) - 1]


@pytest.mark.parametrize("detached", [False, True])
def test_a_generators_gradients_that_its_discriminators_step_throws_away(detached: bool, tmp_path: Path) -> None:
    generator, discriminator = nn.Linear(8, 8), nn.Linear(8, 1)
    to_generate, to_discriminate = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (generator, discriminator))
    with ironlaw.observe(
        [generator, discriminator], [to_discriminate, to_generate], out=tmp_path / "run", plan=False, profile_steps=0
    ):
        for _ in range(12):
            made = generator(torch.randn(4, 8))  # HERE
            made = made.detach() if detached else made
            (discriminator(made) - discriminator(torch.randn(4, 8))).mean().backward()
            to_discriminate.step()
            to_generate.zero_grad()
            (-discriminator(generator(torch.randn(4, 8)))).mean().backward()
            to_generate.step()
            to_discriminate.zero_grad()
    idle = facts_of(tmp_path / "run")["gradients_idle"]
    # Of the discriminator's 9 elements twice and the generator's 72 twice, or once where it is detached.
    assert idle["part"] == pytest.approx(0.0 if detached else 72 / (2 * 9 + 2 * 72))
    assert detached or "# HERE" in line(idle["place"])


def test_a_teacher_whose_gradients_nobody_asked_for(tmp_path: Path) -> None:
    model, teacher = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ironlaw.observe(model, optimizer, out=tmp_path / "run", plan=False, profile_steps=0):
        for _ in range(6):
            x = torch.randn(4, 8)
            wanted = teacher(x)  # HERE
            (model(x) - wanted).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    idle = facts_of(tmp_path / "run")["gradients_idle"]
    assert idle["part"] == pytest.approx(2 / 3) and "# HERE" in line(idle["place"])


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """By other tests of this process."""
    monkeypatch.setattr("ironlaw.observe.habits._compiled_graphs", lambda: 0)


@pytest.mark.usefixtures("nothing_compiled")
def test_checks_unused_heads_and_products_of_zeros_have_lines(tmp_path: Path) -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(64, 512), nn.Linear(512, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            used: torch.Tensor = self.used(x)
            self.unused(used)  # CHECK
            return used

    model = Heads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ironlaw.observe(model, optimizer, out=tmp_path / "run", plan=False, profile_steps=0):
        for _ in range(6):
            logits = model(torch.randn(64, 64))
            assert not torch.isinf(logits).any()  # CHECK
            rows = nn.functional.one_hot(torch.arange(64), 512).float()  # ZEROS
            loss = -(rows * logits.log_softmax(-1)).sum(-1).mean()  # ZEROS
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    facts = facts_of(tmp_path / "run")
    unread, zeros = facts["values_unread"], facts["zeros_multiplied"]
    assert 0 < unread["part"] < 1 and len(unread["lines"]) == 1
    assert all("# CHECK" in line(place) for place in (unread["place"], *unread["lines"]))
    assert 0 < zeros["part"] < 1
    assert all("# ZEROS" in line(place) for place in (zeros["place"], *zeros["lines"]))


@pytest.mark.usefixtures("nothing_compiled")
def test_wide_results_float64_and_optimizers_made_anew_have_lines(tmp_path: Path) -> None:
    model, codes = nn.Linear(64, 64), nn.Parameter(torch.randn(64, 64))
    optimizer = torch.optim.SGD([*model.parameters(), codes], lr=0.1)
    with ironlaw.observe(model, optimizer, out=tmp_path / "run", plan=False, profile_steps=0):
        for _ in range(6):
            optimizer = torch.optim.SGD([*model.parameters(), codes], lr=0.1)  # MADE
            out = model(torch.randn(128, 64))
            distances = (out[:, None] - codes).square().sum(-1)  # WIDE
            distances = distances.repeat(1, 2).clone()  # COPY
            loss = distances.double().logsumexp(-1).mean()  # DOUBLE
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    facts = facts_of(tmp_path / "run")
    assert "# WIDE" in line(facts["broadcasts"]["place"]) and not facts["broadcasts"]["lines"]
    assert "# DOUBLE" in line(facts["float64_operations"]["place"])
    copied = {line(place).partition("# ")[2] for place in (facts["copies"]["place"], *facts["copies"]["lines"])}
    assert copied == {"COPY", "DOUBLE"}
    assert "# MADE" in line(facts["optimizer_rebuilt"]["place"]) and facts["optimizer_rebuilt"]["per_step"] == 1.0


@pytest.mark.usefixtures("nothing_compiled")
def test_vanishing_numbers_slow_operations_and_passes_for_parts_of_a_batch_have_lines(tmp_path: Path) -> None:
    model = nn.Linear(16, 128)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # Few denormal numbers and long rows to sort: on some processors a denormal result takes a hundred times as long.
    energy, rows = torch.full((128, 128), 1e-20), [0.5] * 100_000
    with ironlaw.observe(model, optimizer, out=tmp_path / "run", plan=False, profile_steps=0):
        for _ in range(6):
            loss = torch.zeros(())
            for _ in range(8):
                out = model(torch.randn(1024, 16))  # APART
                tiny = energy * energy  # TINY
                torch.tensor(rows)  # HELD
                ranks = out.argsort(-1)  # SORT
                loss = loss + (out * (ranks < 9)).mean() + tiny[0, 0]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    facts = facts_of(tmp_path / "run")
    assert "# TINY" in line(facts["denormals"]["place"]) and 0 < facts["denormals"]["part"] < 1
    assert "# SORT" in line(facts["operation_slow"]["place"]) and "sort" in facts["operation_slow"]["operation"]
    assert "# APART" in line(facts["passes_apart"]["place"])
    assert "# HELD" in line(facts["line_slow"]["place"]) and sys.gettrace() is None
    assert torch.full((1,), 1e-38).div(2).item() > 0  # what it tries is as it was


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("causal", [False, True])
def test_matrices_that_are_decomposed_and_causal_masks_have_lines(causal: bool, tmp_path: Path) -> None:
    model = nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mask = torch.full((1024, 1024), float("-inf")).triu(1 if causal else 9)
    with ironlaw.observe(model, optimizer, out=tmp_path / "run", plan=False, profile_steps=0):
        for _ in range(6):
            x = model(torch.randn(1, 8, 1024, 16))
            out = nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)  # MASK
            largest = torch.linalg.svdvals(model.weight)[0]  # SVD
            (out.square().mean() / largest).backward()
            optimizer.step()
            optimizer.zero_grad()
    facts = facts_of(tmp_path / "run")
    assert "# SVD" in line(facts["decompositions"]["place"])
    assert ("# MASK" in line(facts["attention_masked"]["place"])) if causal else facts["attention_masked"] is None


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("dimensions", [3, 4])
def test_attention_that_a_mask_of_three_dimensions_keeps_from_its_kernel_has_a_line(
    dimensions: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ironlaw.observe.close_look.share_saved_without", lambda *_, **__: 0.5)  # on any processor
    model = nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mask = torch.randn(8, 512, 512)
    mask = mask if dimensions == 3 else mask[None]
    with ironlaw.observe(model, optimizer, out=tmp_path / "run", plan=False, profile_steps=0):
        for _ in range(6):
            x = model(torch.randn(1, 8, 512, 16))
            out = nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)  # MASK
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    facts = facts_of(tmp_path / "run")
    if dimensions == 3:
        assert "# MASK" in line(facts["attention_mask_rank"]["place"]) and facts["attention_mask_rank"]["part"] > 0.1
        assert facts["operation_slow"] is None or "# MASK" not in line(facts["operation_slow"]["place"])
    else:
        assert facts["attention_mask_rank"] is None


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_outputs_that_no_loss_reads_are_gradients_of_zeros(rows: int, tmp_path: Path) -> None:
    model, head = nn.Linear(16, 64), nn.Linear(64, 512)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    with ironlaw.observe([model, head], optimizer, out=tmp_path / "run", plan=False, profile_steps=0):
        for _ in range(6):
            logits = head(torch.relu(model(torch.randn(4, 64, 16))))  # HEAD
            logits[:, -rows:].logsumexp(-1).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    unread = facts_of(tmp_path / "run")["outputs_unread"]
    assert unread is None if rows == 64 else "# HEAD" in line(unread["place"])


@pytest.mark.parametrize("times", [1, 2])
def test_an_update_with_the_gradients_of_the_last_one(times: int, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ironlaw.observe(model, optimizer, out=tmp_path / "run", plan=False, profile_steps=0):
        for _ in range(6):
            model(torch.randn(4, 8)).square().mean().backward()
            for _ in range(times):
                optimizer.step()  # HERE
            optimizer.zero_grad()
    facts = facts_of(tmp_path / "run")
    assert facts["steps_done"] == 6 and facts["left_in_eval"] is None
    assert (facts["updates_again"] is None) if times == 1 else "# HERE" in line(facts["updates_again"]["place"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_types_that_may_be_slower_than_fp32_are_timed_against_it(dtype: torch.dtype, tmp_path: Path) -> None:
    model = nn.Linear(8, 8).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ironlaw.observe(model, optimizer, out=tmp_path / "run", plan=False, profile_steps=0):
        for _ in range(6):
            model(torch.randn(4, 8, dtype=dtype)).float().square().mean().backward()
            optimizer.step()
    facts = facts_of(tmp_path / "run")
    assert {name for name in ("half", "float64") if facts[name]} == (
        {torch.float16: {"half"}, torch.float32: set(), torch.float64: {"float64"}}[dtype]
    )
    assert all(0 <= facts[name]["saved"] < 1 for name in ("half", "float64") if facts[name])


@pytest.mark.parametrize("looked", [False, True])
def test_gradients_from_elsewhere_are_updates_of_their_own(looked: bool, tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ironlaw.observe(model, optimizer, out=tmp_path / "run", plan=False, profile_steps=0):
        for _ in range(6):
            with torch.no_grad():
                found = model(torch.randn(4, 8)).std() if looked else torch.tensor(1.0)
            for parameter in model.parameters():
                parameter.grad = found * torch.randn_like(parameter)
            optimizer.step()
    facts = facts_of(tmp_path / "run")
    assert facts["steps_done"] == 6 and facts["updates_again"] is None


def test_gradients_that_are_gathered_over_steps_are_not_idle(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ironlaw.observe(model, optimizer, out=tmp_path / "run", plan=False, profile_steps=0):
        for number in range(24):
            model(torch.randn(4, 8)).square().mean().backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    assert facts_of(tmp_path / "run")["gradients_idle"]["part"] == 0.0


@pytest.mark.parametrize("again", [False, True])
def test_a_model_that_is_left_in_evaluation_mode(again: bool, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ironlaw.observe(model, optimizer, out=tmp_path / "run", plan=False, profile_steps=0):
        for _ in range(12):
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()  # HERE
            model.train(again)
    ledger = Ledger.load(tmp_path / "run" / "ledger.json")
    left = ledger.facts["left_in_eval"]
    assert left is None if again else "# HERE" in line(left["place"])
    assert ledger.phase_seconds["forward"] > 0


def test_padding_is_what_all_rows_end_with() -> None:
    rows = torch.randint(1, 50, (4, 16), generator=torch.Generator().manual_seed(0))
    assert padding((rows,), {}) == pytest.approx((0.0, 1 / 16 if bool((rows[:, -1] == rows[0, -1]).all()) else 0.0))
    for length, row in zip((4, 8, 8, 12), rows, strict=True):
        row[length:] = 0
    assert padding((), {"input_ids": rows}) == pytest.approx((32 / 64, 4 / 16))
    assert padding((rows.flip(1),), {}) == pytest.approx((32 / 64, 4 / 16))
    assert padding((torch.zeros(4, 16, dtype=torch.long),), {}) is None  # nobody's data
    assert padding((torch.randn(4, 16),), {}) is None


def test_the_line_that_fills_rows_up(tmp_path: Path) -> None:
    script, other = tmp_path / "train.py", tmp_path / "other.py"
    script.write_text("conv = Conv2d(3, 8, 3, padding=1)\nPAD = 0\n\nrow = row + [PAD] * (60 - len(row))\n")
    assert padding_line([str(tmp_path / "nowhere.py"), str(script)]) == f"{script}:4"
    other.write_text("PAD = 0\nrow = [PAD]\nrows = pad_sequence(rows)\n")
    assert padding_line([str(script), str(other)]) == f"{other}:3"
    unnamed = tmp_path / "unnamed.py"
    unnamed.write_text("width = 60\nrow = row + [0] * (width - len(row))\n")
    assert padding_line([str(unnamed)]) == f"{unnamed}:2"


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("around", [True, False])
def test_a_loop_with_modes_of_its_own_keeps_them(around: bool, tmp_path: Path) -> None:
    """One that counts a whole epoch, and one that begins within the step that is looked at."""
    from torch.utils.flop_counter import FlopCounterMode

    model, flops = nn.Linear(8, 8), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ironlaw.observe(model, optimizer, out=tmp_path / "run", plan=False, profile_steps=0):
        counter = FlopCounterMode(display=False)
        for step in range(6):
            if step == (0 if around else 2):
                counter.__enter__()
            model(torch.randn(4, 8)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        counter.__exit__(None, None, None)
        flops = counter.get_total_flops()
    assert flops == (6 if around else 4) * 2 * (2 * 4 * 8 * 8)
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


@pytest.mark.usefixtures("nothing_compiled")
def test_a_tensor_that_cannot_be_looked_into_ends_no_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise NotImplementedError("no such kernel")

    monkeypatch.setattr("ironlaw.observe.close_look.zero_part", fails)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ironlaw.observe(model, optimizer, out=tmp_path / "run", plan=False, profile_steps=0):
        for _ in range(6):
            model(torch.randn(4, 8)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert facts_of(tmp_path / "run")["values_unread"] is None


@pytest.mark.usefixtures("nothing_compiled")
def test_attention_that_writes_its_scores_has_the_line_that_calls_it(tmp_path: Path) -> None:
    model = nn.MultiheadAttention(16, 2, batch_first=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ironlaw.observe(model, optimizer, out=tmp_path / "run", plan=False, profile_steps=0):
        for _ in range(6):
            x = torch.randn(2, 8, 16).softmax(-1)  # not this one
            out, _ = model(x, x, x)  # ATTENDS
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert "# ATTENDS" in line(facts_of(tmp_path / "run")["places"]["attention_unfused"])


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("learned", [False, True])
def test_what_is_made_of_a_guess_is_a_check_too_unless_the_model_learns_from_it(learned: bool, tmp_path: Path) -> None:
    model, labels = nn.Linear(8, 8), torch.arange(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ironlaw.observe(model, optimizer, out=tmp_path / "run", plan=False, profile_steps=0):
        for _ in range(6):
            out = model(torch.randn(4, 8))
            guess = out.argmax(-1)
            right = guess == labels
            nn.functional.cross_entropy(out, torch.where(right, guess, labels) if learned else labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    found = facts_of(tmp_path / "run")["values_unread"]
    marked = {line(place).strip() for place in (found["place"], *found["lines"])} if found else set()
    assert marked == (set() if learned else {"guess = out.argmax(-1)", "right = guess == labels"})


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("use", ["none", "update", "by hand", "input"])
def test_gradients_that_a_loop_asks_for_are_a_check_unless_something_learns_from_them(use: str, tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    weights = list(model.parameters())
    optimizer = torch.optim.SGD(weights, lr=0.1)
    with ironlaw.observe(model, optimizer, out=tmp_path / "run", plan=False, profile_steps=0):
        for _ in range(6):
            x = torch.randn(4, 8, requires_grad=True)
            loss = model(x).square().mean()
            found = torch.autograd.grad(loss, x if use == "input" else weights, retain_graph=True)  # GRAD
            if use == "update":
                for weight, gradient in zip(weights, found, strict=True):
                    weight.grad = 2 * gradient
            elif use == "by hand":
                with torch.no_grad():
                    torch._foreach_sub_(weights, found)
            elif use == "input":  # as in adversarial training
                model((x + found[0].sign()).detach()).square().mean().backward()
            if use in ("none", "by hand"):
                found[0].norm()
                model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    unread = facts_of(tmp_path / "run")["values_unread"]
    places = [unread["place"], *unread["lines"]] if unread is not None else []
    assert any("# GRAD" in line(place) for place in places) is (use == "none")


@pytest.mark.parametrize("by_hand", [True, False])
def test_gradients_that_a_loop_fills_with_zeros_itself(by_hand: bool, tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ironlaw.observe(model, optimizer, out=tmp_path / "run", plan=False, profile_steps=0):
        for _ in range(8):
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            for parameter in model.parameters():
                gradient, parameter.grad = parameter.grad, parameter.grad if by_hand else None
                assert gradient is not None
                gradient.zero_()
    zeroed = facts_of(tmp_path / "run")["gradients_zeroed"]
    assert ("zero_" in line(zeroed["place"])) if by_hand else zeroed is None


@pytest.mark.usefixtures("nothing_compiled")
def test_a_model_that_is_differentiated_by_its_inputs_has_no_idle_gradients_and_no_slow_line(tmp_path: Path) -> None:
    """As in physics-informed training."""
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ironlaw.observe(model, optimizer, out=tmp_path / "run", plan=False, profile_steps=0):
        for _ in range(6):
            x = torch.rand(512, 2, requires_grad=True)
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            (bend,) = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)
            bend.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    facts = facts_of(tmp_path / "run")
    slow = facts["operation_slow"]
    assert not facts["gradients_idle"]["part"] and (not slow or slow["part"] < 0.2)


@pytest.mark.usefixtures("nothing_compiled")
def test_what_a_hook_computes_has_a_line_also_beside_sparse_tensors(tmp_path: Path) -> None:
    model, rows, graph = nn.Linear(16, 16), nn.Embedding(64, 16, sparse=True), torch.eye(64).to_sparse()
    optimizer = torch.optim.SGD([*model.parameters(), *rows.parameters()], lr=0.1)
    model.weight.register_hook(lambda g: g.repeat(300, 1).flatten().sort().values[: g.numel()].view_as(g))  # HOOK
    with ironlaw.observe(model, optimizer, out=tmp_path / "run", plan=False, profile_steps=0):
        for _ in range(6):
            torch.sparse.mm(graph, model(rows(torch.arange(64)))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    slow = facts_of(tmp_path / "run")["operation_slow"]
    assert "# HOOK" in line(slow["place"]) and "sort" in slow["operation"]


def written_out(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.045 * x**3)))  # GELU


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("of_products", [False, True])
def test_a_function_that_is_written_out_has_its_line_and_one_of_products_is_none(
    of_products: bool, tmp_path: Path
) -> None:
    def activation(x: torch.Tensor) -> torch.Tensor:
        return (x.tanh() + x.sigmoid() + x.exp() + x.cos()) @ x if of_products else written_out(x)

    model = nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ironlaw.observe(model, optimizer, out=tmp_path / "run", plan=False, profile_steps=0):
        for _ in range(6):
            activation(model(torch.randn(256, 256))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = facts_of(tmp_path / "run")["written_out"]
    assert (found is None) is of_products
    if found is not None:
        assert found["function"] == "written_out" and found["operations"] == 8 and "# GELU" in line(found["place"])
        assert 0.2 < found["part"] < 0.9


def test_only_clipping_of_a_whole_model_is_pytorchs_own(tmp_path: Path) -> None:
    by_hand, whole = tmp_path / "by_hand.py", tmp_path / "whole.py"
    by_hand.write_text("for p in model.parameters():\n    nn.utils.clip_grad_norm_(p, 1.0)\n")
    whole.write_text("import torch\ntorch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n")
    assert clipping_line([str(by_hand)]) is None
    assert clipping_line([str(by_hand), str(whole)]) == f"{whole}:2"


@pytest.mark.usefixtures("nothing_compiled")
def test_a_copy_that_gradients_pass_through_untouched_is_read(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ironlaw.observe(model, optimizer, out=tmp_path / "run", plan=False, profile_steps=0):
        for _ in range(6):
            out = model(torch.randn(2, 3, 8, 8))
            out = out.to(memory_format=torch.channels_last).contiguous()
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert facts_of(tmp_path / "run")["values_unread"] is None


class Layers(nn.Module):
    """Twenty layers with weights of their own, one that is applied sixty times, or twenty that are given the same."""

    def __init__(self, kind: str | None) -> None:
        super().__init__()
        self.layers, self.kind = nn.ModuleList(nn.Linear(8, 8) for _ in range(20)), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "HEADS":
            return torch.stack([layer(x).tanh() for layer in self.layers]).sum(0)  # HEADS
        for k in range(60 if self.kind == "APPLIED" else 20):
            x = x + self.layers[0 if self.kind == "APPLIED" else k](x).tanh()  # APPLIED
        return x


def squares(out: torch.Tensor) -> torch.Tensor:
    return torch.stack([row.square().mean() for row in out]).mean()  # LOOP


def computed_by_python(out: torch.Tensor) -> torch.Tensor:
    rows = []
    for row in out[:40]:
        sum(range(40_000))  # PYTHON
        rows.append(row.square().mean())
    return torch.stack(rows).mean()


LOSSES = {"LOOP": squares, "PYTHON": computed_by_python}


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize(("loop", "times"), [("APPLIED", 60), ("HEADS", 20), ("LOOP", 200), ("PYTHON", 0), (None, 1)])
def test_a_loop_of_short_operations_has_a_line_and_layers_of_a_model_are_none(
    loop: str | None, times: int, tmp_path: Path
) -> None:
    model = Layers(loop)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:  # what is around a loop repeats nothing
        out = model(torch.randn(200, 8))
        loss = LOSSES[loop](out) if loop in LOSSES else out.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with ironlaw.observe(model, optimizer, out=tmp_path / "run", plan=False, profile_steps=2):
        for _ in range(12):
            step()
    found = facts_of(tmp_path / "run")["line_slow"]
    if loop is None:
        assert found is None or found["lines"] == ["Python without operations"]
    elif loop == "PYTHON":
        assert "# PYTHON" in line(found["place"]) and found["lines"] == ["Python without operations"]
    else:
        assert f"# {loop}" in line(found["place"]) and found["lines"][-1] == f"the same operations {times} times"
        assert 0.3 < found["forward"] <= 1 and 0.2 < found["backward"] <= 1


class Encoder(nn.Module):
    """Layers of PyTorch's, which ask many questions in Python before they compute."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x)


@pytest.mark.parametrize(("second", "backward", "apart"), [
    ("another part", "once", True), ("what the first gave", "once", False), ("another part", "after each", False),
])  # fmt: skip
def test_parts_of_a_batch_have_one_backward_pass_and_are_no_outputs(second: str, backward: str, apart: bool) -> None:
    """Unlike encoder and head that the loop calls one after the other, or a state that is handed on; and unlike
    gradient accumulation, which saves memory."""
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    partition = Partition()
    recording = LoopRecording(model, [], partition, is_compiled=False)
    habits = Habits(model, [], partition, False, recording, lambda forwards: None)
    for _ in range(4):
        for given in (x, *[model(x) + 1 if second == "what the first gave" else x] * 3):
            habits.forward_begins(model, (given,), {})
            if backward == "after each":
                habits.backward_begins([])
        habits.backward_begins([])
    habits.call = ModuleCall.of(model, (x,), {})
    assert (habits._passes_apart() is not None) is apart
    assert habits.larger_batch(8) is not None  # of micro-batches with a backward pass each, too
    habits.call = ModuleCall.of(nn.Linear(8, 8), (x,), {})  # a part of what is observed
    assert habits.larger_batch(8) is None


@pytest.mark.usefixtures("nothing_compiled")
def test_python_of_pytorch_s_layers_is_not_the_user_s(tmp_path: Path) -> None:
    model = Encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ironlaw.observe(model, optimizer, out=tmp_path / "run", plan=False, profile_steps=0):
        for _ in range(12):
            model(torch.randn(8, 6, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = facts_of(tmp_path / "run")["line_slow"]
    assert found is None or found["forward"] < 0.1


@pytest.mark.usefixtures("nothing_compiled")
def test_what_is_looked_at_before_a_backward_pass_is_no_loop_of_its_line(tmp_path: Path) -> None:
    """Whether gradients of earlier passes have been cleared is asked for every parameter."""
    model = Layers(None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ironlaw.observe(model, optimizer, out=tmp_path / "run", plan=False, profile_steps=2):
        for _ in range(12):
            for _ in range(4):
                loss = model(torch.randn(200, 8)).square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    found = facts_of(tmp_path / "run")["line_slow"]
    assert found is None or found["lines"] == ["Python without operations"]


@pytest.mark.parametrize(("index", "work"), [(torch.arange(4), True), (torch.arange(4) > 2, False)])
def test_rows_by_number_are_work_and_masks_are_not(index: torch.Tensor, work: bool) -> None:
    rows = torch.randn(4, 2)
    assert CountedCall("a.py:1", "index", False, [rows, index], [rows[index]]).is_main_work is work


def test_a_mask_that_was_spread_out_does_not_spread_on() -> None:
    checks, row, q = OperationChecks(nn.Linear(2, 2)), torch.zeros(4, 1, 1, 512), torch.randn(4, 2, 512, 64)
    mask, out = row.repeat(1, 1, 512, 1), torch.randn(4, 2, 512, 64)

    def counts(name: str, operands: list[torch.Tensor], made: torch.Tensor) -> set[str] | None:
        return checks.broadcasts(CountedCall("a.py:3", name, name != "mm", operands, [made]))

    assert counts("repeat", [row], mask) == {"a.py:3"}
    made, negative = mask.exp(), -mask  # alive to the end: what takes their place is made by calls that nobody counts
    assert counts("exp", [mask], made) == set() == counts("neg", [made], negative)
    assert counts("_scaled_dot_product_attention", [q, q, q, mask], out) is None and counts("mul", [out], q) is None
    assert counts("add", [torch.ones(4, 1, 512, 512)], made) is None  # elsewhere, at the address of one that was
    assert counts("neg", [made], -made) is None


def test_what_is_computed_of_weights_alone_has_a_line_and_what_an_input_takes_part_in_has_none() -> None:
    model = nn.Linear(128, 128)
    checks, weight, x = OperationChecks(model), model.weight, torch.randn(4, 128)
    squares, scaled = weight.detach() ** 2, weight.detach() * 2

    def counts(name: str, operands: list[torch.Tensor], made: torch.Tensor) -> bool:
        return bool(checks.weights_combined(CountedCall("a.py:3", name, name != "mm", operands, [made])))

    assert counts("pow", [weight], squares) and counts("sum", [squares], squares.sum())
    assert not counts("t", [weight], weight.t()) and not counts("_to_copy", [weight], weight.double())
    assert not counts("addmm", [model.bias, x, weight], x @ weight) and not counts("mul", [model.bias], model.bias * 2)
    assert not counts("mul", [x], scaled) and not counts("add", [scaled], scaled + 1)


@pytest.mark.parametrize("optimizer_of", [torch.optim.SGD, torch.optim.LBFGS])
def test_a_loop_of_transformed_functions_and_one_of_closures_are_observed(optimizer_of: Any, tmp_path: Path) -> None:
    """Gradients that a closure asks for are part of its loss, as in a loop without one."""
    model = nn.Linear(2, 1)
    ended: list[Any] = []
    optimizer = optimizer_of(model.parameters(), lr=0.1)

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, dict(model.named_parameters()), (x,)).square().mean()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        x = torch.randn(4, 2, requires_grad=True)
        begun = watch.partition.running
        (found,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        ended.append((begun, [interval.phase for interval in watch.partition.intervals[-4:]]))
        loss = found.square().mean()
        loss.backward()
        return loss

    with ironlaw.observe(model, optimizer, out=tmp_path / "run", plan=False, profile_steps=2) as watch:
        for _ in range(12):
            if optimizer_of is torch.optim.LBFGS:
                optimizer.step(closure)
                continue
            torch.func.vmap(loss_of)(torch.randn(3, 4, 2)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    facts = facts_of(tmp_path / "run")
    assert facts["steps_done"] == 12 and facts["forwards_unread"] is None and facts["left_in_eval"] is None
    assert all(begun is None and Phase.HOST not in phases for begun, phases in ended)


@pytest.mark.parametrize("active", [2, 40])
def test_a_profiler_of_the_loops_own_is_left_on_if_it_records_most_steps(active: int, tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    optimizer, schedule = torch.optim.SGD(model.parameters(), lr=0.1), torch.profiler.schedule
    with (
        torch.profiler.profile(schedule=schedule(wait=0, warmup=1, active=active, repeat=1)) as profiler,
        ironlaw.observe(model, optimizer, out=tmp_path / "run", plan=False, profile_steps=0),
    ):
        for _ in range(12):
            model(torch.randn(4, 8)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    assert (facts_of(tmp_path / "run")["profiled"] is not None) is (active > 12)


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("use", ["none", "frozen", "read", "learned"])
def test_gradients_of_inputs_through_what_is_frozen_are_for_nothing_unless_they_are_read(
    use: str, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 1))
    learned = torch.zeros(8, requires_grad=True)
    weights = [*model[1].parameters(), learned]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    with ironlaw.observe(model, optimizer, out=tmp_path / "run", plan=False, profile_steps=0):
        for _ in range(6):
            x = torch.randn(4, 8, requires_grad=use not in ("frozen", "learned"))
            model(x + learned if use == "learned" else x).square().mean().backward()  # MODEL
            if use == "read":
                assert x.grad is not None
                x.grad.norm()
            optimizer.step()
            optimizer.zero_grad()
    found = facts_of(tmp_path / "run")["inputs_differentiated"]
    assert "# MODEL" in line(found["place"]) if use == "none" else found is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_runs_again_finds_no_gradients_of_the_last_step(reentrant: bool, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ironlaw.observe(model, optimizer, out=tmp_path / "run", plan=False, profile_steps=0):
        for _ in range(8):
            hidden = checkpoint(model[0], torch.randn(4, 8, requires_grad=True), use_reentrant=reentrant)
            loss = model[1](hidden).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert facts_of(tmp_path / "run")["gradients_uncleared"] is None


@pytest.mark.parametrize(("name", "read"), [("_foreach_norm", True), ("_foreach_zero_", False)])
def test_gradients_that_the_loop_itself_computes_with_are_read(name: str, read: bool) -> None:
    """As those of the first of two passes of sharpness-aware minimization."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    use = GradientUse(model, [optimizer])
    use.begin()
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.randn(2, 4)).sum()
        use.backward_begins([loss])
        loss.backward()
        use.backward_ended()
        use.operation_called(name, [[p.grad for p in model.parameters()]])
    use.update_begins(optimizer)
    use.end()
    assert use.facts([], 0.0)["gradients_idle"]["part"] == (0.0 if read else 0.5)


def test_a_batch_in_a_sparse_format_is_not_run_again() -> None:
    """PyTorch concatenates no tensors in rows of nonzeros."""
    assert ModuleCall.of(nn.Linear(4, 2), (torch.eye(4).to_sparse_csr(),), {}).passes(times=2) is None


@pytest.mark.parametrize(("ids", "unused"), [
    (torch.arange(256) % 30, 0.971), (torch.arange(256) * 3 % 763, 0.243), (torch.arange(64) % 30, 0.0),
    (torch.arange(2, 66).repeat(4), 0.0),  # positions
])  # fmt: skip
def test_a_vocabulary_is_unused_behind_the_highest_token_of_a_batch(ids: torch.Tensor, unused: float) -> None:
    ids = torch.where(ids == 1, 999, ids)  # as padding
    assert unused_rows(torch.empty(1000, 8), ids.view(4, -1)) == pytest.approx(unused, abs=0.002)


def test_programs_beside_are_named_without_what_their_arguments_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([{(7, 1.0): ("python a.py", 5.0)}, {(7, 1.0): ("python a.py", 5.0), (8, 2.0): ("python b.py", 9.0)}])
    monkeypatch.setattr("ironlaw.observe.other_programs._computed_seconds", lambda: next(times))
    found = OtherPrograms().facts()
    assert found is not None and found["place"].startswith("python b.py (process 8): ") and not found["lines"]
