"""Protocols and values at the boundary between the agent and hardware, kernel and network.

Tests implement them as fakes, plugins with their own classes; only the composition root selects
implementations.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
    HwType,
    Instant,
    Knob,
    KnobState,
    Microjoules,
    Payer,
    PayerInfo,
    Principal,
    Reading,
    Snapshot,
    SourceHealth,
    Trouble,
    Usage,
)
from wattspan.model.settings import Table
from wattspan.sharing.pools import Pools
from wattspan.spans.values import IntervalEnergy


class Clock(Protocol):
    """The source of time."""

    def now(self) -> Instant:
        """The present time on all clocks."""
        ...

    def monotonic(self) -> int:
        """Nanoseconds of the monotonic clock; cheaper than ``now().mono``."""
        ...

    def sleep_until(self, mono: int) -> None:
        """Return as soon as possible after the monotonic time ``mono``."""
        ...


@dataclass(frozen=True, slots=True)
class Batch:
    """The result of one read of a counter source.

    ``domains`` are all present domains of the source; it returns the *same tuple object* while
    nothing has changed, so that callers may compare by identity. A domain without a reading in a
    batch is no error: slow sources may have new values less often. ``calls`` are those of a
    driver's library since the start; None of a source without one.
    """

    domains: tuple[Domain, ...]
    readings: tuple[Reading, ...] = ()
    failures: tuple[Failure, ...] = ()
    usages: tuple[Usage, ...] = ()
    gpus: tuple[GpuStatus, ...] = ()
    calls: int | None = None

    @property
    def frozen(self) -> frozenset[str]:
        """Ids of the domains whose counters do not move while their hardware works."""
        stuck = (one.domain_id for one in self.failures if one.trouble is Trouble.STUCK)
        return frozenset(one for one in stuck if one is not None)

    @staticmethod
    def checked(batch: object) -> Batch:
        """``batch``; TypeError for what would end the cycle of all sources."""
        if not isinstance(batch, Batch):
            raise TypeError(f"read() returns {type(batch).__name__}, no Batch")
        for one in batch.readings:
            if type(one.counter) is not int or not isinstance(one.at, Instant):
                raise TypeError(f"{one.counter!r} of {one.domain_id} at {one.at!r} is no reading")
        return batch


@runtime_checkable
class CounterSource(Protocol):
    """The counters of one device family.

    ``read`` does not raise for a failing counter: a ``Failure`` affects only its own domains. It
    must return promptly; a source whose calls can hang needs a thread.
    """

    @property
    def name(self) -> str: ...

    def read(self) -> Batch: ...

    def close(self) -> None: ...


@runtime_checkable
class PacedSource(Protocol):
    """Methods that a counter source may have as well, to follow the interval of its reads."""

    def pace(self, interval: int) -> None:
        """Expect a read every ``interval`` nanoseconds from now on: 10 ms to 10 s.

        A thread of the source wakes no more often, except to integrate power. Safe from any thread.
        """
        ...

    def integrates_power(self) -> bool:
        """True if ``read`` integrates the power of a device now, and is needed every 100 ms.

        A source with a thread integrates there, whatever the interval of its reads.
        """
        ...


@runtime_checkable
class CoverFollower(Protocol):
    """A method that a counter source may have as well, to read seldom what does not count."""

    def follow_cover(self, members: frozenset[str]) -> None:
        """Know the ids of all domains that count now. Safe from any thread."""
        ...


@dataclass(frozen=True, slots=True)
class UsageBatch:
    """The usage of processes since the previous batch.

    ``infos`` describe all payers that appear in ``usages`` for the first time, and again after a
    change such as ``exec``. The last usage of ``exited`` payers is in this batch or an earlier one.
    """

    usages: tuple[Usage, ...] = ()
    infos: tuple[PayerInfo, ...] = ()
    exited: tuple[Payer, ...] = ()
    failures: tuple[Failure, ...] = ()
    processes: int = 0


@runtime_checkable
class UsageSource(Protocol):
    """The source of CPU usage. Called by one thread at every tick."""

    def poll(self, *, settle: bool = True, watched: frozenset[Payer] | None = None) -> UsageBatch:
        """The usage since the last poll; without ``settle``, some may wait for the next one.

        ``watched`` are the payers whose own use up to each poll counts; None for all. The others
        may share what is left of the use up to that poll.
        """
        ...

    def close(self) -> None: ...


class ProcessDirectory(Protocol):
    """Metadata of processes that devices report by pid. Safe from any thread, fast."""

    def identify(self, pid: int) -> Consumer | None:
        """The present process with ``pid``; None if there is none."""
        ...

    def has_ended(self, consumer: Consumer) -> bool:
        """True if it has ended for certain: a read without descriptors or memory proves nothing."""
        return self.identify(consumer.pid) != consumer

    def describe(self, consumer: Consumer) -> PayerInfo | None:
        """The metadata of ``consumer``; None if it has exited."""
        ...


class EnergyStep(NamedTuple):
    """The energy of a device between two readings; None if it was not measured."""

    start: int
    end: int
    energy: Microjoules | None


class EnergyQueries(Protocol):
    """The energy of recent periods. Safe from any thread.

    Times are monotonic nanoseconds. Answers for times after ``settled`` have less coverage and are
    never extrapolated.
    """

    def expect(self, end: int) -> None:
        """Ask for settlement up to ``end`` before the next snapshot."""
        ...

    def settled(self, consumer: Consumer | None = None) -> int:
        """The watermark of all domains that still settle, and of the profile of ``consumer``."""
        ...

    def domains(self) -> Mapping[str, Domain]:
        """The cover, by id."""
        ...

    def family(self, consumer: Consumer) -> frozenset[Payer]:
        """``consumer`` and its descendants."""
        ...

    def idle(self, domain_id: str, start: int, end: int) -> Microjoules | None:
        """The idle energy of a device that is charged to no process.

        None for a period before the history or with an unknown baseline, in which processes are
        charged with idle energy too.
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
        """Keep a profile of ``consumer``, which reaches back further than the history.

        With ``family``, also one of its family. ``samples`` yields the newest samples of its CPU
        clock (monotonic time, nanoseconds). The profile is kept until the last ``holder`` ends.
        """
        ...

    def forget(self, consumer: Consumer, *, holder: str = "spans") -> None:
        """End a ``watch`` of ``holder``. Idempotent."""
        ...

    def process(
        self, consumer: Consumer, start: int, end: int, *, family: bool = False
    ) -> IntervalEnergy:
        """The energy of a process, or of its family."""
        ...

    def bounded(self, consumer: Consumer, start: int, *, family: bool = False) -> frozenset[HwType]:
        """The types of which the energy of a process since ``start`` is a lower bound.

        A device that it uses was in a gap, or an idle power was unknown; coverage says the rest.
        """
        ...


