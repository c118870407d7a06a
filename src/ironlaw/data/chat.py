"""Conversations rendered with a model's chat template: for prompts, and for training, where only answers are learned.

A template is a Jinja2 program that came with a model, from an untrusted source, so that it runs in a sandbox.
"""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial, wraps
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ironlaw.data.readers import REJECTED, UNLEARNED, Talk, map_texts
from ironlaw.data.tokenizer import GENERATION, Tokenizer, read_tokenizer
from ironlaw.errors import UserError, reported
from ironlaw.files import at_home, read_json, read_json_or_empty, read_text, write_json

# Private-use characters: a quoted text in the rendered text, and where the assistant's text begins and ends.
_MARK, _BEGIN, _END = "\ue000{}\ue001", "\ue002", "\ue003"
_MARKS = re.compile("(\ue000\\d+\ue001|[\ue002\ue003])")
CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"

Messages = Sequence[dict[str, Any]]
ROLES = {"system", "developer", "user", "assistant", "tool", "function"}  # of OpenAI's API; templates may add others


LONG_TEXT = 20_000  # characters; encoding longer texts takes milliseconds

# The characters that byte-level tokenizers write bytes as: the printable ones of Latin-1, and others for the rest.
_PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTES = {chr(byte): byte for byte in _PRINTED} | {
    chr(0x100 + number): byte for number, byte in enumerate(sorted(set(range(256)).difference(_PRINTED)))
}


def encode_ids(tokenizer: Any, text: str, add_special: bool = False) -> list[int]:
    # An unpaired surrogate, from a JSON escape or command-line bytes that are not UTF-8, is a TypeError.
    with reported("the text is not valid Unicode: write it in UTF-8", TypeError):
        if len(text) < LONG_TEXT:
            return list(tokenizer.encode(text, add_special_tokens=add_special).ids)
        # Only batch calls release the interpreter's lock, and without offsets they take half the time.
        return list(tokenizer.encode_batch_fast([text], add_special_tokens=add_special)[0].ids)


