"""What can be configured: the agent's own tables, and the whole as one value.

Each key's ``about`` is its documentation: ``docs/reference/configuration.md`` is made of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from wattspan.config.access import Certificate, ClientAuthority, PrivateKey, TokenFile, check_access
from wattspan.config.control import AutotuneSettings, BoolOrAuto, CapsSettings
from wattspan.config.footprint import CarbonSettings, CostSettings
from wattspan.model import IdlePolicy, NamePolicy
from wattspan.model.settings import Duration, Listen, Size, Table, about, to_plain


class AgentSettings(Table, frozen=True):
    """The agent as a whole: how often it looks, where it keeps things, how far back it knows."""

    interval: Annotated[
        Duration,
        about("How often the counters and the processes are read.", least="10ms", most="1m"),
    ] = Duration.parse("100ms")
    state_dir: Annotated[
        str, about("Where what must outlive a restart is kept; written by the agent alone.")
    ] = "/var/lib/wattspan"
    run_dir: Annotated[
        str,
        about(
            "Where the agent's Unix sockets are; emptied by the system at boot. A directory that "
            "another user owns or can write is refused."
        ),
    ] = "/run/wattspan"
    api: Annotated[
        bool,
        about(
            "Whether questions about energy are answered on a Unix socket in the run directory; "
            "`wattspan measure` and `wattspan.window` ask there."
        ),
    ] = True
    api_resolution: Annotated[
        Duration,
        about(
            "How finely users are told there what CPUs, memory and the platform spend, who are "
            "neither root nor the agent's own: finer figures tell what others compute. Their own "
            "processes' energy is not made coarser, nor is that of GPUs.",
            least="10ms",
            most="1h",
        ),
    ] = Duration.parse("1s")
    max_rate: Annotated[
        int,
        about(
            "How many requests a second with spans or questions are taken of one user of this "
            "host, or of another host; four times as many at once. More are asked to come again.",
            least=1,
            most=1_000_000,
        ),
    ] = 500
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        about("The least severe message that is logged, to standard error."),
    ] = "info"
    history: Annotated[
        Duration,
        about("How far back the timeline of settled energy reaches.", least="1s", most="24h"),
    ] = Duration.parse("5m")
    history_bytes: Annotated[
        Size,
        about(
            "What the timeline may take of memory. The oldest goes first, and is counted.",
            least="1MiB",
            most="4GiB",
        ),
    ] = Size.parse("16MiB")


class ProcessesSettings(Table, frozen=True):
    """Which processes are told apart, and who pays for the idle device."""

    top: Annotated[
        int,
        about(
            "How many processes are listed by name; the rest are summed as `other`.",
            least=0,
            most=10_000,
        ),
    ] = 50
    names: Annotated[
        NamePolicy,
        about(
            "What a process is called everywhere: by the kernel's name for it; an interpreter with "
            "the file or module that it runs, as in `python3 train.py`, and no other argument; or "
            "all alike `process`, told apart by their pids. What was kept before keeps its names."
        ),
    ] = NamePolicy.COMMAND
    groups: Annotated[
        int,
        about(
            "How many containers, pods, jobs, units and users have an account. Beyond, those not "
            "charged for ten minutes are let go, and new ones share the `other` of their kind.",
            least=1,
            most=100_000,
        ),
    ] = 1000
    idle: Annotated[
        IdlePolicy,
        about(
            "Who pays for the energy a device draws while it does nothing: an account of its own, "
            "its users by use, or whoever holds it in equal parts."
        ),
    ] = IdlePolicy.SEPARATE
    events: Annotated[
        BoolOrAuto,
        about(
            "Whether the kernel tells of every fork and exit, so that work shorter than an "
            "interval is charged to who did it. Needs CAP_NET_ADMIN."
        ),
    ] = "auto"


class StoreSettings(Table, frozen=True):
    """The embedded store behind `wattspan report`: energy by minute, hour and day."""

    enabled: Annotated[
        BoolOrAuto,
        about("Whether to keep a store. `auto`: if the state directory can be written."),
    ] = "auto"
    interval: Annotated[
        Duration,
        about("How often what was measured is written down.", least="1s", most="10m"),
    ] = Duration.parse("5s")
    minutes: Annotated[
        Duration, about("How long figures by the minute are kept.", least="1h", most="3650d")
    ] = Duration.parse("2d")
    hours: Annotated[
        Duration, about("How long figures by the hour are kept.", least="1d", most="3650d")
    ] = Duration.parse("60d")
    days: Annotated[
        Duration, about("How long figures by the day are kept.", least="1d", most="36500d")
    ] = Duration.parse("1830d")
    max_size: Annotated[
        Size,
        about(
            "What the store may take of the disk. The oldest goes first.",
            least="1MiB",
            most="64GiB",
        ),
    ] = Size.parse("256MiB")
    processes: Annotated[
        int,
        about(
            "How many commands a bucket of time names; the rest are its `other`.",
            least=1,
            most=10_000,
        ),
    ] = 50
    groups: Annotated[
        int,
        about(
            "How many groups of a kind a bucket of time names; the rest are its `other`.",
            least=1,
            most=10_000,
        ),
    ] = 250
    spans: Annotated[
        int,
        about(
            "How many span names a bucket of time names; the rest are its `other`.",
            least=1,
            most=10_000,
        ),
    ] = 250


class SpansSettings(Table, frozen=True):
    """Spans of instrumented applications: where they come in, how they are weighed, where they go.

    A listener left at its default whose port is taken is only warned of; one that was asked for
    must be had.
    """

    enabled: Annotated[bool, about("Whether spans are received at all.")] = True
    http: Annotated[Listen, about('Where OTLP/HTTP is received; "" for nowhere.')] = Listen(
        "127.0.0.1:4318"
    )
    grpc: Annotated[
        Listen,
        about('Where OTLP/gRPC is received, as on "127.0.0.1:4317"; needs `wattspan[grpc]`.'),
    ] = Listen("")
    unix: Annotated[
        bool,
        about(
            "Whether spans are received on Unix sockets in the run directory, where the kernel "
            "proves who sends."
        ),
    ] = True
    tls_certificate: Certificate = ""
    tls_key: PrivateKey = ""
    tls_client_ca: ClientAuthority = ""
    token_file: TokenFile = ""
    weight: Annotated[
        str,
        about(
            "How a process's power is divided among its open spans: `equal`, `cpu` (by thread CPU "
            "time, where it is told), or the name of a numeric span attribute."
        ),
    ] = "cpu"
    names: Annotated[
        int,
        about(
            "How many pairs of service and span name have a series; the rest share `other`.",
            least=1,
            most=100_000,
        ),
    ] = 500
    resolution: Annotated[
        Duration,
        about(
            "How often the CPU time of processes that send spans is looked at, so that spans "
            "shorter than the agent's interval are told apart.",
            least="1ms",
            most="1s",
        ),
    ] = Duration.parse("10ms")
    max_request: Annotated[
        Size,
        about(
            "The largest request that is taken, after decompression. The CPU time and the memory "
            "that one request may cost grow in proportion.",
            least="64KiB",
            most="1GiB",
        ),
    ] = Size.parse("16MiB")
    buffer: Annotated[
        Size,
        about(
            "What spans may take of memory while their energy settles, half of it those of one "
            "user. Beyond, senders are asked to come again.",
            least="1MiB",
            most="4GiB",
        ),
    ] = Size.parse("128MiB")
    open_spans: Annotated[
        int,
        about("How many announced spans of all processes are kept track of.", least=1, most=10**7),
    ] = 100_000
    forward: Annotated[
        str,
        about(
            "The collector that gets every span, with its energy: an OTLP endpoint such as "
            '"http://collector:4318" or "grpc://collector:4317"; "" for none.'
        ),
    ] = ""
    forward_headers: Annotated[
        str,
        about(
            'Headers sent to that collector, as "authorization=Bearer%20...,x-tenant=a": the form '
            "of OTEL_EXPORTER_OTLP_HEADERS. Never shown.",
            secret=True,
        ),
    ] = ""
    forward_queue: Annotated[
        Size,
        about(
            "What may wait for that collector; the oldest is dropped, and counted.",
            least="1MiB",
            most="64GiB",
        ),
    ] = Size.parse("64MiB")
    forward_spool: Annotated[
        bool,
        about("Whether what waits is kept on disk, in the state directory, over a restart."),
    ] = False
    forward_decisions: Annotated[
        bool,
        about(
            "Whether that collector gets the tuner's decisions and the capper's audit log as well, "
            "as log records."
        ),
    ] = True

    def __post_init__(self) -> None:
        check_access(self)


class EmulationSettings(Table, frozen=True):
    """An emulated host in place of this one; every figure is labelled `emulated`."""

    profile: Annotated[
        str, about('The emulated host to run, as `--emulate` names it; "" for the real one.')
    ] = ""
    counters: Annotated[
        Duration, about("How often its CPU energy counters move.", least="1ms", most="1s")
    ] = Duration.parse("10ms")


TABLES: Mapping[str, type[Table]] = {
    "agent": AgentSettings,
    "processes": ProcessesSettings,
    "store": StoreSettings,
    "spans": SpansSettings,
    "autotune": AutotuneSettings,
    "caps": CapsSettings,
    "cost": CostSettings,
    "carbon": CarbonSettings,
    "emulation": EmulationSettings,
}
"""The agent's own tables. ``[sources.*]`` and ``[exporters.*]`` belong to plugins."""

