"""Answers in OpenAI's format, whole or in chunks, for both APIs; and the decoding of tokens to text while an answer
grows, up to a stop string."""

from __future__ import annotations

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

    def __init__(self, model: str, body: RequestBody, text: Text | None) -> None:
        self.model, self.text, self.body = model, text, body
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self._begun: set[int] = set()
        self.wants_usage = body.stream_options is not None and body.stream_options.include_usage

    max_tokens: int | None
    logprobs: int | None

    def document(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def begin(self, requests: Sequence[Request]) -> Iterator[dict[str, Any]]:
        return iter(())

    def chunks(self, piece: OutputPiece, request: Request) -> Iterator[dict[str, Any]]:
        first = piece.index not in self._begun
        self._begun.add(piece.index)
        if not (piece.text or first or piece.finish or self.logprobs is not None):
            return  # an incomplete character, or the possible start of a stop string
        choice = {"index": piece.index, "finish_reason": piece.finish} | self.gained(piece)
        yield self.document(self.chunk_kind, [choice])

    def end(self, requests: Sequence[Request]) -> Iterator[dict[str, Any]]:
        if self.wants_usage:
            yield self.document(self.chunk_kind, []) | {"usage": usage(requests, self.body.n)}

    def whole(self, requests: Sequence[Request], pieces: Sequence[Sequence[OutputPiece]]) -> dict[str, Any]:
        choices = []
        for index, found in enumerate(pieces):
            text = "".join(piece.text for piece in found)
            chosen = [one for piece in found for one in piece.chosen]
            finish = {"index": index, "finish_reason": found[-1].finish}
            choices.append(finish | self.complete(text, chosen, requests[index]))
        return self.document(self.kind, choices) | {"usage": usage(requests, self.body.n)}

    def gained(self, piece: OutputPiece) -> dict[str, Any]:
        raise NotImplementedError

    def complete(self, text: str, chosen: Sequence[SampledToken], request: Request) -> dict[str, Any]:
        raise NotImplementedError

    def spelt(self, token: int) -> str:
        return str(token) if self.text is None else self.text.decode([token])


class CompletionAnswer(AnswerFormat):
    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, model: str, body: CompletionRequest, text: Text | None) -> None:
        super().__init__(model, body, text)
        self.max_tokens, self.logprobs, self.echo = body.max_tokens, body.logprobs, body.echo
        self._lengths: dict[int, int] = {}

    def begin(self, requests: Sequence[Request]) -> Iterator[dict[str, Any]]:
        for index, request in enumerate(requests if self.echo else ()):
            choice = {"index": index, "finish_reason": None, "text": self._prompt(request), "logprobs": None}
            yield self.document(self.chunk_kind, [choice])

    def gained(self, piece: OutputPiece) -> dict[str, Any]:
        start = self._lengths.get(piece.index, 0)
        self._lengths[piece.index] = start + len(piece.text)
        return {"text": piece.text, "logprobs": self._logs(piece.chosen, start)}

    def complete(self, text: str, chosen: Sequence[SampledToken], request: Request) -> dict[str, Any]:
        before = self._prompt(request) if self.echo else ""
        return {"text": before + text, "logprobs": self._logs(chosen, len(before))}

    def _prompt(self, request: Request) -> str:
        return "" if self.text is None else self.text.decode(request.prompt)

    def _logs(self, chosen: Sequence[SampledToken], offset: int) -> dict[str, Any] | None:
        if self.logprobs is None:
            return None
        tokens = [self.spelt(one.token) for one in chosen]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        tops = [{self.spelt(token): log for token, log in one.top} for one in chosen]
        logs = [one.logprob for one in chosen]
        return {"tokens": tokens, "token_logprobs": logs, "top_logprobs": tops, "text_offset": offsets}


class ChatAnswer(AnswerFormat):
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, model: str, body: ChatRequest, text: Text) -> None:
        super().__init__(model, body, text)
        self.max_tokens = body.max_completion_tokens or body.max_tokens
        self.logprobs = (body.top_logprobs or 0) if body.logprobs else None

    def begin(self, requests: Sequence[Request]) -> Iterator[dict[str, Any]]:
        for index in range(len(requests)):
            delta = {"role": "assistant", "content": ""}
            yield self.document(self.chunk_kind, [{"index": index, "delta": delta, "finish_reason": None}])

    def gained(self, piece: OutputPiece) -> dict[str, Any]:
        delta = {"content": piece.text} if piece.text else {}
        return {"delta": delta, "logprobs": self._logs(piece.chosen)}

    def complete(self, text: str, chosen: Sequence[SampledToken], request: Request) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}, "logprobs": self._logs(chosen)}

    def _logs(self, chosen: Sequence[SampledToken]) -> dict[str, Any] | None:
        if self.logprobs is None:
            return None
        content = []
        for one in chosen:
            tops = [self._log(token, log) for token, log in one.top]
            content.append(self._log(one.token, one.logprob) | {"top_logprobs": tops})
        return {"content": content}

    def _log(self, token: int, log: float | None) -> dict[str, Any]:
        spelt = self.spelt(token)
        return {"token": spelt, "logprob": log, "bytes": list(spelt.encode())}


def usage(requests: Sequence[Request], answers_each: int) -> dict[str, Any]:
    prompt = sum(r.prompt_length for r in requests[::answers_each])
    answer = sum(len(r.tokens) - r.prompt_length for r in requests)
    return {
        "prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": sum(r.shared_tokens for r in requests[::answers_each])},
    }  # fmt: skip


class TextDecoder:
    """Decodes one answer as its tokens arrive. Text that may be the start of a stop string is held back."""

    def __init__(self, text: Text | None, stop: Sequence[str] = (), keeps_stop: bool = False) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer = None if text is None else text.tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self.stop, self.keeps_stop = tuple(stop), keeps_stop
        self._held = ""
        self._ready: list[str] = []

    def __call__(self, chosen: Sequence[SampledToken]) -> bool:
        """Decode new tokens. Returns True if a stop string is complete."""
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
            at, stop = min(ends)
            self._ready.append(self._held[: at + len(stop) * self.keeps_stop])
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
