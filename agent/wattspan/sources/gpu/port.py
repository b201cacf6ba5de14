"""The port of a vendor of GPUs: its library, its boards, and what each of them answers.

A vendor's adapter lists and opens boards (``GpuVendor``), reads one board (``GpuDevice``), tells
the use of it by processes (``GpuUsage``) and sets its limits (``GpuControls``). The session, the
sampler and the actuators are the same for all vendors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol

from wattspan.model import (
    SECOND,
    Domain,
    Failure,
    GpuStatus,
    Instant,
    Microjoules,
    Milliwatts,
    PowerLimits,
    Thing,
    Trouble,
    Usage,
)
from wattspan.model.settings import Duration, Table, about
from wattspan.ports import Clock, SourceContext
from wattspan.sources.driver_thread import CallInterval
from wattspan.sources.energy_meter import EnergyChoice
from wattspan.sources.gpu.calls import (
    NOT_FOUND,
    NOT_SUPPORTED,
    DriverError,
    DriverLibrary,
    DriverMessages,
    GpuCalls,
)
from wattspan.util.text import printable

MAX_TEXT = 96  # NVML's own buffers for names and UUIDs
MAX_USAGE_INTERVAL = 5 * SECOND // 4
"""Intervals wait three seconds for usage, and a utilisation reading holds for two: usage that is
read less often is worth nothing.
"""

GAUGE_SAMPLES = 2
"""Samples between two reads of power and utilisation: sensors smooth power over a second,
utilisation over a sixth. Where power has to be integrated, it is read at every sample.
"""

FailureOf = Callable[[str, Trouble, str, str], Failure]
"""The failure of a thing of a board: what, its class, cause and remedy."""


class GpuSettings(Table, frozen=True):
    """Intervals of the calls of a source of GPUs, and the longest duration of a call.

    Keys:
        enabled: `auto`: read them if there are any; `true`: the agent does not start without them.
        interval: Shortest interval of energy reads, half that of power reads.
        energy: Energy that counts: of the `counter`, of the integrated `power`, or of the counter
            unless both differ by more than the sensors can err by far (`auto`).
        usage_interval: Interval of reads of the processes' use.
        status_interval: Interval of reads of limits, clocks, temperature, memory and throttling.
        deadline: Longest duration of a driver call; a longer one is reported as stuck.
    """

    enabled: bool | Literal["auto"] = "auto"
    interval: Annotated[Duration, about(least="10ms")] = Duration.parse("100ms")
    energy: EnergyChoice = "auto"
    usage_interval: Annotated[Duration, about(least="10ms")] = Duration.parse("500ms")
    status_interval: Annotated[Duration, about(least="10ms")] = Duration.parse("1s")
    deadline: Duration = Duration.parse("2s")

    @property
    def longest(self) -> int:
        """A second: a utilisation reading holds for two, and intervals wait three for usage."""
        return SECOND

    def __post_init__(self) -> None:
        if self.deadline <= self.interval:
            raise ValueError("deadline: it must be longer than the interval")


@dataclass(frozen=True, slots=True)
class GpuIdentity:
    """The constant properties of a board during one session of the library.

    ``domain_id`` survives restarts: ``gpu:UUID`` or ``gpu:ADDRESS``. ``aliases`` are further names
    for operators. ``kind`` names a board without a ``model``. ``pci`` is the address of its first
    function in the kernel's form. ``emulated``: it is no board of the hardware.
    """

    domain_id: str
    index: int
    model: str
    aliases: tuple[str, ...] = ()
    kind: str = "GPU"
    driver: str = ""
    pci: str = ""
    emulated: bool = False

    @property
    def name(self) -> str:
        return self.label(emulated=self.emulated)

    def label(self, *, emulated: bool) -> str:
        """Its name for people."""
        label = f"{self.model or self.kind} {self.index}"
        already = label.lower().startswith("emulated")
        return f"Emulated {label}" if emulated and not already else label


class GpuBoard(NamedTuple):
    """A board that was opened, with the handles of its partitions in this session."""

    identity: GpuIdentity
    handles: Sequence[Any]


class BoardPlace(NamedTuple):
    """A board that the library lists, before it is opened. ``name`` is its name in failures.

    ``domain_id`` is "" if the opened board alone tells it; the vendor then overrides ``find``.
    """

    name: str
    key: Any
    domain_id: str = ""


class GpuGauges(NamedTuple):
    """Power and utilisation at one time; None if unknown.

    ``draw`` is the power to integrate. ``busy`` and ``memory_busy`` are percents. ``module`` is
    the power of the superchip around the GPU, None of another GPU.
    """

    average: Milliwatts | None = None
    instant: Milliwatts | None = None
    draw: Milliwatts | None = None
    busy: int | None = None
    memory_busy: int | None = None
    module: Milliwatts | None = None


class GpuUsage(Protocol):
    """The use of one board by its processes. Calls raise GpuLostError or SessionLostError."""

    division: object
    """A value that changes with ``parts``."""

    pace: CallInterval
    """The interval of ``measure`` with ``settle``, which measures the cost of its calls by it."""

    @property
    def method(self) -> str:
        """The method of attribution; "none" if the driver does not distinguish processes."""
        ...

    @property
    def step(self) -> int:
        """The time resolution in nanoseconds; 0 if it is unknown."""
        ...

    @property
    def held(self) -> bool:
        """True if a process has the board open, as far as the driver lists them."""
        ...

    def measure(
        self, at: Instant, busy: int | None, *, looked: bool, settle: bool
    ) -> Iterable[Usage]:
        """The usage up to ``at``, if it is known. ``looked``: ``busy`` was read at ``at``."""
        ...

    def follow(self, at: Instant) -> Iterable[Usage]:
        """The usage so far, if the status shows that the board was divided otherwise."""
        ...

    def flush(self, at: Instant) -> Iterable[Usage]:
        """The usage up to ``at`` of a board that does not answer."""
        ...

    def resume(self, at: Instant) -> None:
        """Begin anew: the board was suspended up to ``at``."""
        ...

    def parts(self, board: Domain) -> tuple[Domain, ...]:
        """The domains of the instances of a divided board."""
        ...

    def failures(self, failure: FailureOf) -> Iterable[Failure]:
        """The reasons for which energy is not charged to processes, or not to all of them."""
        ...

    def close(self) -> None:
        """Release what the library keeps for it; a new handle is used after that."""
        ...


class GpuDevice(ABC):
    """One board through the time in which it answers.

    A call's error costs its field. GpuLostError or SessionLostError are raised.
    """

    has_steps: ClassVar[bool] = False
    """True if the counter moves so seldom that the time of its moves is searched for."""

    overshoots: ClassVar[bool] = False
    """True if the board may exceed its limit in the time that the power sensor does not see."""

    processor: Thing | None = None
    """The processor with the GPU in it, if the figures are those of both."""

    changed: bool = False
    """True if the handles are no longer those of its partitions.

    Only a library that finds boards at its initialisation alone needs to tell.
    """

    static_power: Milliwatts | None = None
    """The configured power of a blocked board."""

    usage: GpuUsage

    def __init__(self, vendor: GpuVendor, board: GpuBoard) -> None:
        self.identity, self.library = board.identity, vendor.library
        self.clock, self.messages = vendor.clock, vendor.messages
        self.calls = GpuCalls(vendor.library, board.handles[0], vendor.clock)

    def rebind(self, board: GpuBoard) -> None:
        """Use the board of a new initialisation, which was not lost: its handles and its index."""
        index, aliases = board.identity.index, board.identity.aliases
        self.identity = replace(self.identity, index=index, aliases=aliases)
        self.usage.close()
        self.calls.rebind(board.handles[0])

    @abstractmethod
    def energy(self, max_power: Milliwatts) -> tuple[Microjoules | None, Instant]:
        """The energy counter, stamped half-way through its call.

        The name of the call is ``messages.counter``. No board draws more than ``max_power``.
        """

    @abstractmethod
    def gauges(self) -> GpuGauges:
        """Power and utilisation now."""

    def gauges_before_status(self) -> GpuGauges:
        """The gauges, if ``status`` follows, which may use what the same call answers."""
        return self.gauges()

    @abstractmethod
    def status(self, at: Instant) -> GpuStatus:
        """Limits, clocks, temperature and memory; the sampler adds the rest."""

    @property
    def keeps_settings(self) -> bool:
        """False if an initialisation of the library may end the settings of the board."""
        return True

    def sensor_duty(self, gauges: GpuGauges) -> float:
        """The part of the time that the power sensor sees."""
        del gauges
        return 1.0

    @property
    def epoch(self) -> int:
        """The number of restarts of the counter that were noticed."""
        return 0

    @property
    def counter_fault(self) -> str:
        """The reason for which the counter's values are none, as a cause; "" if they are."""
        return ""

    def socket(self) -> int | None:
        """The socket of the superchip around the GPU; None if it is not known."""
        return None

    @property
    def partitions(self) -> str:
        """A clause on the partitions of a divided board; "" of an undivided one."""
        return ""

    @property
    def virtual(self) -> tuple[str, str] | None:
        """Cause and remedy if the board is another machine's, and has no figures here."""
        return None