class Text:
    """A tokenizer for prompts and answers, with the model's chat template if it has one."""

    def __init__(self, tokenizer: Tokenizer, template: str | None, special: dict[str, str]) -> None:
        self.file, self._end = tokenizer.path, tokenizer.end_of_text
        self._plain = tokenizer.inner  # encodes special tokens spelt by a user as plain text
        self.tokenizer = read_tokenizer(tokenizer.path)
        marks = {i: str(token) for i, token in self.tokenizer.get_added_tokens_decoder().items() if token.special}
        self.special = frozenset(marks)
        self._quoted = [*marks.values(), "\ue000", "\ue001", _BEGIN, _END]
        self._is_of_bytes, self._has_bytes = self._joined("aÃ©") == "aé", self._joined("<0x41>") == "A"
        self._spelt: dict[tuple[int, bool], bytes] = {}
        self.source = template
        self.template = None if template is None else _compiled(template)
        self.template_names = special

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Return the ids of a prompt. Special tokens may be spelt in it, as in other servers of this API."""
        return encode_ids(self.tokenizer, text, add_special)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))

    def decode_behind(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens that stand behind other text."""
        return b"".join(map(self.bytes_of, tokens)).decode("utf-8", "replace")

    def bytes_of(self, token: int, begins: bool = False) -> bytes:
        """Return what a token adds to the text before it, or `begins` a text with, in UTF-8: a token may end within a
        character."""
        found = self._spelt.get((token, begins))
        if found is None:
            found = self._spelt[token, begins] = self._bytes(self.tokenizer.id_to_token(token), begins)
        return found

    def _bytes(self, name: str | None, begins: bool) -> bytes:
        if name is None:  # a row of the embedding table that pads it
            return b""
        if self._is_of_bytes:
            return bytes(map(_BYTES.__getitem__, name)) if _BYTES.keys() >= set(name) else name.encode()
        if self._has_bytes and re.fullmatch("<0x[0-9A-F]{2}>", name):
            return bytes.fromhex(name[3:5])
        # Decoders change spaces at the ends of a text, so the token stands between others; "##" is WordPiece's.
        before, after = [] if begins else ["a"], len(self._joined("a", "##a")) - 1
        return self._joined(*before, name, "##a")[len(before) : -after].encode()

    def _joined(self, *names: str) -> str:
        decoder = self.tokenizer.decoder
        return " ".join(names) if decoder is None else str(decoder.decode(list(names)))

    def chat(self, messages: Messages, more: dict[str, Any] | None = None) -> list[int]:
        """Return the tokens of a conversation, up to where the assistant's next answer begins."""
        if self.template is None:
            raise UserError("this model has no chat template: use /v1/completions")
        for role in {m["role"] for m in messages} - ROLES:
            if not any(mark + role + mark in str(self.source) for mark in "'\""):
                raise UserError(f"the model's chat template names no role {role!r}: use system, user or assistant")
        marked, quoted = self._marked(messages)
        return self._tokens(self._render(marked, True, more), quoted)[0].tolist()

    def turn_ends(self) -> frozenset[int]:
        """Return the special token that the template writes after an answer, if it writes one."""
        if self.template is None:
            return frozenset()
        messages = [{"role": "user", "content": "\ue000"}, {"role": "assistant", "content": "\ue001"}]
        try:
            after = self._render(messages, False).rpartition("\ue001")[2].replace(_END, "").lstrip()
        except UserError:  # the template does not accept this conversation
            return frozenset()
        first = self.encode(after, add_special=False)[:1]
        return self.special.intersection(first)

    def conversation(self, messages: Messages, tools: Any = None) -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids (N,) of a whole conversation, and (N,) bool: which of them the assistant wrote.

        These are the tokens within the template's `{% generation %}` blocks, as in transformers. For a template without
        such blocks, they are the tokens that an answer adds to its prompt, including the end of its turn.
        """
        (marked, tools), quoted = self._marked((messages, tools))
        whole = self._render(marked, False, {"tools": tools})
        return self._tokens(whole if _BEGIN in whole else self._by_turns(marked, tools, whole), quoted)

    def preference(self, pair: Talk) -> np.ndarray:
        """Return ids (N,) with marks: the prompt with the chosen answer, then with the rejected one. Text is encoded
        as it is, each answer with the end of text; messages are rendered with the template."""
        prompt, halves = pair["prompt"], []
        for name, mark in (("chosen", 0), ("rejected", REJECTED)):
            answer = pair[name]
            if isinstance(prompt, str) and isinstance(answer, str):
                asked = encode_ids(self._plain, prompt)
                ids = np.array([*asked, *encode_ids(self._plain, answer), self._end])
                learned = np.arange(len(ids)) >= len(asked)
            else:
                assert isinstance(prompt, list) and isinstance(answer, list)
                if self.template is None:
                    raise UserError("messages need a chat template: give one in data.chat_template, or text")
                ids, learned = self.conversation([*prompt, *answer], pair["tools"])
                learned[: len(self.conversation(prompt, pair["tools"])[0])] = False  # answers of earlier turns
            if ids[-1] != self._end:
                ids, learned = np.append(ids, self._end), np.append(learned, False)
            halves.append(np.where(learned, ids, ids | UNLEARNED) | mark)
        return np.concatenate(halves)

    def _marked(self, given: Any) -> tuple[Any, list[str]]:
        """Replace texts that spell a special token by marks. They are encoded apart, so that they cannot use it."""
        quoted: list[str] = []

        def mark(text: str) -> str:
            if not any(token in text for token in self._quoted):
                return text
            quoted.append(text)
            return _MARK.format(len(quoted) - 1)

        return map_texts(mark, given), quoted

    def _by_turns(self, messages: Messages, tools: Any, whole: str) -> str:
        result, at = "", 0
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, after = (self._render(messages[: i + n], not n, {"tools": tools}) for n in (0, 1))
            if not (len(before) >= at and whole.startswith(after) and after.startswith(before)):
                raise UserError(
                    "the chat template rewrites earlier turns, so that what the assistant says cannot be told apart: "
                    "put {% generation %} and {% endgeneration %} around it in the template"
                )
            result += whole[at : len(before)] + _BEGIN + whole[len(before) : len(after)] + _END
            at = len(after)
        return result + whole[at:]

    def _tokens(self, text: str, quoted: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of a rendered text, with the quoted texts, and which overlap the assistant's text."""
        if re.search("[\ue000\ue001]", _MARKS.sub("", text)):  # a part of a mark
            raise UserError("a message spells a special token of this model, and its template cannot quote it")
        ids: list[int] = []
        learned: list[bool] = []
        spans: list[tuple[int, int]] = []  # answers in `chunk`, the text since the last quoted message
        chunk, inside = "", False

        def take() -> None:
            encoded = self.tokenizer.encode(chunk, add_special_tokens=False)
            ids.extend(encoded.ids)
            learned.extend(any(a < end and b > start for start, end in spans) for a, b in encoded.offsets)

        for part in _MARKS.split(text):
            if part.startswith("\ue000"):
                take()
                inner = encode_ids(self._plain, quoted[int(part[1:-1])])
                ids += inner
                learned += [inside] * len(inner)
                chunk, spans = "", []
            elif part in (_BEGIN, _END):
                inside = part == _BEGIN
            else:
                if inside and part:
                    spans.append((len(chunk), len(chunk) + len(part)))
                chunk += part
        take()
        return np.array(ids, dtype=np.int64), np.array(learned, dtype=bool)

    def _render(self, messages: Messages, prompt: bool, more: dict[str, Any] | None = None) -> str:
        assert self.template is not None
        names = {"messages": list(messages), "add_generation_prompt": prompt, "tools": None, "documents": None}
        names |= self.template_names | (more or {})
        _left.set([MAX_RENDERED])
        # An untrusted program, and variables from any request.
        with reported("the model's chat template refuses: {reason}", Exception):
            return str(self.template.render(**names))