class DeviceQueries(Protocol):
    """The energy of devices from readings, before it is settled. Safe from any thread.

    Times are monotonic nanoseconds. ``domains`` are those of the cover and their MIG instances, by
    id; the other calls raise KeyError for an unknown one. ``own`` are the edges of windows that the
    reader may know, sorted, or None for all: without them, old energies are less certain.
    """

    def domains(self) -> Mapping[str, Domain]: ...

    def known(self, domain_id: str) -> int | None:
        """The time of the newest reading; None before the first."""
        ...

    def silent(self, domain_id: str) -> bool:
        """True if the device is gone, or has given no reading for so long that none is due."""
        ...

    def device(
        self, domain_id: str, start: int, end: int, own: Sequence[int] | None = None
    ) -> IntervalEnergy:
        """The energy of one device; time after ``known`` is not covered."""
        ...

    def cells(
        self, domain_id: str, start: int, end: int, own: Sequence[int] | None = None
    ) -> IntervalEnergy:
        """The energy of whole cells of one device, with the uncertainty of thinned ones alone.

        Edges are multiples of the resolution for users who may not read the counters.
        """
        ...

    def timeline(
        self, domain_id: str, start: int, end: int, *, common: bool = False
    ) -> list[EnergyStep]:
        """The energy between neighbouring readings that overlap a period, oldest first.

        With ``common``, none of them is there for the edge of a window.
        """
        ...

    def gpu(self, domain_id: str) -> GpuStatus | None:
        """The newest status of a GPU; None of other devices and before the first status."""
        ...

    def temperatures(self, domain_id: str, start: int, end: int) -> list[tuple[int, int]]:
        """Time and degrees Celsius of a GPU in a period, oldest first."""
        ...


