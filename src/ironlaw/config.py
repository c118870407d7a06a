"""The configuration of a run, from a TOML file, `--set section.key=value` or Python. Unknown keys are errors."""

from __future__ import annotations

import copy
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import tomli_w
from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator

from ironlaw.catalog.formats import computing_formats, read_target
from ironlaw.catalog.models import model_figures, model_names
from ironlaw.data.config import DataConfig
from ironlaw.errors import UserError, did_you_mean, shortened
from ironlaw.files import at_home, read_toml
from ironlaw.model.config import ModelConfig, with_overrides
from ironlaw.refusals import refusals, unused_keys
from ironlaw.schema import Section, refuse, section
from ironlaw.workload.finetune import FinetuneConfig
from ironlaw.workload.layout import Schedule
from ironlaw.workload.optimizers import OptimizerConfig
from ironlaw.workload.sections import CommunicationConfig, ObjectiveConfig, Recompute


def _known_precision(name: str) -> str:
    if name != "auto" and name not in computing_formats():
        known = did_you_mean(name, ("auto", *computing_formats()))
        raise ValueError(f"train.precision = {name!r} is not known: {known}")
    return name


def _read_qat(text: str) -> str:
    try:
        read_target(text, "train.qat =")
    except UserError as error:
        raise ValueError(str(error)) from None
    return text


Precision = Annotated[str, AfterValidator(_known_precision)]


class TrainConfig(Section):
    """The amount of data and the arithmetic of an optimizer step."""

    steps: int = Field(1000, gt=0, le=10**12)  # optimizer updates
    global_batch: int = Field(8, gt=0, le=2**30)  # sequences per optimizer step
    micro_batch: int | None = Field(None, gt=0)  # sequences per forward pass; the whole batch unless given
    sequence: int | None = Field(None, gt=0)  # tokens per sequence; the model's context unless given
    clip: float = Field(1.0, gt=0, allow_inf_nan=True)  # largest global gradient norm; inf: no clipping
    # auto: the fastest for matrix products measured on this machine. Weights, optimizer state, reductions stay fp32.
    precision: Precision = "auto"
    # Quantization-aware training with the weight formats of `ironlaw compress --to`: int4, 2:4, pruned=50%, int4,2:4.
    qat: Annotated[str, AfterValidator(_read_qat)] | None = None
    # chunked: logits of a few hundred tokens at a time. auto: chunked if all logits would exceed 64 MiB in fp32.
    loss: Literal["auto", "full", "chunked"] = "auto"
    # fused: PyTorch's kernel. native: Ironlaw's own (CPU, plain causal attention, one process). auto: the one with the
    # shorter measured time of forward and backward pass on this machine.
    attention: Literal["auto", "fused", "native"] = "auto"
    # torch.compile per block; auto: on CUDA only. graphs: with CUDA graphs too, for steps limited by the host.
    compile: Literal["auto", "on", "off", "graphs"] = "auto"
    average_decay: float | None = Field(None, gt=0, lt=1)  # of an exponential average of the weights, such as 0.999
    noise_scale_every: int = Field(0, ge=0)  # steps between estimates of the critical batch size; 0: none
    offload: Literal["none", "activations", "optimizer", "both"] = "none"  # to host memory, on CUDA
    threads: int | None = Field(None, gt=0, le=4096)  # CPU threads; OMP_NUM_THREADS or all cores unless given
    seed: int = Field(0, ge=0)  # of initial weights, dropout and the order of samples
    start_from: str | None = None  # initial weights: a Hugging Face directory or a run; [model] from = "DIR" sets this
    profile_steps: int = Field(5, ge=0, le=1000)  # profiled steps, for the time by operation; 0: none

    @property
    def offloads_activations(self) -> bool:
        return self.offload in ("activations", "both")

    @property
    def offloads_optimizer(self) -> bool:
        return self.offload in ("optimizer", "both")


WARMUP_STEPS = 100


