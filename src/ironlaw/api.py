"""The Python API: five functions, each returning one typed result that prints as a report and displays in a notebook.

Names and units are those of the ledger and the JSON documents: seconds, bytes, FLOPs, fractions, nats per token.
Invalid input raises `ironlaw.UserError` with one line that states what to write instead.
"""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field

from ironlaw.config import RunConfig, build_config, format_overrides, load_config
from ironlaw.errors import UserError
from ironlaw.files import as_path, read_json_lines
from ironlaw.ledger import Estimate, Ledger
from ironlaw.plan.request_types import Limits, Options, PlanOutcome, Prices
from ironlaw.schema import Count, Text, checked

if TYPE_CHECKING:
    from rich.console import Console
    from torch import nn
    from torch.optim import Optimizer

    from ironlaw.observe.watch import Watch
    from ironlaw.report.document import Document

Settings = Mapping[str, Any]
"""Config values by dotted key: `{"train.steps": 200, "optimizer.lr": 3e-4}`."""

Port = Annotated[int, Field(ge=0, le=65535)]

PRE = '<pre style="white-space:pre;overflow-x:auto;line-height:1.25;font-family:ui-monospace,monospace">{code}</pre>'


class Shown:
    """A result whose `str` is the command's terminal report; a notebook displays the same in colour."""

    def _show(self, console: Console) -> None:
        raise NotImplementedError

    def _recorded(self) -> Console:
        from ironlaw.report.console import recorder

        console = recorder()
        self._show(console)
        return console

    def __str__(self) -> str:
        return "\n".join(line.rstrip() for line in self._recorded().export_text().splitlines()).strip("\n")

    def _repr_html_(self) -> str:
        return self._recorded().export_html(inline_styles=True, code_format=PRE)


class Total:
    """A descriptor for one total of a result's ledger: an `Estimate`, or None if unknown."""

    def __init__(self, doc: str) -> None:
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, result: Any, owner: type | None = None) -> Estimate | None:
        return self if result is None else result.ledger.totals.get(self._name)  # type: ignore[return-value]


class PlanResult(PlanOutcome, Shown):
    """The result of `ironlaw.plan`: `fits`, `ledger`, and `more`, the other sections of `ironlaw plan --json`."""

    parameters = Total("Exact count.")
    flops_per_step = Total("FLOPs of matrix products of one optimizer step; exact.")
    step_seconds = Total("Seconds of one optimizer step.")
    tokens_per_second = Total("Of the whole job.")
    mfu = Total("Model FLOPs utilisation, a fraction.")
    peak_bytes = Total("Tensors at the peak, of the device that holds most.")
    total_seconds = Total("Seconds of the run.")
    ttft_seconds = Total("Of served requests: median seconds to the first token.")
    tpot_seconds = Total("Of served requests: mean seconds per token after the first.")
    output_tokens_per_second = Total("Of served requests: of all copies.")

    def _show(self, console: Console) -> None:
        from ironlaw.report.cluster_view import plan_views
        from ironlaw.report.terminal import show

        for view in plan_views(self):
            show(console, view)


