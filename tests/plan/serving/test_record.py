"""Rows of measured serving: read, planned, put beside what was measured."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from ironlaw.plan.measured.inference import predict, read_serving, serving_record, serving_rows

ROW = {
    "id": "a", "group": "g", "engine": "vllm", "date": "2025-06", "model": "llama-3-8b", "accelerator": "h100-sxm-80gb",
    "accelerators": "1", "tp": "1", "weight_format": "bf16", "scenario": "decode", "input_tokens": "128",
    "output_tokens": "128", "concurrency": "1", "output_tokens_per_second": "150",
}  # fmt: skip


def planned(**changed: str) -> dict[str, float | None]:
    runs, rejected = read_serving([ROW | changed])
    assert not rejected, rejected
    return predict(runs[0])


def test_scenarios_answer_what_they_ask() -> None:
    decode = planned()
    assert decode["output_tokens_per_second"] == pytest.approx(1 / (decode["tpot_seconds"] or 0))
    prompt = planned(scenario="prefill", concurrency="4")
    assert prompt["tpot_seconds"] is None and prompt["output_tokens_per_second"] is None
    assert prompt["prefill_tokens_per_second"] == pytest.approx(4 * 128 / (prompt["ttft_seconds"] or 0))
    many = planned(scenario="fixed-concurrency", concurrency="32")
    assert (many["output_tokens_per_second"] or 0) > 5 * (decode["output_tokens_per_second"] or 0)
    most = planned(scenario="offline", concurrency="")
    assert (most["output_tokens_per_second"] or 0) > (many["output_tokens_per_second"] or 0)


@pytest.mark.parametrize("scenario", ["offline", "fixed-concurrency", "decode"])
def test_two_copies_serve_twice_as_much(scenario: str) -> None:
    """Of requests at once each has half."""
    one, two = (planned(scenario=scenario, accelerators=n, concurrency=str(32 * int(n))) for n in ("1", "2"))
    assert two["output_tokens_per_second"] == pytest.approx(2 * (one["output_tokens_per_second"] or 0))
    assert two["tpot_seconds"] == one["tpot_seconds"]


@pytest.mark.parametrize(
    ("said", "tp", "copies", "replicas"),
    [
        ({"accelerators": "4", "tp": "4"}, 4, 1, 1),
        ({"accelerators": "4", "tp": "4", "dp": "2"}, 2, 2, 1),
        ({"accelerators": "4", "tp": "4", "notes": "attention-DP enabled"}, 1, 4, 1),
        ({"accelerators": "16", "tp": "8", "ep": "8", "dp": "8"}, 1, 8, 2),
        ({"accelerators": "16", "tp": "1", "ep": "8", "dp": "8"}, 1, 8, 2),
        ({"accelerators": "8", "tp": "2", "ep": "8"}, 2, 4, 1),
    ],
)
def test_copies_of_attention_share_experts(said: dict[str, str], tp: int, copies: int, replicas: int) -> None:
    (run,), _ = read_serving([ROW | {"model": "gpt-oss-120b", "scenario": "fixed-concurrency"} | said])
    found = run.layout
    assert (found.tp, found.attention_dp, found.replicas, found.devices) == (tp, copies, replicas, tp * copies)


@pytest.mark.parametrize(
    ("said", "tp", "pp", "replicas"),
    [
        ({}, 4, 1, 1),
        ({"dp": "2"}, 2, 1, 2),
        ({"dp": "4"}, 1, 1, 4),
        ({"engine": "llama.cpp", "weight_format": "q4_k_m"}, 1, 4, 1),
        ({"engine": "exllamav2", "weight_format": "exl2-4.0bpw", "tp": "4"}, 4, 1, 1),
        ({"engine": "transformers", "pp": "2"}, 1, 2, 2),
    ],
)
def test_devices_that_no_degree_tells_of_do_what_the_engine_does(said: dict[str, str], tp: int, pp: int, replicas: int):
    (run,), _ = read_serving([ROW | {"accelerators": "4", "tp": ""} | said])
    assert (run.layout.tp, run.layout.pp, run.layout.replicas) == (tp, pp, replicas)
    assert bool(run.assumed) == ("tp" not in said and "pp" not in said and said.get("dp") != "4")


def test_at_full_load_devices_hold_as_many_copies_as_fit() -> None:
    full = {"scenario": "offline", "accelerators": "8", "tp": "", "model": "llama-2-70b", "weight_format": "fp8"}
    for device, tp in (("h200", 1), ("h100-sxm-80gb", 2), ("l40s", 4)):
        (run,), _ = read_serving([ROW | full | {"accelerator": device}])
        assert (run.layout.tp, run.layout.replicas) == (tp, 8 // tp)


def test_sums_of_a_row_on_pcie_do_not_take_the_link() -> None:
    (link, bus), _ = read_serving([ROW | {"accelerators": "2", "tp": "2", "interconnect": i} for i in ("", "pcie")])
    assert bus.system.link < link.system.link
    assert (predict(bus)["tpot_seconds"] or 0) > (predict(link)["tpot_seconds"] or 0)


def test_requests_beyond_the_cache_wait_and_those_that_ran_at_once_had_room() -> None:
    long = {"scenario": "fixed-concurrency", "input_tokens": "8192", "output_tokens": "1024", "concurrency": "200"}
    shapes = ({}, {"engine": "optimum-habana", "accelerator": "gaudi3", "weight_format": "fp8"})
    (vllm, gaudi), _ = read_serving([ROW | long | shape for shape in shapes])
    assert vllm.concurrency < 60 and vllm.system.cache_bytes == 2
    assert gaudi.concurrency == 200 and gaudi.system.cache_bytes == 1 and "kv_format" in gaudi.assumed[-1]


def test_no_more_run_at_once_than_a_benchmark_queues() -> None:
    full = {"engine": "tensorrt-llm", "scenario": "offline", "input_tokens": "20000", "output_tokens": "2000"}
    shape = full | {"model": "llama-3.2-1b", "accelerators": "8"}
    rows = [ROW | shape | {"source": source} for source in ("", "perf-overview.md")]
    (free, queued), _ = read_serving(rows)
    assert (free.queued, queued.queued) == (float("inf"), 1000 / 8)


def test_a_pass_that_proposes_tokens_gives_more() -> None:
    shape = {"model": "deepseek-r1", "accelerators": "8", "tp": "8", "weight_format": "fp8"}
    (plain, mtp, other), _ = read_serving([ROW | shape | {"speculative": s} for s in ("", "mtp", "eagle")])
    gain = (predict(plain)["tpot_seconds"] or 0) / (predict(mtp)["tpot_seconds"] or 1)
    assert 1.4 < gain < 1.85 and "85%" in mtp.assumed[0]
    assert predict(other) == predict(plain) and "eagle" in other.assumed[0]


def test_a_model_that_is_not_catalogued_is_planned_from_its_columns() -> None:
    shape = {"layers": "32", "hidden": "4096", "heads": "32", "kv_heads": "8", "head_dim": "128", "ffn": "14336"}
    own = planned(model="somebodys-8b", gated_ffn="1", vocab="128256", params="8030261248", **shape)
    assert own["tpot_seconds"] == pytest.approx(planned()["tpot_seconds"], rel=0.01)


def test_an_engine_that_nobody_knows_takes_the_base_with_a_wide_interval() -> None:
    (known, other), _ = read_serving([ROW, ROW | {"engine": "nobodys"}])
    assert not known.assumed and "nobodys" in other.assumed[0]
    wide, narrow = (serving_record([run], [])["rows"][0]["interval"]["tpot_seconds"] for run in (other, known))
    assert wide[1] / wide[0] > 1.3 * narrow[1] / narrow[0]


def test_a_device_whose_maker_prints_no_peak_reads_weights_as_fast_as_its_memory_allows() -> None:
    shape = {"model": "llama-3.2-3b", "engine": "qualcomm-genie", "weight_format": "int4-w4a16", "tp": ""}
    (phone, laptop), _ = read_serving(
        [ROW | shape | {"accelerator": name} for name in ("snapdragon-8-elite-npu", "snapdragon-x-elite-npu")]
    )
    assert "prints none" in phone.assumed[0] and not laptop.assumed
    rates = [(predict(run)["output_tokens_per_second"] or 0) / float(run.system.bandwidth) for run in (phone, laptop)]
    assert rates[0] == pytest.approx(rates[1], rel=0.05)


def test_llama_cpp_on_vulkan_uses_matrix_units_of_intel_from_xe2_on() -> None:
    shape = ROW | {"engine": "llama.cpp", "engine_version": "b6700 Vulkan", "weight_format": "q4_0"}
    (old, new), _ = read_serving([shape | {"accelerator": name} for name in ("arc-a770", "arc-b580")])
    assert old.system.peak == 2 * 19.66e12 and new.system.peak == pytest.approx(8 * 13.67e12)
    (other,), _ = read_serving([shape | {"accelerator": "arc-a770", "engine_version": "b6700 SYCL"}])
    assert other.system.peak == pytest.approx(8 * 19.66e12)


@pytest.mark.parametrize(
    ("device", "year", "per_fp32", "converts"),
    [
        ("rtx-3090", "2025", 4.0, 0),  # matrix units: what scales their sums binds
        ("t4", "2025", 4.0, 0),
        ("a100-sxm-80gb", "2025", 4.0, 0),
        ("a100-sxm-80gb", "2024", 16.0, 1),  # a library's products of 16 bits
        ("v100-sxm-16gb", "2025", 125 / 15.7, 1),  # matrix units know nothing else
        ("gtx-1080-ti", "2024", 2.0, 0),  # the units that scale also multiply
        ("rx-6900-xt", "2025", 2.0, 0),
        ("rx-7900-xtx", "2025", 1.0, 0),  # its fp32 rate is of two instructions at once
    ],
)
def test_products_of_quantised_weights_are_bound_by_the_units_that_scale_them(
    device: str, year: str, per_fp32: float, converts: float
) -> None:
    shape = {"engine": "llama.cpp", "weight_format": "q4_0", "accelerator": device, "date": year}
    (run,), _ = read_serving([ROW | shape])
    assert run.system.peak == pytest.approx(per_fp32 * run.device.peak_flops_per_second["fp32"].value, rel=0.01)
    assert run.system.converts == converts


def test_prompts_of_early_llama_cpp_move_weights_and_scores_more_often() -> None:
    shape = {"engine": "llama.cpp", "model": "llama-2-7b", "scenario": "prefill", "accelerator": "rtx-3090"}

    def seconds(**changed: str) -> float:
        return planned(**shape | changed)["ttft_seconds"] or 0.0

    few, wide = (
        [seconds(date=year, weight_format=form, input_tokens="512") for year in ("2024", "2025")]
        for form in ("q4_0", "f16-gguf")
    )
    assert few[0] - few[1] > 6.6e9 * 4 / 936e9 > wide[0] - wide[1] > 0
    long = {"weight_format": "f16-gguf", "input_tokens": "8192", "date": "2024"}
    assert seconds(**long) > seconds(**long, notes="FA on") + 32 * 32 * 8192**2 / 2 * 20 / 936e9
    assert seconds(**long, notes="flash attention on") == seconds(**long, notes="FA on")


def test_passes_of_a_long_prompt_follow_each_other_through_the_stages_of_llama_cpp() -> None:
    shape = {"model": "llama-2-7b", "scenario": "prefill", "accelerator": "rtx-3090", "tp": "", "date": "2025"}
    for engine, form, tokens, gain in (
        ("llama.cpp", "f16-gguf", "512", 1.0),
        ("llama.cpp", "f16-gguf", "2048", 16 / 7),
        ("transformers", "fp16", "2048", 1.0),
    ):
        one, four = (
            planned(engine=engine, weight_format=form, input_tokens=tokens, accelerators=n, **shape)["ttft_seconds"]
            for n in ("1", "4")
        )
        assert one == pytest.approx(gain * (four or 0))


def test_threads_are_the_cores_that_multiply() -> None:
    shape = {"engine": "llama.cpp", "accelerator": "cpu-ryzen-7950x", "weight_format": "q4_0"}
    (few, all_), _ = read_serving([ROW | shape | {"notes": notes} for notes in ("CPU only, 2 threads.", "")])
    assert few.system.peak == pytest.approx(all_.system.peak / 8) and few.system.bandwidth == all_.system.bandwidth


def test_a_processor_without_a_dot_product_multiplies_8_bits_no_faster() -> None:
    shape = {"engine": "llama.cpp", "model": "llama-3.2-1b", "scenario": "prefill", "input_tokens": "512"}
    for name, ratio in (("cpu-hifive-premier-p550-4-core-risc-v", 1), ("cpu-pi-400-4gb", 1), ("cpu-pi-5-8gb", 2)):
        (few, wide), _ = read_serving(
            [ROW | shape | {"accelerator": name, "weight_format": f} for f in ("q4_0", "bf16")]
        )
        assert few.system.peak == ratio * wide.system.peak


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"accelerator": "h1000"}, "h1000"),
        ({"weight_format": "int3.5"}, "int3.5"),
        ({"tp": "3"}, "need more"),
        ({"concurrency": "-3"}, "at least 0"),
        ({"input_tokens": "1e999"}, "finite"),
        ({"model": "nobodys-7b"}, "layers"),
        ({"scenario": ""}, "scenario is not given"),
    ],
)
def test_rows_that_cannot_be_planned_say_why(changed: dict[str, str], told: str) -> None:
    runs, rejected = read_serving([ROW | changed])
    assert not runs
    assert told in rejected[0][2]


def test_the_record_has_errors_intervals_and_the_baseline(tmp_path: Path) -> None:
    path = tmp_path / "serving.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=[*ROW, "ttft_seconds"])
        writer.writeheader()
        writer.writerows(
            [ROW, ROW | {"id": "b", "scenario": "prefill", "ttft_seconds": "0.01"}, ROW | {"accelerator": "x"}]
        )
    rows = serving_rows(path)
    assert rows is not None
    document = json.loads(json.dumps(serving_record(*read_serving(rows))))
    assert len(document["rows"]) == 2 and len(document["not_planned"]) == 1
    first = document["rows"][0]
    assert first["predicted_ttft_seconds"] is not None and first["predicted_kv_tokens"] > 0
    low, high = first["interval"]["output_tokens_per_second"]
    assert low < first["predicted_output_tokens_per_second"] < high
    found = document["groups"]["g"]["output_tokens_per_second"]
    assert found["n"] == 1 and found["baseline_median"] > 0 and 0 <= found["in_interval"] <= 1


def test_training_runs_are_not_taken_for_serving(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("id,layers,hidden,seq,accelerator,accelerators\na,2,64,128,h100,8\n")
    assert serving_rows(path) is None