class GpuClockReading(NamedTuple):
    """The clock in megahertz. ``limited``: a limit is in force; None if that is not known."""

    megahertz: int | None
    limited: bool | None = None


class GpuControls(ABC):
    """The knobs of one board. Calls raise DriverErrors."""

    def __init__(self, library: DriverLibrary, handle: Any) -> None:
        self._library, self.call = library, library.bound(handle)
        """``call`` answers as the library's function of a name does for this board."""

    @abstractmethod
    def power_limits(self) -> PowerLimits:
        """The limits; ``requested`` is known."""

    @abstractmethod
    def set_power_limit(self, milliwatts: int) -> None:
        """Set the limit that ``power_limits`` shows as ``requested``."""

    @abstractmethod
    def clock_range(self) -> tuple[int | None, int]:
        """The lowest and the highest clock in megahertz; both never change."""

    @abstractmethod
    def clock(self) -> GpuClockReading:
        """The clock now."""

    @abstractmethod
    def limit_clock(self, lowest: int, highest: int) -> None:
        """Bound the clock, in megahertz."""

    @abstractmethod
    def reset_clock(self) -> None:
        """Remove the limit of the clock, whoever set it."""

    def odometer(self) -> int | None:
        """A number that only a reset lowers; None if there is none."""
        return None

    def mode(self) -> str:
        """A mode whose change resets the board; "" if there is none."""
        return ""


