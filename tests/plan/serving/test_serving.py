"""A served plan: passes, requests played step by step, the cheapest devices, and other engines' command lines."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ironlaw.catalog.accelerators import accelerator
from ironlaw.errors import UserError
from ironlaw.model.config import ModelConfig
from ironlaw.plan.request_types import Options
from ironlaw.plan.serving.answer import answer_serving, frontier, layouts_of_copies, search_serving
from ironlaw.plan.serving.emit import emit_notes, emit_serving
from ironlaw.plan.serving.estimate import Served, plan_serving
from ironlaw.plan.serving.rates import device_class, read, serving_engine
from ironlaw.plan.serving.request import parse_request
from ironlaw.plan.serving.simulate import play, transfer_seconds
from ironlaw.plan.serving.systems import Formats, ServingLayout, system_of
from ironlaw.plan.serving.timing import (
    DIVIDED_BYTES,
    ROW_BYTES,
    at_concurrency,
    decode_parts,
    decode_seconds,
    pass_parts,
    prompt_seconds,
    room_error,
    room_tokens,
    tokens_of_a_pass,
    unlimited,
)

LLAMA = ModelConfig.named("llama3-8b")


def served(device: str = "h100-sxm-80gb", weights: str = "bf16", engine: str = "vllm", devices: int = 1) -> Served:
    layout = ServingLayout(tp=devices)
    return Served(LLAMA, accelerator(device), serving_engine(engine), layout, Formats(weights))


def test_a_pass_is_the_sum_of_its_parts() -> None:
    system = served().system
    for sequences, length in ((1.0, 10.0), (64.0, 3000.0)):
        assert sum(pass_parts(system, sequences, length).values()) == pytest.approx(
            float(decode_seconds(system, sequences, length))
        )


def test_passes_take_longer_with_more_of_anything_and_no_less_than_the_hardware_allows() -> None:
    system = served().system
    many = decode_seconds(system, np.array([1.0, 8.0, 64.0, 256.0]), 1000.0)
    assert (np.diff(many) > 0).all()
    assert (np.diff(decode_seconds(system, 64.0, np.array([100.0, 1000.0, 8000.0]))) > 0).all()
    assert (np.diff(prompt_seconds(system, 1.0, np.array([128.0, 1024.0, 8192.0]))) > 0).all()
    assert decode_seconds(system, 1.0, 1.0) > system.demand.dense * 2 / system.bandwidth
    assert prompt_seconds(system, 1.0, 8192.0) > 2 * 8192 * system.demand.dense / system.peak


@pytest.mark.parametrize("engine", read("engines.toml"))
def test_fewer_bits_faster_memory_and_more_ranks_decode_faster(engine: str) -> None:
    def seconds(**changed: object) -> float:
        return float(decode_seconds(served(engine=engine, **changed).system, 1.0, 512.0))  # type: ignore[arg-type]

    assert seconds(weights="fp8") < seconds()
    assert seconds(device="h200") < seconds()


def test_light_load_waits_for_little_more_than_its_prompt_and_heavy_load_is_said_not_to_keep_up() -> None:
    one = served()
    light = play(one.system, parse_request("input=512 output=64 rate=0.5"), one.kv_tokens, 256)
    alone = float(prompt_seconds(one.system, 1.0, 512.0))
    assert light.keeps_up
    assert 0.999 * alone < light.ttft_seconds["p50"] < 2 * alone + 0.02
    heavy = play(one.system, parse_request("input=2048 output=512 rate=200"), one.kv_tokens, 64)
    assert not heavy.keeps_up
    assert (
        heavy.output_tokens_per_second < 1.05 * at_concurrency(one.system, 64.0, 2048.0, 512.0, False).tokens_per_second
    )
    assert heavy.ttft_seconds["p99"] > 20 * alone


@pytest.mark.parametrize("share", [0.9, 1.1, 1.2])
def test_a_rate_holds_when_the_engine_serves_as_many_in_the_long_run(share: float) -> None:
    """Near its highest rate a queue grows for hundreds of requests before anybody notices."""
    one = served()
    always = play(one.system, parse_request("input=1024 output=256 concurrency=256"), one.kv_tokens, 256)
    rate = share * always.requests_per_second
    found = play(one.system, parse_request(f"input=1024 output=256 rate={rate}"), one.kv_tokens, 256)
    assert found.keeps_up == (share < 1)
    assert found.requests_per_second == pytest.approx(min(1.0, 1 / share) * rate, rel=0.06)


def test_no_rate_holds_that_is_not_served() -> None:
    """Where many are served at once, waiting times in both halves of a long run differ by less than a factor of two."""
    one = replace(served(devices=4), model=ModelConfig.named("llama3-70b"))
    found = play(one.system, parse_request("input=1024 output=256 rate=10/s"), one.kv_tokens, 330)
    assert found.requests_per_second < 9 and not found.keeps_up


@pytest.mark.parametrize("share", [0.7, 0.8])
def test_what_keeps_up_serves_what_arrives_and_no_more(share: float) -> None:
    """The tokens of the middle of a run are those of requests that happened to come then."""
    one = served("a100-sxm-80gb")
    rate = share * 3.0
    found = play(one.system, parse_request(f"input=4096 output=64 rate={rate}"), one.kv_tokens, 200)
    assert found.keeps_up and found.requests_per_second == pytest.approx(rate)


def test_requests_that_follow_each_other_agree_with_the_closed_form() -> None:
    one = served()
    played = play(one.system, parse_request("input=512 output=128 concurrency=16"), one.kv_tokens, 256)
    steady = at_concurrency(one.system, 16.0, 512.0, 128.0, False)
    assert played.output_tokens_per_second == pytest.approx(float(steady.tokens_per_second), rel=0.12)
    assert 14 < played.decode_batch <= 16


@pytest.mark.parametrize(("constant", "others"), [("prompt_seconds", 64), ("request_seconds", 1)])
def test_the_host_of_a_pass_delays_all_and_a_server_only_the_request(constant: str, others: int) -> None:
    quick = served().system
    slow = replace(quick, rates=replace(quick.rates, **{constant: getattr(quick.rates, constant) + 0.1}))
    cycles = [64 * 128 / at_concurrency(s, 64.0, 1024.0, 128.0, False).tokens_per_second for s in (quick, slow)]
    assert cycles[1] - cycles[0] == pytest.approx(0.1 * others)
    request = parse_request("input=1024 output=128 rate=0.1")
    alone = [play(s, request, 1e6, 256) for s in (quick, slow)]
    assert alone[1].ttft_seconds["p50"] - alone[0].ttft_seconds["p50"] == pytest.approx(0.1, rel=0.05)
    assert alone[1].tpot_seconds["mean"] == pytest.approx(alone[0].tpot_seconds["mean"], rel=0.02)


def test_launches_that_run_ahead_cost_what_the_device_does_not_wait_for() -> None:
    eager = served(engine="transformers").system
    row = eager.demand.hidden * (ROW_BYTES + DIVIDED_BYTES) / eager.bandwidth
    gaps = eager.demand.layers * (eager.rates.layer_seconds + row)
    for launch, least in ((1e-9, gaps), (1.0, eager.demand.layers * eager.launches)):
        parts = decode_parts(replace(eager, rates=replace(eager.rates, launch_seconds=launch)), 1.0, 512.0)
        device = parts["weights"] + parts["cache"] + parts["collectives"]
        expected = least if least == gaps else least - device
        assert parts["launches"] == pytest.approx(expected, rel=1e-6)


def test_a_prompt_of_many_passes_reads_weights_in_each_and_experts_fill_a_device_less() -> None:
    one = served(engine="llama.cpp", weights="q4_k_m").system
    alone = prompt_seconds(replace(one, demand=replace(one.demand, pair_flops=0.0)), 1.0, np.array([512.0, 2048.0]))
    assert alone[1] == pytest.approx(4 * alone[0])
    mixed = replace(one.demand, experts=one.demand.dense * 8, expert_share=1 / 8)
    rows = mixed.expert_rows(np.array([1.0, 512.0]))
    assert rows == pytest.approx([1.0, 64.0]) and one.demand.expert_rows(512.0) == 512.0


def test_kernels_without_groups_read_keys_and_values_for_every_query_head() -> None:
    system = served().system
    forms = [replace(system, stored_reads=a, expanded_reads=b) for a, b in ((1, 0), (0, 1), (3, 2))]
    parts = [decode_parts(form, 8.0, 512.0)["cache"] for form in forms]
    assert parts[1] == pytest.approx(parts[0] * LLAMA.heads / LLAMA.key_value_heads)
    assert parts[2] == pytest.approx(3 * parts[0] + 2 * parts[1])


def test_a_pipeline_with_room_for_fewer_requests_than_parts_serves_them() -> None:
    request = parse_request("input=100000 output=1000 rate=0.01")
    small = replace(served("rtx-3060"), model=ModelConfig.named("llama-3.1-8b"), layout=ServingLayout(pp=4))
    assert 1 <= small.most_requests(request) < 4
    assert plan_serving(small, request).totals["ttft_seconds"].value > 0


def test_speculation_gives_what_stands_for_a_wider_pass_and_the_drafts() -> None:
    assert tokens_of_a_pass(4, 0.7) == pytest.approx(1 + 0.7 + 0.49 + 0.343 + 0.2401)
    draft = ModelConfig.named("llama-3.2-1b")
    guessed = replace(served(), drafted=4, acceptance=0.7)
    plain, ngram, model = served().system, guessed.system, replace(guessed, draft=draft).system
    before, after = (decode_parts(system, 1.0, 512.0) for system in (plain, ngram))
    assert after["cache"] == pytest.approx(before["cache"] / 2.7731)  # read once for five tokens
    assert after["weights"] == pytest.approx(before["weights"] / 2.7731, rel=0.02)  # bound by reading them
    alone = system_of(draft, accelerator("h100-sxm-80gb"), serving_engine("vllm"), ServingLayout(), Formats("bf16"))
    added = decode_seconds(model, 1.0, 512.0) - decode_seconds(ngram, 1.0, 512.0)
    assert added == pytest.approx(4 * decode_seconds(alone, 1.0, 512.0) / 2.7731)
    assert room_tokens(model) < room_tokens(ngram) == room_tokens(plain)
    busy = plan_serving(
        replace(served(), drafted=8, acceptance=0.5), parse_request("input=64 output=64 concurrency=256")
    )
    assert busy.totals["speculation_gain"].value < 1 < busy.totals["pass_tokens"].value  # products bind: it costs


def test_experts_on_more_ranks_than_attention_exchange_tokens() -> None:
    model = ModelConfig.named("deepseek-v3")
    layout = ServingLayout(tp=1, attention_dp=16)
    system = system_of(model, accelerator("h200"), serving_engine("vllm"), layout, Formats("fp8"))
    visited = 16 * (1 - (15 / 16) ** 8)  # of 16 ranks, by a token that chooses 8 experts
    sent = 64 / 16 * visited * 15 / 16 * 7168 * 2 / (0.7 * system.link)
    expected = 2 * 58 * (system.rates.collective_seconds + sent)  # there and back, in each layer with experts
    assert decode_parts(system, 64.0, 100.0)["collectives"] == pytest.approx(expected)
    assert decode_parts(replace(system, attention_dp=1.0), 64.0, 100.0)["collectives"] == 0
    copies = system.weight_bytes - replace(system, attention_dp=1.0).weight_bytes
    assert 15 * 10e9 < copies < 15 * 25e9  # every rank has attention, the shared experts and the table


def test_copies_of_attention_compute_prompts_side_by_side_when_played_as_in_closed_form() -> None:
    model, request = ModelConfig.named("deepseek-v3"), parse_request("input=4096 output=512 rate=8/s")
    layout = ServingLayout(tp=1, attention_dp=16)
    plan = plan_serving(Served(model, accelerator("h200"), serving_engine("vllm"), layout, Formats("fp8")), request)
    assert plan.facts["keeps_up"] and plan.totals["ttft_seconds"].value < 1
    assert plan.totals["output_tokens_per_second"].value < plan.totals["most_tokens_per_second"].value


def test_a_shared_prefix_is_read_with_every_token_and_computed_by_none() -> None:
    with_prefix = parse_request("input=8192 output=256 rate=4/s prefix=8000")
    one, own = served(), replace(with_prefix, prefix=0)
    shared, alone = (frontier(one, request)[-1] for request in (with_prefix, own))
    read = decode_seconds(one.system, float(shared.requests), 8192.0)
    assert read < shared.tpot_seconds < alone.tpot_seconds
    plan = plan_serving(one, with_prefix)
    assert plan.totals["most_tokens_per_second"].value > plan.totals["output_tokens_per_second"].value


def test_prompts_apart_from_answers_do_not_delay_them_and_their_cache_is_sent() -> None:
    model, request = ModelConfig.named("llama3-70b"), parse_request("input=2048 output=256 rate=1.5")
    one = Served(model, accelerator("h100-sxm-80gb"), serving_engine("vllm"), ServingLayout(4), Formats("bf16"))
    held = 80 * 2 * 8 * 128 * 2 * 2048  # bytes, of which each of four ranks sends a quarter
    assert transfer_seconds(one.system, 2048) == pytest.approx(held / 4 / (0.7 * one.system.link))
    apart = plan_serving(replace(one, layout=ServingLayout(4, prefill=1)), request)
    mixed = plan_serving(one, request)
    assert apart.totals["tpot_seconds"].value < 0.8 * mixed.totals["tpot_seconds"].value
    assert apart.facts["keeps_up"] and apart.totals["kv_transfer_seconds"].value < 0.01
    assert not plan_serving(replace(one, layout=ServingLayout(4, prefill=1)), replace(request, rate=9.0)).facts[
        "keeps_up"
    ]
    with pytest.raises(UserError, match="rate="):
        plan_serving(replace(one, layout=ServingLayout(4, prefill=1)), parse_request("input=2048 output=256"))


def test_parts_of_a_pipeline_work_on_different_requests_and_copies_share_what_comes() -> None:
    """Four parts pass a token no sooner than one device does, and four times as many at once."""
    layouts = (ServingLayout(), ServingLayout(tp=1, pp=4))
    one, four = (replace(served(), layout=layout).system for layout in layouts)
    assert decode_seconds(four, 8.0, 100.0) == decode_seconds(one, 8.0, 100.0)
    rates = [float(unlimited(system, n, 128.0, 128.0)) for system, n in ((one, 16.0), (four, 64.0))]
    assert rates[1] == pytest.approx(4 * rates[0])
    request = parse_request("input=128 output=128 concurrency=64")
    apart = plan_serving(replace(served(), layout=ServingLayout(replicas=4)), request)
    assert 14 < apart.totals["decode_batch"].value <= 16


def test_chips_of_one_generation_with_other_memory_have_effects_of_their_own() -> None:
    classes = {name: device_class(accelerator(name)) for name in ("b200-sxm", "rtx-pro-6000-blackwell", "h200", "a10g")}
    assert list(classes.values()) == ["blackwell", "blackwell-gddr", "hopper", "ampere-gddr"]


def test_a_small_cache_sends_requests_back_and_all_of_them_end() -> None:
    one = served()
    request = parse_request("input=64 output=256 concurrency=32")
    roomy, tight = (play(one.system, request, tokens, 64) for tokens in (1e6, 4000.0))
    assert roomy.preemptions == 0 < tight.preemptions
    assert tight.output_tokens_per_second < roomy.output_tokens_per_second


def test_a_windowed_model_serves_prompts_that_are_longer_than_its_cache() -> None:
    windowed = LLAMA.model_copy(update={"sliding_window": 256})
    one = replace(served(), model=windowed)
    request = parse_request("input=4096 output=64 concurrency=4")
    played = play(one.system, request, 600.0, 64)
    assert played.preemptions == 0 and 1 < played.decode_batch < 3
    with pytest.raises(ValueError, match="holds no request of 4096"):
        play(replace(served(), model=LLAMA).system, request, 600.0, 64)


def test_a_request_longer_than_the_cache_never_fits() -> None:
    small = Served(LLAMA, accelerator("t4"), serving_engine("vllm"), ServingLayout(), Formats("bf16"))
    ledger = plan_serving(small, parse_request("input=512 output=64"))
    assert ledger.facts["fits"] is False
    assert ledger.totals["kv_tokens"].value == 0


@pytest.mark.parametrize(
    ("model", "device", "tp", "weights", "tokens"),
    [  # A100 80 GB: blocks of 16 (vllm-project/vllm pull request 2031), bytes for the cache (10511); issue 21348
        ("llama-2-7b", "a100-sxm-80gb", 1, "fp16", 7351 * 16),
        ("llama-3-8b", "a100-sxm-80gb", 1, "bf16", 53.29 * 2**30 / (2 * 2 * 8 * 128 * 32)),
        ("llama-3-8b", "a100-sxm-80gb", 2, "bf16", 58.97 * 2**30 / (2 * 2 * 4 * 128 * 32)),
        ("qwen3-235b-a22b", "h100-sxm-80gb", 4, "fp8", 178_880),  # little is left: what is uncertain is said
    ],
)
def test_the_cache_holds_what_vllm_printed(model: str, device: str, tp: int, weights: str, tokens: float) -> None:
    one = Served(ModelConfig.named(model), accelerator(device), serving_engine("vllm"), ServingLayout(tp),
                 Formats(weights))  # fmt: skip
    off = room_error(one.system, one.kv_tokens)
    assert tokens == pytest.approx(one.kv_tokens, rel=off) and (off < 0.06) == (tp < 4)
    # As TensorRT-LLM, whose share is of what the weights leave:
    told = replace(one, engine=replace(one.engine, of_free=True)).kv_tokens
    assert told - one.kv_tokens == pytest.approx(
        0.1 * float(one.system.weight_bytes + tp * one.system.workspace_bytes) / float(one.system.token_bytes)
    )


def test_every_total_says_where_it_is_from_and_lies_in_its_interval() -> None:
    ledger = plan_serving(served(), parse_request("input=256 output=64 rate=2 ttft=1s tpot=50ms"))
    for name, total in ledger.totals.items():
        assert total.basis, name
        assert total.low is None or total.high is None or total.low <= total.value <= total.high, name
    assert set(ledger.facts["limits"]) == {"ttft", "tpot", "rate"}
    steps = sum(line.seconds or 0.0 for line in ledger.lines)
    assert steps == pytest.approx(ledger.totals["step_seconds"].value)
    assert sum(ledger.phase_seconds.values()) == pytest.approx(steps)


def test_the_search_holds_its_limits_and_takes_the_cheapest() -> None:
    request = parse_request("input=512 output=128 rate=4 ttft=1s tpot=60ms")
    chosen, others, _ = search_serving(
        LLAMA, serving_engine("vllm"), [Formats("bf16")], request, devices=("h100-sxm-80gb", "l40s", "t4")
    )
    ledger = plan_serving(chosen.served, request)
    assert all(limit["holds"] for limit in ledger.facts["limits"].values())
    assert chosen.usd_per_hour is not None
    assert all((other.usd_per_hour or 0) >= chosen.usd_per_hour for other in others)
    large, slow = ModelConfig.named("llama3-70b"), parse_request("input=2048 output=512 rate=0.1 ttft=2s tpot=50ms")
    formats, devices = [Formats("bf16"), Formats("fp8")], ("rtx-3090", "rtx-4090")
    chosen, others, out = search_serving(large, serving_engine("vllm"), formats, slow, devices=devices)
    assert out["limits, once played step by step"]  # what was tried and failed is not among the next ones
    assert all((other.usd_per_hour or 0) >= (chosen.usd_per_hour or 0) for other in others)
    with pytest.raises(UserError, match="nothing serves this request"):
        search_serving(LLAMA, serving_engine("vllm"), [Formats("bf16")], replace(request, tpot=1e-5), devices=("l40s",))


@pytest.mark.parametrize(("more", "devices"), [("", 8), (" speculate=4 accept=0.8", 1)])
def test_the_search_counts_on_speculation(more: str, devices: int) -> None:
    request = parse_request("input=1024 output=256 rate=1/s tpot=7ms" + more)
    model, engine = ModelConfig.named("llama3-70b"), serving_engine("vllm")
    chosen, _, _ = search_serving(model, engine, [Formats("fp8")], request, devices=("b200-sxm",))
    assert chosen.served.devices == devices


@pytest.mark.parametrize("target", ["vllm", "sglang", "tensorrt-llm", "llama.cpp"])
def test_command_lines_say_what_was_planned(target: str) -> None:
    one = served(engine=target, weights="fp8" if target != "llama.cpp" else "q4_k_m")
    words = shlex.split(emit_serving(target, one, parse_request("input=1024 output=256 rate=1")))
    assert words[0] in ("vllm", "python", "trtllm-serve", "llama-server")
    assert "2560" in words or str(4 * 2560) in words  # the longest, or that of all slots


@pytest.mark.parametrize("target", ["llama.cpp", "tensorrt-llm"])
def test_a_command_that_starts_one_copy_says_so(target: str) -> None:
    """Its requests at once are those of one copy."""
    two = replace(served(), engine=serving_engine(target), layout=ServingLayout(replicas=2))
    line = emit_serving(target, two, parse_request("input=10 output=10 concurrency=6"))
    assert "one of 2 copies" in emit_notes(target, two)[1] and (target != "llama.cpp" or "--parallel 3" in line)


@pytest.mark.parametrize(
    ("target", "change", "reason"),
    [("vllm", {"layout": ServingLayout(tp=3)}, "equally many of 32 heads"),
     ("vllm", {"layout": ServingLayout(attention_dp=2)}, "llama3-8b has none: leave ep= out"),
     ("llama.cpp", {"formats": Formats("int4-awq")}, "hold no int4-awq: use for example --weights q4_k_m"),
     ("tensorrt-llm", {"device": accelerator("mi300x")}, "not on mi300x: use vllm")],
)  # fmt: skip
def test_a_command_that_its_engine_would_refuse_is_not_written(target: str, change: Any, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        emit_serving(target, replace(served(engine=target), **change), parse_request("input=10 output=10"))


def test_copies_of_attention_and_of_the_model_in_sglangs_words() -> None:
    """The `--dp` of its older `--enable-dp-attention`, which counted either, is deprecated (0.5.23)."""
    layout, model = ServingLayout(attention_dp=2, replicas=3), ModelConfig.named("mixtral-8x7b")
    both = replace(served(engine="sglang"), model=model, layout=layout)
    line = emit_serving("sglang", both, parse_request("input=10 output=10"))
    assert "--tp 2 --attn-dp-size 2 --ep-size 2 --dp 3" in line
    assert not any("copies" in note for note in emit_notes("sglang", both))


def test_a_command_leaves_to_the_engine_what_it_decides() -> None:
    """vLLM reads a checkpoint's own format, and its kernel depends on the device. llama.cpp has 256 slots at most."""
    request = parse_request("input=10 output=10 concurrency=900")
    assert "--quantization" not in emit_serving("vllm", served(weights="int4-gptq"), request)
    assert "--parallel 256" in emit_serving("llama.cpp", served(engine="llama.cpp"), request)


