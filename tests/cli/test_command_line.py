"""What every verb does alike: one line or one document for an error, no markup, no escapes, exit codes, completion."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from ironlaw.__main__ import main
from ironlaw.config import RunConfig, load_config
from ironlaw.cores import usable_threads
from ironlaw.data.readers import LINE_LIMIT_BYTES, read
from ironlaw.errors import UserError, printable
from ironlaw.explain.runs import list_runs
from ironlaw.files import write_text
from ironlaw.plan.request import resolve
from ironlaw.report.console import output, print_json
from ironlaw.train.parallel.ranks import micro_batch_of
from ironlaw.train.run_directory import new_run_directory

Here = Callable[..., tuple[int, str, str]]
Start = Callable[..., subprocess.Popen[str]]


def test_under_json_an_error_is_the_document_on_stdout_and_a_line_of_json_on_stderr(ironlaw_here: Here) -> None:
    for words in (("plan", "nothing.toml"), ("plan", "gpt2", "--steps", "x"), ("nonsense",)):
        code, out, err = ironlaw_here(*words, "--json")
        document = json.loads(out)
        assert (code, document["exit_code"], document["schema_version"]) == (2, 2, 1) and document["error"]
        assert json.loads(err) == document
    code, out, err = ironlaw_here("plan", "nothing.toml")
    assert (code, out) == (2, "") and err.startswith("ironlaw: no config file")


def test_without_a_verb_there_is_help_and_nothing_else(ironlaw_here: Here) -> None:
    for words in ((), ("data",)):
        code, out, err = ironlaw_here(*words)
        assert code == 2 and "Usage: ironlaw" in out and err == ""


def test_a_fault_of_our_own_is_one_line_and_keeps_the_rest_for_a_report(
    ironlaw_here: Here, monkeypatch: pytest.MonkeyPatch, user_cache: Path
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("what")

    monkeypatch.setattr("ironlaw.catalog.entries.entry_names", broken)
    code, _, err = ironlaw_here("catalog")
    assert code == 70 and err.count("\n") == 1 and "a fault of Ironlaw itself: KeyError: 'what'" in err
    assert "Traceback" in (user_cache / "ironlaw" / "fault.txt").read_text(encoding="utf-8")


def test_ctrl_c_that_a_library_swallows_still_interrupts(ironlaw_here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    def imported(*_: object, **__: object) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise ImportError("cannot load module more than once per process")

    monkeypatch.setattr("ironlaw.catalog.entries.entry_names", imported)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert ironlaw_here("catalog") == (130, "", "ironlaw: interrupted\n")


def test_ctrl_c_while_the_command_line_is_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "ironlaw.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "ironlaw.cli.main", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 130 and capsys.readouterr().err == "ironlaw: interrupted\n"


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_reader_that_leaves_is_no_failure_of_a_verb(
    ironlaw_here: Here, monkeypatch: pytest.MonkeyPatch, tiny_file: Callable[..., Path], more: tuple[str, ...]
) -> None:
    read, write = os.pipe()
    os.close(read)
    with contextlib.suppress(BrokenPipeError), open(write, "w", encoding="utf-8") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert ironlaw_here("launch", tiny_file(), "--on", "slurm", *more)[0] == 0


def test_an_error_behind_the_document_prints_no_second_one(ironlaw_here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    def answered(as_json: bool, document: object, view: object) -> None:
        print_json(document)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ironlaw.cli.listings.answer", answered)
    code, out, err = ironlaw_here("catalog", "--json")
    assert code == 2 and json.loads(out)["models"] and "the disk is full" in json.loads(err)["error"]


@pytest.mark.parametrize("name", ["[bold]x[/bold]", "[/x]", "a\x1b[31m\x1b]0;tb", "a\u202eb", ":smile:", "a\x9bb"])
def test_names_reach_a_terminal_as_they_are_spelt(
    ironlaw_here: Here, tiny_file: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    config = tiny_file({"name": name})
    code, out, _ = ironlaw_here("plan", config)
    assert code == 0 and printable(name) in " ".join(out.split())
    code, _, err = ironlaw_here("plan", name + "/x")
    assert code == 2 and printable(name) in err
    for text in (out, err):
        assert not any(character in text for character in "\x1b\x07\x9b\u202e")


def test_styles_survive_what_is_spelt_out(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Console] = []
    monkeypatch.setattr(Console, "is_terminal", property(lambda self: True))
    made.append(output())
    made[0]._color_system = None  # type: ignore[attr-defined]
    made[0].print("[x]", style="bold")
    assert "[x]" in capsys.readouterr().out


def test_a_model_s_name_leads_out_of_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("../../x", "/etc/x", "..", "a/b\\c", "-rf", "\x1b[0m", "é" * 300, ""):
        path = new_run_directory(name)
        assert path.parent == Path("runs") and ".." not in path.parts and len(path.name) < 100
        assert not path.name.startswith(("-", "."))
    assert len({new_run_directory("gpt") for _ in range(10)}) == 10  # as runs begun in the same second ask for theirs


def test_a_damaged_run_hides_no_other(ironlaw_here: Here, tmp_path: Path) -> None:
    for name, content in {"deep": b"[" * 100_000, "binary": bytes(range(256)), "list": b"[]", "empty": b""}.items():
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "ledger.json").write_bytes(content)
    (tmp_path / "runs" / "loop").symlink_to("loop")
    found = list_runs(tmp_path / "runs")
    assert {Path(run["run"]).name for run in found} == {"deep", "binary", "list", "empty"}
    assert all(run["state"].startswith("unreadable") for run in found)
    code, out, _ = ironlaw_here("runs")
    assert code == 0 and "unreadable" in out


def test_writing_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine", encoding="utf-8")
    (tmp_path / "link").symlink_to("mine")
    write_text(tmp_path / "link", "other")
    assert (tmp_path / "mine").read_text(encoding="utf-8") == "mine"
    assert (tmp_path / "link").read_text(encoding="utf-8") == "other" and not (tmp_path / "link").is_symlink()


def test_set_reaches_any_depth(ironlaw_here: Here, tiny_file: Callable[..., Path]) -> None:
    experts = ["model.moe.experts=4", "model.moe.experts_per_token=2", "model.bias=false"]
    config = load_config(tiny_file(), experts)
    assert config.model.moe is not None and config.model.moe.experts == 4
    moe = resolve("mixtral-8x7b", ["model.moe.experts=4"]).model.moe
    assert moe is not None and (moe.experts, moe.experts_per_token) == (4, 2)
    code, _, err = ironlaw_here("plan", "mixtral-8x7b", "--set", "model.moe.expers=4")
    assert code == 2 and "did you mean model.moe.experts" in err


@pytest.mark.parametrize(
    "setting",
    [
        "optimizer.lr=inf", "model.layers=true", "data.path=", "model.tied=1", "train.steps=true",
        "model.layers=1000000", "model.layers=1000000000", "train.seed=99999999999999999999999", "optimizer.lr=nan", "train.steps='3'",  # noqa: E501
    ],
)  # fmt: skip
def test_a_config_is_strict_and_bounded(tiny_file: Callable[..., Path], setting: str) -> None:
    with pytest.raises(UserError, match=setting.partition("=")[0].replace(".", r"\.") + "|out of range|empty"):
        load_config(tiny_file(), [setting])
    assert load_config(tiny_file(), ["train.steps=1e3", "train.clip=inf"]).train.steps == 1000


def test_a_warmup_longer_than_the_run_is_refused(
    ironlaw_here: Here, tiny_file: Callable[..., Path], tiny_config: Callable[..., RunConfig]
) -> None:
    code, _, said = ironlaw_here("plan", tiny_file(), "--set", "schedule.warmup_steps=13")
    assert code == 2 and "schedule.warmup_steps = 13 is longer than the run, train.steps = 12" in said
    document = tiny_config().model_dump(exclude_none=True)
    del document["schedule"]["warmup_steps"]
    assert RunConfig(**document).warmup_steps == 12  # not given: 100, or all of a shorter run


def test_a_byte_order_mark_is_no_text(ironlaw_here: Here, tiny_file: Callable[..., Path]) -> None:
    config = tiny_file()
    config.write_bytes(b"\xef\xbb\xbf" + config.read_bytes())
    assert ironlaw_here("plan", config)[0] == 0


def test_a_line_of_half_a_gigabyte_is_left_out_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b'{"text": "')
        for _ in range(2 * LINE_LIMIT_BYTES >> 20):
            file.write(b"a" * 2**20)
        file.write(b'"}\n{"text": "the next"}\n')
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    records = list(read("jsonl", path, "text"))
    assert [record.content for record in records] == [None, "the next"]
    assert "64 MiB" in records[0].reason
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 4 * LINE_LIMIT_BYTES
    assert [record.content for record in read("jsonl", path, "text", start=records[0].next)] == ["the next"]


def test_threads_are_those_of_the_environment_and_of_the_affinity_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(6)))
    for said, threads in {"4": 4, "8": 6, "": 6, "x": 6, "0": 6, "2,3": 2, "1": 1}.items():
        monkeypatch.setenv("OMP_NUM_THREADS", said)
        assert usable_threads() == threads
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")  # torchrun sets 1 where nobody has
    assert usable_threads() == 6


def test_stages_get_micro_batches_where_none_is_said(tiny_config: Callable[..., RunConfig]) -> None:
    config = tiny_config(layout={"pp": 2}, train={"global_batch": 16})
    assert micro_batch_of(config, 16) == 2  # four each
    assert micro_batch_of(config, 4) == 1
    assert micro_batch_of(tiny_config(layout={"pp": 2}, train={"global_batch": 16, "micro_batch": 8}), 16) == 8


@pytest.mark.parametrize(("words", "expected"), [("ironlaw la", "launch"), ("ironlaw plan --net", "--network")])
def test_the_shell_completes_verbs_and_options(ironlaw_process: Callable[..., object], words: str, expected: str,
                                               monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    for name, value in {
        "_IRONLAW_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    done = ironlaw_process()
    assert expected in done.stdout.split(), done  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [pytest.param(("nothing.toml",), marks=pytest.mark.long), ("config.toml", "--layout", "dp=3")], ids=str
)
def test_a_refusal_on_ranks_is_one_line(
    words: tuple[str, ...], tiny_file: Callable[..., Path], tmp_path: Path, user_cache: Path
) -> None:
    """Of a config that all read, and of a layout that is checked once they are ranks."""
    tiny_file()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, "-m", "ironlaw", "train", *words, "--out", "run"], cwd=tmp_path, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGUSR1
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("ironlaw: "), done.stderr


@pytest.mark.slow
def test_a_terminal_that_goes_away_loses_nothing(
    tiny_file: Callable[..., Path], tmp_path: Path, user_cache: Path
) -> None:
    """The session's terminal is closed: SIGHUP, and every further word to it fails."""
    import pty

    config = tiny_file(train={"steps": 100_000}, checkpoint={"every": 0}, evaluation={"every": 0})
    leader, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "ironlaw", "train", str(config), "--out", "run"], cwd=tmp_path, stdin=terminal,
        stdout=terminal, stderr=terminal, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # also where the tests are under nohup
    )  # fmt: skip
    os.close(terminal)
    metrics, until = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 200

    def trained(steps: int) -> None:
        while not (metrics.is_file() and metrics.read_bytes().count(b"\n") > steps) and time.monotonic() < until:
            assert process.poll() is None
            time.sleep(0.05)

    trained(20)
    os.close(leader)  # every word to it fails from here on, before the signal too
    trained(metrics.read_bytes().count(b"\n") + 20)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=200) == 129
    steps = metrics.read_bytes().count(b"\n")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step-{steps:08d}"]


