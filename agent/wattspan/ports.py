"""What the agent needs of the world, as small protocols.

Everything that touches hardware, the kernel or the network stands behind one of these; tests
pass fakes, plugins pass their own. Only the composition root knows which is which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from wattspan.model import (
    CapKey,
    CapRow,
    Consumer,
    Domain,
    Failure,
    GpuStatus,
    Instant,
    Knob,
    KnobState,
    Microjoules,
    Payer,
    PayerInfo,
    Reading,
    Snapshot,
    SourceHealth,
    Trouble,
    Usage,
)
from wattspan.model.settings import Table
from wattspan.spans.values import IntervalEnergy


class Clock(Protocol):
    """The only way to learn the time, or to let it pass."""

    def now(self) -> Instant:
        """This moment on all clocks."""
        ...

    def monotonic(self) -> int:
        """Nanoseconds of the monotonic clock; cheaper than ``now().mono``."""
        ...

    def sleep_until(self, mono: int) -> None:
        """Return at, or as soon as possible after, the monotonic time ``mono``."""
        ...


@dataclass(frozen=True, slots=True)
class Batch:
    """All that one turn of a counter source yields.

    ``domains`` is every domain the source knows at present; the *same tuple object* is returned
    while nothing changed, so the caller may compare by identity. A domain without a reading in
    this batch is not an error by itself: slow sources answer less often than they are asked.
    """

    domains: tuple[Domain, ...]
    readings: tuple[Reading, ...] = ()
    failures: tuple[Failure, ...] = ()
    usages: tuple[Usage, ...] = ()
    gpus: tuple[GpuStatus, ...] = ()


@runtime_checkable
class CounterSource(Protocol):
    """A family of energy counters.

    ``read`` never raises for a counter that fails: that is a ``Failure`` and costs only its own
    domains. It must return promptly; a source whose calls can hang owns a thread.
    """

    @property
    def name(self) -> str: ...

    def read(self) -> Batch: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class UsageBatch:
    """What processes did since the previous batch, and who they are.

    ``infos`` describes every payer that appears in ``usages`` for the first time (a payer may
    be described anew when it changes, after ``exec``). ``exited`` payers will not be heard of
    again; their last usage is in this batch or was in an earlier one.
    """

    usages: tuple[Usage, ...] = ()
    infos: tuple[PayerInfo, ...] = ()
    exited: tuple[Payer, ...] = ()
    failures: tuple[Failure, ...] = ()
    processes: int = 0


@runtime_checkable
class UsageSource(Protocol):
    """Who used the CPUs. Called from one thread, at tick rate."""

    def poll(self) -> UsageBatch: ...

    def close(self) -> None: ...


class ProcessDirectory(Protocol):
    """Names the processes that a device knows by pid only. Safe from any thread, cheap."""

    def identify(self, pid: int) -> Consumer | None:
        """The process that has ``pid`` now; None if there is none."""
        ...

    def describe(self, consumer: Consumer) -> PayerInfo | None:
        """Who ``consumer`` is; None if it is gone."""
        ...


class EnergyQueries(Protocol):
    """What was spent in stretches of the recent past. Safe from any thread.

    Times are monotonic nanoseconds. What is asked of the time after ``settled`` is answered with
    less coverage, never with a guess.
    """

    def settled(self, consumer: Consumer | None = None) -> int:
        """Every domain that still answers is settled up to here, and told for ``consumer``."""
        ...

    def domains(self) -> Mapping[str, Domain]:
        """The cover, by id."""
        ...

    def family(self, consumer: Consumer) -> frozenset[Payer]:
        """``consumer`` and whatever descends from it."""
        ...

    def device(self, domain_id: str, start: int, end: int) -> IntervalEnergy:
        """What one device spent, whoever caused it."""
        ...

    def idle(self, domain_id: str, start: int, end: int) -> Microjoules | None:
        """What of a device's energy nobody was charged with, for it would have been drawn anyhow.

        None where idle power was not known yet, or the history does not reach: then processes
        are charged with it too.
        """
        ...

    def watch(
        self,
        consumer: Consumer,
        *,
        family: bool = False,
        samples: Callable[[], Iterable[tuple[int, int]]] | None = None,
        holder: str = "spans",
    ) -> object:
        """Keep what ``consumer`` spends from now on for longer than the history reaches.

        With ``family``, what its descendants spend as well. ``samples`` yields the newest
        readings of its CPU clock, monotonic time and nanoseconds, finer than the agent's own. It
        is kept until every ``holder`` has let it go.
        """
        ...

    def forget(self, consumer: Consumer, *, holder: str = "spans") -> None:
        """``holder`` does not ask about ``consumer`` any more. Again: nothing."""
        ...

    def process(
        self, consumer: Consumer, start: int, end: int, *, family: bool = False
    ) -> IntervalEnergy:
        """What a process spent; with ``family``, and whatever descends from it."""
        ...


class Actuator(Protocol):
    """One kind of knob on every device that has it. Belongs to one thread.

    Every call raises ActuatorError, which names the device, the cause and the remedy.
    """

    @property
    def knob(self) -> Knob: ...

    def devices(self) -> tuple[KnobState, ...]:
        """Every device that has this knob, as it is now; those that cannot be read are left out."""
        ...

    def read(self, device: str) -> KnobState:
        """One device's knob as it is now."""
        ...

    def write(self, device: str, value: int | None) -> KnobState:
        """Set it, and read it back. None takes away a setting that has no number of its own."""
        ...

    def close(self) -> None: ...