class ScheduleConfig(Section):
    """The learning rate as a function of the step, relative to its peak."""

    # cosine (arXiv 1608.03983), linear and exponential decay to min_lr_fraction at the last step; inverse_sqrt decays
    # with the square root of the step (arXiv 1706.03762); step multiplies by step_factor every step_every steps; wsd
    # stays at the peak and decays linearly over the last decay_fraction of the steps (arXiv 2404.06395).
    kind: Literal["cosine", "linear", "inverse_sqrt", "exponential", "step", "wsd", "constant"] = "cosine"
    # Linear warmup from 0, while Adam's second moment settles; by default 100 steps, or all of a shorter run.
    warmup_steps: int | None = Field(None, ge=0)
    min_lr_fraction: float = Field(0.1, ge=0, le=1)  # final learning rate, as a fraction of the peak
    decay_fraction: float = Field(0.2, gt=0, le=1)  # wsd: fraction of the steps that decay
    step_every: int = Field(1000, gt=0)  # step: steps between cuts
    step_factor: float = Field(0.5, gt=0, lt=1)  # step: factor on the rate at each cut
    # Factor on the peak rate optimizer.lr: batch / reference_batch (linear) or its square root (sqrt).
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    reference_batch: int = Field(256, gt=0)  # sequences per step for which optimizer.lr was chosen


class ScalerConfig(Section):
    """Loss scaling, which keeps small gradients above fp16's underflow threshold (train.precision = "fp16")."""

    initial: float = Field(65536.0, gt=0)  # the first scale
    growth: float = Field(2.0, gt=1)  # factor on the scale after growth_steps
    growth_steps: int = Field(2000, gt=0)  # consecutive steps without an overflow
    backoff: float = Field(0.5, gt=0, lt=1)  # factor on the scale after a step that overflowed; its update is skipped


# Keys of earlier versions -> their present names.
MOVED = {f"train.{key}": f"optimizer.{key}" for key in ("lr", "beta1", "beta2", "eps", "weight_decay")} | {
    f"train.{key}": f"schedule.{key}" for key in ("warmup_steps", "min_lr_fraction")
}


class CheckpointConfig(Section):
    every: int = Field(200, ge=0)  # steps; 0: only at the end and when interrupted
    keep: int = Field(2, gt=0)  # number of newest checkpoints kept
    keep_every: int = Field(0, ge=0)  # also keep those of steps divisible by this; 0: none
    keep_best: int = Field(0, ge=0)  # also keep this many with the lowest validation loss


class RecoveryConfig(Section):
    """Detection of loss spikes, and the rollback that follows one (train/recovery.py)."""

    enabled: bool = True  # false: spikes are ignored, and a loss that is not finite ends the run
    window: int = Field(64, ge=16)  # steps that define the normal loss
    threshold: float = Field(8.0, gt=0)  # robust standard deviations above the window's median
    minimum_rise: float = Field(0.3, ge=0)  # nats above it too: a nearly constant loss has tiny deviations
    patience: int = Field(3, gt=0)  # consecutive steps above both: one hard batch is not a spike
    rewind: int = Field(10, ge=0)  # roll back to a checkpoint at least this many steps before the spike
    skip_before: int = Field(8, ge=0)  # batches before the spike that are skipped with it
    skip_after: int = Field(32, ge=0)  # batches after it; PaLM skipped 200 to 500 in all (arXiv 2204.02311)
    strikes: int = Field(3, gt=0)  # number of spikes that stops the run
    forgive_steps: int = Field(1000, gt=0, le=10**12)  # steps without a spike after which the count restarts
    # The rest is for runs on several ranks (train/parallel/watcher.py).
    collective_seconds: float = Field(300.0, gt=0)  # timeout of a collective; the job ends and names the hanging ranks
    straggler_every: int = Field(10, ge=0)  # steps between comparisons of the ranks' times; 0: none
    straggler_threshold: float = Field(0.15, gt=0, lt=1)  # a slow rank's extra time, as a fraction of the step


