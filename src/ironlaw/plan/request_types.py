"""Options of `ironlaw plan`, the training run that they describe, and the result. Independent of the cluster planner.

    work = settle(model, Options(tokens="1T"), accelerators=64)
    work.sequence, work.global_batch, work.steps
    work.assumed[0].name, work.assumed[0].how_to_set

Nothing is assumed silently: every default carries its reason and the option that replaces it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ironlaw import units
from ironlaw.catalog.accelerators import alias_of
from ironlaw.config import RunConfig, build_config
from ironlaw.errors import UserError, refuse_options
from ironlaw.ledger import Ledger
from ironlaw.model.config import ModelConfig
from ironlaw.plan.totals import fits
from ironlaw.workload.layout import Layout

DECODER, CLUSTER = "training a decoder", "clusters, --on 8xh100-sxm-80gb"
RANKS = "processes of this machine, --ranks 2 without --on"
TRACED, SERVED = "a traced module, PACKAGE.MODULE:FUNCTION", 'serving, --serve "input=1024 output=256 rate=10/s"'
ANY = "any"  # stands for hardware that a request leaves open, within limits
REPLICATED = "a traced module on accelerators, --on 8xh100-sxm-80gb"

SUBJECTS = {
    **dict.fromkeys(("tokens", "seq", "global_batch"), (DECODER,)),
    **dict.fromkeys(("steps", "precision", "optimizer"), (DECODER, TRACED)),
    **dict.fromkeys(("network", "per_node"), (CLUSTER, REPLICATED)),
    **dict.fromkeys(("engine", "emit"), (CLUSTER, SERVED)),
    "layout": (CLUSTER, REPLICATED, RANKS, SERVED), "ranks": (RANKS,), "input": (TRACED,), "real": (TRACED,),
    "weights": (SERVED,), "kv": (SERVED,), "price_per_hour": (CLUSTER, REPLICATED, SERVED),
    **dict.fromkeys(("grid", "pue", "within", "max_rent"), (CLUSTER, REPLICATED)),
}  # fmt: skip
"""Subjects that each option applies to."""


@dataclass(frozen=True)
class Assumption:
    """A value that the plan needs and the user did not give."""

    name: str
    value: str
    reason: str
    how_to_set: str

    def to_json(self) -> dict[str, str]:
        return asdict(self)


def assume_accelerator(name: str) -> list[Assumption]:
    """Returns which of several forms is planned where `name` does not tell them apart; nothing where it does."""
    taken, why = alias_of(name) or (name, "")
    return [Assumption("accelerator", taken, f"'{name}': {why}", "--on")] if why else []


def assume_missing(reason: str, *wanted: tuple[str, object, str, str]) -> list[Assumption]:
    """Returns assumptions for those of (name, given value, default, option that sets it) that were not given."""
    return [Assumption(name, value, reason, flag) for name, given, value, flag in wanted if given is None]


@dataclass(frozen=True)
class Prices:
    """Prices and power figures from the user; None: those of the catalogue."""

    usd_per_hour: float | None = None
    grid: str | None = None
    pue: str | None = None  # a number, or a kind of data centre


@dataclass(frozen=True)
class Limits:
    """What a run may take at most; None: anything."""

    seconds: float | None = None
    rent_usd: float | None = None

    @classmethod
    def of(cls, within: str | None, rent_usd: float | None) -> Limits:
        """Returns the limits of a time as users write it. Raises UserError for one that is none."""
        try:
            return cls(None if within is None else units.parse_seconds(within), rent_usd)
        except ValueError as error:
            raise UserError(f"--within {error}") from None

    @property
    def default_target(self) -> str:
        """What is planned for where no hardware is named."""
        return ANY if self else "this"

    def __bool__(self) -> bool:
        return self.seconds is not None or self.rent_usd is not None

    def allow(self, seconds: float, rent_usd: float) -> bool:
        return (self.seconds is None or seconds <= self.seconds) and (
            self.rent_usd is None or rent_usd <= self.rent_usd
        )


@dataclass(frozen=True)
class Options:
    """The options beside WHAT and WHERE; None: not given."""

    tokens: str | None = None  # in total: "1T", "500B", "2e12"
    sequence: int | None = None  # tokens
    global_batch: int | None = None  # sequences per step
    steps: int | None = None
    precision: str | None = None
    optimizer: str | None = None
    engine: str | None = None
    layout: str | None = None
    emit: str | None = None
    prices: Prices = field(default_factory=Prices)
    limits: Limits = field(default_factory=Limits)
    inputs: tuple[str, ...] = ()  # of a traced module: NAME=SIZES:DTYPE
    real: bool = False  # a traced module runs one step on real tensors
    network: str | None = None  # of a node, as text; None: the usual one
    per_node: int | None = None  # accelerators per node; None: the usual number
    ranks: int | None = None  # on this machine: CPU ranks that torchrun starts
    weights: str | None = None  # of a server: their format, and the cache's
    kv: str | None = None
    runnable: Callable[[RunConfig, Layout], bool] | None = None  # whether the trainer runs a layout

    def check_subjects(self, *subjects: str) -> None:
        """Raises UserError for an option that applies to none of `subjects`."""
        prices = {"price_per_hour": self.prices.usd_per_hour, "grid": self.prices.grid, "pue": self.prices.pue}
        limits = {"within": self.limits.seconds, "max_rent": self.limits.rent_usd}
        refuse_options(vars(self) | prices | limits | {"seq": self.sequence, "input": self.inputs}, SUBJECTS, *subjects)


@dataclass(frozen=True)
class PlanOutcome:
    """A plan: its ledger, and in `more` further sections (candidates, budget, advice)."""

    ledger: Ledger
    fits: bool
    more: dict[str, Any] = field(default_factory=dict)
    layout: Layout | None = None  # on a cluster

    @classmethod
    def of(cls, ledger: Ledger, assumed: Iterable[Assumption]) -> PlanOutcome:
        """Returns the plan of one process or of identical replicas."""
        return cls(ledger, fits(ledger), {"assumed": [one.to_json() for one in assumed]})

    def check_limits(self, limits: Limits) -> PlanOutcome:
        """Returns the plan with limits beside what is planned: one that fails is a no, as memory is. Raises UserError
        for a limit on a rent that is not known."""
        totals, found = self.ledger.totals, dict[str, Any]()
        for name, limit in (("total_seconds", limits.seconds), ("rent_usd", limits.rent_usd)):
            if limit is not None and self.fits:
                if name not in totals:
                    raise UserError("--max-rent needs a price, and none is known: give --price-per-hour")
                found[name] = {"limit": limit, "holds": totals[name].value <= limit}
        holds = all(one["holds"] for one in found.values())
        return replace(self, fits=self.fits and holds, more=self.more | ({"limits": found} if found else {}))

    def to_json(self) -> dict[str, Any]:
        """Returns `fits` and the totals, each {value, interval, origin, basis}, then `more` and the whole ledger."""
        totals = {name: estimate.to_json() for name, estimate in self.ledger.totals.items()}
        return {"fits": self.fits} | totals | self.more | {"ledger": self.ledger.to_json()}


@dataclass(frozen=True)
class RequestedModel:
    """The model of a request, and the run's config if a config file gives one."""

    model: ModelConfig
    config: RunConfig | None = None
    left_out: tuple[str, ...] = ()  # parts of the requested model that `model` lacks
    has_file: bool = False  # whether the config comes from a file


