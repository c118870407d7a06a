"""The HTTP server: OpenAI's completion and chat APIs for one engine, with FastAPI.

    app = create_app(engine)

Handlers run in the event loop, the engine in a separate thread; its outputs are passed on once per step.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from http import HTTPStatus
from importlib.resources import files
from typing import Any, TypeVar

from fastapi import Depends, FastAPI, Response
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ironlaw.data.chat import LONG_TEXT
from ironlaw.errors import UserError
from ironlaw.serve.answers import AnswerFormat, ChatAnswer, CompletionAnswer, TextDecoder
from ironlaw.serve.constrain import State, compile_grammar, token_table
from ironlaw.serve.engine import Busy, Draining, Engine
from ironlaw.serve.metrics import Metrics
from ironlaw.serve.protocol import ChatRequest, CompletionRequest, RequestBody
from ironlaw.serve.request import OutputPiece, Request, SampledToken

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_OPEN = ("/", "/health")  # accessible without a key
_PRIVATE_HOST = re.compile(r"(\[.*|[^.]*|.*\.(\d+|localhost|local|internal)\.?)(:\d*)?", re.I)  # in no public DNS
_NO_BUFFER = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # nginx passes on a stream as it comes
_JSON = "application/json"
BODY_SECONDS = 60  # limit for receiving a whole body
Result = TypeVar("Result")


@dataclass
class Job:
    """One HTTP request. Several prompts, or several answers to one, are several requests of the engine."""

    requests: list[Request] = field(default_factory=list)
    queue: asyncio.Queue[OutputPiece] = field(default_factory=asyncio.Queue)

    async def pieces(self) -> AsyncIterator[OutputPiece]:
        """Yield the pieces of all answers until all are finished. Raises HTTPException if one fails."""
        left = len(self.requests)
        while left:
            piece = await self.queue.get()
            if piece.finish in ("error", "cancelled"):
                raise _failure(self.requests[piece.index])
            left -= piece.finish is not None
            yield piece


class Server:
    """The handlers of the API, and the state that they share."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.text, self.config = engine, engine.served.text, engine.config
        self.metrics = Metrics(engine)
        self.created = int(time.time())
        self.loop: asyncio.AbstractEventLoop | None = None  # set once it runs
        self._pieces: list[tuple[Job, OutputPiece]] = []  # of the current step
        if self.text is not None:  # in a chat, an answer also ends with its turn
            engine.served.end_tokens |= self.text.turn_ends()
        engine.on_finish, engine.after_step = self.metrics.finished, self._send

    def _send(self) -> None:
        """Pass the outputs of a step from the engine's thread to the event loop, with one call."""

        def deliver(pieces: list[tuple[Job, OutputPiece]]) -> None:
            for job, piece in pieces:
                job.queue.put_nowait(piece)

        if self._pieces and self.loop is not None:
            with suppress(RuntimeError):  # the loop is closed, and no client listens
                self.loop.call_soon_threadsafe(deliver, self._pieces)
            self._pieces = []

    # -- answers -----------------------------------------------------------------------------------------------------

    async def completions(self, http: HttpRequest) -> Response:
        body = CompletionRequest.model_validate(await self._json(http))
        prompts: list[list[int]] = []
        for prompt in body.prompts:
            if not isinstance(prompt, str):
                prompts.append(prompt)
            elif self.text is not None:
                prompts.append(await _run_in_thread(len(prompt) >= LONG_TEXT, partial(self.text.encode, prompt)))
            else:
                raise UserError("this model has no tokenizer: send the prompt as token ids")
        return await self.answer(body, prompts, CompletionAnswer(self.engine.served.name, body, self.text), http)

    async def chat(self, http: HttpRequest) -> Response:
        body = ChatRequest.model_validate(await self._json(http))
        if self.text is None:
            raise UserError("this model has no tokenizer: use /v1/completions with token ids")
        messages = [m.plain() for m in body.messages]
        is_long = sum(len(m["content"]) for m in messages) >= LONG_TEXT
        prompt = await _run_in_thread(is_long, partial(self.text.chat, messages, body.chat_template_kwargs))
        return await self.answer(body, [prompt], ChatAnswer(self.engine.served.name, body, self.text), http)

    async def _json(self, http: HttpRequest) -> Any:
        """Return the body's document."""
        kind = http.headers.get("content-type", _JSON)
        # A browser may send text on behalf of another site's page; only JSON requires a preflight request.
        if kind.partition(";")[0].strip().lower() != _JSON:
            raise HTTPException(415, f"content-type {kind[:100]!r} is not read: send {_JSON}")
        coding = http.headers.get("content-encoding", "identity").lower()
        if coding != "identity":
            raise HTTPException(415, f"content-encoding {coding!r} is not read: send the JSON as it is")
        try:
            text = (await asyncio.wait_for(self._read(http), BODY_SECONDS)).decode("utf-8")
            document: Any = json.loads(text)
            if "\\ud" in text.lower():  # half of a surrogate pair is not a character, and tokenizers reject it
                json.dumps(document, ensure_ascii=False).encode("utf-8")
        except TimeoutError:
            raise HTTPException(408, f"the body did not come within {BODY_SECONDS} s") from None
        except (ValueError, RecursionError):
            raise UserError("the body is not JSON in UTF-8") from None
        return document

    async def _read(self, http: HttpRequest) -> bytes:
        body, limit = bytearray(), self.config.body_bytes
        too_large = HTTPException(413, f"the body is larger than {limit} bytes")
        if int(http.headers.get("content-length", 0)) > limit:
            raise too_large
        async for part in http.stream():
            body += part
            if len(body) > limit:
                raise too_large
        return bytes(body)

    async def answer(
        self, body: RequestBody, prompts: Sequence[Sequence[int]], form: AnswerFormat, http: HttpRequest
    ) -> Response:
        self._check_name(body.model)
        if len(prompts) * body.n > self.config.batch + self.config.waiting:
            raise UserError(f"{len(prompts)} prompts of {body.n} answers are more than this server takes at once")
        ruled = body.grammar() is not None  # large grammars take seconds to compile
        job = await _run_in_thread(ruled, partial(self._job, body, prompts, form))
        try:
            self.engine.submit(*job.requests)
        except Busy as error:
            self.metrics.refused.inc()
            raise HTTPException(429, str(error), {"Retry-After": str(self._retry_seconds())}) from None
        except Draining as error:
            raise HTTPException(503, str(error), {"Retry-After": "10"}) from None
        if body.stream:
            return StreamingResponse(self._stream(job, form), headers=_NO_BUFFER, media_type="text/event-stream")
        return await self._whole(job, form, http)

    def _check_name(self, model: str | None) -> None:
        if model is not None and model != self.engine.served.name:
            raise HTTPException(404, f"no model {model[:100]!r} here: use {self.engine.served.name!r}")

    def _retry_seconds(self) -> int:
        """Estimate the seconds until a place is free, from those of the newest answers and the length of the queue."""
        done = [r for r in list(self.engine.finished)[-20:] if r.last_token is not None]
        if not done:
            return 1
        each = sum((r.last_token or 0.0) - (r.admitted or r.arrived) for r in done) / len(done)
        return max(1, min(60, math.ceil(each * self.engine.waiting / self.config.batch)))

    def _job(self, body: RequestBody, prompts: Sequence[Sequence[int]], form: AnswerFormat) -> Job:
        asked = body.grammar()
        if (body.stops or asked) and self.text is None:
            raise UserError("this model has no tokenizer: stop strings and forms of answers need one")
        state = None if asked is None else State(compile_grammar(*asked), self._token_table)
        job = Job()
        for prompt in prompts:
            sampling = body.sampling(self._length(prompt, form.max_tokens), form.logprobs)
            for number in range(body.n):  # answers with one seed differ from each other, but can be reproduced
                seed = None if body.seed is None else body.seed + 0x9E3779B9 * number
                reader = TextDecoder(form.reader(), sampling.stop, sampling.include_stop)
                on_output = partial(self._on_output, job, len(job.requests), reader)
                own = None if state is None else state.copy()
                job.requests.append(
                    Request(prompt, replace(sampling, seed=seed), on_output, reader, body.priority, state=own)
                )
        return job

    def _on_output(
        self, job: Job, index: int, reader: TextDecoder, request: Request, chosen: list[SampledToken]
    ) -> None:
        text = reader.take(request.finish is not None)
        self._pieces.append((job, OutputPiece(index, text, chosen, request.finish)))

    def _length(self, prompt: Sequence[int], asked: int | None) -> int:
        fit = self.engine.longest_prompt + 1
        room = fit - len(prompt)
        if asked is None:
            return max(1, min(self.config.max_tokens, room))
        if 0 < room < asked:
            raise UserError(
                f"max_tokens = {asked} beside {len(prompt)} of the prompt is more than the {fit} that fit: use {room}"
            )
        return asked

    @cached_property
    def _token_table(self) -> Any:
        assert self.text is not None
        return token_table(self.text.file, self.engine.served.end_tokens, self.engine.model_config.vocab)

    async def _stream(self, job: Job, form: AnswerFormat) -> AsyncIterator[str]:
        """Yield events, all that are ready at once: only between writes does the loop see that a client has left."""
        text = _events(form.begin(job.requests))
        try:
            if text:
                yield text
                text = ""
            try:
                async for piece in job.pieces():
                    text += _events(form.chunks(piece))
                    if text and job.queue.empty():
                        yield text
                        text = ""
                text += _events(form.end(job.requests)) + "data: [DONE]\n\n"
            except HTTPException as failure:
                text += _events([{"error": _error(failure.detail, failure.status_code)}])
            yield text
        finally:  # also if the client disconnects
            self._cancel(job)

    async def _whole(self, job: Job, form: AnswerFormat, http: HttpRequest) -> Response:
        async def collect() -> list[OutputPiece]:
            return [piece async for piece in job.pieces()]

        collected, gone = asyncio.ensure_future(collect()), asyncio.ensure_future(_disconnected(http))
        try:
            await asyncio.wait({collected, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not collected.done():
                return Response(status_code=499)  # the client has disconnected
            return JSONResponse(form.whole(job.requests, collected.result()))
        finally:
            collected.cancel()
            gone.cancel()
            self._cancel(job)

    def _cancel(self, job: Job) -> None:
        self.engine.cancel(*(request for request in job.requests if request.finish is None))

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [await self.model()]}

    async def model(self, name: str | None = None) -> dict[str, Any]:
        self._check_name(name)
        return {"id": self.engine.served.name, "object": "model", "created": self.created, "owned_by": "ironlaw",
                "max_model_len": self.engine.context}  # fmt: skip

    # -- figures -----------------------------------------------------------------------------------------------------

    async def health(self) -> Response:
        down = self.engine.failure or ("draining" if self.engine.is_draining else None)
        return Response(status_code=200) if down is None else _error_response(down, 503, {"Retry-After": "10"})

    async def prometheus(self) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def state(self) -> dict[str, Any]:
        """Return the current state for the web page."""
        engine = self.engine
        newest = list(engine.trace.steps)[-200:]
        span = newest[-1].start + newest[-1].seconds - newest[0].start if newest else 0.0
        recent = newest and time.monotonic() - newest[-1].start < 2.0
        return {
            "model": engine.served.name, "running": engine.running, "waiting": engine.waiting,
            "batch": self.config.batch, "kv_usage": engine.blocks.usage, "steps": engine.trace.count,
            "tokens_per_second": sum(s.produced for s in newest) / span if recent and span else 0.0,
            "preemptions": engine.scheduler.preemptions,
            "chat": self.text is not None and self.text.template is not None,
        }  # fmt: skip

    async def steps(self, since: int = 0, after: float = 0.0) -> dict[str, Any]:
        """Return the newest engine steps from number `since` on, facts on the engine, and the queue seconds of requests
        that arrived after the time `after`. `ironlaw bench` writes them into its run."""
        from ironlaw.serve.measured import facts

        engine = self.engine
        found = await asyncio.to_thread(lambda: [s.to_json() for s in engine.trace.since(since)])
        waited = [r.admitted - r.arrived for r in list(engine.finished) if r.admitted is not None and r.arrived > after]
        about = {"next": engine.trace.count, "now": time.monotonic(), "facts": facts(engine)}
        lines = [asdict(line) for line in engine.recording.lines()]
        return about | {"queue_seconds": waited, "lines": lines, "steps": found}

    async def profile(self, steps: int = 5) -> dict[str, Any]:
        """Record the next steps of decode only and of prefill only, operation by operation."""
        if not 0 < steps <= 100:
            raise UserError(f"steps = {steps} is not between 1 and 100")
        self.engine.recording.start(steps)
        return {"steps": steps}

    async def page(self) -> HTMLResponse:
        return HTMLResponse(files("ironlaw.serve").joinpath("page.html").read_text("utf-8"))


def _failure(request: Request) -> HTTPException:
    """Return the error of a request that did not end: status 400 if the same request would fail again."""
    if request.failure is None:
        return HTTPException(503, "the server is shutting down", {"Retry-After": "10"})
    return HTTPException(400 if request.is_at_fault else 500, request.failure)


async def _run_in_thread(is_long: bool, work: Callable[[], Result]) -> Result:
    """Run long work in a thread, so that streams continue."""
    return await asyncio.to_thread(work) if is_long else work()


async def _disconnected(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _events(documents: Iterable[dict[str, Any]]) -> str:
    return "".join(f"data: {json.dumps(d, ensure_ascii=False, separators=(',', ':'))}\n\n" for d in documents)


def _error(message: str, status: int) -> dict[str, Any]:
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"message": " ".join(message.split())[:500], "type": kind, "param": None, "code": status}


def _error_response(message: str, status: int, headers: Any = None) -> JSONResponse:
    return JSONResponse({"error": _error(message, status)}, status, headers)


def create_app(engine: Engine) -> FastAPI:
    server, config = Server(engine), engine.config

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        server.loop = asyncio.get_running_loop()
        engine.start()
        yield
        await asyncio.to_thread(engine.drain, config.drain_seconds)

    async def check_key(http: HttpRequest) -> None:
        scheme, _, given = http.headers.get("authorization", "").encode("latin-1").partition(b" ")
        keys = [key.encode() for key in config.api_keys]
        if scheme.lower() != b"bearer" or not any(hmac.compare_digest(given.strip(), key) for key in keys):
            raise HTTPException(401, "a valid API key is needed: Authorization: Bearer KEY")

    async def check_host(http: HttpRequest) -> None:
        """Refuse a public name: a website can make its own name that of this machine, and have browsers send requests
        (DNS rebinding)."""
        host = http.headers.get("host", "")
        if config.host in _LOOPBACK and not _PRIVATE_HOST.fullmatch(host):
            raise HTTPException(
                403, f"without a key nothing is answered as {host[:100]!r}: set serve.api_keys, or send Host: localhost"
            )

    check = [Depends(check_key if config.api_keys else check_host)]
    app = FastAPI(title="Ironlaw", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.server = server
    for kind in (HTTPException, ValidationError, RequestValidationError, ClientDisconnect, UserError, Exception):
        app.add_exception_handler(kind, _handle_error)
    for method, path, handler in (
        ("POST", "/v1/completions", server.completions), ("POST", "/v1/chat/completions", server.chat),
        ("GET", "/v1/models", server.models), ("GET", "/v1/models/{name:path}", server.model),
        ("GET", "/health", server.health), ("GET", "/metrics", server.prometheus), ("GET", "/state", server.state),
        ("GET", "/steps", server.steps), ("POST", "/profile", server.profile), ("GET", "/", server.page),
    ):  # fmt: skip
        methods = ["GET", "HEAD"] if method == "GET" else [method]
        app.add_api_route(path, handler, methods=methods, dependencies=[] if path in _OPEN else check)
    return app


async def _handle_error(http: HttpRequest, error: Exception) -> Response:
    """Report an error as one line in OpenAI's format."""
    if isinstance(error, HTTPException):
        detail = str(error.detail)
        if detail == HTTPStatus(error.status_code).phrase:  # the router's: no such path, or another method
            where = f"{http.method} {http.url.path[:100]}"
            detail = f"{where} is not offered here: use POST /v1/chat/completions or POST /v1/completions"
        return _error_response(detail, error.status_code, error.headers)
    if isinstance(error, ValidationError | RequestValidationError):
        return _error_response(_format_problems(error.errors()), 400)
    if isinstance(error, ClientDisconnect):
        return _error_response("the client left before its request was whole", 400)
    if isinstance(error, UserError):
        return _error_response(str(error), 400)
    return _error_response(f"{type(error).__name__} in the server", 500)


def _format_problems(problems: Sequence[Any]) -> str:
    # Of a value's alternatives, the one that fits furthest.
    problem = min(problems, key=lambda p: (p["type"] != "extra_forbidden", -len(p["loc"])))
    where = ".".join(str(part) for part in problem["loc"] if part not in ("query", "body"))
    if problem["type"] == "extra_forbidden":
        return f"{where[:100]} is not a field of this API: leave it out"
    message = str(problem["msg"]).removeprefix("Value error, ")
    return (f"{where[:100]}: {message}" if where else message)[:400]