@pytest.mark.parametrize(
    ("device", "engine"), [("cpu-ryzen-7950x", "llama.cpp"), ("gaudi3", "vllm"), ("trainium1", "vllm"), ("l4", "vllm"),
                           ("m4-8c", "llama.cpp"), ("rx-7900-xtx", "vllm"), ("arc-b580", "llama.cpp")],
)  # fmt: skip
def test_an_engine_that_runs_on_the_device_is_assumed(device: str, engine: str) -> None:
    answer = answer_serving(ModelConfig.named("llama-3.2-1b"), device, "input=10 output=10", Options())
    assert answer.more["served"]["engine"] == engine


def test_of_several_forms_of_a_device_the_one_planned_is_said() -> None:
    answer = answer_serving(ModelConfig.named("llama-3.2-1b"), "rtx-3080", "input=10 output=10", Options())
    said = {one["name"]: one["value"] for one in answer.more["assumed"]}
    assert said["accelerator"] == answer.more["served"]["device"] == "rtx-3080-10gb"


@pytest.mark.parametrize(
    ("load", "layout"),
    [("rate=100/s tpot=30ms", "tp=1 replicas=8"), ("rate=1/s tpot=30ms", "tp=8"), ("concurrency=1", "tp=8")],
)
def test_devices_are_divided_so_that_the_limits_hold(load: str, layout: str) -> None:
    """And so that one request alone is answered soonest, where several layouts hold them."""
    answer = answer_serving(LLAMA, "8xh100-sxm-80gb", f"input=1024 output=256 {load}", Options())
    assert answer.fits and answer.more["served"]["layout"] == layout