class Actuator(Protocol):
    """One knob of all devices that have it. For one thread.

    All calls may raise ActuatorError, which names the device, the cause and the remedy.
    """

    @property
    def knob(self) -> Knob: ...

    def devices(self) -> tuple[KnobState, ...]:
        """The present state of all devices with this knob that can be read."""
        ...

    def read(self, device: str) -> KnobState:
        """The present state of one device's knob."""
        ...

    def write(self, device: str, value: int | None) -> KnobState:
        """Set the knob and read it back. None removes a setting without an original value."""
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


@dataclass(frozen=True, slots=True)
class ActuatorContext:
    """Arguments for the construction of actuators: the knobs in use, and the root of sysfs."""

    clock: Clock
    knobs: Collection[Knob]
    sysfs: Path


@dataclass(frozen=True, slots=True)
class ActuatorPlugin:
    """The value of a ``wattspan.actuators`` entry point.

    ``open`` returns an actuator for each of the context's knobs that the plugin's devices have; no
    device is used before the first call. The capper loads it only if its configuration names it.
    """

    open: Callable[[ActuatorContext], Iterable[SlottedActuator]]


class CapTotals(NamedTuple):
    """Totals of the capper; ``ceiling`` is the host's, in milliwatts."""

    writes: int = 0
    restores: int = 0
    ceiling: int | None = None
    suspended: bool = False
    """All limits were restored on request; the capper writes none until its next start."""
    shared: str = ""
    """The socket, if the capper is that of another agent of the host."""
    resets: int = 0


class Caps(Protocol):
    """The tuner's connection to the capper. For one thread; never blocks for long.

    All calls raise CapsError if the capper does not respond or refuses.
    """

    @property
    def totals(self) -> CapTotals:
        """Totals of the newest response."""
        ...

    def rows(self, *, renew: bool = False) -> tuple[CapRow, ...]:
        """Every knob as it stands now.

        ``renew`` renews the lease: for the loop that watches the budget, after a full pass.
        """
        ...

    def hold(self, job: str, caps: Mapping[CapKey, int], why: str) -> tuple[CapRow, ...]:
        """Hold exactly ``caps`` for ``job``; returns the present state, which may lag."""
        ...

    def release(self, job: str = "") -> None:
        """Release the caps of ``job``; "" for all jobs."""
        ...

    def close(self) -> None: ...


SnapshotView = Callable[[], Snapshot]
"""Returns the newest snapshot, without side effects. Safe from any thread."""


class Exporter(Protocol):
    """Publishes snapshots in threads of its own and never blocks the poller."""

    @property
    def name(self) -> str: ...

    @property
    def address(self) -> str | None:
        """Its URL once started; None for one that pushes."""
        ...

    @property
    def drops(self) -> int:
        """Number of exports that it dropped. Safe from any thread."""
        ...

    def start(self, view: SnapshotView) -> None:
        """Start; ExporterError if it cannot."""
        ...

    def stop(self) -> None: ...


@runtime_checkable
class MonitoredExporter(Protocol):
    """An exporter that reports its health."""

    @property
    def health(self) -> SourceHealth:
        """The health of the destination. Safe from any thread."""
        ...


@dataclass(frozen=True, slots=True)
class SourceContext:
    """Arguments for the construction of a source.

    ``emulated``: roots and libraries belong to an emulated host, and all domains must be labelled
    as emulated. ``nvml`` and ``amdsmi`` replace the modules ``pynvml`` and ``amdsmi``, ``sysfs``
    the configured root.
    """

    clock: Clock
    directory: ProcessDirectory
    emulated: bool = False
    nvml: Any = None
    sysfs: Path | None = None
    resolution: int | None = None  # step of emulated CPU counters in nanoseconds
    amdsmi: Any = None


