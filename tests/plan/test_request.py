"""What a user asks on a catalogued cluster, and what comes back."""

import json
import resource
import subprocess
import sys
import time
from inspect import signature

import pytest

from ironlaw.catalog.accelerators import accelerator, accelerator_names
from ironlaw.catalog.nodes import parse_cluster
from ironlaw.cli.plan import plan as command
from ironlaw.errors import UserError
from ironlaw.model.config import ModelConfig
from ironlaw.plan.cluster.estimate import ClusterRequest, plan_cluster
from ironlaw.plan.cluster.intervals import DEFAULT_ON, checked_runs
from ironlaw.plan.cluster.layout_space import CAPABILITIES, lacking
from ironlaw.plan.engines.named import engine, engines
from ironlaw.plan.request import plan_request, resolve
from ironlaw.plan.request_types import Options
from ironlaw.plan.requests.cluster import software_for
from ironlaw.workload.layout import parse_layout


def work(tokens, sequence, global_batch, steps=None):
    return {"tokens": tokens, "sequence": sequence, "global_batch": global_batch, "steps": steps}


BIG_BATCH = work("1T", 8192, 1024)


def plan(what="llama3-8b", on="8xh100-sxm-80gb", layout=None, **options):
    return plan_request(what, on=on, options=Options(layout=layout, **options))


@pytest.fixture(scope="module")
def searched():
    return plan(**work("1T", 8192, 512))


def test_the_document_has_the_promised_keys(searched):
    document = json.loads(json.dumps(searched.to_json(), allow_nan=False))
    assert document["fits"] is True
    for name in ("step_seconds", "peak_bytes", "parameters", "flops_per_step", "mfu", "total_seconds", "rent_usd"):
        assert set(document[name]) == {"value", "interval", "origin", "basis"}, name
    assert {"layout", "candidates", "ruled_out", "assumed", "budget"} <= set(document)
    assert document["work"]["tokens"] >= 1e12


def test_totals_agree_with_each_other(searched):
    totals, more = searched.ledger.totals, searched.more
    assert totals["total_seconds"].value == pytest.approx(totals["step_seconds"].value * more["work"]["steps"])
    assert totals["accelerator_hours"].value == pytest.approx(8 * totals["total_seconds"].value / 3600)
    chosen = [c for c in more["candidates"] if c["layout"]["text"] == more["layout"]["text"]]
    assert chosen and chosen[0]["step_seconds"]["value"] == pytest.approx(totals["step_seconds"].value)
    assert sum(more["terms"].values()) == pytest.approx(totals["step_seconds"].value)


def test_the_ranking_is_ordered_and_says_why(searched):
    candidates = searched.more["candidates"]
    seconds = [c["step_seconds"]["value"] for c in candidates]
    assert len(candidates) == 5 and seconds == sorted(seconds)
    assert candidates[0]["why_slower"] == "" and all(
        c["why_slower"] for c in candidates[1:] if c["step_seconds"]["value"] > 1.01 * seconds[0]
    )


def test_the_chosen_layout_is_sure_to_fit_and_hardly_slower(searched):
    fastest = searched.more["candidates"][0]["step_seconds"]["value"]
    assert searched.ledger.totals["step_seconds"].value <= 1.03 * fastest
    assert searched.ledger.totals["peak_bytes"].high <= searched.more["margin"]["limit_bytes"]


def test_conventions_of_mfu_differ_by_what_they_count(searched):
    totals = searched.ledger.totals
    tokens, model = totals["tokens_per_second"].value, totals["parameters"].value
    assert totals["mfu_6nd"].value == pytest.approx(6 * model * tokens / (8 * 989.4e12), rel=1e-6)
    assert totals["mfu_palm"].value > totals["mfu"].value
    assert totals["hfu"].value >= totals["mfu"].value * 0.999


