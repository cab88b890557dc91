"""The metrics for Prometheus: one table of metrics, counters of calls, and values read from engines and jobs.

Names, buckets and meanings are vLLM's if it has the metric, with `attn_` in place of `vllm:` (docs/decisions/0012).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import structlog
from attn_core.errors import AttnError
from attn_schema import EngineStats, JobState, ModelState, TrainingJob
from attn_schema.methods import (
    GET_ENGINE_STATS,
    LIST_MODELS,
    LIST_TRAINING_JOBS,
    GetEngineStatsRequest,
    ListModelsRequest,
    ListTrainingJobsRequest,
)
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from attn_gateway.call import SERVER, Call
from attn_gateway.calls import Calls

log = structlog.get_logger()

Kind = Literal["counter", "gauge", "histogram"]

REQUEST_LABELS = ("model_name", "tenant")
ENGINE_LABELS = ("model_name", "replica")
CALL_LABELS = ("method", "code")

FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
REQUEST_BUCKETS = (0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 480.0)
COUNT_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


@dataclass(frozen=True)
class Metric:
    """One metric; `buckets` are the upper bounds of a histogram. Counters get the suffix `_total`."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()

    @property
    def samples(self) -> tuple[str, ...]:
        """The names of its time series in Prometheus."""
        if self.kind == "counter":
            return (f"{self.name}_total",)
        return tuple(f"{self.name}_{end}" for end in ("bucket", "count", "sum")) if self.buckets else (self.name,)


METRICS = (
    Metric("attn_time_to_first_token_seconds", "histogram", REQUEST_LABELS, "Time to first token.",
           FIRST_TOKEN_BUCKETS),
    Metric("attn_inter_token_latency_seconds", "histogram", REQUEST_LABELS, "Time between two messages of tokens.",
           TOKEN_BUCKETS),
    Metric("attn_e2e_request_latency_seconds", "histogram", REQUEST_LABELS, "Time from request to last token.",
           REQUEST_BUCKETS),
    Metric("attn_request_queue_time_seconds", "histogram", REQUEST_LABELS, "Time until a request is first scheduled.",
           REQUEST_BUCKETS),
    Metric("attn_request_prompt_tokens", "histogram", REQUEST_LABELS, "Prompt tokens of a request.", COUNT_BUCKETS),
    Metric("attn_request_generation_tokens", "histogram", REQUEST_LABELS, "Generated tokens of a request.",
           COUNT_BUCKETS),
    Metric("attn_prompt_tokens", "counter", REQUEST_LABELS,
           "Prompt tokens of requests that ended; of those that were cut off, estimated from their texts."),
    Metric("attn_generation_tokens", "counter", REQUEST_LABELS, "Generated tokens that were sent."),
    Metric("attn_prefix_cache_queries", "counter", REQUEST_LABELS, "Prompt tokens looked up in the prefix cache."),
    Metric("attn_prefix_cache_hits", "counter", REQUEST_LABELS, "Prompt tokens found in the prefix cache."),
    Metric("attn_request_success", "counter", (*REQUEST_LABELS, "finished_reason"), "Completions by finish reason."),
    Metric("attn_calls", "counter", CALL_LABELS, "Calls by method and canonical code, over gRPC and HTTP."),
    Metric("attn_http_requests", "counter", ("path", "status"), "HTTP requests by route and status; 499: client gone."),
    Metric("attn_call_duration_seconds", "histogram", ("method",), "Time from a call to its end.", REQUEST_BUCKETS),
    Metric("attn_num_requests_running", "gauge", ENGINE_LABELS, "Sequences in the engine's batch."),
    Metric("attn_num_requests_waiting", "gauge", ENGINE_LABELS, "Sequences that wait to be scheduled."),
    Metric("attn_kv_cache_usage_perc", "gauge", ENGINE_LABELS, "Fraction of the KV cache in use, from 0 to 1."),
    Metric("attn_num_preemptions", "counter", ENGINE_LABELS, "Preemptions."),
    Metric("attn_computed_tokens", "counter", ENGINE_LABELS, "Tokens computed, recomputed ones included."),
    Metric("attn_spec_decode_num_draft_tokens", "counter", ENGINE_LABELS, "Draft tokens of speculative decoding."),
    Metric("attn_spec_decode_num_accepted_tokens", "counter", ENGINE_LABELS, "Draft tokens that were accepted."),
    Metric("attn_kv_offload_bytes", "gauge", ENGINE_LABELS, "Offloaded KV cache of preempted requests."),
    Metric("attn_engine_resident_memory_bytes", "gauge", ENGINE_LABELS, "Memory that the engine's process holds."),
    Metric("attn_engine_cpu_seconds", "counter", ENGINE_LABELS, "Processor time that the engine's process has used."),
    Metric("attn_models", "gauge", ("state",), "Models by state."),
    Metric("attn_jobs", "gauge", ("state",), "Training jobs by state."),
    Metric("attn_training_tokens_per_second", "gauge", ("job",), "Tokens a second of a running job."),
    Metric("attn_training_step", "gauge", ("job",), "Optimizer steps done by a running job."),
)  # fmt: skip
"""All metrics; dashboards are tested against this table."""

