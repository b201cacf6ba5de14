"""Configuration tables of the agent, and `Config`, which holds all of them.

The docstring of each table documents its keys: ``scripts/reference.py`` writes
``docs/reference/configuration.md`` from them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args, get_type_hints

import msgspec

from wattspan.config.tables import (
    BoolOrAuto,
    CapsSettings,
    CarbonSettings,
    CostSettings,
    FleetSettings,
    ServingSettings,
)
from wattspan.config.tuning_settings import AutotuneSettings, LatencyPercentile
from wattspan.model import SECOND, HwType, IdlePolicy, Knob, Milliwatts, NamePolicy
from wattspan.model.settings import Duration, Listen, Size, Table, about, quoted, to_plain


class SamplingInterval(Duration):
    """A fixed duration, or ``"auto"``, whose value is the interval at rest."""

    kind = 'duration such as "100ms" or "1s", or "auto"'
    is_auto = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``text``; ValueError."""
        if text.strip() != "auto":
            return super().parse(text)
        interval = cls(10**9)
        interval.is_auto = True
        return interval

    def __str__(self) -> str:
        return "auto" if self.is_auto else super().__str__()


class AgentSettings(Table, frozen=True):
    """The agent as a whole: sampling interval, directories, query limits and history.

    Keys:
        interval: Sampling interval of counters and process accounting. `auto`: one second at rest,
            and 100 ms while somebody needs it: a process that sends spans, holds a side-channel
            connection or measures windows, a query, a tuned job, a source of a plugin that
            integrates power when it is read, an idle power that is still learned, and the first
            seconds after the start.
        state_dir: Directory of data that outlives a restart. Only the agent writes there.
        run_dir: Directory of the Unix sockets. No other user may own or write it.
        api: Serve queries of `wattspan measure` and `wattspan.window` on a Unix socket.
        api_resolution: Time resolution of CPU, memory, platform and MIG instance energy for users
            other than root and the agent's own: finer figures disclose computations of others. The
            energy of a user's own processes and of GPUs keeps its full resolution.
        max_rate: Requests per second with spans or queries that the agent accepts from one user of
            this host, or from one other host; the burst is four times as many. The agent answers
            further requests with a retry status.
        log_level: Lowest severity of logged messages. The log goes to standard error.
        history: Length of the in-memory history of settled energy.
        history_bytes: Memory limit of that history; the oldest is dropped.
    """

    interval: Annotated[SamplingInterval, about(least="10ms", most="1m")] = SamplingInterval.parse(
        "auto"
    )
    state_dir: str = "/var/lib/wattspan"
    run_dir: str = "/run/wattspan"
    api: bool = True
    api_resolution: Annotated[Duration, about(least="10ms", most="1h")] = Duration.parse("1s")
    max_rate: Annotated[int, about(least=1, most=1_000_000)] = 500
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    history: Annotated[Duration, about(least="1s", most="24h")] = Duration.parse("5m")
    history_bytes: Annotated[Size, about(least="1MiB", most="4GiB")] = Size.parse("16MiB")


class ProcessesSettings(Table, frozen=True):
    """Naming and limits of processes and groups, and the attribution of idle energy.

    Keys:
        top: Processes with a series; `other` is the sum of the rest.
        names: Name of a process in every output: the kernel's name; for an interpreter the file or
            module that it runs as well, as in `python3 train.py`, without other arguments; or
            `process` for all, distinguished by pid. Stored data keeps its earlier names.
        groups: Number of containers, pods, jobs, units and users with an account. Above it,
            users have equal shares: groups without energy for ten minutes are removed, excess
            groups share their kind's `other`.
        pod_resources: Socket of the kubelet's Pod Resources API, which names the pods of each GPU
            and MIG instance. `"auto"`: `/var/lib/kubelet/pod-resources/kubelet.sock` if the agent
            may use it and h2 is installed; `""`: none.
        kubernetes_node: Name of this node in Kubernetes. With it the agent asks the API server for
            the ResourceSlices of the node, where no CDI specification names a GPU that Dynamic
            Resource Allocation gave to a pod. `""`: it asks no API server.
        idle: Attribution of a device's idle energy: to a separate account, to its users in
            proportion to use, or to its holders in equal parts.
        cpu_idle_watts: Idle power of each CPU package until the agent has learned it; 0: unknown.
            For a host that is never at rest.
        memory_idle_watts: The same for the memory of each package.
        events: Receive every fork and exit from the kernel, so that the agent attributes work
            shorter than a sampling interval to its process. Needs CAP_NET_ADMIN. `false` also turns
            off the count of work by CPU socket in the scheduler (eBPF).
        counters: Performance counters of processes. `auto`: by the helper `wattspan-counters`, if
            its socket exists.
    """

    top: Annotated[int, about(least=0, most=10_000)] = 50
    names: NamePolicy = NamePolicy.COMMAND
    groups: Annotated[int, about(least=1, most=100_000)] = 1000
    pod_resources: str = "auto"
    kubernetes_node: str = ""
    idle: IdlePolicy = IdlePolicy.SEPARATE
    cpu_idle_watts: Annotated[float, about(least=0, most=10_000)] = 0.0
    memory_idle_watts: Annotated[float, about(least=0, most=10_000)] = 0.0
    events: BoolOrAuto = "auto"
    counters: Literal["auto", "off"] = "auto"

    @property
    def idle_powers(self) -> dict[HwType, Milliwatts]:
        """The idle powers that are known from the configuration."""
        watts = {HwType.CPU: self.cpu_idle_watts, HwType.MEMORY: self.memory_idle_watts}
        return {kind: Milliwatts(round(one * 1000)) for kind, one in watts.items() if one}