def test_no_interval_is_faster_than_the_peak():
    mfu = plan("pythia-6.9b", on="8xtpu-v5p", layout="dp=8 zero=3 micro_batch=4", global_batch=1024).ledger.totals[
        "mfu"
    ]
    assert mfu.value < 0.7 and mfu.high == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("engine", "matmuls", "attention"), [("nemo", 0, 1), ("maxtext", 0.63, 1), ("torchtitan", 0.38, 0)]
)
def test_hfu_counts_what_the_engine_repeats(engine, matmuls, attention):
    """By hand: 218,103,808 weights of products in each of 32 blocks; a token meets 4,096 of 8,192 keys on average."""
    words = {
        "on": "64xh100-sxm-80gb",
        "sequence": 8192,
        "global_batch": 64,
        "layout": "dp=64 zero=3 recompute=selective",
    }
    totals = plan("llama3-8b", engine=engine, **words).ledger.totals
    blocks, scores, head = 32 * 218_103_808, 32 * 2 * 4096 * 4096, 4096 * 128_256
    once = blocks + scores + head
    again = (matmuls * blocks + attention * scores) / (3 * once)
    assert totals["hfu"].value / totals["mfu"].value == pytest.approx(1 + again, rel=0.002)


def test_a_given_layout_is_planned_as_given():
    answer = plan("llama3-1b", "h100-sxm-80gb", "dp=1 micro_batch=1 recompute=selective", **work("1B", 2048, 8))
    assert answer.fits and answer.more["layout"]["recompute"] == "selective"
    assert answer.more["layout"]["accumulation"] == 8 and answer.more["candidates"] == []


def test_a_layout_that_does_not_fit_says_by_how_much_and_what_would():
    answer = plan(layout="dp=8 zero=0", **work("1B", 8192, 64))
    assert not answer.fits
    missing = answer.ledger.totals["peak_bytes"].value - answer.more["margin"]["limit_bytes"]
    assert answer.more["margin"]["missing_bytes"] == pytest.approx(missing) and missing > 1e9
    proposed = answer.more["would_fit"][0].removeprefix('--layout "').removesuffix('"')
    assert plan(layout=proposed, **work("1B", 8192, 64)).fits


def test_when_nothing_fits_the_proposed_hardware_does():
    answer = plan("llama3-405b", **work("1B", 8192, 64))
    assert not answer.fits and answer.more["would_fit"]
    for words in answer.more["would_fit"]:
        assert plan("llama3-70b", words.removeprefix("--on "), **work("1B", 8192, 64)).fits, words


@pytest.mark.parametrize("name", accelerator_names())
def test_every_catalogued_accelerator_is_planned_or_refused_in_one_line(name):
    for count in (1, 8):
        try:
            answer = plan("gpt2", f"{count}x{name}", layout=f"dp={count}", **work(None, 1024, 64, 10))
        except UserError as error:
            assert "is known" in str(error) and "\n" not in str(error)
        else:
            assert answer.ledger.totals["step_seconds"].value > 0


def test_a_budget_of_recomputation_is_settled_in_the_answer():
    answer = plan(layout="dp=8 zero=3 micro_batch=4 recompute=budget:60GiB", **BIG_BATCH)
    assert "budget" not in answer.more["layout"]["text"]
    assert answer.more["layout"]["recompute"] in answer.ledger.facts["layout"]
    assert answer.ledger.totals["peak_bytes"].value <= 60 * 2**30


def test_offloading_is_announced_where_nothing_fits_without():
    answer = plan("llama3-70b", **work("1B", 4096, 64))
    assert answer.fits and answer.more["layout"]["offload"] != "none"
    assert "no measured run backs" in answer.more["margin"]["choice"]
    assert answer.ledger.facts["host_bytes"] <= answer.ledger.facts["host_limit_bytes"]


def test_layout_and_cluster_fill_in_each_other():
    counted = plan(on="h100-sxm-80gb", layout="dp=4 zero=3 tp=2", **BIG_BATCH)
    assert counted.more["cluster"]["accelerators"] == 8
    assert "accelerators" in [a["name"] for a in counted.more["assumed"]]
    filled = plan(on="16xh100-sxm-80gb", layout="tp=4 zero=1", **BIG_BATCH)
    assert filled.more["layout"]["dp"] == 4


def test_a_layout_that_cannot_be_is_wrong_input():
    with pytest.raises(UserError, match="the cluster has 8"):
        plan(layout="dp=3", **BIG_BATCH)


def test_assumptions_are_listed(searched):
    assert [a["name"] for a in searched.more["assumed"]] == ["precision", "engine"]
    assert {"sequence", "global batch", "tokens"} <= {a["name"] for a in plan("gpt2", "h200").more["assumed"]}
    assert [a["name"] for a in plan("gpt2", "h200", engine="generic", precision="bf16").more["assumed"]] == [
        "sequence", "global batch", "tokens",
    ]  # fmt: skip


