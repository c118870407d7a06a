"""Metrics for Prometheus under vLLM's names, so that dashboards made for vLLM show this server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from ironlaw.serve.engine import Engine
from ironlaw.serve.request import Request

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 50_000, 100_000)


class Metrics:
    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        label = {"registry": self.registry, "labelnames": ("model_name",)}
        name = engine.served.name

        def histogram(what: str, about: str, buckets: tuple[float, ...]) -> Any:
            return Histogram(f"vllm:{what}", about, buckets=buckets, **label).labels(name)  # type: ignore[arg-type]

        self._first = histogram("time_to_first_token_seconds", "From arrival to the first token.", _SECONDS)
        self._between = histogram("inter_token_latency_seconds", "Mean time between tokens of a request.", _SECONDS)
        self._whole = histogram("e2e_request_latency_seconds", "From arrival to the last token.", _SECONDS)
        self._queue = histogram("request_queue_time_seconds", "From arrival to the first step.", _SECONDS)
        self._prompt = histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._answer = histogram("request_generation_tokens", "Tokens of an answer.", _TOKENS)
        ends = Counter("vllm:request_success", "Requests that ended, by why.", ("model_name", "finished_reason"),
                       registry=self.registry)  # fmt: skip
        named = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}
        self._ends = {why: ends.labels(name, theirs) for why, theirs in named.items()}
        refused = Counter("ironlaw:requests_refused", "Requests that found no place.", **label)  # type: ignore[arg-type]
        self.refused = refused.labels(name)
        self.engine = engine
        self.registry.register(self)

    def finished(self, request: Request) -> None:
        self._ends[request.finish or "error"].inc()
        count = len(request.tokens) - request.prompt_length
        self._prompt.observe(request.prompt_length)
        self._answer.observe(count)
        if request.admitted is not None:
            self._queue.observe(request.admitted - request.arrived)
        if request.first_token is not None and request.last_token is not None:
            self._first.observe(request.first_token - request.arrived)
            self._whole.observe(request.last_token - request.arrived)
            if count > 1:
                self._between.observe((request.last_token - request.first_token) / (count - 1))

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Any]:
        """Yield gauges and counters of the engine. The registry calls this for every request for metrics."""
        engine, totals = self.engine, self.engine.trace
        gauges = {
            "num_requests_running": engine.running,
            "num_requests_waiting": engine.waiting,
            "kv_cache_usage_perc": engine.blocks.usage,
        }
        counters = {
            "num_preemptions": engine.scheduler.preemptions,
            "prefix_cache_queries": engine.blocks.queried,
            "prefix_cache_hits": engine.blocks.hits,
            "prompt_tokens": engine.prompt_tokens,
            "generation_tokens": totals.produced,
            "iterations": totals.count,
            "spec_decode_num_draft_tokens": engine.drafted_tokens,
            "spec_decode_num_accepted_tokens": engine.accepted_tokens,
        }
        for kinds, family in ((gauges, GaugeMetricFamily), (counters, CounterMetricFamily)):
            for what, value in kinds.items():
                metric = family(f"vllm:{what}", what.replace("_", " "), labels=["model_name"])
                metric.add_metric([engine.served.name], value)
                yield metric
