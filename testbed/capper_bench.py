"""A capper's insides on devices that are only numbers: they fail, and are written by others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from errno import ENOSPC
from pathlib import Path

from testbed.journals import journal_entries
from wattspan.capper.audit import AuditEvent
from wattspan.capper.cap_manager import CapManager
from wattspan.capper.ceilings import PowerCeilings
from wattspan.capper.devices import ManagedDevices
from wattspan.capper.journal import Journal, JournalEntry
from wattspan.capper.planner import OperatorLimits
from wattspan.capper.server import RequestHandler
from wattspan.config import CapsSettings
from wattspan.model import CapKey, DevicePresence, Knob, KnobState, Trouble
from wattspan.ports import ActuatorError
from wattspan.testing import ManualClock
from wattspan.util.files import replace_file

BOOT = "4a6b1c52-0000-4000-8000-000000000000"
W = 1000


class Killed(BaseException):
    """The process ends here; none of its threads continues."""


@dataclass
class Board:
    """One device. ``stands`` is the current limit, ``obeys`` the enforced limit if it differs."""

    stands: int
    minimum: int = 200 * W
    default: int = 700 * W
    maximum: int = 700 * W
    obeys: int | None = None
    fault: Trouble | None = None
    locked: bool = False
    inert: bool = False  # takes a value and keeps the old one
    late: bool = False  # carries a write out, and then fails
    unit: int = 1
    session: int = 0  # grows when the device returns from a reset


@dataclass
class FakeActuator:
    """Any number of boards. ``watch`` sees each write before it happens; raising stops it."""

    boards: dict[str, Board]
    knob: Knob = Knob.GPU_POWER
    watch: Callable[[CapKey, int | None], None] = lambda key, value: None
    after: Callable[[CapKey], None] = lambda key: None
    written: list[tuple[str, int | None]] = field(default_factory=list)
    reads: int = 0
    closed: bool = False

    def devices(self) -> tuple[KnobState, ...]:
        return tuple(self.read(name) for name, board in self.boards.items() if not board.fault)

    @property
    def unidentified(self) -> int | None:
        """Like isolated devices: a hung one is not in the list and counts."""
        hung = any(board.fault is Trouble.STUCK for board in self.boards.values())
        return len(self.boards) if hung else None

    def prefetch(self, devices: Iterable[str]) -> None:
        """Reads at once anyway."""

    def read(self, device: str) -> KnobState:
        board = self._board(device)
        self.reads += 1
        return KnobState(
            CapKey(self.knob, device),
            device.upper(),
            minimum=board.minimum,
            default=board.default,
            maximum=board.maximum,
            requested=None if self.knob is Knob.GPU_CLOCK else board.stands,
            enforced=board.stands if board.obeys is None else board.obeys,
            aliases=(device.removeprefix("gpu"),),
            presence=DevicePresence(session=board.session),
        )

    def write(self, device: str, value: int | None) -> KnobState:
        board = self._board(device)
        self.watch(CapKey(self.knob, device), value)
        if board.locked:
            raise ActuatorError(f"{device} is locked.", Trouble.DENIED, locked=True)
        if not board.inert:
            board.stands = board.maximum if value is None else value // board.unit * board.unit
        self.written.append((device, value))
        self.after(CapKey(self.knob, device))
        if board.late:
            raise ActuatorError(f"{device} did not answer.", Trouble.RETRY)
        return self.read(device)

    def close(self) -> None:
        self.closed = True

    def _board(self, device: str) -> Board:
        board = self.boards.get(device)
        if board is None:
            raise ActuatorError(f"There is no {device}.", Trouble.ABSENT)
        if board.fault is not None:
            raise ActuatorError(f"{device} does not answer.", board.fault)
        return board


class Disk(Journal):
    """A journal on a disk that is full when ``full`` says so, and takes its time.

    ``meanwhile`` happens once, when something has just been written down.
    """

    full = False
    cut = False
    """True if the process ends between the two copies of the next save."""
    meanwhile: Callable[[], None] | None = None

    def _replace(self, text: bytes) -> None:
        if self.full:
            raise OSError(ENOSPC, "No space left on device")
        if self.cut:
            self.cut = False
            replace_file(self.path, text, self.path.with_name("journal.draft"))
            raise Killed
        super()._replace(text)
        if self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()


class Bench:
    """A CapManager with its dependencies. ``crash`` drops it, and starts another on the same
    disk."""

    def __init__(
        self,
        folder: Path,
        *,
        boards: int = 2,
        knob: Knob = Knob.GPU_POWER,
        limits: OperatorLimits = OperatorLimits(0.6, 0, 1.0),  # noqa: B008 - frozen
        tunable: tuple[str, ...] = (),
        knobs: tuple[Knob, ...] = (),
    ) -> None:
        self.folder, self.limits, self.tunable, self.knobs = folder, limits, tunable, knobs
        self.clock = ManualClock()
        self.actuator = FakeActuator({f"gpu{n}": Board(650 * W) for n in range(boards)}, knob)
        self.events: list[AuditEvent] = []
        self.start()

    def start(self) -> None:
        self.journal = Disk(self.folder, BOOT)
        devices = ManagedDevices([self.actuator], self.clock)
        limits = replace(self.limits, tunable=self.tunable, knobs=self.knobs)
        self.manager = CapManager(devices, self.journal, self.clock, self.events.append, limits)
        self.manager.start()

    def crash(self) -> None:
        """Like SIGKILL: data not on disk is lost."""
        self.start()
        self.manager.turn()

    def key(self, number: int = 0) -> CapKey:
        return CapKey(self.actuator.knob, f"gpu{number}")

    def board(self, number: int = 0) -> Board:
        return self.actuator.boards[f"gpu{number}"]

    def hold(self, value: int, *numbers: int, holder: int = 1, job: str = "job") -> None:
        self.manager.hold(holder, job, {self.key(n): value for n in numbers or (0,)}, "why")

    def turn(self, seconds: float = 0.0) -> None:
        self.clock.advance(seconds)
        self.manager.turn()

    def desk(
        self,
        settings: CapsSettings = CapsSettings(),  # noqa: B008 - frozen
        *,
        record: Callable[[AuditEvent], None] | None = None,
        in_fleet: bool = False,
    ) -> RequestHandler:
        """The requests of this capper; its events are recorded beside those of the manager."""
        record = record or self.events.append
        path = self.folder / "ceilings.json"
        ceilings = PowerCeilings(settings, path, BOOT, self.clock, record=record, in_fleet=in_fleet)
        return RequestHandler(self.manager, ceilings, self.clock, record)

    @property
    def stands(self) -> list[int]:
        return [board.stands for board in self.actuator.boards.values()]

    @property
    def on_disk(self) -> dict[str, dict[str, object]]:
        """Entries of the journal file by device."""
        return {entry["device"]: entry for entry in journal_entries(self.folder)}

    def deeds(self) -> list[str]:
        return [str(event.deed) for event in self.events]


def entry(**fields: object) -> JournalEntry:
    """A journal's entry of a board whose original is 650 W and which is capped to 500 W."""
    usual = JournalEntry(
        knob=Knob.GPU_POWER,
        device="gpu0",
        name="GPU0",
        original=650 * W,
        default=700 * W,
        minimum=200 * W,
        maximum=700 * W,
        value=500 * W,
        written=True,
    )
    return type(usual)(
        **{name: fields.get(name, getattr(usual, name)) for name in usual.__struct_fields__}
    )