def test_an_engine_that_nobody_checked_there_is_said():
    assert plan(**BIG_BATCH).more["engine"]["checked_runs"] > 0
    assert plan(on="8xa100-sxm-80gb", **BIG_BATCH).more["engine"]["checked_runs"] > 0
    engine = plan(on="8xa100-sxm-80gb", engine="nemo", **BIG_BATCH).more["engine"]
    assert engine["checked_runs"] == 0 and "composer-fsdp" in engine["checked_there"]


def test_checked_engines_exist():
    assert set(checked_runs()) <= set(engines())
    assert all(generation in checked_runs()[name] for generation, name in DEFAULT_ON.items())


def test_a_sliding_window_saves_attention():
    """4,096 of 8,192 tokens: (w / s) (2 - w / s) = 3/4 of the scores of full attention."""
    model = ModelConfig.named("mistral-7b")
    layout, cluster = parse_layout("dp=8 zero=3"), parse_cluster("8xh100-sxm-80gb")
    windowed, full = (
        plan_cluster(
            ClusterRequest(model.model_copy(update={"sliding_window": w}), cluster, sequence=8192, global_batch=64),
            layout,
        ).ledger
        for w in (4096, 8192)
    )

    def attention(ledger, name):
        return sum(getattr(line, name) for line in ledger.lines if line.operation == "attention")

    assert attention(windowed, "flops") / attention(full, "flops") == pytest.approx(0.75, rel=1e-6)
    assert attention(windowed, "seconds") < 0.9 * attention(full, "seconds")


def test_a_config_file_on_a_catalogued_accelerator(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[model]\nname = "gpt2"\n[train]\nsteps = 10\nglobal_batch = 16\nsequence = 512\n')
    answer = plan(str(file), "h100-sxm-80gb")
    assert answer.more["work"] | {"tokens": 0} == {
        "sequence": 512, "global_batch": 16, "steps": 10, "tokens": 0, "tokens_per_step": 8192,
    }  # fmt: skip


def test_scaling_stops_where_doubling_no_longer_pays():
    rows = plan("gpt2", "8xh100-sxm-80gb", **work("1B", 1024, 64)).more["scaling"]
    assert rows["rows"][0]["accelerators"] == 4
    gains = [row["gain"] for row in rows["rows"] if row["gain"] is not None]
    assert (rows["pays_up_to"] is not None and gains[-1] < 0.5) or "divides" in rows["reason"]
    assert all(gain >= 0.5 for gain in gains[1:-1])
    slower = plan("gpt2", "16xh100-sxm-80gb", **work("1B", 1024, 8)).more["scaling"]
    assert slower["pays_up_to"] == 8 and slower["reason"] == "doubling to 16 is 3% slower"


def test_tensor_parallelism_stays_inside_the_island():
    answer = plan("llama3-8b", "32xh100-sxm-80gb", **BIG_BATCH)
    assert answer.more["ruled_out"]["tensor parallelism across the network"]["count"] > 0
    assert all(c["layout"]["tp"] <= 8 for c in answer.more["candidates"])


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("llama4", "did you mean llama3"),
        ("nothing.toml", "no config file"),
        ("./nothing", "no config at"),
    ],
)
def test_what_cannot_be_resolved(what, message):
    with pytest.raises(UserError, match=message):
        resolve(what)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "int4"}, "unknown precision"),
        ({"precision": "mxfp8"}, "no mxfp8 peak of h100-sxm-80gb: use --precision fp32 or tf32 or fp16 or bf16"),
        ({"optimizer": "adamw8"}, "unknown optimizer 'adamw8'"),
        ({"engine": "megatorn"}, "unknown engine"),
        ({"emit": "torchtitan", "layout": "dp=8 zero=1"}, "cannot be written for torchtitan"),
        ({"emit": "ironlaw", "precision": "fp8"}, "cannot be written as options of ironlaw"),
        ({"emit": "torchtitn"}, "did you mean torchtitan"),
    ],
)
def test_wrong_options_are_one_line(options, message):
    with pytest.raises(UserError, match=message) as caught:
        plan(**BIG_BATCH, **options)
    assert "\n" not in str(caught.value)