class StoreSettings(Table, frozen=True):
    """The embedded store behind `wattspan report`: energy by minute, hour and day.

    Keys:
        enabled: Keep a store. `auto`: if the agent can write the state directory.
        interval: Interval of writes to the store.
        minutes: Retention of buckets of a minute.
        hours: Retention of buckets of an hour.
        days: Retention of buckets of a day.
        max_size: Disk limit of the store; the oldest data goes first.
        processes: Commands with a row in one bucket; `other` is the rest.
        groups: Groups of a kind with a row in a bucket; `other` is the rest.
        spans: Span names with a row in one bucket; `other` is the rest.
    """

    enabled: BoolOrAuto = "auto"
    interval: Annotated[Duration, about(least="1s", most="10m")] = Duration.parse("5s")
    minutes: Annotated[Duration, about(least="1h", most="3650d")] = Duration.parse("2d")
    hours: Annotated[Duration, about(least="1d", most="3650d")] = Duration.parse("60d")
    days: Annotated[Duration, about(least="1d", most="36500d")] = Duration.parse("1830d")
    max_size: Annotated[Size, about(least="1MiB", most="64GiB")] = Size.parse("256MiB")
    processes: Annotated[int, about(least=1, most=10_000)] = 50
    groups: Annotated[int, about(least=1, most=10_000)] = 250
    spans: Annotated[int, about(least=1, most=10_000)] = 250


class AccessSettings(Table, frozen=True):
    """The keys of TLS and tokens, for the table of a listener.

    Keys:
        tls_certificate: PEM file with the certificate and its chain; the listener then accepts TLS
            only. The agent reads this file and the next three again when they change.
        tls_key: PEM file with the key; "" if the file of the certificate holds it.
        tls_client_ca: PEM file of an authority; the listener then requires client certificates by
            it.
        token_file: File with one token per line, unreadable for other users. The listener then
            requires one of them, as bearer token or as password of any user.
    """

    tls_certificate: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    token_file: str = ""

    def __post_init__(self) -> None:
        if (self.tls_key or self.tls_client_ca) and not self.tls_certificate:
            raise ValueError("tls_key and tls_client_ca need tls_certificate")


SpanPreset = Literal["vllm", "sglang", "tgi", "tensorrt-llm", "gen_ai"]
SPAN_PRESETS: tuple[SpanPreset, ...] = get_args(SpanPreset)

SpanFigure = Literal[
    "input_tokens",
    "output_tokens",
    "cached_tokens",
    "model",
    "operation",
    "queue_time",
    "first_token_time",
    "prefill_time",
    "decode_time",
]
_MAX_ATTRIBUTES, _MAX_ATTRIBUTE = 32, 200