FAMILIES = ("sources", "exporters")


@dataclass(frozen=True, slots=True)
class ConfigSchema:
    """Which tables can be written: by dotted name, the agent's own and the plugins'.

    ``broken`` are the tables of plugins that are installed but cannot be loaded: what stands
    there cannot be checked, and is no error of whoever wrote it. Without ``checks_plugins`` the
    tables of all plugins are skipped: a privileged process imports no plugin to check them.
    """

    tables: Mapping[str, type[Table]] = field(default_factory=lambda: dict(TABLES))
    broken: frozenset[str] = frozenset()
    checks_plugins: bool = True

    def skips(self, where: str) -> bool:
        """True if the table ``where`` is accepted without a check."""
        family, _, _ = where.partition(".")
        return where in self.broken or (not self.checks_plugins and family in FAMILIES)

    @property
    def skipped(self) -> tuple[str, ...]:
        """The tables, and the families of tables, that are accepted without a check."""
        return (*sorted(self.broken), *(() if self.checks_plugins else FAMILIES))


class FlagValue(NamedTuple):
    """A value given on the command line, by the option that gave it."""

    option: str
    value: object


class SettingOrigin(NamedTuple):
    """Where a value came from: ``flag``, ``environment``, ``file`` or ``default``."""

    kind: Literal["flag", "environment", "file", "default"]
    where: str = ""

    def __str__(self) -> str:
        return self.where or self.kind


