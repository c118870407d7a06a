# ruff: noqa: E501 a table reads best by the row
"""Wrong input for every verb, as data: what is put into the folder, what is called, by class of mistake.

`cases()` gives (name, arguments, files): CONFIG, MODEL and RUN stand for good ones; a file's content is bytes, or a
function that makes it at a path. What each must end in is said once, in `test_bad_inputs.py`.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

Content = bytes | Callable[[Path], object]
Case = tuple[str, list[str], dict[str, Content]]

NEW = ["--out", "new"]
CLUSTER = ["--on", "8xh100-sxm-80gb"]
HUGE = "99999999999999999999999"  # 23 digits
NUMBERS = ("inf", "-inf", "nan", "-1", HUGE, "-" + HUGE, "1e400", "true", "abc", "", "0x", "[1]", "{a=1}", "1;2", "９x")

# What a verb is called with around a config file.
CONFIG_VERBS: dict[str, tuple[list[str], list[str]]] = {
    "plan": (["plan"], []),
    "plan on a cluster": (["plan"], CLUSTER),
    "train": (["train"], NEW),
    "tune": (["tune"], ["--budget", "1s", "--out", "tuned"]),
    "launch": (["launch"], ["--on", "slurm"]),
    "rehearse": (["rehearse"], ["--on", "2xh100-sxm-80gb"]),
    "data prepare": (["data", "prepare"], []),
    "data stats": (["data", "stats"], []),
    "data inspect": (["data", "inspect"], []),
    "data check": (["data", "check"], []),
    "data export": (["data", "export"], ["prefix"]),
}
RUN_VERBS: dict[str, tuple[list[str], list[str]]] = {
    "explain": (["explain"], []),
    "explain two": (["explain", "RUN"], []),
    "generate": (["generate"], ["--tokens", "2"]),
    "export": (["export"], []),
    "compress": (["compress"], ["--to", "int4"]),
    "runs": (["runs"], []),
}
CSV_VERBS: dict[str, tuple[list[str], list[str]]] = {
    "validate": (["validate"], []),
    "calibrate": (["calibrate"], ["--as", "mine"]),
}


def circle(path: Path) -> None:
    path.symlink_to(path.name)


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def fifo(path: Path) -> None:
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.mkdir()


def loop_of_folders(path: Path) -> None:
    path.mkdir()
    (path / "again").symlink_to(path.absolute())


DEEP_JSON = b"[" * 100_000
# No file of any kind that is read here.
UNREADABLE: dict[str, Content] = {
    "nothing in it": b"",
    "binary": bytes(range(256)),
    "zeros": bytes(5000),
    "latin-1": b'[model]\nname = "gpt2\xe9"\n',
    "utf-16": '[model]\nname = "gpt2"\n'.encode("utf-16"),
    "an image": b"\x89PNG\r\n\x1a\n\0\0\0",
    "deep brackets": b"a = " + b"[" * 100_000,
    "deep JSON": DEEP_JSON,
    "5,000 digits": b"[model]\nlayers = " + b"9" * 5000,
    "a circular link": circle,
    "a dangling link": dangling,
    "a pipe": fifo,
    "a folder": folder,
    "a folder in itself": loop_of_folders,
}
NAMES = (
    "a" * 300, "[/bold]", "[red]x", "x\x1b[31m\x1b]0;title\x07", "../../../nothing", "~nobody/x", "a\u202eb", "-", "\udcff",
    "a\nb", "é", "//", "*", "%s%n", "{x}", "$(x)", "", ".", "C:\\x", "x\x00y".replace("\x00", "\x01"),
)  # fmt: skip


def _with(content: bytes, **files: Content) -> dict[str, Content]:
    return {"bad": content, **files}


def of_config_files() -> Iterator[Case]:
    for verb, (before, after) in CONFIG_VERBS.items():
        for what, content in UNREADABLE.items():
            yield f"{verb}: config is {what}", [*before, "bad.toml", *after], {"bad.toml": content}


def of_paths() -> Iterator[Case]:
    for verb, (before, after) in {**CONFIG_VERBS, **RUN_VERBS, **CSV_VERBS}.items():
        for number in range(len(NAMES)) if verb in ("plan", "explain", "validate") else (0, 1, 3, 5, 8):
            yield f"{verb}: path {number} {NAMES[number][:9]!a}", [*before, NAMES[number] + "x", *after], {}
        yield f"{verb}: path is a circular link", [*before, "loop", *after], {"loop": circle}


TABLES = {
    "model is a number": b"model = 3\n", "model is a list": b"[[model]]\nname = 'gpt2'\n",
    "train is text": b"train = 'x'\n[model]\nname = 'gpt2'\n", "no model": b"[train]\nsteps = 3\n",
    "a name that is a number": b"[model]\nname = 3\n", "a name that is a list": b"[model]\nname = ['gpt2']\n",
    "from nowhere": b"[model]\nfrom = 'nowhere'\n", "from a number": b"[model]\nfrom = 3\n",
    "from nothing": b"[model]\nfrom = ''\n", "from a control character": b'[model]\nfrom = "a\\u0000b"\n',
    "from itself": b"[model]\nfrom = 'here'\n", "twice": b"[model]\nname = 'gpt2'\n[model]\n",
    "a date": b"[model]\nname = 2026-01-01\n", "sources that are text": b"[model]\nname='gpt2'\n[data]\nsources = 'x'\n",
    "sources with a wrong key": b"[model]\nname='gpt2'\n[[data.sources]]\npth = 'x'\n",
    "sources of nothing": b"[model]\nname='gpt2'\n[[data.sources]]\npath = ''\n",
    "a table for a number": b"[model]\nname='gpt2'\n[train.steps]\nx = 1\n",
    "experts without a number": b"[model]\nname='gpt2'\n[model.moe]\nexperts = 4\n",
    "an unknown section with markup": b"[model]\nname='gpt2'\n['[/x]']\na = 1\n",
    "an unknown key with an escape": b'[model]\nname="gpt2"\n[train]\n"\\u001b[31m" = 1\n',
}  # fmt: skip


def of_tables() -> Iterator[Case]:
    for what, content in TABLES.items():
        for verb in ("plan", "train"):
            before, after = CONFIG_VERBS[verb]
            itself = b"[model]\nfrom = '../here'\n"
            yield f"{verb}: {what}", [*before, "bad.toml", *after], {"bad.toml": content, "here/config.toml": itself}


KEYS = (
    "model.layers", "model.hidden", "model.heads", "model.vocab", "model.context", "model.norm_eps", "train.steps",
    "train.global_batch", "train.clip", "optimizer.lr", "optimizer.beta1", "schedule.warmup_steps", "train.seed",
    "evaluation.batches", "checkpoint.every", "layout.tp", "data.validation_fraction", "recovery.window",
)  # fmt: skip
FINE = {("train.clip", "inf"), ("train.clip", "1e400")}
SETTINGS = (
    "model.layers=1000000", "model.layers=1000000000", "model.name=", "model.tied=2", "model.tied=yes", "model.bias=1",
    "model.layers=0", "model.heads=0", "model.dropout=1", "model.positions=rope2", "model.qkv_clip=1e300",
    "data.path=", "data.path=nowhere",
    "data.tokenizer=nowhere", "data.tokenizer=", "data.field=", "train.precision=int3", "train.steps=1e30",
    "train.steps=0.5", "schedule.warmup_steps=99", "schedule.kind=cosine2", "recompute.budget=x", "recompute.budget=infGB",
    "recompute.budget=1.1.1GB", "optimizer.name=adamw2", "optimizer.no_decay=['nothing']", "optimizer.rank=0",
    "tracking.to=['x']", "tracking.to=x", "layout.schedule=x", "model=3", "train=3", "=", "a.b.c.d=1", "train.steps.x=1",
    "train.=1", "..=1", "train.steps", "model.moe.x=1", "model.moe=1", "model.moe.experts=0", "model.latent.x=1",
    "data.format=[]", "data.format={a=1}", "data.sources=[{format=[1]}]", "model.parallel_norms=true",
    "data.sources=[]x", "data.sources=['x']", "data.sources=[{}]", "data.cache=", "model.rope_scaling=3",
    "model.rope_scaling={a='b'}", "optimizer.groups=[{pattern=''}]", "train.start_from=nowhere", "train.offload=x",
)  # fmt: skip


def of_settings() -> Iterator[Case]:
    for key in KEYS:
        for value in NUMBERS:
            if (key, value) not in FINE:
                yield f"train: --set {key}={value}", ["train", "CONFIG", *NEW, "--set", f"{key}={value}"], {}
    for setting in SETTINGS:
        yield f"train: --set {setting}", ["train", "CONFIG", *NEW, "--set", setting], {}
        if setting.startswith("model") and not setting.startswith("model.name"):
            yield f"plan a model: --set {setting}", ["plan", "MODEL", *CLUSTER, "--set", setting], {}


# (verb and its arguments, option): a number is expected.
NUMBER_OPTIONS = (
    *((["plan", "MODEL", *CLUSTER], f"--{name}") for name in (
        "steps", "seq", "global-batch", "per-node", "price-per-hour", "tokens", "pue", "ranks",
    )),
    (["plan", "MODEL"], "--ranks"), (["measure"], "--threads"), (["launch", "CONFIG", "--on", "slurm"], "--nodes"),
    (["launch", "CONFIG", "--on", "slurm"], "--per-node"), (["launch", "CONFIG", "--on", "slurm"], "--min-nodes"),
    (["tune", "CONFIG", "--out", "tuned"], "--budget"), (["generate", "RUN"], "--tokens"),
    (["generate", "RUN"], "--temperature"), (["generate", "RUN"], "--top-k"), (["generate", "RUN", "--tokens", "1"], "--seed"),
    (["data", "inspect", "CONFIG"], "--step"), (["data", "inspect", "CONFIG"], "--rows"),
    (["data", "clean", "--cache", "none"], "--unused-days"),
)  # fmt: skip
FINE_OPTIONS = {"--seed -1", f"--unused-days {HUGE}", f"--temperature {HUGE}"}


def of_number_options() -> Iterator[Case]:
    for words, option in NUMBER_OPTIONS:
        for value in NUMBERS:
            if f"{option} {value}" not in FINE_OPTIONS:
                yield f"{' '.join(words)} {option} {value}", [*words, f"{option}={value}"], {}


LAYOUTS = (
    "dp=0", "dp=-1", f"dp={HUGE}", "dp=inf", "dp=true", "dp=1e3", "tp=1000000000", "dp=8 dp=8", "x=1", "=", "dp", "dp=8 pp=",
    "zero=4", "sp=x", "schedule=x", "recompute=every:0", "recompute=budget:0", f"recompute=every:{HUGE}", "[/x]=1",
    "\x1b[31m=1", "recompute=budget:infgib", "offload=x", "cp_kind=x", "micro_batch=0", f"micro_batch={HUGE}",
)  # fmt: skip
WORDS = {
    "--on": (
        "", "x", "0xh100-sxm-80gb", "-1xh100-sxm-80gb", f"{HUGE}xh100-sxm-80gb", "infxh100-sxm-80gb", "1.5xh100-sxm-80gb",
        "8x", "8xh100@x", "8xh100-sxm-80gb@", "[/x]", "\x1b[31m", "../x", "8x../../x", "1e9xh100-sxm-80gb",
    ),
    "--engine": ("", "x", "[/x]", "../../x", "a" * 300, "\x1b[0m", "/etc/passwd"),
    "--grid": ("", "x", "[/x]", "../x"),
    "--pue": ("", "0", "0.5", "[/x]", "1e400"),
    "--precision": ("", "x", "[/x]", "int8"),
    "--optimizer": ("", "x", "[/x]"),
    "--emit": ("", "x", "[/x]", "../x"),
    "--network": ("", "x", "[/x]", "inf Gb/s", "0x 100 Gb/s InfiniBand"),
    "--tokens": ("", "0", "-5", "1Q", "1e99", "1.1.1", f"{HUGE}T", "1e400"),
    "--layout": LAYOUTS,
}  # fmt: skip


def of_long_words() -> Iterator[Case]:
    """More digits than Python converts, in every option that takes words."""
    digits = "9" * 5000
    for option, form in {"--on": "{}xh100-sxm-80gb", "--network": "{} ports of HDR", "--layout": "recompute=every:{}",
                         "--tokens": "{}T", "--serve": "input={} output=1 rate=1/s", "--pue": "{}"}.items():  # fmt: skip
        given = [] if option == "--on" else CLUSTER
        yield f"plan {option} of 5,000 digits", ["plan", "MODEL", *given, option, form.format(digits)], {}
    for value in (f"x={digits}", f"x=4:int64:{digits}", "x=99999999999x99999999999"):
        yield f"plan --input {value[:12]}", ["plan", "torch.nn:Identity", "--input", value], {}
    yield "tune --budget of 5,000 digits", ["tune", "CONFIG", "--out", "tuned", "--budget", f"{digits}s"], {}
    for setting in ("optimizer.name=sgd", "optimizer.name=muon", "optimizer.no_decay=['embedding']"):
        words = ["train", "CONFIG", "--out", "damaged", "--resume", "--set", "train.steps=3", "--set", setting]
        yield f"train --resume: --set {setting}", words, {"damaged": _copied}
    for words in (["launch", "CONFIG", "--on=slurm", "--image=x"], ["launch", "CONFIG", "--on=ssh", "--hosts=a", "--claim=x"],
                  ["launch", "CONFIG", "--on=slurm", "--hosts=x"], ["plan", "CONFIG", "--input=x=4"],
                  ["plan", "MODEL", *CLUSTER, "--real"], ["tune", "CONFIG", "--out=tuned", "--concurrency=3"],
                  ["plan", "torch.nn:Identity", "--input=x=4", "--precision=bf16"], ["rehearse", "torch.nn:Identity", *CLUSTER],
                  ["plan", "torch.nn:Identity", "--input=x=4", "--seq=4"]):  # fmt: skip
        yield f"options of something else: {' '.join(words)}", words, {}
    yield "serve: a draft without speculation", ["serve", "RUN", "--port=0", "--set", "serve.draft=RUN"], {}
    yield "generate: a prompt that is no UTF-8", ["generate", "RUN", "--tokens=1", "--prompt=a\udcff"], {}
    for layout in ("layout.tp=2", "layout.dp=4", "layout.ep=2", "layout.virtual_stages=2"):
        yield f"train in one process: {layout}", ["train", "CONFIG", *NEW, "--set", layout], {}
    for layout in ("ep=8", "virtual_stages=3"):
        yield f"train in one process: --layout {layout}", ["train", "CONFIG", *NEW, "--layout", layout], {}


MODULES = b"""
import sys
def leaves(): sys.exit(7)
def fails(): raise OSError("[/x]\\x1b[31m")
def never(): return never()
"""


def of_modules() -> Iterator[Case]:
    for name in ("leaves", "fails", "never", "absent"):
        yield f"plan a module: {name}", ["plan", f"mine:{name}", "--input=x=4"], {"mine.py": MODULES}
        yield f"plan its inputs: {name}", ["plan", "torch.nn:Identity", f"--input=mine:{name}"], {"mine.py": MODULES}
    yield "plan a script", ["plan", "script:build", "--input=x=4"], {"script.py": b"import sys\nsys.exit(3)\n"}


def of_words() -> Iterator[Case]:
    for option, values in WORDS.items():
        for value in values:
            given = [] if option == "--on" else CLUSTER
            yield f"plan {option} {value!a}", ["plan", "MODEL", *given, f"{option}={value}"], {}
    for value in LAYOUTS:
        yield f"train --layout {value!a}", ["train", "CONFIG", *NEW, "--layout", value], {}
    for value in NAMES:
        yield f"catalog {value[:9]!a}", ["catalog", "--", value + "x"], {}
        yield f"calibrate --as {value[:9]!a}", ["calibrate", "runs.csv", "--as", value + "/"], {"runs.csv": b"x"}
    for value in ("0s", "0", "-1s", "x", "", "1e9h", "nan", "infs", "1y", HUGE + "h"):
        yield f"tune --budget {value}", ["tune", "CONFIG", "--out", "tuned", f"--budget={value}"], {}
    for verb, words in {
        "runs": ["runs", ".", "--sort", "[/x]"], "export": ["export", "RUN", "exported", "--dtype", "[/x]"],
        "export to": ["export", "RUN", "exported", "--to", "\x1b"], "launch": ["launch", "CONFIG", "--on", "[/x]"],
        "input": ["plan", "torch:x", "--input", "[/x]"], "no verb": ["[/x]"], "no option": ["plan", "--[/x]"],
        "no command": ["data", "[/x]"], "too many": ["runs", "a", "b", "c"],
    }.items():  # fmt: skip
        yield f"{verb}: words", words, {}


HUGGING_FACE = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                "intermediate_size": 128, "vocab_size": 300, "max_position_embeddings": 64}  # fmt: skip


def of_hugging_face() -> Iterator[Case]:
    for what, content in UNREADABLE.items():
        yield f"plan: config.json is {what}", ["plan", "hf"], {"hf/config.json": content}
    for key in HUGGING_FACE:
        for value in (None, -1, 0, 1.5, True, "x", [], {}, 10**23, 1e400):
            text = json.dumps(HUGGING_FACE | {key: value}).encode()
            yield f"plan: config.json {key}={value}", ["plan", "hf"], {"hf/config.json": text}
    for text in (b"3", b'"x"', b"[]", b"null", b"{}", b'{"a":', b'{"model_type": "[/x]"}', b'{"model_type": 3}'):
        yield f"plan: config.json {text.decode()}", ["plan", "hf"], {"hf/config.json": text}
    for key, value in {
        "rope_scaling": 3, "rope_scaling ": {"type": "x"}, "rope_scaling  ": {"rope_type": "yarn", "factor": "x"},
        "rope_theta": "x", "rope_parameters": [], "layer_types": 3, "sliding_window": "x", "head_dim": -1, "hidden_act": 3,
        "num_key_value_heads": 3, "num_key_value_heads ": "x", "torch_dtype": 3, "tie_word_embeddings": "x",
        "architectures": 3, "num_local_experts": "x", "quantization_config": 3, "rms_norm_eps": "x", "attention_bias": "x",
    }.items():  # fmt: skip
        text = json.dumps(HUGGING_FACE | {key.strip(): value}).encode()
        yield f"plan: config.json {key}={value}", ["plan", "hf"], {"hf/config.json": text}


HEADER = "id,layers,hidden,heads,seq,global_batch,accelerator,accelerators,step_seconds,framework\n"
ROW = "a,12,768,12,1024,512,h100-sxm-80gb,8,1.0,Megatron-LM\n"
CSV: dict[str, Content] = {
    "no header": b"1,2,3\n", "one column": b"layers\n12\n", "only a header": HEADER.encode(),
    "a cell of 200 KB": (HEADER + ROW.replace("a,", "a" * 200_000 + ",", 1)).encode(),
    "an open quote": (HEADER + '"' + ROW * 3000).encode(), "no rows but blanks": HEADER.encode() + b"\n\n,,,\n",
    "NUL later": (HEADER + ROW * 100).encode() + b"\0\0\n", "utf-16": (HEADER + ROW).encode("utf-16"),
    "markup": (HEADER + ROW.replace("a,", "[/x]\x1b[31m,", 1).replace("12,", "x,", 1)).encode(),
    **{f"layers {n}": (HEADER + ROW.replace("12", n, 1)).encode() for n in ("inf", "nan", "-1", "1e9", HUGE, "1e400", "true", "1_0", "٣")},
    **{f"seconds {n}": (HEADER + ROW.replace("1.0", n, 1)).encode() for n in ("inf", "nan", "-1", "0", HUGE, "1e400", "true")},
    **{f"accelerators {n}": (HEADER + ROW.replace(",8,", f",{n},", 1)).encode() for n in ("inf", "nan", "-1", "1e12", HUGE, "0.5")},
    **{f"batch {n}": (HEADER + ROW.replace(",512,", f",{n},", 1)).encode() for n in ("inf", "nan", "-1", "1e12", HUGE)},
    "accelerator markup": (HEADER + ROW.replace("h100-sxm-80gb", "[/x]", 1)).encode(),
    "framework escape": (HEADER + ROW.replace("Megatron-LM", "\x1b[31m", 1)).encode(),
}  # fmt: skip


def of_csv() -> Iterator[Case]:
    for verb, (before, after) in CSV_VERBS.items():
        for what, content in {**UNREADABLE, **CSV}.items():
            yield f"{verb}: runs are {what}", [*before, "bad.csv", *after], {"bad.csv": content}


TRACES: dict[str, Content] = {
    **{f"t.json {what}": content for what, content in UNREADABLE.items()},
    "t.json.gz no gzip": b"x" * 100, "t.json.gz cut": gzip.compress(b"[" + b" " * 10_000)[:40],
    "t.json.gz binary": gzip.compress(bytes(range(256)) * 100), "t.json one object": b"{}", "t.json numbers": b"[1, 2, 3]",
    **{f"t.json event {n}": json.dumps({"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1, "dur": 1} | e]}).encode()
       for n, e in enumerate((
           {"ts": "x"}, {"ts": None}, {"dur": "x"}, {"dur": 1e400}, {"ts": float("nan")}, {"args": 3}, {"args": []},
           {"args": {"External id": "x"}}, {"args": {"Sequence number": []}}, {"name": []}, {"tid": []}, {"tid": {}},
           {"dur": -1}, {"ts": 10**23}, {"cat": 3}, {"args": {"Input Dims": "x"}}, {"name": "\x1b[31m[/x]"},
       ))},
}  # fmt: skip


def of_traces() -> Iterator[Case]:
    for what, content in TRACES.items():
        name = what.split()[0]
        yield f"explain: {what}", ["explain", name], {name: content}


TEXTS: dict[str, dict[str, Content]] = {
    "a folder in itself": {"text": loop_of_folders}, "a circular link": {"text": circle}, "a pipe": {"text": fifo},
    "binary": {"text": bytes(range(256))}, "latin-1": {"text": b"caf\xe9 " * 999}, "no JSONL": {"text.jsonl": b"x\n"},
    "deep JSONL": {"text.jsonl": DEEP_JSON}, "JSONL of numbers": {"text.jsonl": b"3\n"},
    "JSONL without the field": {"text.jsonl": b'{"a": 1}\n'}, "a field that is a number": {"text.jsonl": b'{"text": 1}\n'},
    "no gzip": {"text.jsonl.gz": b"xxxx"}, "cut gzip": {"text.jsonl.gz": gzip.compress(b'{"text": "a b"}\n' * 999)[:40]},
    "no zstandard": {"text.jsonl.zst": b"xxxx"}, "no Parquet": {"text.parquet": b"xxxx"}, "no Arrow": {"text.arrow": b"xxxx"},
    "empty Parquet": {"text.parquet": b""}, "no index": {"text.idx": b"MMIDIDX", "text.bin": b"xx"},
    "an index alone": {"text.idx": bytes(99)}, "a wrong index": {"text.idx": b"MMIDIDX\0\0" + b"\xff" * 99, "text.bin": b"x" * 9},
    "a dataset of bad JSON": {"text/state.json": b"{"}, "a dataset of a list": {"text/state.json": b"[]"},
    "a dataset without files": {"text/state.json": b'{"_data_files": [{"filename": "x.arrow"}]}'},
    "a dataset outside": {"text/state.json": b'{"_data_files": [{"filename": "../../x.arrow"}]}'},
    "a dataset of numbers": {"text/state.json": b'{"_data_files": 3}'},
    "splits of bad JSON": {"text/dataset_dict.json": b"{"}, "splits of numbers": {"text/dataset_dict.json": b'{"splits": 3}'},
    "splits outside": {"text/dataset_dict.json": b'{"splits": ["../.."]}'},
}  # fmt: skip


def of_texts() -> Iterator[Case]:
    for what, files in TEXTS.items():
        name = next(iter(files)).split("/")[0]
        for verb in ("train", "data stats"):
            before, after = CONFIG_VERBS[verb]
            yield f"{verb}: text is {what}", [*before, "CONFIG", *after, "--set", f"data.path=./{name}"], files
    for what, content in UNREADABLE.items():
        words = ["train", "CONFIG", *NEW, "--set", "data.tokenizer=./t.json"]
        yield f"train: tokenizer is {what}", words, {"t.json": content}


OUTS: dict[str, tuple[str, dict[str, Content]]] = {
    "a file": ("f", {"f": b"x"}), "below a file": ("f/x", {"f": b"x"}), "a circular link": ("f", {"f": circle}),
    "below a circular link": ("f/x", {"f": circle}), "a dangling link": ("f", {"f": dangling}), "too long": ("a" * 300, {}),
    "a full folder": ("f", {"f/mine.txt": b"x"}), "a device": ("/dev/null", {}), "below a device": ("/dev/null/x", {}),
    "in /proc": ("/proc/nothing/x", {}), "a pipe": ("f", {"f": fifo}),
}  # fmt: skip


def of_outputs() -> Iterator[Case]:
    for what, (path, files) in OUTS.items():
        yield f"train --out: {what}", ["train", "CONFIG", "--out", path], files
        yield f"tune --out: {what}", ["tune", "CONFIG", "--budget", "1s", "--out", path], files
        yield f"export: to {what}", ["export", "RUN", path], files
        yield f"compress --out: {what}", ["compress", "RUN", "--to", "int4", "--out", path], files
        if what not in ("a full folder", "a device", "a file", "a dangling link", "a pipe", "a circular link"):
            yield (
                f"validate --html: {what}",
                ["validate", "runs.csv", "--html", path],
                {"runs.csv": (HEADER + ROW).encode(), **files},
            )
            yield f"data export: {what}", ["data", "export", "CONFIG", f"{path}/x"], files


# A run's files, and what may have become of them; the verb that reads each must say so.
RUN_FILES = ("config.toml", "ledger.json", "plan.json", "metrics.jsonl", "sessions.jsonl", "tokenizer.json")
DAMAGE: dict[str, Content] = {
    name: UNREADABLE[name]
    for name in ("nothing in it", "binary", "latin-1", "deep JSON", "a circular link", "a folder", "a pipe")
} | {
    "a list": b"[]", "an empty object": b"{}", "numbers": b'{"schema_version": 3, "lines": 3}\n', "null": b"null\n",
    "half": b'{"schema_version": 1, "lin',
}  # fmt: skip


def of_runs() -> Iterator[Case]:
    for verb, (before, after) in RUN_VERBS.items():
        for name in RUN_FILES:
            for what, content in DAMAGE.items():
                path = "." if verb == "runs" else "damaged"
                yield (
                    f"{verb}: {name} is {what}",
                    [*before, path, *after],
                    {"damaged": _copied, f"damaged/{name}": content},
                )
    for what, content in DAMAGE.items():
        words = ["train", "CONFIG", "--out", "damaged", "--resume", "--set", "train.steps=3"]
        for name in ("config.toml", "metrics.jsonl", "sessions.jsonl"):
            yield f"train --resume: {name} is {what}", words, {"damaged": _copied, f"damaged/{name}": content}
        for verb in ("generate", "export", "compress"):
            before, after = RUN_VERBS[verb]
            files: dict[str, Content] = {"damaged": _copied, "damaged/checkpoints/*/checkpoint.json": content}
            yield f"{verb}: checkpoint.json is {what}", [*before, "damaged", *after], files


SERVE_SETTINGS = (
    "serve.weights=int3", "serve.weights=", "serve.weights=[/x]", "serve.kv=x", "serve.x=1", "serve.page_tokens=0",
    "serve.page_tokens=nan", "serve.max_batch=-1", "serve.threads=0", "serve", "=1", "model.layers=3",
)  # fmt: skip
NOBODY = "http://127.0.0.1:9"  # the port of the discard service, where nothing listens


def of_serving() -> Iterator[Case]:
    for value in ("nowhere", "[/x]", "a\nb", "bad.toml", "f"):
        yield f"serve: {value!a}", ["serve", value, "--port", "0"], {"f": b"x"}
        yield f"tune --serve {value!a}", ["tune", "--serve", value, "--budget", "1s"], {"f": b"x"}
    for setting in SERVE_SETTINGS:
        yield f"serve --set {setting}", ["serve", "RUN", "--port", "0", "--set", setting], {}
    for value in ("-1", "abc", "65536", HUGE, ""):
        yield f"serve --port {value}", ["serve", "RUN", f"--port={value}"], {}
    yield "serve --engine", ["serve", "RUN", "--engine", "[/x]"], {}
    for option in ("--rate", "--seconds", "--ttft", "--tpot", "--timeout", "--requests", "--concurrency", "--input"):
        for value in ("nan", "-1", "inf", "abc", HUGE):
            yield f"bench {option} {value}", ["bench", NOBODY, f"{option}={value}"], {}
    for value in ("x", "", "[/x]", "http://", "ftp://x", NOBODY):
        yield f"bench: {value!a}", ["bench", value, "--requests", "1", "--timeout", "1"], {}
    for value in ("http://[::1", "http://127.0.0.1:99999", "http://a b", "http://\udcff", NOBODY):
        key = ["--api-key", "a\r\nHost: b"] if value == NOBODY else []
        yield f"bench with requests: {value!a}", ["bench", value, "--concurrency=1", "--requests=1", *key], {}
    for option in ("--weights", "--kv"):
        for value in ("", "x", "[/x]", "int3", "\x1b[31m"):
            yield f"plan {option} {value!a}", ["plan", "MODEL", *CLUSTER, "--serve", f"{option}={value}"], {}
    for value in ("x", "[/x]", "\x1b", "../x"):
        yield f"formats {value!a}", ["formats", value], {}
    for words in (["--to", "x"], ["--to", ""], ["--to", "int4", "--method", "[/x]"], ["--to", "int4", "--prune-by", "x"],
                  ["--sweep", "--budget", "-1s"], ["--to", "int4", "--data", "nowhere"]):  # fmt: skip
        yield f"compress {' '.join(words)}", ["compress", "RUN", "--out", "smaller", *words], {}


FINETUNE_SETTINGS = (
    "method=lorra", "method=", "method=1", "rank=0", "rank=-1", "rank=1.5", "rank=inf", f"rank={HUGE}", "rank=true", "rank=[1]",
    "alpha=0", "alpha=-1", "alpha=nan", "alpha=inf", "alpha=text", "dropout=1", "dropout=-0.1", "dropout=nan", "targets=[]",
    'targets=["nowhere"]', "targets=[1]", "targets=c_attn", "targets=", 'targets=["../../x"]', 'targets=["[bold]"]', "start_from=",
    "start_from=nowhere", "start_from=/dev/null", "start_from=RUN", "rnk=4",
)  # fmt: skip
ADAPTER_FIELDS: dict[str, object] = {
    "a list": [], "no fields": {}, "no type": {"r": 16}, "another type": {"peft_type": "IA3"},
    "a rank in words": {"peft_type": "LORA", "r": "many"}, "a rank of nothing": {"peft_type": "LORA", "r": None},
    "another rank": {"peft_type": "LORA", "r": 4, "lora_alpha": 32}, "a list as rank": {"peft_type": "LORA", "r": [16]},
    "ranks of nothing": {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "rank_pattern": {"c_attn": 0}},
    "ranks in a list": {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "rank_pattern": ["c_attn"]},
    "good fields": {"peft_type": "LORA", "r": 16, "lora_alpha": 32},
}  # fmt: skip


def of_finetuning() -> Iterator[Case]:
    lora = ["train", "CONFIG", *NEW, "--set", "finetune.method=lora", "--set"]
    for setting in FINETUNE_SETTINGS:
        yield f"adapters: {setting}", [*lora, "model.from=RUN", "--set", f"finetune.{setting}"], {}
    for place in ("nowhere", "/dev/null", "[1]", "1", "hf:", "https://x/y", "corpus"):
        yield f"adapters of {place}", [*lora, f"model.from={place}"], {"corpus/a.txt": b"text"}
    for setting in ("model.layers=3", "model.vocab=10", "model.moe.experts=4", "train.precision=fp8", "layout.tp=2"):
        yield f"adapters and {setting}", [*lora, "model.from=RUN", "--set", setting], {}
    start = [*lora, "model.from=RUN", "--set", "finetune.start_from=adapter"]
    fields = {what: json.dumps(table).encode() for what, table in ADAPTER_FIELDS.items()}
    for what, content in (DAMAGE | fields).items():
        there: dict[str, Content] = {"adapter/adapter_config.json": content, "adapter/adapter_model.safetensors": b"zz"}
        yield f"adapter_config.json: {what}", start, there
    yield "measure --threads: more than cores", ["measure", "--threads", "99999"], {}
    for prefix in ("", ".", "/"):
        yield f"data export to '{prefix}'", ["data", "export", "CONFIG", prefix], {}


def may_answer(name: str) -> bool:
    """Whether a verb may do without what is wrong: a row of many runs, a key that its family does not have, a file
    that it does not read."""
    of_a_run = any(f"{name_of} is" in name for name_of in RUN_FILES[1:])
    return name.startswith(("runs:", "explain", "validate: runs", "calibrate: runs", "plan: config.json")) or of_a_run


def _copied(path: Path) -> None:
    """The good run, by its files: `test_bad_inputs.py` says where it is."""
    raise NotImplementedError


COPY_OF_THE_RUN = _copied


def cases() -> list[Case]:
    made = (
        of_config_files, of_paths, of_tables, of_settings, of_number_options, of_words, of_hugging_face, of_csv, of_traces,
        of_texts, of_outputs, of_runs, of_serving, of_finetuning, of_modules, of_long_words,
    )  # fmt: skip
    return [case for make in made for case in make()]