def run(*arguments, **options):
    command = [sys.executable, "-m", "ironlaw", "plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def test_exit_codes_and_streams():
    fits = run("gpt2", "--on", "h200", "--json")
    assert fits.returncode == 0 and json.loads(fits.stdout)["fits"] is True and fits.stderr == ""
    wrong = run("gpt2", "--on", "h201")
    assert wrong.returncode == 2 and wrong.stdout == "" and wrong.stderr.count("\n") == 1
    no = run("llama3-8b", "--on", "h100-sxm-80gb", "--layout", "dp=1")
    assert no.returncode == 1 and "too much" in no.stdout


def test_options_for_another_trainer_are_alone_on_stdout():
    emitted = run("llama3-8b", "--on", "8xh100-sxm-80gb", "--emit", "deepspeed")
    assert emitted.returncode == 0 and json.loads(emitted.stdout)["zero_optimization"]["stage"] in (0, 1, 2, 3)


def test_planning_never_imports_torch():
    code = (
        "import sys; from ironlaw.plan.request import plan_request; import ironlaw.report.cluster_view;"
        "plan_request('gpt2', on='h200'); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


REPORT_PEAK = """
import re, runpy, sys
try:
    runpy.run_module("ironlaw", run_name="__main__")
finally:
    print(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1], file=sys.stderr)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak from /proc")
def test_gpt3_on_4096_accelerators_in_seconds_and_a_gibibyte():
    start = time.perf_counter()
    # The process says its own peak: what the system reports of a child includes the size of the one that forked it.
    command = [sys.executable, "-c", REPORT_PEAK, "plan", "gpt3-175b", "--on", "4096xa100-sxm-80gb", "--json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = time.perf_counter() - start
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert json.loads(done.stdout)["searched"]["planned"] > 5_000
    assert min(seconds, processor) < 10
    assert int(done.stderr) < 2**20  # KiB


def test_a_config_that_offloads_is_planned_so_on_one_accelerator(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text('[model]\nname = "llama3-8b"\n[train]\nsequence = 2048\nglobal_batch = 8\nmicro_batch = 2\n')
    for value in ("activations", "both"):
        answer = plan_request(str(path), on="1xh100-sxm-80gb", overrides=[f"train.offload={value}"], options=Options())
        layout = answer.more["layout"]
        assert (layout["offload"], layout["micro_batch"], layout["recompute"]) == (value, 2, "none")
        assert answer.ledger.facts["host_bytes"] > 0


def test_a_network_can_be_described():
    """Half the cards, half the rate; a network oversubscribed 2:1 is as slow as one of half the rate."""
    layout = "dp=64 zero=3 micro_batch=1"
    usual, slow, over, small = (
        plan_request("llama3-8b", on="64xh100-sxm-80gb", options=Options(layout=layout, network=words, per_node=size))
        for words, size in ((None, None), ("4x 400 Gb/s IB", None), ("8x NDR IB per node, 2:1", None), (None, 4))
    )
    seconds = [answer.more["terms"]["communication of sharded state"] for answer in (usual, slow, over, small)]
    assert seconds[1] > 1.5 * seconds[0] and seconds[2] == pytest.approx(seconds[1])
    assert slow.more["cluster"]["network_bytes_per_second"] == 200e9
    assert small.more["cluster"]["nodes"] == 16 and small.more["cluster"]["per_node"] == 4
    with pytest.raises(UserError, match="names no kind of network with a rate"):
        plan_request("llama3-8b", on="64xh100-sxm-80gb", options=Options(network="fast"))
    with pytest.raises(UserError, match="--network is for clusters"):
        plan_request("gpt2", on="this", options=Options(network="8x NDR"))


def test_an_odd_lot_of_accelerators_is_told_which_fewer_are_faster():
    answer = plan_request("llama3-8b", on="17xh100-sxm-80gb", options=Options(global_batch=16))
    first = answer.more["first_change"]["tried"][0]
    assert first["change"].startswith("--on 16xh100-sxm-80gb") and first["gain"] > 0.3
    round_ones = plan_request("llama3-8b", on="16xh100-sxm-80gb", options=Options(global_batch=16))
    assert not any("divide better" in change["change"] for change in round_ones.more["first_change"]["tried"])


def test_the_software_assumed_can_run_the_layout():
    """On A100s most runs are of a framework that shards only: GPT-3 on 4,096 of them has no layout there."""
    answer = plan("gpt3-175b", on="4096xa100-sxm-80gb")
    name, layout = answer.more["engine"]["name"], parse_layout(answer.more["layout"]["text"])
    assert layout.tp * layout.pp > 1 and not lacking(engine(name), layout)
    said = next(entry for entry in answer.more["assumed"] if entry["name"] == "engine")
    assert said["value"] == name and "composer-fsdp, which has no tensor or pipeline parallelism" in said["reason"]
    others = answer.more["engine"]["others"]
    assert others and all(not lacking(engine(o["engine"]), parse_layout(o["layout"])) for o in others)
    assert all(o["step_seconds"] > 0 and o["engine"] != name for o in others)


def test_a_given_layout_decides_on_the_software_and_given_software_on_the_layouts():
    words = {"what": "llama3-8b", "on": "16xa100-sxm-80gb", **BIG_BATCH}
    assert plan(**words, layout="dp=16 zero=3").more["engine"]["name"] == "composer-fsdp"
    assert plan(**words, layout="dp=2 tp=4 pp=2 zero=1").more["engine"]["name"] == "nemo"
    assert plan(**words, layout="dp=2 tp=4 pp=2 schedule=zb").more["engine"]["name"] == "generic"
    with pytest.raises(UserError, match=r"composer-fsdp has no .*pipeline parallelism.*use --engine"):
        plan(**words, layout="dp=2 tp=4 pp=2 zero=1", engine="composer-fsdp")
    found = plan(**words, engine="composer-fsdp").more
    assert found["layout"]["tp"] == found["layout"]["pp"] == 1 and "others" not in found["engine"]
    assert any("composer-fsdp has no" in wall for wall in found["ruled_out"])


@pytest.mark.parametrize(
    "layout", ["dp=8 zero=1 offload=optimizer", "dp=4 cp=2 cp_kind=ring", "dp=4 pp=2 zero=3 schedule=zb"]
)
def test_software_named_in_a_refusal_runs_the_layout(layout):
    words = {"what": "llama3-8b", "on": "8xh100-sxm-80gb", **BIG_BATCH, "layout": layout}
    for refused in ("composer-fsdp", "levanter") if "cp" in layout else ("composer-fsdp",):
        with pytest.raises(UserError, match=f"{refused} has no ") as refusal:
            plan(**words, engine=refused)
    able = str(refusal.value).partition("use --engine ")[2].split(", ")
    assert able and all(plan(**words, engine=name).ledger.lines for name in able)


def test_every_word_of_what_an_engine_lacks_is_known():
    assert all(set(e.lacks) <= set(CAPABILITIES) for e in engines().values())


def test_names_that_stand_for_others_and_devices_of_which_too_little_is_known():
    assumed = plan("deepseek-r1", on="256xa100-80gb", layout="dp=8 ep=8 tp=4 pp=8 zero=1").more["assumed"]
    said = {entry["name"]: entry for entry in assumed}
    assert said["accelerator"]["value"] == "a100-sxm-80gb" and "the form is not said" in said["accelerator"]["reason"]
    assert said["model"]["value"] == "deepseek-v3" and "deepseek-r1" in said["model"]["reason"]
    with pytest.raises(UserError, match="its maker prints none"):
        plan("qwen3-0.6b", on="snapdragon-8-elite-npu")
    with pytest.raises(UserError, match="holds 8: use 1, 2, 4 or 8"):
        plan(per_node=3)


def test_adapters_multiply_in_formats_that_the_trainer_has_and_mfu_is_of_that_formats_peak() -> None:
    def adapted(precision):
        lora = ["finetune.method=lora"]
        return plan_request("gpt2", on="a100-sxm-80gb", overrides=lora, options=Options(precision=precision))

    for precision in ("bf16", "tf32", "fp32"):
        assert 0 < adapted(precision).ledger.totals["mfu"].value < 0.75, precision
    with pytest.raises(UserError, match="16 bits or more"):
        adapted("fp8")


def test_what_is_asked_of_adapters_is_planned_or_refused() -> None:
    def adapted(**asked):
        return plan_request("gpt2", on="a100-sxm-80gb", overrides=["finetune.method=lora"], options=Options(**asked))

    usual, paged = (adapted(optimizer=name, tokens="1M").ledger for name in ("adamw", "adam8bit"))
    assert paged.memory_bytes()["optimizer"] < 0.5 * usual.memory_bytes()["optimizer"]
    assert usual.facts["steps"] == 62  # of 16 sequences of 1,024 tokens, rounded up
    for asked in ({"engine": "nemo"}, {"network": "400 Gb/s RoCE"}, {"per_node": 4}):
        with pytest.raises(UserError, match="leave --layout"):
            adapted(**asked)


def test_what_sets_an_assumption_is_an_option_of_the_command() -> None:
    options = {f"--{name.strip('_').replace('_', '-')}" for name in signature(command).parameters}
    adapters = plan_request("gpt2", on="3xrtx-4090", overrides=["finetune.method=lora"])
    for answer in (adapters, plan("gpt2", "h200")):
        words = [word for one in answer.more["assumed"] for word in one["how_to_set"].split() if word.startswith("--")]
        assert words and set(words) <= options


def test_adapters_are_planned_on_a_catalogued_accelerator() -> None:
    """By hand: 68,451,041,280 weights of blocks in nf4 with scales in 8 bits, embedding and output layer in bf16."""
    known = ModelConfig.named("llama3-70b")
    answer = plan_request("llama3-70b", on="rtx-4090", overrides=["finetune.method=qlora"])
    ends, norms = 2 * known.vocab * known.hidden, (2 * known.layers + 1) * known.hidden
    nf4 = (known.parameters - ends - norms) * (4 + 8 / 64 + 32 / 64 / 256) / 8
    # Of rank 16: query and output, key and value, the three matrices of the network.
    trained = 80 * 16 * (2 * (8192 + 8192) + 2 * (8192 + 1024) + 3 * (8192 + 28672))
    held = {line.component: line.bytes for line in answer.ledger.memory}
    assert held["optimizer"] == pytest.approx(8 * trained, rel=1e-4)
    tables = 2 * 4 * known.context * 64  # cosines and sines
    assert held["weights"] == pytest.approx(2 * ends + 4 * norms + nf4 + 4 * trained + tables, rel=1e-5)
    assert not answer.fits and "too much already" in answer.ledger.facts["finetune"]
    small = plan_request("llama3-8b", on="rtx-4090", overrides=["finetune.method=qlora"])
    said = small.ledger.facts["finetune"]
    assert small.fits and "left for activations" in said
    # A tenth of the model, which adapters alone leave frozen, is named with the key that trains it.
    ends = 2 * 128256 * 4096 / 8030261248
    assert f"output layer ({ends:.0%})" in said and 'finetune.modules_to_save = ["embeddings"]' in said
    settings = ["finetune.method=qlora", 'finetune.modules_to_save=["embeddings"]']
    saved = plan_request("llama3-8b", on="rtx-4090", overrides=settings)
    assert "output layer" not in saved.ledger.facts["finetune"]
    assert f"beside {8030261248 - 2 * 128256 * 4096:,} frozen ones" in saved.ledger.facts["finetune"]
    # On two cards each has half of what one holds: nf4 codes too, all but the scales of scales.
    shared = plan_request("llama3-70b", on="2xrtx-4090", overrides=["finetune.method=qlora"])
    halves = {line.component: line.bytes for line in shared.ledger.memory}
    assert halves["weights"] == pytest.approx((held["weights"] + tables) / 2, rel=1e-3)
    assert not shared.fits and "left for activations" in shared.ledger.facts["finetune"]
    assert f"trains {trained:,} parameters" in shared.ledger.facts["finetune"]  # of the job, not of a card
    options = Options(sequence=512)  # with a quarter of the words
    earlier = plan_request("llama-2-70b", on="2xrtx-4090", overrides=["finetune.method=qlora"], options=options)
    assert earlier.fits
    assert "dp 2, ZeRO 3" in str(shared.more["assumed"])


def test_an_accelerator_without_runs_says_so():
    (generic,) = software_for(Options(), accelerator("mi250x"))
    assert generic.value == "generic" and generic.reason == "no runs on cdna2 are known"