class SpansSettings(AccessSettings, frozen=True):
    """Spans of instrumented applications: receivers, attribution and forwarding.

    If the port of a listener with its default address is in use, the agent logs a warning and
    continues. If the port of a configured listener is in use, the agent does not start.

    Keys:
        enabled: Receive spans.
        http: Address of the OTLP/HTTP receiver; "" for none. The default is both addresses of
            `localhost`, `[::1]:4318` too.
        grpc: Address of the OTLP/gRPC receiver, such as "127.0.0.1:4317". Needs the package h2.
        unix: Receive spans on Unix sockets, where the kernel proves the sender's identity.
        forwarders: Receive the spans of forwarders, such as collectors, on `otlp-forwarder.sock`,
            and with `grpc` on `otlp-forwarder-grpc.sock`. Members of the agent's group may connect,
            and the agent believes the processes that they name.
        pod: Principal of a process in a Kubernetes pod: `pod`: processes of a pod may send spans
            for each other; `uid`: those of one user in the pod.
        unproven: Believe `process.pid` with `container.id` or `process.creation.time` of senders
            that the kernel cannot identify, such as those on another host or in another network
            namespace. Such a sender can claim the energy of any process.
        weight: Division of a process's power among its open spans: `equal`, `cpu` (by thread CPU
            time, where the application reports it), or the name of a numeric span attribute.
        presets: Engines for language models whose spans are recognised by their attributes. The GPU
            energy of an engine is divided among its concurrent requests. `gen_ai` are the
            conventions of OpenTelemetry.
        attributes: Further names of span attributes for tokens, models, operations and the
            latencies of engines, read before the known ones: `input_tokens =
            ["app.prompt_tokens"]`. `cached_tokens` are a part of the input. Times are seconds, or
            text such as `1.5ms`.
        names: Service-span name pairs with a series; `other` is the rest.
        waiting: Names of spans in which a process waits for other ranks. The agent learns the
            static power of GPUs from their time, and `wattspan advise` reports its energy.
        resolution: Sampling interval of the CPU time of processes that send spans. It separates
            spans shorter than the agent's interval.
        max_request: Size limit of a request after decompression.
        buffer: Memory limit of spans whose energy has not settled; the spans of one user take at
            most half. Above it, the agent answers senders with a retry status.
        open_spans: Announced open spans of all processes that the agent tracks.
        forward: Collector that receives every span with its energy: an OTLP endpoint such as
            "http://collector:4318" or "grpc://collector:4317"; "" for none.
        forward_headers: Headers sent to that collector, as "authorization=Bearer%20...,x-tenant=a":
            the form of OTEL_EXPORTER_OTLP_HEADERS. Never shown.
        forward_headers_file: A file with more headers for that collector, one a line, `name:
            value`; read at the start. Credentials belong there.
        forward_queue: Size limit of the queue for that collector. The agent drops and counts the
            largest owner's oldest spans.
        forward_spool: Keep that queue on disk, in the state directory, across restarts.
        forward_decisions: Send decisions and the capper's audit log to the collector as log
            records.
    """

    enabled: bool = True
    http: Listen = Listen("127.0.0.1:4318")
    grpc: Listen = Listen("")
    unix: bool = True
    forwarders: bool = False
    pod: Literal["pod", "uid"] = "pod"
    unproven: bool = False
    weight: str = "cpu"
    presets: tuple[SpanPreset, ...] = SPAN_PRESETS
    attributes: dict[SpanFigure, list[str]] = msgspec.field(default_factory=dict)
    names: Annotated[int, about(least=1, most=100_000)] = 500
    waiting: tuple[str, ...] = ("all_reduce", "recv")
    resolution: Annotated[Duration, about(least="1ms", most="1s")] = Duration.parse("10ms")
    max_request: Annotated[Size, about(least="64KiB", most="1GiB")] = Size.parse("16MiB")
    buffer: Annotated[Size, about(least="1MiB", most="4GiB")] = Size.parse("128MiB")
    open_spans: Annotated[int, about(least=1, most=10**7)] = 100_000
    forward: str = ""
    forward_headers: Annotated[str, about(secret=True)] = ""
    forward_headers_file: str = ""
    forward_queue: Annotated[Size, about(least="1MiB", most="64GiB")] = Size.parse("64MiB")
    forward_spool: bool = False
    forward_decisions: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [name for each in self.attributes.values() for name in each]
        if len(names) > _MAX_ATTRIBUTES:
            raise ValueError(f"attributes: {len(names)} names; at most {_MAX_ATTRIBUTES}")
        for name in names:
            if not 0 < len(name) <= _MAX_ATTRIBUTE:
                raise ValueError(
                    f"attributes: a name has 1 to {_MAX_ATTRIBUTE} characters, not {len(name)}"
                )
            if names.count(name) > 1:
                raise ValueError(f"attributes: {name!r} is named twice")


