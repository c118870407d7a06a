"""Answers in OpenAI's format, whole or in chunks, for both APIs; and the decoding of tokens to text while an answer
grows, up to a stop string."""

from __future__ import annotations

import codecs
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from ironlaw.data.chat import Text
from ironlaw.serve.protocol import ChatRequest, CompletionRequest, RequestBody
from ironlaw.serve.request import OutputPiece, Request, SampledToken


class AnswerFormat:
    """Formats the answer to one HTTP request."""

    kind, prefix, chunk_kind = "", "", ""
    begins_text = False  # an answer goes on with its prompt

    def __init__(self, model: str, body: RequestBody, text: Text | None) -> None:
        self.model, self.text, self.body = model, text, body
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self._begun: set[int] = set()
        self.wants_usage = body.stream_options is not None and body.stream_options.include_usage

    max_tokens: int | None
    logprobs: int | None

    def document(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        found = {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}
        return found | {"usage": None} if self.wants_usage else found

    def begin(self, requests: Sequence[Request]) -> Iterator[dict[str, Any]]:
        return iter(())

    def chunks(self, piece: OutputPiece) -> Iterator[dict[str, Any]]:
        first = piece.index not in self._begun
        self._begun.add(piece.index)
        if not (piece.text or first or piece.finish or self.logprobs is not None):
            return  # an incomplete character, or the possible start of a stop string
        yield self.document(self.chunk_kind, [self.choice(piece)])

    def end(self, requests: Sequence[Request]) -> Iterator[dict[str, Any]]:
        if self.wants_usage:
            yield self.document(self.chunk_kind, []) | {"usage": usage(requests, self.body.n)}

    def whole(self, requests: Sequence[Request], pieces: Sequence[OutputPiece]) -> dict[str, Any]:
        answers = [OutputPiece(index, "", [], None) for index in range(len(requests))]
        for piece in pieces:
            answer = answers[piece.index]
            answer.text += piece.text
            answer.chosen += piece.chosen
            answer.finish = piece.finish
        choices = [self.choice(answer, whole=True) for answer in answers]
        return self.document(self.kind, choices) | {"usage": usage(requests, self.body.n)}

    def choice(self, piece: OutputPiece, whole: bool = False) -> dict[str, Any]:
        """Return a piece of an answer, or a whole one."""
        return {"index": piece.index, "finish_reason": piece.finish, "logprobs": self.logs(piece)}

    def logs(self, piece: OutputPiece) -> dict[str, Any] | None:
        raise NotImplementedError

    def reader(self) -> TokenReader:
        """Return what reads the tokens of one answer."""
        return TokenReader(self.text, self.body.skip_special_tokens, self.begins_text)

    def bytes_of(self, token: int) -> bytes:
        return str(token).encode() if self.text is None else self.text.bytes_of(token)

    def token_text(self, token: int) -> str:
        """Return the text of a token; of one that is not whole characters, its bytes, as OpenAI writes them."""
        found = self.bytes_of(token)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)


