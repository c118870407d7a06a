"""The engine: takes requests and produces tokens, one step at a time.

    engine = Engine(loaded, config)
    engine.submit(request)              # from any thread; raises Busy if too many requests wait
    engine.step()                       # or engine.start(), which takes the steps in a separate thread
    engine.cancel(request)

Everything but `submit`, `cancel` and reading statistics happens in the thread that takes the steps.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from ironlaw.errors import UserError
from ironlaw.schema import refuse
from ironlaw.serve.blocks import Blocks, layer_groups
from ironlaw.serve.config import ServeConfig
from ironlaw.serve.constrain import allowed_tokens
from ironlaw.serve.loading import LoadedModel
from ironlaw.serve.recording import Recording
from ironlaw.serve.request import FinishReason, Request, SampledToken, SamplingParams
from ironlaw.serve.runner import Runner, RunnerWork, kv_bytes_per_token
from ironlaw.serve.sampler import Row, sample
from ironlaw.serve.scheduler import Scheduler
from ironlaw.serve.speculation import DraftModel, NGram, Proposer
from ironlaw.serve.trace import StepRecord, Trace

log = logging.getLogger("ironlaw.serve")


class Busy(Exception):
    """Too many requests are waiting: try again later."""


class Draining(Exception):
    """The server is shutting down and accepts no new requests."""


class Engine:
    def __init__(self, served: LoadedModel, config: ServeConfig) -> None:
        self.config, self.served = config, served
        self.model_config = served.model.config
        self.context = config.context or self.model_config.context
        if self.context > self.model_config.context:
            raise UserError(f"serve.context = {self.context:,} is more than the model's {self.model_config.context:,}")
        scaling = self.model_config.rope_scaling if self.model_config.rope_long else None
        self._original_context = int(scaling["original_context"]) if scaling else sys.maxsize
        models = [served] + ([served.draft] if served.draft is not None else [])
        windows, groups = layer_groups([m.model.config for m in models])
        page = config.block * sum(
            kv_bytes_per_token(m.model.config, m.kv) * max(map(own.count, own))
            for m, own in zip(models, groups, strict=True)
        )
        count = config.blocks or served.kv_memory(config) // page
        # At most the pages that all requests of full length can use.
        count = min(count, config.batch * len(windows) * -(-self.context // config.block)) + 1  # page 0 is reserved
        if count <= len(windows):
            raise UserError(
                f"no memory for keys and values: {page * len(windows):,} bytes a page; raise serve.kv_memory"
            )
        self.blocks = Blocks(count, config.block, config.share_prefixes, windows)
        self.scheduler = Scheduler(config, self.blocks)
        self.runner, *drafts = (
            Runner(m, own, count, config.block, config.compiled, config.graphs)
            for m, own in zip(models, groups, strict=True)
        )
        self.proposer = Proposer()
        if config.speculation == "ngram":
            self.proposer = NGram(config.ngram, config.drafted)
        elif drafts:
            self.proposer = DraftModel(drafts[0], config.drafted)
        self.trace = Trace(config.trace_steps)
        self.recording = Recording()
        self.passes: list[dict[str, Any]] = []  # measured in `warmup.py`
        self.request_seconds: float | None = None  # to queue one of several simultaneous requests, measured there too
        self.is_draining = False
        self.failure: str | None = None
        self.after_step: Callable[[], None] = lambda: None  # set by the HTTP server, to deliver outputs
        self.on_finish: Callable[[Request], None] = lambda request: None
        self._arrivals: deque[Request] = deque()
        self._cancelled: deque[Request] = deque()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._number = 0
        longest = self.blocks.longest(config.token_budget)
        self.longest_prompt = int(min(self.context, longest)) - 1  # leaves room for an answer of one token
        self.finished: deque[Request] = deque(maxlen=4_000)  # the newest, for statistics
        self.drafted_tokens = self.accepted_tokens = 0
        self.prompt_tokens = 0  # of requests that have a first token, computed or found in shared pages

    # -- from any thread ---------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        return len(self.scheduler.waiting) + len(self._arrivals)

    @property
    def running(self) -> int:
        return len(self.scheduler.running)

    def check(self, request: Request) -> None:
        """Raise UserError if a request can never run."""
        prompt, sampling, vocab = request.prompt, request.sampling, self.model_config.vocab
        named = (*prompt, *sampling.stop_token_ids, *(token for token, _ in sampling.logit_bias))
        unknown = next((token for token in named if not 0 <= token < vocab), None)
        refuse((
            (not prompt, "the prompt has no tokens: send some text"),
            (len(prompt) > self.longest_prompt,
             f"the prompt has {len(prompt)} tokens, this server takes {self.longest_prompt}: send a shorter one"),
            (unknown is not None, f"token {unknown} is not in the vocabulary of {vocab}"),
        ))  # fmt: skip

    def submit(self, *requests: Request) -> None:
        """Queue all requests or none. Raises Busy, Draining, or UserError."""
        for request in requests:
            self.check(request)
        with self._wake:
            if self.is_draining or self.failure:
                raise Draining(self.failure or "the server is shutting down")
            free = max(0, self.config.batch - len(self.scheduler.running))
            if self.waiting + len(requests) > self.config.waiting + free:
                raise Busy(f"{self.waiting} requests wait already, serve.waiting = {self.config.waiting}")
            for request in requests:
                request.number = self._number
                self._number += 1
                sampling = request.sampling
                request.seed = self.config.seed + request.number if sampling.seed is None else sampling.seed
                request.ends = frozenset(sampling.stop_token_ids)
                if not sampling.ignore_eos:
                    request.ends |= self.served.end_tokens
                request.is_long = self._is_long(request)
                self._arrivals.append(request)
            self._wake.notify()

    def cancel(self, *requests: Request) -> None:
        with self._wake:
            self._cancelled.extend(requests)
            self._wake.notify()

    def start(self) -> None:
        self._thread = threading.Thread(target=self._loop, name="ironlaw-engine", daemon=True)
        self._thread.start()

    def drain(self, seconds: float) -> None:
        """Accept nothing new, finish the requests in progress, and cancel those that are not finished in time."""
        self.is_draining = True
        end = time.monotonic() + seconds
        while (self.running or self.waiting) and time.monotonic() < end and not self.failure:
            time.sleep(0.02)
        self.stop()
        if self._thread is not None:
            self._thread.join(timeout=10)

    def stop(self) -> None:
        """Take no further steps. Requests in progress are reported as cancelled."""
        with self._wake:
            self._stopping = self.is_draining = True
            self._wake.notify()

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, at_once: float = math.inf
    ) -> list[Request]:
        """Answer all prompts in the calling thread, at most `at_once` of them in progress, for `ironlaw generate`,
        `ironlaw tune --serve`, tests and benchmarks."""
        requests = [Request(prompt, sampling) for prompt in prompts]
        left, most = deque(requests), min(at_once, self.config.batch + self.config.waiting)
        while left or self.running or self.waiting:
            while left and self.running + self.waiting < most:
                self.submit(left.popleft())
            self.step()
        return requests

    def stream(self, prompt: Sequence[int], sampling: SamplingParams) -> Iterator[int]:
        """Yield the tokens of an answer as they are made. It may exceed the context: whenever that is full, the model
        continues from its newest half. The end-of-text token is not included."""
        window, made = list(prompt)[-self.longest_prompt :], 0
        while made < sampling.max_tokens:
            seed = (sampling.seed or self.config.seed) + made
            request = Request(window, replace(sampling, max_tokens=sampling.max_tokens - made, seed=seed))
            self.submit(request)
            seen = 0
            while self.running or self.waiting:
                self.step()
                new = request.answer[seen:]
                seen += len(new)
                is_ended = request.finish not in (None, "length")
                yield from new[:-1] if is_ended and new and new[-1] in self.served.end_tokens else new
            if is_ended:
                return
            made += seen
            window = request.tokens[-max(1, self.longest_prompt // 2) :]

    # -- the step ----------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        torch.set_num_threads(self.served.threads)
        while True:
            with self._wake:
                while not (self._stopping or self._arrivals or self._cancelled or self.running or self.waiting):
                    self._wake.wait()
                if self._stopping:
                    break
            try:
                if not self.step():
                    time.sleep(0.001)  # no request fits until another one is cancelled
                self.after_step()
            except Exception as error:  # a bug or a failed device: no client may wait forever
                log.exception("the engine stopped")
                self.failure = f"the engine stopped: {type(error).__name__}: {error}".splitlines()[0]
                break
        self._process_queues()
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            request.failure = self.failure
            self._finish(request, "cancelled" if self.failure is None else "error", [])
        self.after_step()

    def step(self) -> int:
        """Take one step. Returns the number of requests in it."""
        began = time.perf_counter()
        self._process_queues()
        step = self.scheduler.schedule(self._propose)
        if not step:
            return 0
        self.proposer.fill(step)
        scheduled_at = time.perf_counter()
        work = [self._work(request, count) for request, count in step.items()]
        record = self._record(work)
        with self.recording.step(self.served.model, record.phase):
            logits, ordered = self.runner.run(work)
        self.proposer.computed(work)
        if self.served.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        computed_at = time.perf_counter()
        chosen = self._sample(logits, ordered)
        sampled_at = time.perf_counter()
        self._accept(ordered, chosen, record)
        ended = time.perf_counter()
        record.schedule_seconds = scheduled_at - began
        record.model_seconds = computed_at - scheduled_at
        record.sample_seconds = sampled_at - computed_at
        record.output_seconds = ended - sampled_at
        record.seconds = ended - began
        self.trace.add(record)
        return len(step)

    def _sample(self, logits: torch.Tensor | None, ordered: Sequence[RunnerWork]) -> list[SampledToken]:
        """Sample a token for each of the rows (R, V)."""
        if logits is None:
            return []
        rows = [Row(w.request, w.start + len(w.tokens) - n) for w in ordered for n in reversed(range(w.wanted))]
        return sample(logits, rows, allowed_tokens(rows, self.model_config.vocab))

    def _fail(self, request: Request, error: Exception) -> None:
        request.is_at_fault = isinstance(error, UserError)
        failure = str(error)
        if not request.is_at_fault:
            log.error("a token could not be read", exc_info=error)
            failure = f"a token could not be read: {type(error).__name__}: {error}"
        request.failure = failure.splitlines()[0]
        self._finish(request, "error", [])

    def _process_queues(self) -> None:
        while self._arrivals:
            self.scheduler.add(self._arrivals.popleft())
        while self._cancelled:
            request = self._cancelled.popleft()
            if request.finish is None:
                self._finish(request, "cancelled", [])

    def _propose(self, request: Request) -> list[int]:
        # Drafted tokens are verified by the model's own logits, which nothing may change or mask.
        is_own = request.state is None and not request.sampling.changes_logits
        drafted = self.proposer.propose(request) if is_own else []
        # There are no positions beyond the context; beyond the original one all tokens are computed again.
        end = self.context if request.is_long else min(self.context, self._original_context)
        return drafted[: max(0, end - len(request.tokens))]

    def _work(self, request: Request, count: int) -> RunnerWork:
        end = request.computed + count
        known = request.tokens[request.computed : end]
        wanted = 1 + len(request.drafted) if end >= len(request.tokens) else 0  # no logits within a prompt
        if request.is_scoring:
            wanted = len(known)
        return RunnerWork(request, known + request.drafted, request.computed, wanted)

    def _record(self, work: Sequence[RunnerWork]) -> StepRecord:
        decoding = [len(w.tokens) for w in work if w.request.is_decoding]
        decode, prefill = sum(decoding), sum(len(w.tokens) for w in work) - sum(decoding)
        return StepRecord(
            number=self.trace.count, start=time.monotonic(),
            phase="mixed" if decode and prefill else "decode" if decode else "prefill",
            requests=len(work), prefill_tokens=prefill, decode_tokens=decode, decode_requests=len(decoding),
            accepted=0, produced=0,
            kv_tokens=sum(w.start for w in work), kv_usage=self.blocks.usage, waiting=len(self.scheduler.waiting),
        )  # fmt: skip

    def _accept(self, ordered: Sequence[RunnerWork], chosen: Sequence[SampledToken], record: StepRecord) -> None:
        """Accept the drafted tokens that are confirmed and one token more, and pass them on."""
        at, now = 0, time.monotonic()
        for w in ordered:
            request, drafted = w.request, w.request.drafted
            request.computed = w.start + len(w.tokens) - len(drafted)
            if not w.wanted:
                continue
            new, at = list(chosen[at : at + w.wanted]), at + w.wanted
            if request.is_scoring:
                new = request.score(new, w.start + 1)
                if not new:
                    continue
            stands = 0
            while stands < len(drafted) and new[stands].token == drafted[stands]:
                stands += 1
            request.computed += stands
            request.drafted_for = min(request.drafted_for, request.computed)
            record.accepted += stands
            self.drafted_tokens += len(drafted)
            self.accepted_tokens += stands
            request.drafted = []
            try:
                record.produced += self._append(request, new[: stands + 1], now)
            except Exception as error:  # in its text or constraint: other requests are not affected
                self._fail(request, error)

    def _append(self, request: Request, new: list[SampledToken], now: float) -> int:
        sampling, taken = request.sampling, list[SampledToken]()
        finish: FinishReason | None = None if sampling.max_tokens else "length"
        for chosen in new if sampling.max_tokens else ():
            request.tokens.append(chosen.token)
            taken.append(chosen)
            count = len(request.tokens) - request.prompt_length
            if request.state is not None:
                request.state.take(chosen.token)
            ends = chosen.token in request.ends
            if request.decode is not None and (sampling.include_stop or not ends):
                ends |= request.decode(chosen, count > sampling.min_tokens)
            if ends:
                finish = "stop"
            full = len(request.tokens) > self.longest_prompt
            if finish is None and (count >= sampling.max_tokens or full):
                finish = "length"
            if finish is not None:
                break
        told = taken
        if request.first_token is None:
            request.first_token, told = now, request.scored + taken
            self.prompt_tokens += request.prompt_length
        request.last_token = now
        if finish is not None:
            self._finish(request, finish, told)
            return len(taken)
        if not request.is_long and self._is_long(request):  # all rotary positions change: compute them again
            request.is_long, request.digests = True, []
            self.blocks.release(request)
            request.drafted_for = 0
        request.on_output(request, told)
        return len(taken)

    def _finish(self, request: Request, finish: FinishReason, taken: list[SampledToken]) -> None:
        request.finish = finish
        self.scheduler.remove(request)
        self.finished.append(request)
        self.on_finish(request)
        request.on_output(request, taken)
        # The request is kept for statistics, but must not keep other objects alive.
        request.on_output, request.decode, request.state, request.digests = lambda request, chosen: None, None, None, []

    def _is_long(self, request: Request) -> bool:
        return len(request.tokens) > self._original_context