def test_a_model_with_experts_is_served_by_copies_of_attention_where_they_serve_more() -> None:
    """Latent attention keeps one cache for all heads, which tensor parallel ranks each hold whole."""
    text = "input=1024 output=256 concurrency=4096 tpot=100ms"
    answer = answer_serving(ModelConfig.named("deepseek-v3"), "8xb200-sxm", text, Options(weights="fp8", emit="vllm"))
    assert "ep=8" in answer.more["served"]["layout"]
    assert "--enable-expert-parallel" in answer.more["emit"]["text"]


@pytest.mark.parametrize(
    ("engine", "model", "ways"),
    [("vllm", "mixtral-8x7b", {"tp=4", "tp=2 pp=2", "tp=1 pp=4", "tp=2 ep=4", "tp=1 ep=4"}),
     ("sglang", "llama3-8b", {"tp=4", "tp=2 pp=2", "tp=1 pp=4"}), ("vllm", "gpt2-xl", {"tp=1 pp=4"}),
     ("tensorrt-llm", "mixtral-8x7b", {"tp=4", "tp=2 pp=2", "tp=1 pp=4"}), ("mlc-llm", "llama3-8b", {"tp=4"}),
     ("llama.cpp", "llama3-8b", {"tp=1 pp=4"})],
)  # fmt: skip
def test_only_layouts_that_the_engine_can_be_told_are_tried(engine: str, model: str, ways: set[str]) -> None:
    given = ModelConfig.named(model), serving_engine(engine)
    linked, apart = (
        {str(layout) for layout in layouts_of_copies(given[0], accelerator(name), given[1], 4)}
        for name in ("h100-sxm-80gb", "rtx-4090")
    )
    assert linked == ways and apart == {way for way in ways if "ep" not in way}  # experts are shared over a link


