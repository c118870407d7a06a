"""Between text and tokens while an answer grows: pieces of text, stop strings, chat templates."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ironlaw.errors import UserError
from ironlaw.serve.request import Chosen

_MARK = "\ue000{}\ue001"  # private use: stands for a message while the template is rendered


class Text:
    """A tokenizer for prompts and answers, and the model's chat template if it has one."""

    def __init__(self, file: Path, template: str | None = None, special: dict[str, str] | None = None) -> None:
        from tokenizers import Tokenizer

        def read(as_text: bool) -> Any:
            tokenizer = Tokenizer.from_file(str(file))
            tokenizer.no_padding()
            tokenizer.no_truncation()
            tokenizer.encode_special_tokens = as_text
            return tokenizer

        self.file = file
        self.tokenizer = read(as_text=False)
        self._plain = read(as_text=True)  # a special token that a user spells is text about it
        self._special = [str(t) for t in self.tokenizer.get_added_tokens_decoder().values() if t.special]
        self.template = None if template is None else _compiled(template)
        self.template_names = special or {}

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Of a prompt; special tokens may be spelt, as in all servers of this API."""
        return list(self.tokenizer.encode(text, add_special_tokens=add_special).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))

    def chat(self, messages: Sequence[dict[str, Any]], more: dict[str, Any] | None = None) -> list[int]:
        """Tokens of a conversation, up to where the assistant speaks next."""
        if self.template is None:
            raise UserError("this model has no chat template: use /v1/completions")
        spelt = [i for i, m in enumerate(messages) if any(s in m["content"] for s in self._special)]
        if not spelt:
            return self.encode(self._render(messages, more), add_special=False)
        # Whoever writes a special token in a message must not end it by that: such messages are encoded apart.
        marked = [m | {"content": _MARK.format(i)} if i in spelt else m for i, m in enumerate(messages)]
        rest, tokens = self._render(marked, more), []
        for i in spelt:
            before, found, rest_after = rest.partition(_MARK.format(i))
            if not found:
                raise UserError("a message spells a special token of this model, and its template cannot quote it")
            tokens += self.encode(before, add_special=False)
            tokens += self._plain.encode(messages[i]["content"], add_special_tokens=False).ids
            rest = rest_after
        return tokens + self.encode(rest, add_special=False)

    def _render(self, messages: Sequence[dict[str, Any]], more: dict[str, Any] | None) -> str:
        import jinja2

        assert self.template is not None
        try:
            return str(
                self.template.render(
                    messages=list(messages), add_generation_prompt=True, **(self.template_names | (more or {}))
                )
            )
        except jinja2.TemplateError as error:
            raise UserError(f"the model's chat template refuses: {' '.join(str(error).split())[:200]}") from None


def _compiled(template: str) -> Any:
    """A template comes with a model, that is, from anywhere: it runs in a sandbox and changes nothing."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise UserError(f"the model's chat template cannot be read: {' '.join(str(error).split())[:200]}") from None


class Reader:
    """One answer's text as its tokens come. What may be the beginning of a stop string is held back."""

    def __init__(self, text: Text | None, stop: Sequence[str] = (), keeps_stop: bool = False) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer = None if text is None else text.tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self.stop, self.keeps_stop = tuple(stop), keeps_stop
        self._held = ""
        self._ready: list[str] = []
        self.stopped_by: str | None = None

    def __call__(self, chosen: Sequence[Chosen]) -> bool:
        """True when a stop string is complete."""
        if self._tokenizer is None:
            return False
        for one in chosen:
            piece = self._stream.step(self._tokenizer, one.token)
            if piece and self._read(piece):
                return True
        return False

    def _read(self, piece: str) -> bool:
        self._held += piece
        ends = [(at, s) for s in self.stop if (at := self._held.find(s)) >= 0]
        if ends:
            at, self.stopped_by = min(ends)
            self._ready.append(self._held[: at + len(self.stopped_by) * self.keeps_stop])
            self._held = ""
            return True
        keep = max((_overlap(self._held, s) for s in self.stop), default=0)
        self._ready.append(self._held[: len(self._held) - keep])
        self._held = self._held[len(self._held) - keep :]
        return False

    def take(self, ended: bool) -> str:
        """The text that may be shown, since the last time."""
        if ended:
            self._ready.append(self._held)
            self._held = ""
        ready, self._ready = "".join(self._ready), []
        return ready


def _overlap(text: str, stop: str) -> int:
    """The longest end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