# -- the work ----------------------------------------------------------------------------------------------------------


TOKENS_PER_PARAMETER = 20
"""Compute-optimal training tokens per parameter (Hoffmann et al. 2022, arXiv 2203.15556, tables 2 and 3)."""

USUAL_SEQUENCE = 8192
"""Longest sequence of ordinary pretraining (Llama 3, arXiv 2407.21783, section 3.4.1); long contexts follow it."""

BATCH_TOKENS = ((1e9, 0.5e6), (5e9, 1e6), (10e9, 2e6), (math.inf, 4e6))
"""(Upper bound of the parameters, tokens per step), after table 2.1 of GPT-3 (arXiv 2005.14165: 0.5M below 1B, 1M, 2M,
then 2 to 3.2M) and the 4M of Llama 2 and Llama 3."""

_QUANTITY = re.compile(r"^(\d[\d,_]*\.?\d*(?:e[+-]?\d+)?)\s*([kmbt]?)$", re.IGNORECASE)
_FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


@dataclass
class Work:
    """One training run: `steps` optimizer steps of `global_batch` sequences of `sequence` tokens."""

    sequence: int
    global_batch: int
    steps: int
    assumed: list[Assumption] = field(default_factory=list)


def tokens_of(text: str) -> float:
    """Parses a number of tokens: `1T`, `500B`, `2e12`, `1,000,000`. Raises UserError for other text."""
    match, number = _QUANTITY.match(text.strip()), 0.0
    with suppress(ValueError):
        number = units.parse_number(match[1]) * _FACTORS[match[2].lower()] if match else 0.0
    if not 1 <= number < 1e18:
        raise UserError(f"--tokens '{text}' is not a possible number of tokens: write for example 1T, 500B or 2e12")
    return number