def test_what_does_not_fit_is_told_of_the_largest_copy() -> None:
    answer = answer_serving(ModelConfig.named("deepseek-v3"), "8xl4", "input=10 output=10", Options(weights="fp8"))
    assert not answer.fits and answer.more["served"]["layout"] == "tp=8"


def test_a_name_never_reaches_the_shell_as_a_command() -> None:
    one = replace(served(), model=LLAMA.model_copy(update={"name": "x; touch /tmp/owned"}))
    line = emit_serving("vllm", one, parse_request("input=10 output=10"))
    assert "'x; touch /tmp/owned'" in line


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "input is not given"),
        ("input=10", "output is not given"),
        ("input=10 output=ten", "no amount above 0"),
        ("input=-1 output=10", "no amount above 0"),
        ("input=1e999 output=10", "no amount above 0"),
        ("input=1.5 output=10", "no number of tokens"),
        ("input=10 output=10 rate=1 concurrency=2", "twice"),
        ("input=10 output=10 input=11", "given twice"),
        ("input=10 output=10 speed=3", "unknown key"),
        ("input=10 output=10 prefix=11", "longer than input"),
        ("input 10", "no word key=value"),
        ("input=10 output=10 speculate=4", "accept=0.7"),
        ("input=10 output=10 accept=0.7", "accept=0.7"),
        ("input=10 output=10 speculate=4 accept=1.5", "share below 1"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(text: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        parse_request(text)


@pytest.mark.parametrize(
    ("on", "text", "options", "told"),
    [
        ("0xh100-sxm-80gb", "input=1 output=1", {}, "COUNTx"),
        ("4xh100-sxm-80gb", "input=1 output=1", {"layout": "tp=3"}, "devices"),
        ("4xh100-sxm-80gb", "input=1 output=1", {"layout": "dp=4"}, "unknown key 'dp'"),
        ("4xh100-sxm-80gb", "input=1 output=1", {"layout": "tp=2 ep=3"}, "multiple of tp"),
        ("4xh100-sxm-80gb", "input=1 output=1 speculate=4 accept=0.7 draft=llama4-1t", {}, "llama"),
        ("h100-sxm-80gb", "input=1000000 output=1", {}, "takes"),
        ("h100-sxm-80gb", "input=1 output=1", {"weights": "int5"}, "weight format"),
        ("h100-sxm-80gb", "input=1 output=1", {"kv": "int5"}, "--kv"),
        ("h100-sxm-80gb", "input=1 output=1", {"engine": "vlm"}, "vllm"),
        ("h100-sxm-80gb", "input=1 output=1", {"emit": "triton"}, "triton"),
        ("h100-sxm-80gb", "input=1 output=1", {"emit": "vllm", "kv": "int8"}, "no cache in int8: use --kv bf16"),
        ("rtx-3090", "input=1 output=1", {"emit": "llama.cpp", "kv": "fp8", "weights": "q4_k_m"}, "no cache in fp8"),
        ("h100-sxm-80gb", "input=1 output=1", {"sequence": 9}, "--seq is for training a decoder"),
        ("h100-sxm-80gb", "input=1 output=1", {"network": "8x200 Gb/s"}, "--network is for clusters"),
        (None, "input=1 output=1", {}, "rate="),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(
    on: str | None, text: str, options: dict[str, str], told: str
) -> None:
    with pytest.raises(UserError, match=told) as refused:
        answer_serving(LLAMA, on, text, Options(**options))
    assert "\n" not in str(refused.value)