class _Generation(Extension):
    """`{% generation %}` and `{% endgeneration %}`, which transformers' templates put around the text to learn."""

    tags = {"generation"}  # noqa: RUF012 as Jinja2 declares it

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.TemplateData(mark)]) for mark in (_BEGIN, _END))
        return [begin, *body, end]


MAX_RENDERED, PASS = 5 * 10**7, 50  # characters that a rendering makes in all, and for how many of them a pass counts
_PRODUCTS = ("*", "**", "center", "expandtabs", "indent", "join", "ljust", "replace", "rjust", "tojson", "wordwrap",
             "zfill")  # fmt: skip
_left: ContextVar[list[int]] = ContextVar("characters that a rendering may still make")


class _Bounded(ImmutableSandboxedEnvironment):
    """A sandbox where texts, lists and passes of loops are paid from one sum. Jinja2 only limits `range`s."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = _filtered(loop.iter, "passes")
        joints: Any = tree.find_all((nodes.Concat, nodes.Output))
        for joined in joints:
            joined.nodes = [n if isinstance(n, nodes.TemplateData) else _filtered(n, "written") for n in joined.nodes]
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        return _paid(self.binop_table[operator], operator)(left, right)

    def call(self, context: Any, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        method = partial(super().call, context, called)
        return _paid(method, getattr(called, "__name__", ""), getattr(called, "__self__", None))(*args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        return wrapped and _paid(wrapped, "format", value.__self__)


def _filtered(value: Any, name: str) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


def _pay(size: int) -> None:
    left = _left.get()
    left[0] -= size
    if left[0] < 0:
        loops = f"{MAX_RENDERED // PASS:,} passes of loops"
        raise jinja2.TemplateError(f"it makes more than {MAX_RENDERED:,} characters, or {loops}")


def _paid(function: Callable[..., Any], name: str, of: Any = None) -> Callable[..., Any]:
    """Wrap an operator, a filter or a method `of` a text. What may grow is paid before it is made."""

    @wraps(function)
    def paid(*given: Any, **named: Any) -> Any:
        if name == "join":  # what is joined may come one by one
            given = tuple(list(v) if isinstance(v, Iterator) else v for v in given)
        _pay(_growth(name, [v for v in (of, *given, *named.values()) if isinstance(v, str | int | list | tuple)]))
        result = function(*given, **named)
        _pay(len(result) if isinstance(result, str | list | tuple) else 1)
        return result

    return paid


def _growth(name: str, values: list[Any]) -> int:
    """Return an upper bound of the result's length where it may exceed all arguments together, else 0. The bound of a
    number is its size."""
    if name in ("%", "format"):
        return max((int(width) for v in values if isinstance(v, str) for width in re.findall(r"\d+", v)), default=0)
    if name not in _PRODUCTS:
        return MAX_RENDERED + 1 if name == "translate" else 0
    lists = [len(v) + sum(len(i) for i in v if isinstance(i, str)) for v in values if isinstance(v, list | tuple)]
    sizes = lists + [abs(v) if isinstance(v, int) else len(v) for v in values if isinstance(v, int | str)]
    return math.prod(max(1, size) for size in sizes)


def _passes(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _pay(PASS)
        yield item


def _written(value: Any) -> Any:
    _pay(len(str(value)))
    return value


def _compiled(template: str) -> Any:
    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = _Bounded(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # with transformers' options
    environment.filters = {name: _paid(given, name) for name, given in environment.filters.items()}
    environment.filters |= {"passes": _passes, "written": _written}
    del environment.globals["lipsum"]  # draws words one by one
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    told = "the model's chat template cannot be read: {reason}"
    with reported(told, jinja2.TemplateError, SyntaxError, RecursionError):
        return environment.from_string(template)


def read_template(folder: Path, given: str | None = None) -> tuple[str | None, dict[str, str]]:
    """Return the chat template of a Hugging Face directory or a run, or that of the `given` file, and the special
    tokens that it may name."""
    fields = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    tokens = {key: value for key, value in fields.items() if key.endswith("_token") and not isinstance(value, bool)}
    special = {key: _token(value) for key, value in tokens.items() if value}
    file = folder / TEMPLATE if given is None else at_home(given)
    if given is not None and not file.is_file():
        raise UserError(f"data.chat_template = {given!r} is not a file: give a Jinja2 template")
    if file.is_file():
        return read_text(file, "template"), special
    template = fields.get("chat_template")
    if isinstance(template, list):  # several templates with names
        named = (t for t in template if isinstance(t, dict) and t.get("name") == "default")
        template = next(named, {}).get("template")
    return template if isinstance(template, str) else None, special


def write_tokenizer_fields(folder: Path, tokenizer: Tokenizer, template: str | None = None) -> None:
    """Write into `folder`, which has a copy of the tokenizer, the fields of the files beside it: chat
    template, special tokens, and the ids at which its model stops. `template`: a file with another chat template."""
    source, special = read_template(tokenizer.home, template)
    if source is not None:
        special = {"eos_token": tokenizer.end_of_text_token} | special | {"chat_template": source}
    if special:
        write_json(folder / CONFIG, special)
    stated = read_json_or_empty(tokenizer.home / GENERATION)
    if stated or tokenizer.ends != {tokenizer.end_of_text}:
        write_json(folder / GENERATION, stated | end_fields(tokenizer.begin, tokenizer.ends, tokenizer.end))


def end_fields(begin: int, ends: Iterable[int], end: int) -> dict[str, Any]:
    """Return the fields of `config.json` and `generation_config.json` for where a text begins and ends, `end` first."""
    several = sorted(ends, key=lambda one: (one != end, one))
    return {"bos_token_id": begin, "eos_token_id": several if len(several) > 1 else several[0]}


def text_for_training(tokenizer: Tokenizer, template: str | None, plain: bool = False) -> Text:
    """Return a `Text` with the template in the file `template`, or else the one beside the tokenizer. UserError if
    there is none, unless `plain` text is enough."""
    source, special = read_template(tokenizer.home, template)
    if source is None and not plain:
        raise UserError(
            f"there is no chat template beside the tokenizer in {tokenizer.home}: give one in data.chat_template, a "
            "Jinja2 file that writes `messages` as text"
        )
    return Text(tokenizer, source, {"eos_token": tokenizer.end_of_text_token} | special)


def _token(value: Any) -> str:
    return str(value["content"]) if isinstance(value, dict) and "content" in value else str(value)