class EmulationSettings(Table, frozen=True):
    """An emulated host in place of the real one. Every figure has the provenance `emulated`.

    Keys:
        profile: Emulated host to run, as in `--emulate`; "" for the real host.
        counters: Update interval of its CPU energy counters.
    """

    profile: str = ""
    counters: Annotated[Duration, about(least="1ms", most="1s")] = Duration.parse("10ms")


FAMILIES = ("sources", "exporters")


@dataclass(frozen=True, slots=True)
class ConfigSchema:
    """Known tables by dotted name: those of the agent and those of plugins.

    ``broken`` are the tables of installed plugins that do not load: their content cannot be
    checked and is not a fault. Without ``checks_plugins`` the tables of all plugins are skipped:
    a privileged process imports no plugin to check them.
    """

    tables: Mapping[str, type[Table]] = field(default_factory=lambda: dict(TABLES))
    broken: frozenset[str] = frozenset()
    checks_plugins: bool = True

    def skips(self, where: str) -> bool:
        """Return True if the table ``where`` is accepted without a check."""
        family, _, _ = where.partition(".")
        return where in self.broken or (not self.checks_plugins and family in FAMILIES)

    @property
    def skipped(self) -> tuple[str, ...]:
        """Tables and families of tables that are accepted without a check."""
        return (*sorted(self.broken), *(() if self.checks_plugins else FAMILIES))


class FlagValue(NamedTuple):
    """A value from the command line, and the option that gave it."""

    option: str
    value: object


class SettingOrigin(NamedTuple):
    """The origin of a value: ``flag``, ``environment``, ``file``, ``agent`` or ``default``.

    ``agent`` is a value that the running agent publishes for its clients.
    """

    kind: Literal["flag", "environment", "file", "agent", "default"]
    where: str = ""

    def __str__(self) -> str:
        return self.where or self.kind


@dataclass(frozen=True, slots=True)
class Config:
    """A valid configuration.

    ``sources`` and ``exporters`` hold one table for each plugin that loads, by name. ``origins``
    maps each dotted key that is set to the origin of its value. ``path`` is the file that was
    read, or None; ``hidden`` is the default file, if the user of a client may not read it.
    ``warnings`` are sentences for the operator.
    """

    agent: AgentSettings = field(default_factory=AgentSettings)
    processes: ProcessesSettings = field(default_factory=ProcessesSettings)
    store: StoreSettings = field(default_factory=StoreSettings)
    spans: SpansSettings = field(default_factory=SpansSettings)
    autotune: AutotuneSettings = field(default_factory=AutotuneSettings)
    caps: CapsSettings = field(default_factory=CapsSettings)
    cost: CostSettings = field(default_factory=CostSettings)
    carbon: CarbonSettings = field(default_factory=CarbonSettings)
    fleet: FleetSettings = field(default_factory=FleetSettings)
    serving: ServingSettings = field(default_factory=ServingSettings)
    emulation: EmulationSettings = field(default_factory=EmulationSettings)
    sources: Mapping[str, Table] = field(default_factory=dict)
    exporters: Mapping[str, Table] = field(default_factory=dict)
    origins: Mapping[str, SettingOrigin] = field(default_factory=dict)
    path: Path | None = None
    hidden: Path | None = None
    warnings: tuple[str, ...] = ()

    def origin(self, key: str) -> SettingOrigin:
        """The origin of the value of a dotted key."""
        return self.origins.get(key, SettingOrigin("default"))

    @property
    def tables(self) -> dict[str, Table]:
        """Every table by its dotted name."""
        own: dict[str, Table] = {name: getattr(self, name) for name in TABLES}
        return (
            own
            | {f"sources.{name}": table for name, table in self.sources.items()}
            | {f"exporters.{name}": table for name, table in self.exporters.items()}
        )

    def plain(self) -> dict[str, dict[str, Any]]:
        """Every table by its dotted name, in plain TOML-like values."""
        return {where: to_plain(table) for where, table in self.tables.items()}


TABLES: Mapping[str, type[Table]] = {
    name: kind
    for name, kind in get_type_hints(Config).items()
    if isinstance(kind, type) and issubclass(kind, Table)
}
"""The agent's own tables. ``[sources.*]`` and ``[exporters.*]`` belong to plugins."""