@dataclass(frozen=True, slots=True)
class Config:
    """A configuration in which nothing is wrong.

    ``sources`` and ``exporters`` hold one settled table for each plugin that loads, by name.
    ``origins`` tells for each dotted key where its value came from. ``path`` is the file that
    was read, None if there was none. ``warnings`` are sentences for the operator.
    """

    agent: AgentSettings = field(default_factory=AgentSettings)
    processes: ProcessesSettings = field(default_factory=ProcessesSettings)
    store: StoreSettings = field(default_factory=StoreSettings)
    spans: SpansSettings = field(default_factory=SpansSettings)
    autotune: AutotuneSettings = field(default_factory=AutotuneSettings)
    caps: CapsSettings = field(default_factory=CapsSettings)
    cost: CostSettings = field(default_factory=CostSettings)
    carbon: CarbonSettings = field(default_factory=CarbonSettings)
    emulation: EmulationSettings = field(default_factory=EmulationSettings)
    sources: Mapping[str, Table] = field(default_factory=dict)
    exporters: Mapping[str, Table] = field(default_factory=dict)
    origins: Mapping[str, SettingOrigin] = field(default_factory=dict)
    path: Path | None = None
    warnings: tuple[str, ...] = ()

    @property
    def tables(self) -> dict[str, Table]:
        """Every table by its dotted name, as it stands in a file."""
        own: dict[str, Table] = {
            "agent": self.agent,
            "processes": self.processes,
            "store": self.store,
            "spans": self.spans,
            "autotune": self.autotune,
            "caps": self.caps,
            "cost": self.cost,
            "carbon": self.carbon,
            "emulation": self.emulation,
        }
        return (
            own
            | {f"sources.{name}": table for name, table in self.sources.items()}
            | {f"exporters.{name}": table for name, table in self.exporters.items()}
        )

    def plain(self) -> dict[str, dict[str, Any]]:
        """Every table by its dotted name, in plain TOML-like values."""
        return {where: to_plain(table) for where, table in self.tables.items()}