class SlottedActuator(Actuator, Protocol):
    """An actuator that can identify its devices one by one, without reading their settings."""

    def slots(self) -> int:
        """Number of device slots; ActuatorError."""
        ...

    def id_at(self, slot: int) -> str | None:
        """Id of the device in ``slot``; None if it cannot be identified. ActuatorError."""
        ...


class CapTotals(NamedTuple):
    """What the process that writes has done; ``ceiling`` is the host's, in milliwatts."""

    writes: int = 0
    restores: int = 0
    ceiling: int | None = None
    suspended: bool = False
    """Everything was given back on request, and nothing is set while that process lives."""


class Caps(Protocol):
    """The tuner's way to the one process that may write. Safe from one thread; never blocks long.

    Every call raises CapsError if that process does not answer, or refuses.
    """

    @property
    def totals(self) -> CapTotals:
        """As of the newest answer."""
        ...

    def rows(self, *, renew: bool = False) -> tuple[CapRow, ...]:
        """Every knob as it stands now.

        ``renew`` begins the lease anew: for the loop that watches the budget, after a full pass.
        """
        ...

    def hold(self, job: str, caps: Mapping[CapKey, int], why: str) -> tuple[CapRow, ...]:
        """Hold exactly ``caps`` for ``job``; how they stand now, which may be on their way."""
        ...

    def release(self, job: str = "") -> None:
        """Give back what ``job`` holds; "" is everything."""
        ...

    def close(self) -> None: ...


SnapshotView = Callable[[], Snapshot]
"""Returns the newest snapshot. Calling it changes nothing, however often and from wherever."""


class Exporter(Protocol):
    """Sends snapshots somewhere. Runs in threads of its own and never blocks the poller."""

    @property
    def name(self) -> str: ...

    @property
    def address(self) -> str | None:
        """Where it can be reached once started, as a URL; None for one that pushes."""
        ...

    @property
    def drops(self) -> int:
        """How often it could not send or serve something, and dropped it. Safe from any thread."""
        ...

    def start(self, view: SnapshotView) -> None:
        """Begin. Raises ExporterError with one clear sentence if it cannot."""
        ...

    def stop(self) -> None: ...


@runtime_checkable
class MonitoredExporter(Protocol):
    """An exporter that can fail long after it started, and says so as a source would."""

    @property
    def health(self) -> SourceHealth:
        """How what it sends to is doing. Safe from any thread."""
        ...