@dataclass(frozen=True, repr=False)
class TrainResult(Shown):
    """A finished or interrupted run of `ironlaw.train`. `interrupted` is the signal's name, or None."""

    path: Path
    steps: int
    interrupted: str | None
    ledger: Ledger = field(repr=False)

    step_seconds = Total("Median seconds of one optimizer step.")
    tokens_per_second = Total("At that step.")
    mfu = Total("Model FLOPs utilisation, a fraction.")
    peak_bytes = Total("Tensors at the peak.")
    validation_loss = Total("Nats per token, at the last evaluation.")
    total_seconds = Total("Seconds of the whole run.")

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The entries of `metrics.jsonl`: loss, seconds, learning rate and more of each step."""
        return list(read_json_lines(self.path / "metrics.jsonl"))

    def _show(self, console: Console) -> None:
        from ironlaw.report.live import print_summary

        print_summary(self.path, self.ledger, console)


@dataclass(frozen=True, repr=False)
class ExplainResult(Shown):
    """The result of `ironlaw.explain`. `document` is the one `ironlaw explain --json` prints."""

    document: dict[str, Any] = field(repr=False)
    _view: Document = field(repr=False)

    @property
    def bottleneck(self) -> str:
        """One sentence: the bottleneck of a run, or why one of two runs is faster."""
        return str(next(self.document[key] for key in ("bottleneck", "sentence", "binds") if key in self.document))

    @property
    def remedies(self) -> list[dict[str, Any]]:
        """Recommended changes, best first, each with its planned gain and the settings that apply it."""
        return list(self.document.get("remedies", []))

    @checked
    def write_html(self, path: str | Path) -> Path:
        """Write the report with charts as a self-contained HTML page. UserError if the result has no such page."""
        from ironlaw.report.page import write

        if not self._view.page:
            raise UserError("only one training run's explanation has a page: give one run, not two or a served load")
        return write(as_path(path, "path"), self._view)

    def _show(self, console: Console) -> None:
        from ironlaw.report.terminal import show

        show(console, self._view)


class RunningServer(Shown):
    """A model served over HTTP by a thread of this process until `close` or the end of a `with` block."""

    def __init__(self, path: Path, settings: Sequence[str], port: int) -> None:
        from ironlaw.serve.config import serve_config
        from ironlaw.serve.engine import Engine
        from ironlaw.serve.loading import load_served
        from ironlaw.serve.server import build_server, require_extra

        require_extra()
        config = serve_config(settings, port=port)
        self.engine = Engine(load_served(path, config), config)
        self.url, ready = "", threading.Event()

        def on_ready(url: str) -> None:
            self.url = url
            ready.set()

        self._server = build_server(self.engine, on_ready)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not ready.wait(0.1):
            if not self._thread.is_alive():
                raise UserError(f"cannot listen on {config.host}:{config.port}: use another port, or 0")

    @checked
    def complete(self, prompt: str, *, max_tokens: Count = 64, temperature: float = 1.0, **more: Any) -> str:
        """Return the completion of `prompt` from the server's `/v1/completions`; `more` are other request fields."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": temperature}
        try:
            data = json.dumps(body | more, allow_nan=False).encode()
            request = urllib.request.Request(f"{self.url}/v1/completions", data, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request) as answer:
                return str(json.load(answer)["choices"][0]["text"])
        except urllib.error.HTTPError as refused:
            raise UserError(json.load(refused)["error"]["message"]) from None
        except urllib.error.URLError:
            raise UserError(f"{self.url} does not answer: the server is closed") from None
        except (TypeError, ValueError) as error:
            raise UserError(f"complete: {error}: give fields of a JSON request") from None

    def close(self) -> None:
        """Finish running requests, refuse new ones, and stop the server."""
        self.engine.is_draining = True
        self._server.should_exit = True
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _show(self, console: Console) -> None:
        served = self.engine.served
        state = self.url if self._thread.is_alive() else "closed"
        console.print(f"{served.name}: {state}, {served.weights} weights, {served.kv} keys and values, {served.device}")


@checked
def plan(
    what: str | Path | Settings | RunConfig,
    *,
    on: Text | None = None,
    settings: Settings | None = None,
    tokens: Text | None = None,
    steps: Count | None = None,
    sequence: Count | None = None,
    global_batch: Count | None = None,
    precision: Text | None = None,
    optimizer: Text | None = None,
    engine: Text | None = None,
    layout: Text | None = None,
    network: Text | None = None,
    serve: Text | None = None,
    weights: Text | None = None,
    price_per_hour: Annotated[float, Field(ge=0.0001, le=1e6)] | None = None,
    within: Text | None = None,
    max_rent: Annotated[float, Field(ge=0.01, le=1e12)] | None = None,
) -> PlanResult:
    """Plan a run before it starts, or with `serve="input=1024 output=256 rate=10/s"` a served model.

    `what` is a config file, its tables, a `RunConfig`, a catalogued model or a Hugging Face config. `on` is hardware
    such as `"8xh100-sxm-80gb"`, by default this machine, or with `within="7d"` or `max_rent` the best for these. The
    other arguments are the options of `ironlaw plan`; None leaves one out. PyTorch is not imported.
    """
    is_file = isinstance(what, str | Path)
    subject = str(what) if is_file else _config(what, settings)
    options = Options(
        tokens, sequence, global_batch, steps, precision, optimizer, engine, layout, None,
        Prices(price_per_hour, None, None), Limits.of(within, max_rent), network=network, weights=weights,
    )  # fmt: skip
    answer = planned(subject, on, format_overrides(settings) if is_file else [], serve, options)
    return PlanResult(answer.ledger, answer.fits, answer.more)