class TrackingConfig(Section):
    """Trackers that receive metrics besides metrics.jsonl. Needs the extra `track`."""

    to: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()  # none by default
    every: int = Field(10, gt=0)  # steps; validation losses are always sent
    project: str = "ironlaw"  # project of Weights & Biases, experiment of MLflow
    name: str | None = None  # name of the run there; the run directory's unless given
    batch_digests: bool = False  # also write a checksum of each step's tokens to metrics.jsonl


class EvaluationConfig(Section):
    every: int = Field(100, ge=0)  # steps; 0: only at the end
    batches: int = Field(8, gt=0, le=2**30)  # validation batches of `train.global_batch` sequences each


class LayoutConfig(Section):
    """How the job is spread over processes, one per device, in the planner's terms (`workload/layout.py`).

    With a [layout] table, even an empty one, dropout masks depend on the sample only, so that all layouts train alike.
    """

    dp: int | None = Field(None, gt=0, le=2**20)  # data parallel replicas; all remaining ranks unless given
    zero: int = Field(0, ge=0, le=3)  # sharded over replicas: 1 optimizer state, 2 and gradients, 3 and weights (FSDP2)
    shard: int | None = Field(None, gt=0, le=2**20)  # replicas over which one copy is sharded; all unless given
    tp: int = Field(1, gt=0, le=2**14)  # tensor parallel ranks: heads, feed-forward width and vocabulary are divided
    sp: bool = False  # sequence parallel: tp ranks divide the residual stream too; less memory for the same traffic
    pp: int = Field(1, gt=0, le=2**14)  # pipeline stages
    virtual_stages: int = Field(1, gt=0, le=2**14)  # model chunks per pipeline rank: a smaller bubble, more messages
    schedule: Schedule = "1f1b"  # order of the stages' forward and backward passes
    cp: int = Field(1, gt=0, le=2**14)  # context parallel ranks: each sequence is divided
    ep: int = Field(1, gt=0, le=2**14)  # expert parallel ranks, out of the data parallel ones

    @property
    def ranks(self) -> int:
        """The product of the degrees but ep, which divides data parallel ranks: an absent `dp` counts as `ep`."""
        return (self.dp or self.ep) * self.tp * self.pp * self.cp


class RunConfig(Section):
    """A whole run. `model` is a table of ModelConfig fields, or `name = "gpt2"` with fields to override."""

    model: ModelConfig
    data: DataConfig = section()
    train: TrainConfig = section()
    optimizer: OptimizerConfig = section()
    schedule: ScheduleConfig = section()
    scaler: ScalerConfig = section()
    recompute: Recompute = section()
    checkpoint: CheckpointConfig = section()
    evaluation: EvaluationConfig = section()
    recovery: RecoveryConfig = section()
    tracking: TrackingConfig = section()
    layout: LayoutConfig | None = None
    communication: CommunicationConfig = section()
    finetune: FinetuneConfig = section()
    objective: ObjectiveConfig = section()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        refuse(refusals(self))
        return self

    def unused_keys(self) -> list[str]:
        """Return a line for each key that is given although nothing reads it with the other settings."""
        return unused_keys(self)

    def in_layout(self, layout: LayoutConfig) -> RunConfig:
        """Return the config with another layout. Raises UserError if its settings exclude each other then."""
        changed = self.model_copy(update={"layout": layout})
        refuse(refusals(changed))
        return changed

    @property
    def micro_batch(self) -> int:
        return self.train.micro_batch or self.train.global_batch

    @property
    def sequence(self) -> int:
        return self.train.sequence or self.model.context

    @property
    def accumulation(self) -> int:
        """Micro-batches per step."""
        return max(1, -(-self.train.global_batch // self.micro_batch))

    @property
    def warmup_steps(self) -> int:
        given = self.schedule.warmup_steps
        return min(WARMUP_STEPS, self.train.steps) if given is None else given

    @property
    def tokens_per_step(self) -> int:
        return self.train.global_batch * self.sequence

    def to_toml(self) -> str:
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))


