"""Configuration table of the tuner: [autotune]."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, NamedTuple

from wattspan.config.tables import duplicate_positions
from wattspan.model import Knob
from wattspan.model.settings import Duration, Table, about, quoted


class LatencyPercentile(NamedTuple):
    """A limit in nanoseconds that at most a ratio ``allowed`` of the requests may exceed.

    ``first`` is true for the time to the first token, false for the time between tokens. ``name``
    is the key of the configuration.
    """

    name: str
    first: bool
    limit: int
    allowed: float


class LatencySource(NamedTuple):
    """The place of a latency in the spans of a request; all are "" for the engine's own report.

    At most one of the names of a span attribute, an event and a child span is given.
    """

    attribute: str = ""
    event: str = ""
    child: str = ""

    @classmethod
    def parse(cls, text: str) -> LatencySource:
        kind, colon, name = text.partition(":")
        if colon and kind in ("event", "span"):
            return cls(event=name) if kind == "event" else cls(child=name)
        return cls(attribute=text)


PIPELINE_KEYS = ("stage", "microbatch", "instruction")
"""The attributes of an instruction of a pipeline."""

REPLICA_KEY = "replica"
"""The attribute by which the data-parallel pipelines of one service differ; it is optional."""

TOKENS = "tokens"
"""The work that is counted by the tokens of a span instead of an attribute of this name."""

_PERCENTILE = re.compile(r"(ttft|tbt)_p([5-9][0-9]{0,3})")


class TunedJobSettings(Table, frozen=True):
    """One tuned job, identified by the spans that are its units of work.

    An empty key matches every span. Set `service`, `span`, both, or `engine`.

    Keys:
        service: `service.name` of its spans.
        span: Name of the span that is one unit of its work.
        work: Span attribute with the amount of work of a unit, such as tokens or samples, if the
            amount varies; "tokens" are the `gen_ai.usage.*` tokens. "" counts each span as 1.
        compute: Span of a rank's own computation in a synchronous job, to cap waiting ranks lower.
        kind: Units of work are sequential (`steps`) or concurrent (`requests`).
        latency: For requests: latency limit at `percentile`; 0: that of the original setting.
        percentile: For requests: fraction of the requests that must be within `latency`.
        control: `search` looks for one setting for all loads within the slowdown budget. `track`,
            for requests: the setting follows the load of a server, within the latency limits `slo`.
        slo: With `track`: latency limits, such as `{ttft_p99 = "400ms", tbt_p99 = "100ms"}`: time
            to the first token, and time between tokens, at a percentile from 50 (`p999` is the
            99.9th).
        period: With `track`: time over which the load is averaged; the original setting is restored
            within about a period of a rise.
        ttft: With `track`: the time to the first token. A span attribute (seconds, or text with a
            unit such as `340ms`); "event:NAME", the time of the first such event; "span:NAME", the
            end of the first such child span; "": the report of an engine (`presets` in `[spans]`).
        tbt: With `track`: the mean time between tokens. A span attribute as in `ttft`;
            "event:NAME", the mean time between such events; "span:NAME", the duration of such child
            spans per further output token; "": the time after the first token per further output
            token.
        engine: With `track`: the `name` (or host and port) of a `[[serving.engine]]`, whose page
            shows load and latencies where requests are not announced as spans, or without `span`.
        classes: With `track`: `length` requires the limits of short (below 256 prompt tokens),
            medium and long (from 1024) requests separately.
        pipeline: For pipeline-parallel training: names of the span attributes of an instruction,
            such as `{stage = "stage", microbatch = "microbatch", instruction = "instruction"}`. The
            GPU of each rank gets a clock of its own; `span` is one iteration of a rank. With data
            parallelism, add `replica = "NAME"`: an attribute whose value names the pipeline.
        hosts: Most hosts of a fleet on which ranks of this synchronous job run. From 2 on, they
            compare settings one after another, and each has its part of the slowdown budget. With
            `pipeline`: the number of hosts on which the ranks of its one pipeline run; one of them
            plans the clocks of all.
        max_slowdown: Slowdown budget of this job; the default is that of `[autotune]`.
        mode: Mode of this job; the default is that of `[autotune]`.
    """

    service: str = ""
    span: str = ""
    work: str = ""
    compute: str = ""
    kind: Literal["auto", "steps", "requests"] = "auto"
    latency: Duration = Duration(0)
    percentile: Annotated[
        float, about(least=0.5, most=0.9999, hint="0.99 is the 99th percentile")
    ] = 0.99
    control: Literal["search", "track"] = "search"
    slo: dict[str, Duration] = {}  # noqa: RUF012 - msgspec copies it
    period: Annotated[Duration, about(least="1s", most="10m")] = Duration.parse("5s")
    ttft: str = ""
    tbt: str = ""
    engine: str = ""
    classes: Literal["", "length"] = ""
    pipeline: dict[str, str] = {}  # noqa: RUF012 - msgspec copies it
    hosts: Annotated[int, about(least=1, most=64)] = 1
    max_slowdown: Annotated[float | None, about(least=0, most=1, hint="0.05 is 5 %")] = None
    mode: Literal["", "advise", "apply"] = ""

    def __post_init__(self) -> None:
        if not self.service and not self.span and not self.engine:
            raise ValueError("a job needs `service` or `span` to identify its spans")

    @property
    def tracked(self) -> bool:
        """True if its setting follows its load."""
        return self.control == "track"

    @property
    def unit(self) -> tuple[str, str]:
        """The names of service and span of a job with an engine; "" for no span."""
        return self.service or self.engine, self.span

    def matches(self, service: str, span: str) -> bool:
        """True if such spans are its units of work."""
        if self.engine and not self.span:
            return (service, span) == self.unit
        return self.service in ("", service) and self.span in ("", span)

    @property
    def on_several_hosts(self) -> bool:
        """True if other hosts of the fleet may have ranks of the same job."""
        return self.hosts > 1 or REPLICA_KEY in self.pipeline

    @property
    def objectives(self) -> tuple[LatencyPercentile, ...]:
        """The valid entries of ``slo``."""
        found = []
        for name, limit in self.slo.items():
            matched = _PERCENTILE.fullmatch(name)
            if matched is not None:
                kind, digits = matched.groups()
                whole = 10 ** len(digits)
                allowed = (whole - int(digits)) / whole
                found.append(LatencyPercentile(name, kind == "ttft", int(limit), allowed))
        return tuple(found)

    def contradictions(self) -> Iterator[tuple[str, str]]:
        yield from self._pipeline_contradictions()
        if self.hosts > 1 and (self.tracked or self.kind == "requests"):
            yield (
                "hosts",
                "has an effect on synchronous steps only: requests are served by each host alone. "
                "Remove it.",
            )
        if not self.tracked:
            yield from self._without_tracking()
            return
        if self.kind != "requests":
            yield "control", 'load tracking is for requests. Set kind = "requests".'
        if not self.span and not self.engine:
            yield (
                "span",
                "load tracking needs the name of the span that is one request, or its `engine`.",
            )
        if self.engine and self.span and not self.service:
            yield "service", "the engine tells no service. Name that of the spans, or remove span."
        if not self.slo:
            yield (
                "slo",
                "load tracking needs a latency limit. Set one, such as "
                'slo = {ttft_p99 = "400ms", tbt_p99 = "100ms"}.',
            )
        known = {one.name for one in self.objectives}
        for name, limit in self.slo.items():
            if name not in known:
                yield (
                    "slo",
                    f"{quoted(name)} is not a latency at a percentile. Write ttft_p99 or tbt_p99, "
                    "with a percentile from 50 to 99.99.",
                )
            elif not limit:
                yield "slo", f"a limit of 0 for {name} allows no request. Set a longer time."
        for key in ("ttft", "tbt"):
            text: str = getattr(self, key)
            if text and not any(LatencySource.parse(text)):
                yield key, f"{quoted(text)} names nothing. Write event:NAME or span:NAME."
        replaced = "the latency limits in slo replace it"
        for key, cause in (
            ("latency", replaced),
            ("max_slowdown", replaced),
            ("compute", "load tracking does not divide a server into ranks"),
        ):
            if getattr(self, key) not in ("", 0, None):
                yield key, f'has no effect with control = "track": {cause}. Remove it.'

    def _pipeline_contradictions(self) -> Iterator[tuple[str, str]]:
        if not self.pipeline:
            return
        named = self.pipeline.keys() - {REPLICA_KEY}
        if named != set(PIPELINE_KEYS) or not all(self.pipeline.values()):
            yield (
                "pipeline",
                f"it names the attributes {', '.join(PIPELINE_KEYS)}, each of them and no others "
                f"except {REPLICA_KEY}. "
                'Write {stage = "stage", microbatch = "microbatch", instruction = "instruction"}.',
            )
        if not self.span:
            yield "span", "a pipeline needs the name of the span that is one iteration of a rank."
        if self.kind == "requests":
            yield "kind", 'iterations of a pipeline are steps. Set kind = "steps", or remove it.'
        for key in ("work", "compute"):
            if getattr(self, key):
                yield key, "has no effect in a pipeline: its instructions replace it. Remove it."
        if self.tracked:
            yield "control", "a pipeline has no requests whose load could be tracked. Remove it."
        if self.hosts > 1 and REPLICA_KEY in self.pipeline:
            yield (
                "hosts",
                f"{REPLICA_KEY} names pipelines that each run on one host. Remove it, and give "
                "each pipeline that runs on several hosts a service of its own; or remove hosts.",
            )

    def _without_tracking(self) -> Iterator[tuple[str, str]]:
        for key in ("slo", "ttft", "tbt", "classes", "engine"):
            if getattr(self, key):
                yield (
                    key,
                    'has no effect without load tracking. Set control = "track", or remove it.',
                )


def matching_job(
    jobs: Sequence[TunedJobSettings], service: str, span: str
) -> TunedJobSettings | None:
    """The first job whose units of work are such spans."""
    return next((job for job in jobs if job.matches(service, span)), None)


class AutotuneSettings(Table, frozen=True):
    """The tuner: slowdown budget, knobs and search.

    Keys:
        mode: `advise` reports decisions only; `apply` applies them to the jobs named below.
        max_slowdown: Slowdown budget of a job over its whole run: 0.05 is 5 %.
        confidence: Confidence level at which a setting must keep the budget.
        objective: Quantity to minimise among the settings that keep the budget.
        eta: With `cost`: weight of energy; the weight of time is the rest.
        knobs: Knobs that the tuner may set, in this order. A device does not report `gpu_clock`, so
            the capper resets it instead of restoring it.
        floor: Lowest cap, as a fraction of the device's default limit.
        gpus: UUIDs or indices of the GPUs that the tuner may cap; an empty list: all.
        groups: Groups whose jobs may be tuned, each as `name` or `kind:name`, such as a container,
            a pod, a unit or `user:ann`; an empty list: all.
        apply_found: Apply caps to jobs that the tuner detected from their spans as well.
        declared: Jobs that applications declare: `ignore` them; `tighten` lets an application
            choose a smaller budget, fewer knobs and the objective; `allow` also a larger budget,
            and applies limits to declared jobs that are not named below. The mode is never raised.
        job: Jobs, `[[autotune.job]]`.
        block: Shortest duration of a measurement block.
        block_units: Fewest units of work in a measurement block.
        settle: Shortest settling time after each change of a setting; the tuner waits longer where
            caps take longer to have their full effect.
        settle_units: Fewest units of work in the settling time.
        dwell: Shortest time between two searches.
    """

    mode: Literal["off", "advise", "apply"] = "off"
    max_slowdown: Annotated[float, about(least=0, most=1, hint="0.05 is 5 %")] = 0.05
    confidence: Annotated[float, about(least=0.5, most=0.9999, hint="0.95 is 95 %")] = 0.95
    objective: Literal["energy", "cost", "time"] = "energy"
    eta: Annotated[float, about(least=0, most=1)] = 0.5
    knobs: tuple[Knob, ...] = (Knob.GPU_POWER,)
    floor: Annotated[float, about(least=0, most=1, hint="0.6 is 60 %")] = 0.6
    gpus: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    apply_found: bool = False
    declared: Literal["ignore", "tighten", "allow"] = "tighten"
    job: tuple[TunedJobSettings, ...] = ()
    block: Annotated[Duration, about(least="100ms", most="1h")] = Duration.parse("500ms")
    block_units: Annotated[int, about(least=5, most=100_000)] = 10
    settle: Annotated[Duration, about(least="0s", most="10m")] = Duration.parse("750ms")
    settle_units: Annotated[int, about(least=0, most=10_000)] = 1
    dwell: Annotated[Duration, about(least="1s", most="30d")] = Duration.parse("10m")

    def contradictions(self) -> Iterator[tuple[str, str]]:
        budgets = {"max_slowdown": self.max_slowdown} | {
            f"job[{number}].max_slowdown": job.max_slowdown for number, job in enumerate(self.job)
        }
        for key, budget in budgets.items():
            if budget == 0:
                yield (
                    key,
                    "a budget of 0 allows no trial, because trials take time. "
                    'Set a budget such as 0.02, or set [autotune] mode = "off".',
                )
        if not self.knobs:
            yield (
                "knobs",
                "the list is empty. Name a knob, such as "
                '["gpu_power"], or set [autotune] mode = "off".',
            )
        elif Knob.GPU_CLOCK not in self.knobs and any(job.pipeline for job in self.job):
            yield (
                "knobs",
                "a pipeline is tuned by the clocks of its GPUs. Add gpu_clock, or remove "
                "`pipeline` from the job.",
            )
        for position in duplicate_positions(self.knobs):
            yield "knobs", f'the list names "{self.knobs[position]}" twice. Remove one.'
        yield from self._shadowed_jobs()

    def _shadowed_jobs(self) -> Iterator[tuple[str, str]]:
        """Jobs whose spans all match an earlier job."""
        for number, job in enumerate(self.job):
            for earlier, other in enumerate(self.job[:number]):
                if other.engine and job.engine == other.engine:
                    yield f"job[{number}]", f"autotune.job[{earlier}] has its engine. Remove one."
                    break
                if other.matches(*job.unit):
                    same = (other.service, other.span) == (job.service, job.span)
                    yield (
                        f"job[{number}]",
                        f"autotune.job[{earlier}] is the same job. Remove one of them."
                        if same
                        else f"the earlier autotune.job[{earlier}] matches all of its spans. "
                        "Write the narrower job first.",
                    )
                    break

    def warnings(self, *, spans: bool) -> Iterator[str]:
        """Sentences about settings without effect; ``spans``: the agent receives spans."""
        if self.mode == "off":
            if self.declared == "allow":
                yield (
                    '[autotune] declared = "allow" has no effect while [autotune] mode is "off". '
                    'Set [autotune] mode to "advise" or "apply".'
                )
            for number, job in enumerate(self.job):
                if job.mode:
                    yield (
                        f"The mode of autotune.job[{number}] has no effect while [autotune] mode "
                        'is "off". Set [autotune] mode to "advise" or "apply".'
                    )
            return
        if Knob.GPU_CLOCK in self.knobs:
            yield (
                '[autotune] knobs has "gpu_clock": a GPU does not report its locked clocks. The '
                "capper resets the clocks when it releases them, which also removes another "
                "program's lock."
            )
        if not spans:
            by_spans = [f"[[autotune.job]] {n}" for n, job in enumerate(self.job) if not job.engine]
            declined = "every job" if len(by_spans) == len(self.job) else ", ".join(by_spans)
            if declined:
                yield (
                    "[autotune] measures the speed of a job by its spans, and [spans] enabled is "
                    f"false: the tuner will decline {declined}."
                )
        applied = any((job.mode or self.mode) == "apply" for job in self.job)
        chosen = self.apply_found or self.declared == "allow"
        if self.mode == "apply" and not applied and not chosen:
            yield (
                '[autotune] mode = "apply" applies to no job: name one as [[autotune.job]], or set '
                'declared = "allow" or apply_found = true. Until then the tuner only advises.'
            )