class GpuVendor(ABC):
    """A vendor's library, for the sessions of the agent and of the capper. For one thread."""

    messages: ClassVar[DriverMessages]
    kernel_driver: ClassVar[str]

    finds_again: ClassVar[bool] = True
    """False if the library finds boards at its initialisation only."""

    reinitialise_after: ClassVar[int] = 15
    """Failures to recover a lost board after which the library is initialised again, although the
    other boards answer: a board that was bound again is not found otherwise. It grows with
    ``resets_settings``. A board that the kernel has no longer in its driver is awaited instead."""

    opens_single: ClassVar[bool] = False
    """True if ``place_at`` leads to one board without a call on others. Boards that such a library
    has open are kept awake."""

    resets_settings: ClassVar[bool] = False
    """True if an initialisation may end the settings of all boards, where no other process keeps
    the driver loaded."""

    is_thread_safe: ClassVar[bool] = False
    """True if a thread may call the library while a call of another one hangs."""

    def __init__(self, library: DriverLibrary, clock: Clock) -> None:
        self.library, self.clock = library, clock

    @abstractmethod
    def begin(self) -> None:
        """Initialise the library. DriverError."""

    @abstractmethod
    def end(self) -> None:
        """End the session with the library. DriverError."""

    @abstractmethod
    def places(self) -> list[BoardPlace]:
        """The boards in the order of the driver. DriverError."""

    def place_at(self, address: str) -> BoardPlace:
        """The board at a PCI address, which may not be there; with ``opens_single`` only."""
        raise DriverError(NOT_SUPPORTED, cause=address)

    def can_suspend(self, address: str) -> bool:
        """False if the driver keeps the board at ``address`` awake, whatever the kernel permits."""
        del address
        return True

    @abstractmethod
    def open(self, place: BoardPlace) -> GpuBoard | None:
        """The board; None for one of another vendor. DriverError."""

    @abstractmethod
    def device(self, board: GpuBoard, settings: Any, context: SourceContext) -> GpuDevice:
        """The board, to be read with the settings of the source."""

    def controls(self, board: GpuBoard) -> GpuControls:
        """The board, to be limited. DriverError if its knobs cannot be set."""
        del board
        raise DriverError(NOT_SUPPORTED)

    def find(self, domain_id: str) -> GpuBoard:
        """The board with an id, without a call on any other where that is possible. DriverError."""
        for place in self.places():
            board = self.open(place) if place.domain_id == domain_id else None
            if board is not None:
                return board
        raise DriverError(NOT_FOUND)

    def unmatched(self, models: Iterable[str], settings: Any) -> Iterable[Failure]:
        """Failures of settings that match none of the boards' ``models``."""
        del models, settings
        return ()

    def close(self) -> None:  # noqa: B027 - most keep nothing
        """Release what is kept beyond the session."""


def driver_text(value: Any) -> str:
    """Text of a driver, printable. Old bindings return bytes."""
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return printable(text[:MAX_TEXT])
