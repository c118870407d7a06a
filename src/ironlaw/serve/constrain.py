"""Constrains answers, by `llguidance`: to JSON, JSON of a schema, a regular expression, a grammar or a choice.

Before each token the library returns which tokens may follow; the logits of all others become minus infinity.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ironlaw.errors import UserError
from ironlaw.serve.sampler import Row

LEXER_FUEL = 300_000  # of the library's million: a second for `(a{1000}){1000}` where it took nine


class State:
    """The constraint of one request's answer, and how much of it has been matched. Raises UserError if the library
    gives the constraint up, which it does with some at once."""

    def __init__(self, grammar: str, tokenizer: Any) -> None:
        library = _library()
        limits = library.LLParserLimits(initial_lexer_fuel=LEXER_FUEL)
        self.matcher = library.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        self._compute_mask()

    def copy(self) -> State:
        """Return a state that advances separately: large constraints take a second to prepare, and n answers have n."""
        other = copy(self)
        other.matcher = self.matcher.deep_copy()
        return other

    def take(self, token: int) -> None:
        """Advance by a token of the answer."""
        self.matcher.consume_token(token)
        self._compute_mask()

    def mask(self, vocab: int) -> Tensor:
        """Return a mask (V,), true where a token is allowed."""
        each = (self._bits[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
        flat = each.flatten().bool()[:vocab]
        return torch.nn.functional.pad(flat, (0, vocab - len(flat)))

    def _compute_mask(self) -> None:
        self._bits = torch.frombuffer(bytearray(self.matcher.compute_bitmask()), dtype=torch.uint8)
        # The library raises nothing: it allows the end of text alone, as if the answer were whole.
        if self.matcher.is_error():
            why = self.matcher.get_error().splitlines()[0]
            raise UserError(
                f"the form of the answer cannot be followed ({why}): send one that text can have, or smaller"
            )


def allowed_tokens(rows: Sequence[Row], vocab: int) -> Tensor | None:
    """Return masks (R, V) for the rows of a step, or None if no request has a constraint."""
    if not any(row.request.state is not None for row in rows):
        return None
    everything = torch.ones(vocab, dtype=torch.bool)
    return torch.stack([everything if r.request.state is None else r.request.state.mask(vocab) for r in rows])


def compile_grammar(kind: str, value: Any) -> str:
    """Compile a json_schema, regex, choice or grammar (Lark). UserError if the library cannot read it."""
    LLMatcher = _library().LLMatcher
    try:
        if kind == "json_schema":
            grammar = LLMatcher.grammar_from_json_schema(value if isinstance(value, str) else json.dumps(value))
        elif kind == "regex":
            grammar = LLMatcher.grammar_from_regex(value)
        elif kind == "choice":
            options = " | ".join(json.dumps(str(option)) for option in value)
            grammar = LLMatcher.grammar_from_lark(f"start: {options}")
        else:
            grammar = LLMatcher.grammar_from_lark(value)
    except Exception as error:  # the library raises several kinds
        raise UserError(f"{kind} cannot be read: {' '.join(str(error).split())[:200]}") from None
    problem = LLMatcher.validate_grammar(grammar)
    if problem:
        raise UserError(f"{kind} cannot be read: {' '.join(str(problem).split())[:200]}")
    return str(grammar)


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise UserError("answers of a given form need an extra: pip install 'ironlaw[serve]'") from None
    return llguidance


def token_table(file: Path, end_tokens: Iterable[int], vocab: int) -> Any:
    """Return the tokenizer in the library's format. UserError if the library does not know its kind."""
    library = _library()
    try:
        return library.LLTokenizer(str(file), n_vocab=vocab, eos_token=sorted(end_tokens) or None)
    except ValueError as error:
        raise UserError(f"forms of answers do not go with this model's tokenizer: {str(error)[:200]}") from None