def planned(
    what: str | RunConfig, on: str | None, overrides: Sequence[str], serve: str | None, options: Options,
    report: Callable[[float, str], None] = lambda share, what: None,
) -> PlanOutcome:  # fmt: skip
    """Return the plan of training or, for a request `serve`, of serving. For `report` see `plan_request`."""
    from ironlaw.plan.request import plan_request, resolve

    if serve is None:
        on = on or options.limits.default_target
        return plan_request(what, on=on, overrides=overrides, options=options, report=report)
    if on == "this":
        raise UserError("--serve on this machine is measured, not planned: ironlaw serve RUN, then ironlaw bench URL")
    from ironlaw.plan.serving.answer import answer_serving

    model = what.model if isinstance(what, RunConfig) else resolve(what, overrides).model
    return answer_serving(model, on, serve, options)


@checked
def train(
    config: str | Path | Settings | RunConfig,
    *,
    out: str | Path | None = None,
    settings: Settings | None = None,
    resume: bool = False,
    quiet: bool = False,
) -> TrainResult:
    """Train in this process and write the run to the directory `out`, by default `runs/MODEL-DATE`.

    A machine without a stored profile is measured first. Progress goes to stderr unless `quiet`. Ctrl-C saves a
    checkpoint and returns."""
    from ironlaw.machine.keep import this_machine
    from ironlaw.report.console import messages, progress, recorder
    from ironlaw.report.live import LiveRun
    from ironlaw.train.run_directory import new_run_directory
    from ironlaw.train.session import run_training

    chosen = _config(config, settings)
    folder = as_path(out, "out") if out is not None else new_run_directory(chosen.model.name)
    profile = this_machine(messages().print, progress)
    live = LiveRun(recorder() if quiet else messages(), folder)
    with live:
        outcome = run_training(
            chosen, folder, profile, resume=resume,
            data_progress=live.data_progress, planned=live.planned, watch=live.step, say=live.say,
        )  # fmt: skip
    return TrainResult(folder, outcome.step, outcome.interrupted, outcome.ledger)


def explain(
    run: str | Path | TrainResult | Watch, other: str | Path | TrainResult | Watch | None = None
) -> ExplainResult:
    """Explain a run against its plan, a profiler trace or a load saved by `bench --out`, or compare with `other`."""
    return ExplainResult(*explained(_path(run), None if other is None else _path(other)))


def explained(run: Path, other: Path | None = None) -> tuple[dict[str, Any], Document]:
    """Return the JSON document and the view of a run, trace or served load, or of its comparison with `other`."""
    from ironlaw.explain.runs import explain_path
    from ironlaw.explain.serving import explain_serving, is_serving_run

    if other is not None:
        if load := next(filter(is_serving_run, (run, other)), None):
            raise UserError(f"{load} is a load of a server, and only runs and traces are compared: give it alone")
        from ironlaw.explain.compare import compare
        from ironlaw.explain.grades import keep
        from ironlaw.report.comparison_view import comparison_view

        comparison = compare(explain_path(run), explain_path(other))
        if comparison.grade is not None:
            keep(comparison.grade)
        document = comparison.to_json()
        return document, comparison_view(document)
    if is_serving_run(run):
        from ironlaw.report.serving_view import server_view

        document = explain_serving(run).to_json()
        return document, server_view(document)
    from ironlaw.report.run_view import run_view

    explanation = explain_path(run)
    document = explanation.to_json()
    return document, run_view(document, explanation.metrics, explanation.config_text)


@checked
def serve(path: str | Path | TrainResult, *, port: Port = 0, settings: Settings | None = None) -> RunningServer:
    """Serve a run or a Hugging Face directory over HTTP in a thread; `port` 0 picks a free port. The keys of `settings`
    are those of `ironlaw serve --set`, such as `{"serve.batch": 16}`."""
    return RunningServer(_path(path), format_overrides(settings), port)


def observe(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer],
    out: str | Path | None = None,
    *,
    profile_steps: int = 3,
    plan: bool = True,
    name: str | None = None,
) -> Watch:
    """Return a context manager that observes your own training loop and writes the run directory `out`.

    Pass several models and optimizers, as of a GAN, as lists. `profile_steps` is the number of steps profiled after
    the first few. With `plan`, the module is traced at the end, to compare a plan with the measurement.
    """
    from ironlaw.observe.watch import Watch

    return Watch(model, optimizer, out, profile_steps=profile_steps, plan=plan, name=name)


def _config(config: str | Path | Settings | RunConfig, settings: Settings | None) -> RunConfig:
    overrides = format_overrides(settings)
    if isinstance(config, str | Path):
        return load_config(Path(config), overrides)
    tables = config.model_dump(exclude_none=True) if isinstance(config, RunConfig) else config
    return build_config(dict(tables), overrides=overrides)


def _path(run: Any) -> Path:
    """Return the directory or file of a run given in any accepted form."""
    return as_path(getattr(run, "out", None) or getattr(run, "path", None) or run, "run")