@dataclass(frozen=True, slots=True)
class SourceContext:
    """What a source is given to be built with.

    ``emulated`` says that the roots and libraries the source is handed belong to an emulated
    host, so every one of its domains must be labelled so. ``nvml`` stands in for the ``pynvml``
    module where the emulated host brings its own; ``sysfs`` for the configured root.
    """

    clock: Clock
    directory: ProcessDirectory
    emulated: bool = False
    nvml: Any = None
    sysfs: Path | None = None
    resolution: int | None = None  # how often emulated CPU counters move, in nanoseconds


@dataclass(frozen=True, slots=True)
class SourcePlugin:
    """What a ``wattspan.sources`` entry point resolves to.

    ``settings`` is the plugin's own table, ``[sources.NAME]``. ``open`` is called once; it
    raises SourceError when the source was asked for explicitly (``enabled = true``) and cannot
    be had, and returns None when it was left to ``auto`` and there is nothing here to read.
    """

    settings: type[Table]
    open: Callable[[Any, SourceContext], CounterSource | None]


def _no_counter(listener: str) -> Callable[[str], None]:
    return lambda reason: None


def _no_uid(_: tuple[str, int], __: tuple[str, int]) -> None:
    return None


@dataclass(frozen=True, slots=True)
class ExporterContext:
    """What an exporter is given to be built with."""

    clock: Clock
    version: str
    log: Callable[[str], None]
    refusals: Callable[[str], Callable[[str], None]] = _no_counter
    """Of a listener by name: what it calls with the reason for which it turned somebody away."""
    uid_of: Callable[[tuple[str, int], tuple[str, int]], int | None] = _no_uid
    """The user who owns the socket at the first of two ends of a TCP connection, if known."""


def _no_faults(settings: Any) -> Iterable[str]:
    return ()


@dataclass(frozen=True, slots=True)
class ExporterPlugin:
    """What a ``wattspan.exporters`` entry point resolves to: ``[exporters.NAME]`` and a maker.

    ``open`` returns None when the settings turn the exporter off. ``faults`` has a sentence for
    each thing in them that ``open`` would refuse; it looks at files at most, and opens nothing.
    """

    settings: type[Table]
    open: Callable[[Any, ExporterContext], Exporter | None]
    faults: Callable[[Any], Iterable[str]] = _no_faults


class WattspanError(Exception):
    """An error whose message is one sentence for the operator: thing, cause, remedy."""

    exit_code = 1


class ConfigError(WattspanError):
    """The configuration says something that cannot be."""

    exit_code = 2


class SourceError(WattspanError):
    """A source that was asked for explicitly cannot be had."""

    exit_code = 3


class ExporterError(WattspanError):
    """An exporter cannot start: port in use, bad certificate."""

    exit_code = 4


class ListenError(WattspanError):
    """A socket cannot be listened on: port in use, another agent there, no right to it."""

    exit_code = 4


class StoreError(WattspanError):
    """The store cannot be used at all; ``failure`` is what it says, in parts."""

    exit_code = 5

    def __init__(self, said: Failure | str) -> None:
        super().__init__(str(said))
        self.failure = said if isinstance(said, Failure) else None


class ActuatorError(WattspanError):
    """A device's limit cannot be read or set. ``trouble`` says what sort of reason it is."""

    def __init__(self, sentence: str, trouble: Trouble, *, locked: bool = False) -> None:
        super().__init__(sentence)
        self.trouble = trouble
        self.locked = locked  # by firmware, until the next boot


SUSPENDED = (
    "Everything was given back by `wattspan caps restore`, and nothing is set before the capper is"
    " started anew."
)
"""What is said of caps that are wanted meanwhile."""


class CapsError(WattspanError):
    """A cap was refused, or nobody answers who could set it. ``refusal`` is "" for the latter."""

    exit_code = 6

    def __init__(self, sentence: str, refusal: str = "", device: str = "") -> None:
        super().__init__(sentence)
        self.refusal = refusal
        self.device = device