EXAMPLES = Path(__file__).parent / "examples"


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a TOML file (or a run directory's `config.toml`) and apply `section.key=value` overrides."""
    if path.is_dir() and (path / "config.toml").is_file():
        path = path / "config.toml"
    brought = EXAMPLES / path.name  # the wheel contains the examples, so they are found from any working directory
    if not path.is_file() and path.parent == Path("examples") and brought.is_file():
        path = brought
    if not path.is_file():
        raise UserError(f"no config file at {path}: write one like examples/gpt-tiny.toml, or check the path")
    return build_config(read_toml(path), str(path), overrides)


def build_config(document: dict[str, Any], where: str = "config", overrides: Sequence[str] = ()) -> RunConfig:
    """Build a RunConfig from plain tables and `section.key=value` overrides; the first problem raises a UserError."""
    if overrides:
        document = copy.deepcopy(document)
        for override in overrides:
            apply_override(document, override)
    if "model" not in document:
        raise UserError(f'{where} has no [model] table: add one, for example [model] with name = "gpt2"')
    model = document["model"]
    if not isinstance(model, dict):
        raise UserError(f'{where}: model must be a table; for a catalogued model write [model] and name = "gpt2"')
    try:
        started = "from" in model
        if started:
            document = _started_from(document, model, where)
            model = document["model"]
        name = model.get("name")
        if name is not None and not isinstance(name, str):
            raise UserError(f'{where}: model.name = {name!r} is no name: write it in quotes, such as name = "gpt2"')
        if not started and name is not None and (name in model_names() or "layers" not in model):
            document = document | {"model": with_overrides(model_figures(name), model)}
        return RunConfig(**document)
    except ValidationError as error:
        raise UserError(f"{where}: {explain_invalid(error, RunConfig)}") from None


def read_model_config(folder: Path, called: str) -> ModelConfig:
    """Read the model config of a run or Hugging Face directory; `called` names the folder in the error."""
    if (folder / "config.toml").is_file():
        return load_config(folder).model
    from ironlaw.model.huggingface.configs import is_config_file, read_config  # thirty families: for those who ask

    if is_config_file(folder):
        return read_config(folder)
    raise UserError(f"{called} is neither a Hugging Face directory nor a run")


def _started_from(document: dict[str, Any], model: dict[str, Any], where: str) -> dict[str, Any]:
    """Apply `[model] from = "DIR"`: take dimensions, weights and tokenizer from a Hugging Face directory or a run."""
    folder = at_home(str(model["from"]))
    overrides = {key: value for key, value in model.items() if key != "from"}
    for key in overrides.keys() - ModelConfig.model_fields.keys():
        raise UserError(f"unknown key model.{key}: {did_you_mean(key, ModelConfig.model_fields, prefix='model.')}")
    there = read_model_config(folder, f"{where}: model.from = {model['from']!r}")
    tables = {"model": with_overrides(there.model_dump(exclude_none=True), overrides)}
    tables["train"] = document.get("train", {}) | {"start_from": str(folder.absolute())}
    if tables["model"]["name"] in model_names():  # a catalogued name would replace the dimensions by the catalogue's
        tables["model"]["name"] += "-here"
    # The weights need the tokenizer they were trained with.
    tables["data"] = find_tokenizer(folder) | document.get("data", {})
    return document | tables


def find_tokenizer(folder: Path) -> dict[str, str]:
    """Return the key of `[data]` for a model's directory; none for a run without tokenizer, trained on mock data."""
    tokenizer = folder / "tokenizer.json"
    if tokenizer.is_file() or not (folder / "config.toml").is_file():
        return {"tokenizer": str((tokenizer if tokenizer.is_file() else folder).absolute())}
    return {}


def format_overrides(settings: Mapping[str, Any] | None) -> list[str]:
    """Return `{"train.steps": 200}` as a list of `section.key=value`, the form of `--set`."""
    for key, value in (settings or {}).items():
        if value is None:
            raise UserError(f"{key} = None says nothing: leave it out")
    return [f"{key}={_as_toml(value)}" for key, value in (settings or {}).items()]


def _as_toml(value: Any) -> str:
    """Return a value as TOML writes it: what JSON writes, but for tables, infinities and NaN."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)} = {_as_toml(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_as_toml, value)) + "]"
    return str(float(value)) if isinstance(value, float) else json.dumps(value, ensure_ascii=False, default=str)


def apply_override(
    document: dict[str, Any], override: str, root: type[BaseModel] = RunConfig, example: str = "optimizer.lr=3e-4"
) -> None:
    """Set a key of any depth, as in `optimizer.lr=3e-4`. The value is parsed as TOML, or else taken as a string. The
    document is that of a `root`."""
    name, equals, text = override.partition("=")
    parts = name.strip().split(".")
    if not equals or len(parts) < 2 or not all(parts):
        raise UserError(f"--set {override!r} is not section.key=value: write for example --set {example}")
    value = toml_value(text)
    if not isinstance(value, str) and _is_text(parts, root):
        value = text  # in data.path=2024 the value is a folder, not a number
    table = document
    for depth, part in enumerate(parts[:-1], start=1):
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise UserError(f"--set {override!r}: {'.'.join(parts[:depth])} is not a section")
    table[parts[-1]] = value


def toml_value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _is_text(parts: Sequence[str], root: type[BaseModel]) -> bool:
    """Whether a key's type is free text; False for unknown keys, which are refused later."""
    kind = _section_type(parts[:-1], root)
    field = kind.model_fields.get(parts[-1]) if kind is not None else None
    return field is not None and field.annotation in (str, str | None)


def _section_type(parts: Sequence[str], root: type[BaseModel]) -> type[BaseModel] | None:
    """Return the type of a section by its path, optional sections included; None if there is no such section."""
    kind: type[BaseModel] | None = root
    for part in parts:
        known = kind.model_fields.get(part) if kind is not None else None
        # Finds the model X in `X`, `X | None` and `tuple[X, ...]`.
        kinds = (known.annotation, *get_args(known.annotation)) if known else ()
        kind = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
    return kind


def explain_invalid(error: ValidationError, root: type[BaseModel]) -> str:
    """Describe the first problem with its key and, for an unknown key, the nearest valid one.

    Unknown keys are reported first, since a key that seems missing is often misspelt, and missing ones last: what is
    wrong in what is there was written by the user.
    """
    turns = {"extra_forbidden": 0, "missing": 2}
    problem = min(error.errors(), key=lambda problem: turns.get(problem["type"], 1))
    location = [str(part) for part in problem["loc"]]
    key = ".".join(location)
    if problem["type"] == "extra_forbidden":
        if key in MOVED:
            return f"{key} has moved: write {MOVED[key]}"
        if len(location) == 1:
            return f"unknown section {key}: {did_you_mean(key, root.model_fields)}"
        kind = _section_type([part for part in location[:-1] if not part.isdigit()], root)
        assert kind is not None
        near = did_you_mean(location[-1], kind.model_fields, prefix=f"{'.'.join(location[:-1])}.")
        return f"unknown key {key}: {near}"
    if problem["type"] == "missing":
        return f"{key} is missing: add it, or give model.name of a catalogued model"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "tuple_type":
        message = f"write a list, [{json.dumps(problem['input'], default=str)}]"
    if not key or problem["type"] == "value_error":
        return f"{key + ': ' if key and not message.startswith(key) else ''}{message}"
    return f"{key} = {shortened(repr(problem['input']))}: {message[0].lower()}{message[1:]}"