_ZONE = re.compile(r"(rapl:)?package-\d+(-die-\d+)?|intel-rapl:[0-9a-f]+")
_ADDRESS = r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"
_BOARD = re.compile(rf"\d+|amd:\d+|(gpu:)?(GPU-.*|{_ADDRESS})", re.IGNORECASE)


def ineffective_settings(config: Config) -> Iterator[str]:
    """A sentence for each setting that matches nothing, whatever host it is for."""
    caps, tuned = config.caps, config.autotune
    for one in caps.fixed:
        if one.knob is Knob.CPU_POWER and _BOARD.fullmatch(one.device):
            yield (
                f'[[caps.fixed]] device = {quoted(one.device)} with knob = "cpu_power" matches'
                ' nothing: CPU packages are zones, as "intel-rapl:0" or "package-0".'
            )
        if one.knob is Knob.GPU_POWER and _ZONE.fullmatch(one.device):
            yield (
                f"[[caps.fixed]] device = {quoted(one.device)} matches no GPU: write"
                ' knob = "cpu_power" for a zone.'
            )
    has_budget = caps.budget_watts or caps.budget_file or caps.ceiling_users
    if caps.priority and not has_budget and not config.fleet.is_enabled:
        yield (
            "[[caps.priority]] has no effect without a budget: set [caps] budget_watts, budget_file"
            " or ceiling_users, or remove it."
        )
    if tuned.mode == "off" and (tuned.job or tuned.gpus or tuned.groups):
        named = "[autotune] gpus" if tuned.gpus else "[autotune] groups"
        named = "[[autotune.job]]" if tuned.job else named
        yield f'{named} has no effect with [autotune] mode = "off": set "advise" or "apply".'
    if tuned.mode != "off":
        yield from _tracked_engines(config)
    for key in ("forward_headers", "forward_headers_file", "forward_spool"):
        if getattr(config.spans, key) and not config.spans.forward:
            yield f"[spans] {key} has no effect without a collector: set [spans] forward."


def _tracked_engines(config: Config) -> Iterator[str]:
    """Sentences on the limits of tracked jobs that their engines' pages cannot show."""
    engines = {one.label: one for one in config.serving.engine}
    for number, job in enumerate(config.autotune.job):
        if not job.engine:
            continue
        job_name, engine = f"[[autotune.job]] {number}", engines.get(job.engine)
        if engine is None:
            yield (
                f"{job_name} engine = {quoted(job.engine)} names no [[serving.engine]]: write the"
                " `name` of one, or the host and port of its `url`."
            )
            continue
        if engine.interval > job.period:
            yield (
                f"{job_name} averages its load over {engine.interval}, the interval of its engine's"
                f" page, instead of its period of {job.period}."
            )
        if job.classes:
            yield (
                f"{job_name} classes: the page of its engine cannot track the job, only announced"
                " spans can. Remove `classes` to track it by the page."
            )
        for one in job.objectives:
            yield from _page_limit(job_name, one, engine.kind)


def _page_limit(job: str, objective: LatencyPercentile, kind: str) -> Iterator[str]:
    """Sentences if the pages of an engine of a kind count another limit, or cannot show it."""
    from wattspan.inference.latency_histograms import LATENCIES, LatencyNames

    lacking, below, stand_ins = list[str](), list[str](), list[str]()
    for each in LATENCIES if kind == "auto" else (kind,):
        names = LATENCIES.get(each, LatencyNames())
        bounds = names.first_bounds if objective.first else names.between_bounds
        known = [round(one * SECOND) for one in bounds]
        found = [one for one in known if one <= objective.limit]
        if not names.has(first=objective.first):
            lacking.append(each)
        elif bounds and not found:
            below.append(each)
        elif bounds and found[-1] != objective.limit:
            stand_ins.append(f"{Duration(found[-1])} ({each})")
    limit = f"{job} slo {objective.name} = {Duration(objective.limit)}"
    if lacking:
        yield (
            f"{limit}: the page of {' and '.join(lacking)} has no histogram of this latency and"
            " cannot track the job, only announced spans can."
        )
    if below:
        yield (
            f"{limit}: the page of {' and '.join(below)} has no bound up to it, and every request"
            " counts as missed: the setting is never lowered."
        )
    if stand_ins:
        yield (
            f"{limit}: an engine's page has no such bound, and counts the requests by the next"
            f" lower one: {', '.join(stand_ins)}."
        )
