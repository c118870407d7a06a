"""A request on its way through the engine, and what it asks of the sampler."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Finish = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. The order: penalties and biases, the constraint, temperature, top-k, top-p, min-p."""

    max_tokens: int = 256
    temperature: float = 1.0  # 0: the likeliest token
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0  # least probability, as a part of the likeliest token's
    presence_penalty: float = 0.0  # off the logits of tokens in the answer (OpenAI's definition)
    frequency_penalty: float = 0.0  # off them for every time they are
    repetition_penalty: float = 1.0  # divides logits of tokens in prompt and answer (arXiv 1909.05858)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()  # beside the end of text
    ignore_end: bool = False  # the end of text is a token like any other
    min_tokens: int = 0  # before which nothing stops the answer
    logprobs: int | None = None  # so many likeliest tokens with each token; 0: the token's own only
    logit_bias: tuple[tuple[int, float], ...] = ()
    constraint: Callable[[], Any] | None = None  # makes the state of what the answer must be: `constrain.State`
    keeps_stop: bool = False  # the stop string is part of the answer

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def changes_logits(self) -> bool:
        """Before a token is drawn: then its row is handled apart."""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0 or self.logit_bias
        )

    @property
    def can_speculate(self) -> bool:
        """Proposed tokens are checked against the model's own logits: nothing may change or mask these."""
        return not self.changes_logits and self.constraint is None


@dataclass
class Chosen:
    """A token and, where asked for, logarithms of probabilities."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class Piece:
    """What one request gained in one step."""

    index: int
    text: str
    chosen: list[Chosen]
    finish: Finish | None


@dataclass(eq=False)  # each is itself: queues are searched for it
class Request:
    """`tokens` grow from the prompt to prompt and answer; keys and values of the first `computed` are in pages."""

    prompt: Sequence[int]
    sampling: Sampling
    on_output: Callable[[Request, list[Chosen]], None] = lambda request, chosen: None  # `finish` is set with the last
    reads: Callable[[list[Chosen]], bool] | None = None  # new tokens as text: true where that ends the answer
    priority: int = 0  # lower goes first, with policy "priority"
    number: int = 0  # in order of arrival
    seed: int = 0
    arrived: float = field(default_factory=time.monotonic)

    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    blocks: list[list[int]] = field(default_factory=list)  # pages by group of layers
    remembered: int = 0  # of each group's, which others can find by now
    digests: list[bytes] = field(default_factory=list)  # of the first full blocks
    is_long: bool = False  # beyond the original context of a model that turns positions otherwise from there on
    drafted_for: int = 0  # tokens whose keys and values the draft model has
    drafted: list[int] = field(default_factory=list)  # proposed for this step
    finish: Finish | None = None
    failure: str | None = None  # with `finish` "error", if it is this request's alone
    shared_tokens: int = 0  # of the prompt, found in pages when the request was first admitted
    preemptions: int = 0
    state: Any = None  # of the constraint
    admitted: float | None = None  # first scheduled
    first_token: float | None = None
    last_token: float | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def prompt_length(self) -> int:
        return len(self.prompt)

    @property
    def answer(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def salt(self) -> bytes:
        return b"long" if self.is_long else b""

    @property
    def is_decoding(self) -> bool:
        """All but the newest token are in pages."""
        return self.computed == len(self.tokens) - 1 and len(self.tokens) > len(self.prompt)