@dataclass(frozen=True, slots=True)
class SourcePlugin:
    """The value of a ``wattspan.sources`` entry point.

    ``settings`` is the plugin's own table, ``[sources.NAME]``. If there is nothing to read,
    ``open`` raises SourceError with ``enabled = true`` and returns None with ``auto``; it is then
    called again every few seconds, because a driver may be loaded at any time, and so it is after
    any other exception: it releases what it opened before it raises. It does not block, because no
    counter is read meanwhile; after a failure that took more than a second it is not called again.
    ``advice`` returns a sentence for each setting that matches nothing on this host; it may read
    files. ``present`` is asked before ``open`` is called again: False while there is certainly
    nothing to read.
    """

    settings: type[Table]
    open: Callable[[Any, SourceContext], CounterSource | None]
    advice: Callable[[Any], Iterable[str]] = lambda _: ()
    present: Callable[[SourceContext], bool] = lambda _: True


class PeerPrincipals(Protocol):
    """Finds the principals of peers; None is unknown."""

    def connected(self, pid: int | None, uid: int | None) -> Principal | None:
        """The principal behind a Unix socket, by the credentials of its peer."""

    def socket_owner(self, end: tuple[str, int], other: tuple[str, int]) -> Principal | None:
        """The principal who owns the socket at the first end of a TCP connection."""


@dataclass(frozen=True, slots=True)
class ExporterContext:
    """Arguments for the construction of an exporter."""

    clock: Clock
    version: str
    log: Callable[[str], None]
    refusals: Callable[[str], Callable[[str], None]] = lambda _: lambda _: None
    """Returns the counter of rejections of a listener, which is called with the reason."""
    principals: PeerPrincipals | None = None
    """Finds the principals of peers; by default, by user id alone."""
    pools: Pools | None = None
    """Makes the bounded pools that peers fill, whose counters the agent exports."""


@dataclass(frozen=True, slots=True)
class ExporterPlugin:
    """The value of a ``wattspan.exporters`` entry point, with the table ``[exporters.NAME]``.

    ``open`` returns None if the settings turn the exporter off. ``faults`` returns a sentence for
    each setting that ``open`` would refuse; it may read files and opens nothing.
    """

    settings: type[Table]
    open: Callable[[Any, ExporterContext], Exporter | None]
    faults: Callable[[Any], Iterable[str]] = lambda _: ()


class WattspanError(Exception):
    """An error whose message is a sentence for the operator: thing, cause, remedy."""

    exit_code = 1


def error_sentences(*checks: Callable[[], object]) -> Iterator[str]:
    """The sentences of the WattspanErrors that ``checks`` raise, in their order."""
    for check in checks:
        try:
            check()
        except WattspanError as error:
            yield from str(error).splitlines()


class ConfigError(WattspanError):
    """Invalid configuration."""

    exit_code = 2


class SourceError(WattspanError):
    """A source that is explicitly enabled is not available."""

    exit_code = 3


class ExporterError(WattspanError):
    """An exporter cannot start: port in use, invalid certificate."""

    exit_code = 4


class ListenError(WattspanError):
    """A socket cannot be opened: port in use, another agent, missing permission."""

    exit_code = 4


class StoreError(WattspanError):
    """The store cannot be used; ``failure`` has the parts of the message."""

    exit_code = 5

    def __init__(self, message: Failure | str) -> None:
        super().__init__(str(message))
        self.failure = message if isinstance(message, Failure) else None


class ActuatorError(WattspanError):
    """A device's limit cannot be read or set; ``trouble`` is the class of the cause."""

    def __init__(self, sentence: str, trouble: Trouble, *, locked: bool = False) -> None:
        super().__init__(sentence)
        self.trouble = trouble
        self.locked = locked  # by firmware, until the next boot


SUSPENDED = (
    "All limits were restored by `wattspan caps restore`; none is set until the capper restarts."
)
"""The message for requests of caps after a restore."""


class CapsError(WattspanError):
    """A cap was refused, or the capper does not respond: then ``refusal`` is ""."""

    exit_code = 6

    def __init__(self, sentence: str, refusal: str = "", device: str = "") -> None:
        super().__init__(sentence)
        self.refusal = refusal
        self.device = device
