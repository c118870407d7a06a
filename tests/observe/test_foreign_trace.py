"""Traces of the profiler, read: CPU ones that were recorded, and a GPU one whose every microsecond is known because it
was made up (see `record_traces.py`)."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from ironlaw.errors import UserError
from ironlaw.ledger import Kind, Ledger, Phase
from ironlaw.observe import trace_file
from ironlaw.observe.foreign_trace import _by_priority, trace_ledger
from ironlaw.observe.timeline import phase_segment
from ironlaw.observe.trace_file import read_trace

TRACES = Path(__file__).parent / "traces"


@pytest.fixture(scope="module")
def gpu() -> Ledger:
    return trace_ledger(read_trace(TRACES / "gpu_synthetic.json.gz"))


def test_every_instant_on_a_device_has_one_phase(gpu: Ledger) -> None:
    milliseconds = {str(phase): 1e3 * seconds for phase, seconds in gpu.phase_seconds.items()}
    assert milliseconds == pytest.approx(
        {"data": 1.0, "transfer": 0.5, "forward": 3.0, "backward": 4.0, "communication": 1.0, "optimizer": 0.5}
    )
    assert gpu.totals["step_seconds"].value == pytest.approx(0.010)


def test_a_call_has_the_instants_behind_those_that_it_calls() -> None:
    kernels, calls = ([phase_segment(phase, *span) for span in spans] for phase, spans in (
        (Phase.FORWARD, [(30, 60)]), (Phase.HOST, [(0, 100), (10, 20)]),
    ))  # fmt: skip
    pieces = _by_priority([kernels, calls], 0, 110, Phase.IDLE)
    assert [(piece.style, piece.start, piece.end) for piece in pieces if piece.start >= 30] == [
        ("forward", 30, 60), ("host", 60, 100), ("idle", 100, 110),
    ]  # fmt: skip


def test_kernels_count_where_they_were_launched(gpu: Ledger) -> None:
    seconds = {(line.phase, line.kind): line.seconds for line in gpu.lines}
    assert seconds[Phase.FORWARD, Kind.MATMUL] == pytest.approx(0.003)
    assert seconds[Phase.BACKWARD, Kind.MATMUL] == pytest.approx(0.004)
    assert seconds[Phase.COMMUNICATION, Kind.COLLECTIVE] == pytest.approx(0.002)  # hidden or not
    assert gpu.facts["precision"] == "bf16" and gpu.facts["world_size"] == 8
    assert gpu.facts["machine"] == "NVIDIA H100 80GB HBM3"
    assert gpu.facts["sync_points"][0]["place"] == "cudaStreamSynchronize"


def test_products_have_the_flops_of_their_shapes(gpu: Ledger) -> None:
    product = next(gpu.select(phase=Phase.FORWARD, kind=Kind.MATMUL))
    assert product.flops == 2 * 8192 * 4096 * 4096


@pytest.mark.parametrize("name", ["cpu_plain", "cpu_shapes_and_stacks"])
def test_recorded_cpu_traces_close(name: str) -> None:
    ledger = trace_ledger(read_trace(TRACES / f"{name}.json.gz"))
    step = ledger.totals["step_seconds"].value
    assert ledger.facts["steps_done"] == 3
    assert sum(ledger.phase_seconds.values()) == pytest.approx(step, rel=1e-6)
    assert {Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER} <= set(ledger.phase_seconds)
    products = [line for line in ledger.lines if line.kind is Kind.MATMUL]
    assert {line.phase for line in products} == {Phase.FORWARD, Phase.BACKWARD}
    assert sum(line.seconds or 0 for line in ledger.lines) <= step


def test_stacks_give_the_line_of_a_sync_point() -> None:
    ledger = trace_ledger(read_trace(TRACES / "cpu_shapes_and_stacks.json.gz"))
    assert ledger.facts["sync_points"][0]["place"].startswith("train.py:")
    plain = trace_ledger(read_trace(TRACES / "cpu_plain.json.gz"))
    assert "with_stack=True" in plain.facts["sync_points"][0]["place"]


def test_reading_in_pieces_is_reading_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = read_trace(TRACES / "cpu_plain.json.gz")
    monkeypatch.setattr(trace_file, "_CHUNK", 997)
    pieces = read_trace(TRACES / "cpu_plain.json.gz")
    assert pieces.events == whole.events
    plain = tmp_path / "trace.json"  # without compression, and cut off in the middle of an event
    text = gzip.decompress((TRACES / "cpu_plain.json.gz").read_bytes()).decode()
    plain.write_text(text[: len(text) // 2])
    assert 0 < len(read_trace(plain).events) < len(whole.events)


@pytest.mark.parametrize(
    "content", ["", "no json", "{}", '{"traceEvents": []}', '[{"ph": "X", "cat": "kernel", "dur": 1}]']
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(UserError, match="export_chrome_trace"):
        read_trace(path)


# -- several kinds of GPU traces ---------------------------------------------------------------------------------


def milliseconds(ledger: Ledger) -> dict[str, float]:
    return {str(phase): 1e3 * seconds for phase, seconds in ledger.phase_seconds.items()}


def test_kernels_that_only_the_driver_call_links_have_the_phase_of_the_operation_around_it() -> None:
    ledger = trace_ledger(read_trace(TRACES / "gpu_eager.json.gz"))
    found = milliseconds(ledger)
    assert found["forward"] == pytest.approx(2.0 + 0.002) and found["backward"] == pytest.approx(2.0)
    assert found["optimizer"] == pytest.approx(0.5)
    assert found["host"] + found["idle"] == pytest.approx(16.0 - 4.502, rel=1e-3)
    assert ledger.facts["precision"] == "fp32" and ledger.facts["launches_per_step"] == 301
    assert ledger.facts["sync_points"][0]["place"] == "train.py:41"
    names = {line.operation for line in ledger.lines if line.kind is Kind.OPTIMIZER}
    assert names and not any("<" in name or "void" in name for name in names)


def test_compiled_regions_have_phases_and_kinds() -> None:
    ledger = trace_ledger(read_trace(TRACES / "gpu_compiled.json.gz"))
    assert milliseconds(ledger) == pytest.approx({"forward": 6.0, "backward": 10.0, "optimizer": 1.0})
    kinds: dict[Kind, float] = {}
    for line in ledger.lines:
        kinds[line.kind] = kinds.get(line.kind, 0.0) + 1e3 * (line.seconds or 0.0)
    assert kinds[Kind.MATMUL] == pytest.approx(11.0) and kinds[Kind.ATTENTION] == pytest.approx(2.0)
    assert kinds[Kind.NORM] == pytest.approx(2.0) and kinds[Kind.OPTIMIZER] == pytest.approx(1.0)
    assert ledger.facts["unfused_attention"] is False


def test_only_what_outlasts_the_backward_pass_is_exposed_communication() -> None:
    ledger = trace_ledger(read_trace(TRACES / "gpu_ddp.json.gz"))
    expected = {"forward": 4.0, "backward": 6.0, "communication": 4.0, "optimizer": 1.0}
    assert milliseconds(ledger) == pytest.approx(expected)
    whole = sum(line.seconds or 0.0 for line in ledger.lines if line.kind is Kind.COLLECTIVE)
    assert whole == pytest.approx(0.010) and ledger.facts["world_size"] == 4