class CompletionAnswer(AnswerFormat):
    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, model: str, body: CompletionRequest, text: Text | None) -> None:
        super().__init__(model, body, text)
        self.max_tokens, self.logprobs, self.echo = body.max_tokens, body.logprobs, body.echo
        self._prompts = body.prompts
        self._ends: dict[int, int] = {}  # characters of each answer so far, for `text_offset`

    def begin(self, requests: Sequence[Request]) -> Iterator[dict[str, Any]]:
        for index in range(len(requests) if self.echo else 0):
            choice = {"index": index, "finish_reason": None, "text": self._prompt(index), "logprobs": None}
            yield self.document(self.chunk_kind, [choice])

    def choice(self, piece: OutputPiece, whole: bool = False) -> dict[str, Any]:
        before = self._prompt(piece.index) if whole and self.echo else ""
        return super().choice(piece) | {"text": before + piece.text}

    def _prompt(self, index: int) -> str:
        prompt = self._prompts[index // self.body.n]
        return prompt if isinstance(prompt, str) else "" if self.text is None else self.text.decode(prompt)

    def logs(self, piece: OutputPiece) -> dict[str, Any] | None:
        if self.logprobs is None:
            return None
        offset, read = self._ends.get(piece.index, 0), self.reader()
        tokens, offsets = [self.token_text(one.token) for one in piece.chosen], []
        for one, token in zip(piece.chosen, tokens, strict=True):
            text = read(one.token) if one.text is None else one.text  # the prompt's tokens are not decoded
            offsets.append(offset + max(0, len(text) - len(token)))  # behind what a broken character has become
            offset += len(text)
        self._ends[piece.index] = offset
        # The drawn token is there, too, if it is not among the most likely ones.
        tops = [
            None
            if one.logprob is None
            else {self.token_text(t): log for t, log in (*one.top, (one.token, one.logprob))}
            for one in piece.chosen
        ]
        logs = [one.logprob for one in piece.chosen]
        return {"tokens": tokens, "token_logprobs": logs, "top_logprobs": tops, "text_offset": offsets}


class ChatAnswer(AnswerFormat):
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"
    begins_text = True

    def __init__(self, model: str, body: ChatRequest, text: Text) -> None:
        super().__init__(model, body, text)
        self.max_tokens = body.max_completion_tokens or body.max_tokens
        self.logprobs = (body.top_logprobs or 0) if body.logprobs else None

    def begin(self, requests: Sequence[Request]) -> Iterator[dict[str, Any]]:
        for index in range(len(requests)):
            delta = {"role": "assistant", "content": ""}
            yield self.document(self.chunk_kind, [{"index": index, "delta": delta, "finish_reason": None}])

    def choice(self, piece: OutputPiece, whole: bool = False) -> dict[str, Any]:
        if whole:
            return super().choice(piece) | {"message": {"role": "assistant", "content": piece.text}}
        return super().choice(piece) | {"delta": {"content": piece.text} if piece.text else {}}

    def logs(self, piece: OutputPiece) -> dict[str, Any] | None:
        if self.logprobs is None:
            return None
        content = []
        for one in piece.chosen:
            tops = [self._log(token, log) for token, log in one.top]
            content.append(self._log(one.token, one.logprob) | {"top_logprobs": tops})
        return {"content": content}

    def _log(self, token: int, log: float | None) -> dict[str, Any]:
        return {"token": self.token_text(token), "logprob": log, "bytes": list(self.bytes_of(token))}


def usage(requests: Sequence[Request], answers_each: int) -> dict[str, Any]:
    prompt = sum(r.prompt_length for r in requests[::answers_each])
    answer = sum(len(r.tokens) - r.prompt_length for r in requests)
    return {
        "prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": sum(r.shared_tokens for r in requests[::answers_each])},
    }  # fmt: skip


class TokenReader:
    """Returns the text of tokens as they come. A character that is not whole yet stays behind, for its last token."""

    def __init__(self, text: Text | None, skips_special: bool = True, begins: bool = False) -> None:
        self._text, self._begins = text, begins
        self._hidden = text.special if text is not None and skips_special else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def __call__(self, token: int) -> str:
        if self._text is None or token in self._hidden:
            return ""
        found = self._utf8.decode(self._text.bytes_of(token, self._begins))
        self._begins = False
        return found

    def rest(self) -> str:
        """Return a replacement for the character that was begun and has no last token."""
        return self._utf8.decode(b"", final=True)


class TextDecoder:
    """Decodes one answer as its tokens arrive. Text that may be the start of a stop string is held back."""

    def __init__(self, read: TokenReader, stop: Sequence[str] = (), include_stop: bool = False) -> None:
        self.read, self.stop, self.include_stop = read, tuple(stop), include_stop
        self._held = ""
        self._ready: list[str] = []

    def __call__(self, chosen: SampledToken, may_stop: bool = True) -> bool:
        """Decode a new token. Returns True if a stop string is complete, where one `may_stop` the answer."""
        chosen.text = self.read(chosen.token)
        self._held += chosen.text
        ends = [(at, s) for s in self.stop if (at := self._held.find(s)) >= 0] if may_stop else []
        if ends:
            at, stop = min(ends)
            self._ready.append(self._held[: at + len(stop) * self.include_stop])
            self._held = ""
            return True
        keep = max((_overlap(self._held, s) for s in self.stop), default=0)
        self._ready.append(self._held[: len(self._held) - keep])
        self._held = self._held[len(self._held) - keep :]
        return False

    def take(self, ended: bool) -> str:
        """Return the new text that may be shown."""
        if ended:
            self._ready.append(self._held)
            self._held = ""
        ready, self._ready = "".join(self._ready), []
        return ready


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` with which `stop` begins."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