BY_NAME = {metric.name: metric for metric in METRICS}
ENGINE_FIELDS = {
    "attn_num_requests_running": "running",
    "attn_num_requests_waiting": "waiting",
    "attn_num_preemptions": "preemptions",
    "attn_computed_tokens": "computed_tokens",
    "attn_spec_decode_num_draft_tokens": "draft_tokens",
    "attn_spec_decode_num_accepted_tokens": "accepted_tokens",
    "attn_kv_offload_bytes": "offloaded_bytes",
    "attn_engine_resident_memory_bytes": "resident_memory_bytes",
    "attn_engine_cpu_seconds": "cpu_seconds",
}
"""The metrics of engines, with the field of `EngineStats` that each shows."""

PAGE_SIZE = 1000
REPLICA = "0"
"""The replica label of a model with one engine."""

Family = CounterMetricFamily | GaugeMetricFamily


class _Snapshot(Collector):
    """A Prometheus collector of values that were read before."""

    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Family]:
        yield from self._families


class Metrics:
    """The metrics of one server."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)  # process_cpu_seconds_total, process_resident_memory_bytes, ...
        self._counters: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}
        asked = {*ENGINE_FIELDS, "attn_kv_cache_usage_perc"}
        for metric in METRICS:
            if metric.kind == "histogram":
                self._histograms[metric.name] = Histogram(
                    metric.name, metric.help, metric.labels, buckets=metric.buckets, registry=self._registry
                )
            elif metric.kind == "counter" and metric.name not in asked:
                self._counters[metric.name] = Counter(metric.name, metric.help, metric.labels, registry=self._registry)

    def count(self, name: str, labels: Sequence[str], amount: float = 1.0) -> None:
        """Add to a counter."""
        self._counters[name].labels(*labels).inc(amount)

    def observe(self, name: str, labels: Sequence[str], value: float) -> None:
        """Add a value to a histogram."""
        self._histograms[name].labels(*labels).observe(value)

    async def text(self, calls: Calls | None) -> bytes:
        """All metrics in Prometheus's text format; `calls` must need no token, and with None no service is called.

        Values that cannot be read at the moment, such as those of an engine that is restarting, are left out.
        """
        if calls is None:
            return generate_latest(self._registry)
        models, jobs = await asyncio.gather(_models(calls), _jobs(calls))
        asked = CollectorRegistry()
        asked.register(_Snapshot([*models, *jobs]))
        return generate_latest(self._registry) + generate_latest(asked)


def _family(name: str, values: Iterable[tuple[Sequence[str], float]]) -> Family:
    metric = BY_NAME[name]
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family: Family = kind(metric.name, metric.help, labels=metric.labels)
    for labels, value in values:
        family.add_metric(labels, value)
    return family


async def _models(calls: Calls) -> list[Family]:
    """The metrics of models and their engines."""
    if LIST_MODELS.path not in calls.rows:
        return []
    listed = await calls.unary(LIST_MODELS, ListModelsRequest(page_size=PAGE_SIZE), _own_call())
    serving = [model.name for model in listed.models if model.state is ModelState.SERVING]
    found = await asyncio.gather(*(_stats(calls, name) for name in serving))
    stats = {
        (name, replica): each
        for name, of_model in zip(serving, found, strict=True)
        if of_model is not None
        for replica, each in by_replica(of_model).items()
    }
    states = dict.fromkeys(ModelState, 0)
    for model in listed.models:
        states[model.state] += 1
    usage = {
        labels: each.kv_tokens_used / each.kv_tokens_total for labels, each in stats.items() if each.kv_tokens_total
    }
    return [
        _family("attn_models", [((state,), number) for state, number in states.items()]),
        _family("attn_kv_cache_usage_perc", usage.items()),
        *(
            _family(name, [(labels, getattr(each, field)) for labels, each in stats.items()])
            for name, field in ENGINE_FIELDS.items()
        ),
    ]


def by_replica(stats: EngineStats) -> dict[str, EngineStats]:
    """The statistics of each engine, by the name of its replica."""
    return {replica.name: replica.stats for replica in stats.replicas} or {REPLICA: stats}


async def _stats(calls: Calls, model: str) -> EngineStats | None:
    try:
        found: EngineStats = await calls.unary(GET_ENGINE_STATS, GetEngineStatsRequest(model=model), _own_call())
    except AttnError as error:
        log.warning("the metrics of an engine could not be read", model=model, reason=error.message)
        return None
    return found


async def _jobs(calls: Calls) -> list[Family]:
    """The number of training jobs in each state, and the speed and step of the running ones."""
    if LIST_TRAINING_JOBS.path not in calls.rows:
        return []
    jobs: list[TrainingJob] = []
    token: str | None = ""
    while token is not None:
        request = ListTrainingJobsRequest(page_size=PAGE_SIZE, page_token=token)
        page = await calls.unary(LIST_TRAINING_JOBS, request, _own_call())
        jobs += page.jobs
        token = page.next_page_token or None
    states = dict.fromkeys(JobState, 0)
    for job in jobs:
        states[job.state] += 1
    running = [job for job in jobs if job.state is JobState.RUNNING]
    speeds = [((job.id,), job.last_metrics["tokens_per_second"]) for job in running
              if "tokens_per_second" in job.last_metrics]  # fmt: skip
    return [
        _family("attn_jobs", [((state,), number) for state, number in states.items()]),
        _family("attn_training_tokens_per_second", speeds),
        _family("attn_training_step", [((job.id,), job.step) for job in running]),
    ]


def _own_call() -> Call:
    return Call(request_id="metrics", caller=SERVER)