def settle(model: ModelConfig, options: Options, accelerators: int, config: RunConfig | None = None) -> Work:
    """Returns the run to plan: from the options, else the config file, else stated assumptions."""
    if options.tokens is not None and options.steps is not None:
        raise UserError("--tokens and --steps say the same thing twice: give one of them")
    assumed: list[Assumption] = []
    sequence = options.sequence or (config.sequence if config else None) or _usual_sequence(model, assumed)
    if sequence > model.context:
        raise UserError(
            f"--seq {sequence} is longer than the context of {model.name}, {model.context} tokens: "
            f"use --seq {model.context} or less"
        )
    batch = options.global_batch or (config.train.global_batch if config else None)
    batch = batch or _usual_batch(model, sequence, accelerators, assumed)
    if options.steps is not None:
        return Work(sequence, batch, options.steps, assumed)
    if options.tokens is None and config is not None:
        return Work(sequence, batch, config.train.steps, assumed)
    tokens = tokens_of(options.tokens) if options.tokens is not None else _usual_tokens(model, assumed)
    return Work(sequence, batch, max(1, math.ceil(tokens / (sequence * batch))), assumed)


def with_work(config: RunConfig, work: Work, options: Options, **train: int) -> RunConfig:
    """Returns the config of a run that does the work, under the options; `train` has further keys of its table."""
    document = config.model_dump(exclude_none=True)
    document["train"] |= {
        "sequence": work.sequence, "global_batch": work.global_batch, "steps": work.steps,
        "precision": options.precision or config.train.precision, **train,
    }  # fmt: skip
    document["optimizer"]["name"] = options.optimizer or config.optimizer.name
    return build_config(document, where="the options")


def _usual_sequence(model: ModelConfig, assumed: list[Assumption]) -> int:
    sequence = min(model.context, USUAL_SEQUENCE)
    reason = "the model's context"
    if sequence < model.context:
        reason = f"usual for pretraining; the model's context is {model.context:,} (arXiv 2407.21783, 3.4.1)"
    assumed.append(Assumption("sequence", f"{sequence:,} tokens", reason, "--seq"))
    return sequence


def _usual_batch(model: ModelConfig, sequence: int, accelerators: int, assumed: list[Assumption]) -> int:
    """Returns the odd part of the number of accelerators times the power of two nearest to the usual batch."""
    target = next(tokens for below, tokens in BATCH_TOKENS if model.parameters < below) / sequence
    odd = accelerators
    while odd % 2 == 0:
        odd //= 2
    batch = odd * 2 ** max(0, round(math.log2(target / odd)) if target > odd else 0)
    reason = f"{batch * sequence / 1e6:.2f}M tokens per step, usual for this size (arXiv 2005.14165, table 2.1)"
    assumed.append(Assumption("global batch", f"{batch:,} sequences", reason, "--global-batch"))
    return batch


def _usual_tokens(model: ModelConfig, assumed: list[Assumption]) -> float:
    tokens = float(TOKENS_PER_PARAMETER * model.parameters)
    reason = f"{TOKENS_PER_PARAMETER} per parameter, compute-optimal (Chinchilla, arXiv 2203.15556)"
    shown = f"{tokens / 1e12:.3g}T" if tokens >= 1e12 else f"{tokens / 1e9:.3g}B"
    assumed.append(Assumption("tokens", shown, reason, "--tokens or --steps"))
    return tokens