@pytest.mark.parametrize("words", [("catalog",), ("formats", "--json"), ("--version",)], ids=str)
def test_a_reader_that_goes_away_is_no_failure_and_a_full_disk_is_one_line(
    words: tuple[str, ...], user_cache: Path
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    for stdout, code, lines in ((writer, 0, 0), (os.open("/dev/full", os.O_WRONLY), 2, 1)):
        done = subprocess.run(
            [sys.executable, "-m", "ironlaw", *words], stdout=stdout, stderr=subprocess.PIPE, text=True, check=False
        )
        os.close(stdout)
        assert (done.returncode, done.stderr.count("\n")) == (code, lines), done.stderr


@pytest.mark.parametrize(("variables", "says"), [
    ({"WORLD_SIZE": "2"}, "RANK expected"), ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR expected"),
    ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_WORLD_SIZE": "x"}, "LOCAL_WORLD_SIZE='x'"),
    ({"TORCHELASTIC_MAX_RESTARTS": "x", "WORLD_SIZE": "2"}, "TORCHELASTIC_MAX_RESTARTS='x'"),
    ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0'"), ({"XDG_CACHE_HOME": "~nobody_here/x"}, "set XDG_CACHE_HOME"),
])  # fmt: skip
def test_what_is_left_in_the_environment_is_named(
    variables: dict[str, str], says: str, ironlaw_here: Here, tiny_file: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    config = tiny_file()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code, _, err = ironlaw_here("train", config, "--out", "run")
    assert (code, err.count("\n")) == (2, 1) and says in err


def test_a_home_that_nobody_knows_is_one_line(ironlaw_here: Here, tiny_file: Callable[..., Path]) -> None:
    code, _, err = ironlaw_here("train", tiny_file(data={"tokenizer": "~nobody_here/x"}), "--out", "run")
    assert (code, err.count("\n")) == (2, 1) and "~nobody_here/x" in err
