"""GPU boards' power limits and highest clocks, through any vendor's library.

Handles are void once a board fell off the bus or the driver was reloaded. So a board is identified
by the id of its domain, and gets a new handle whenever the old one turns out to be void.

The limit of a clock, in megahertz, cannot be read back. So the original is "no limit", and a reset
is all that can restore it. The reported limit is the one that this process set, as long as the
driver has not been reloaded since.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from wattspan.capper.actuators import (
    DeviceActuator,
    PowerActuator,
    actuator_error,
    format_setting,
    load_identity,
)
from wattspan.model import SECOND, CapKey, DevicePresence, Knob, KnobState, Trouble
from wattspan.ports import ActuatorError, Clock, SlottedActuator
from wattspan.sources.gpu import calls
from wattspan.sources.gpu.calls import DriverError
from wattspan.sources.gpu.port import (
    BoardPlace,
    GpuBoard,
    GpuControls,
    GpuIdentity,
    GpuVendor,
)
from wattspan.sources.gpu.session import BoundDevices

REINITIALIZE_AFTER = 30 * SECOND
"""Interval of library initialisations for a lost board, where one may end the limits of all other
boards."""

_VOID_HANDLE_ERRORS = calls.GPU_ERRORS | {calls.UNKNOWN}
_READ_LIMITS, _READ_CLOCKS = "read the power limits of", "read the clocks of"
_READ_ENERGY = "read the energy counter of"

T = TypeVar("T")


class GpuBoards:
    """A session with a vendor's library, begun when it is first needed. Belongs to one thread.

    ``generation`` grows whenever the driver was, or may have been, reloaded, and lost its settings.
    """

    def __init__(self, vendor: GpuVendor, sysfs: Path | None = None) -> None:
        """``sysfs`` shows the loads of the driver and of the boards; None for an emulated host."""
        self._vendor, self._clock, self._sysfs = vendor, vendor.clock, sysfs
        self._bound = None if sysfs is None else BoundDevices(sysfs, vendor.kernel_driver)
        self._begun = False
        self._boards: dict[str, GpuBoard] = {}  # with handles that are not known to be void
        self._known: dict[str, GpuIdentity] = {}  # of all boards ever found
        self._losses: Counter[str] = Counter()  # void handles of each board
        self._reinitialize_at: dict[str, int] = {}  # for each lost board
        self._places: list[BoardPlace] = []  # when they were last counted
        self.generation = 0

    def identity(self, device: str) -> GpuIdentity:
        """The board; ActuatorError if there is none, or it does not answer."""
        return self._board(device).identity

    def slots(self) -> int:
        """The number of boards that the driver lists. ActuatorError."""
        if self._bound is not None and self._bound.all_suspended():
            raise _suspended_error("the GPUs")
        self._places = self._list()
        missing = self._known.keys() - {place.domain_id for place in self._places}
        if missing and not self._vendor.finds_again:
            self.close()  # an initialisation is all that finds a board that returned
            self._places = self._list()
        return len(self._places)

    def id_at(self, slot: int) -> str | None:
        """The id of the board in ``slot``; None if it cannot be identified."""
        for device, identity in self._known.items():
            if identity.index == slot and self._is_suspended(device):
                return device
        self._begin()
        try:
            places = self._places or self._vendor.places()
            board = self._vendor.open(places[slot]) if slot < len(places) else None
        except DriverError as error:
            if error.code not in calls.SESSION_ERRORS:
                return None
            self.close()
            raise self._error("list the GPUs", error) from None
        return None if board is None else self._remember(board).identity.domain_id

    def ask(self, device: str, thing: str, call: Callable[[GpuControls], T]) -> T:
        """The result of ``call`` for one board; ``thing`` names the call in errors.

        A void handle is replaced, and the call repeated once. ActuatorError.
        """
        again = False
        while True:
            board = self._board(device)
            try:
                return call(self._vendor.controls(board))
            except DriverError as error:
                lost = self._is_void(device, error)
                if again or not lost:
                    raise self._error(f"{thing} {self._name(device)}", error) from None
                again = True

    def state(self, knob: Knob, device: str, settings: Mapping[str, int | None]) -> KnobState:
        """The state of a knob of a board, which answers, with these ``settings``. ActuatorError."""
        identity, presence = self.identity(device), self._presence(device)
        name, aliases = identity.name, identity.aliases
        return KnobState(CapKey(knob, device), name, aliases=aliases, presence=presence, **settings)

    def _presence(self, device: str) -> DevicePresence:
        """The evidence of resets of a board, which answers. ActuatorError."""
        identity, load = self.identity(device), ""
        if self._sysfs is not None:
            driver = f"bus/pci/devices/{identity.pci}/driver"
            nodes = (f"module/{self._vendor.kernel_driver}", driver if identity.pci else "")
            load = load_identity(self._sysfs, *filter(None, nodes))
        mode = self.ask(device, _READ_LIMITS, lambda board: board.mode())
        return DevicePresence(
            f"{load} {mode}" if mode else load,  # a change of the mode is a reset
            self.generation + self._losses[device],
            self.ask(device, _READ_ENERGY, lambda board: board.odometer()),
        )

    def close(self) -> None:
        """End the session; the next call begins another one."""
        self._boards.clear()
        self._places = []
        if self._begun:
            self._begun = False
            with contextlib.suppress(DriverError):
                self._vendor.end()

    # ------------------------------------------------------------------------------ session

    def _begin(self) -> None:
        """Begin the session, unless it has begun."""
        if self._begun:
            return
        try:
            self._vendor.begin()
        except DriverError as error:
            raise self._error("reach the GPUs", error) from None
        self._begun = True
        self.generation += self._vendor.resets_settings

    def _list(self) -> list[BoardPlace]:
        """The boards that the driver lists, in a new session if this one fails."""
        self._begin()
        try:
            return self._vendor.places()
        except DriverError:
            self.close()
        self._begin()
        try:
            return self._vendor.places()
        except DriverError as error:
            self.close()
            raise self._error("list the GPUs", error) from None

    def _remember(self, board: GpuBoard) -> GpuBoard:
        device = board.identity.domain_id
        self._boards[device], self._known[device] = board, board.identity
        return board

    def _name(self, device: str) -> str:
        """The name of ``device`` for people; its id if it was never found."""
        return self._known[device].name if device in self._known else device

    def _is_suspended(self, device: str) -> bool:
        """True if the board is suspended, as far as it or its id tells its address."""
        known = self._known.get(device)
        address = device.removeprefix("gpu:") if known is None else known.pci
        return self._bound is not None and self._bound.suspended(address)

    def _is_void(self, device: str, error: DriverError) -> bool:
        """True if ``error`` means that the handle is void; then it is dropped.

        Where only an initialisation finds boards, the session ends: the old list has old handles.
        """
        # A getter has no argument to reject but its handle.
        stale = error.code == calls.INVALID_ARGUMENT and error.bare
        session = error.code in calls.SESSION_ERRORS
        if not session and not stale and error.code not in _VOID_HANDLE_ERRORS:
            return False
        if session or not self._vendor.finds_again:
            self.close()  # an initialisation returns new handles, of all boards
        self._boards.pop(device, None)
        # The generation counts sessions where their begin may reset settings; elsewhere each begin
        # makes older handles stale, which is no loss.
        self._losses[device] += not (session if self._vendor.resets_settings else stale)
        return True

    def _board(self, device: str) -> GpuBoard:
        if self._is_suspended(device):
            raise _suspended_error(self._name(device))
        self._begin()
        return self._boards.get(device) or self._find(device)

    def _find(self, device: str) -> GpuBoard:
        """A new handle for a board. No other board is called, since that call may hang."""
        try:
            board = self._remember(self._vendor.find(device))
        except DriverError as error:
            return self._find_lost(device, error)
        self._reinitialize_at.pop(device, None)
        return board

    def _find_lost(self, device: str, error: DriverError) -> GpuBoard:
        """A board that was not found, after an initialisation of the library if one is due."""
        unknown = error.code == calls.NOT_FOUND
        if self._may_initialise(device, error.code):
            self.close()
            self._begin()
            with contextlib.suppress(DriverError):
                return self._remember(self._vendor.find(device))
            if self._vendor.finds_again:
                for slot in range(self.slots()):
                    if self.id_at(slot) == device:
                        return self._boards[device]
        elif error.code in calls.SESSION_ERRORS:
            self.close()
        if device in self._known:
            lost = DriverError(calls.GPU_NOT_FOUND if unknown else error.code)
            raise self._error(f"reach {self._name(device)}", lost) from None
        if not unknown:
            raise self._error(f"find {device}", error) from None
        cause, remedy = "this host has no such GPU", self._vendor.messages.list_command
        raise actuator_error(f"find {device}", cause, remedy, Trouble.ABSENT) from None

    def _may_initialise(self, device: str, code: int) -> bool:
        """True if an initialisation may find a board, and is due."""
        if not self._vendor.resets_settings:
            return True
        if device not in self._known:
            return False
        now = self._clock.monotonic()
        due = self._reinitialize_at.setdefault(device, now + REINITIALIZE_AFTER)
        if code not in calls.SESSION_ERRORS and now < due:
            return False
        self._reinitialize_at[device] = now + REINITIALIZE_AFTER
        return True

    def _error(self, thing: str, error: DriverError) -> ActuatorError:
        """The failure of ``thing``, as in "set the power limit of GPU 0"."""
        messages, code = self._vendor.messages, error.code
        cause, remedy = error.cause or messages.cause_of(code), error.remedy
        if code == calls.INVALID_ARGUMENT:
            cause = "the driver rejects the value"
            remedy = "Ask for a value in the device's range, as `wattspan caps status` shows it."
        trouble = Trouble.ABSENT if code in calls.FIELD_ERRORS else Trouble.RETRY
        if code in _TROUBLES:
            trouble = _TROUBLES[code]
        return actuator_error(
            thing, cause, remedy or messages.setter_remedies.get(code, ""), trouble
        )


_TROUBLES = {
    calls.INVALID_ARGUMENT: Trouble.MALFORMED,
    calls.NO_PERMISSION: Trouble.DENIED,
}


def _suspended_error(name: str) -> ActuatorError:
    """A board that the kernel has powered down, which a call of its driver would wake."""
    return actuator_error(
        f"reach {name}",
        "it is suspended, and a call would wake it",
        "Its cap is applied when it resumes.",
        Trouble.RETRY,
    )


class GpuActuator(DeviceActuator):
    """Common part of both knobs of a board."""

    def __init__(self, boards: GpuBoards, clock: Clock) -> None:
        super().__init__(clock)
        self._boards = boards

    def slots(self) -> int:
        return self._boards.slots()

    def id_at(self, slot: int) -> str | None:
        return self._boards.id_at(slot)

    def close(self) -> None:
        self._boards.close()

    def _check_range(self, state: KnobState, value: int) -> None:
        """Name the range, which the driver's own refusal does not."""
        lowest = max(1, state.minimum or 0)
        if lowest <= value <= (state.maximum or value):
            return
        setting, low, high = (
            format_setting(self.knob, one) for one in (value, lowest, state.maximum)
        )
        raise actuator_error(
            f"set the {self.knob.value} of {state.name} to {setting}",
            f"the range is {low} to {high}",
            "Ask for a value in that range.",
            Trouble.MALFORMED,
        )


class GpuPower(GpuActuator, PowerActuator):
    """The Actuator of GPU_POWER."""

    knob = Knob.GPU_POWER

    def write(self, device: str, value: int | None) -> KnobState:
        """Set the limit and read it back."""
        before = self._before(device)
        if value is None:
            raise self._always_limited(before)
        self._check_range(before, value)
        self._boards.ask(
            device, "set the power limit of", lambda board: board.set_power_limit(value)
        )
        return self._confirmed(before, value)

    def _state(self, device: str) -> KnobState:
        limits = self._boards.ask(device, _READ_LIMITS, lambda board: board.power_limits())
        return self._boards.state(self.knob, device, asdict(limits))


class GpuClock(GpuActuator):
    """The Actuator of GPU_CLOCK. ``enforced`` is reported while the clock obeys the limit."""

    knob = Knob.GPU_CLOCK

    def __init__(self, boards: GpuBoards, clock: Clock) -> None:
        super().__init__(boards, clock)
        self._limits: dict[str, int] = {}
        self._session = boards.generation
        self._ranges: dict[str, tuple[int | None, int]] = {}  # they never change

    def write(self, device: str, value: int | None) -> KnobState:
        """Limit the clock to ``value``; None removes the limit, whoever set it."""
        if value is None:
            self._boards.ask(device, "reset the clocks of", lambda board: board.reset_clock())
            self._limits.pop(device, None)
            return self.read(device)
        before = self._before(device)
        self._check_range(before, value)
        # The lower bound is the lowest clock there is, so that an idle board can still sleep.
        lowest = before.minimum or 0
        self._boards.ask(
            device, "limit the clocks of", lambda board: board.limit_clock(lowest, value)
        )
        self._limits[device] = value
        return self._settled(device, lambda now: now.enforced == value)

    def _state(self, device: str) -> KnobState:
        if device not in self._ranges:
            self._ranges[device] = self._boards.ask(
                device, _READ_CLOCKS, lambda board: board.clock_range()
            )
        minimum, maximum = self._ranges[device]
        clock, limited = self._boards.ask(device, _READ_CLOCKS, lambda board: board.clock())
        if self._session != self._boards.generation:
            self._session = self._boards.generation
            self._limits.clear()  # the driver was reloaded, and no clock is limited any more
        if limited is False:
            self._limits.pop(device, None)
        limit = self._limits.get(device)
        obeyed = limit is not None and clock is not None and clock <= limit
        settings = {"minimum": minimum, "default": maximum, "maximum": maximum}
        settings |= {"requested": limit, "enforced": limit if obeyed else None}
        return self._boards.state(self.knob, device, settings)


def gpu_actuators(
    vendor: GpuVendor, knobs: Collection[Knob], sysfs: Path | None = None
) -> list[SlottedActuator]:
    """The actuators of the ``knobs`` of a vendor's boards, on one session with its library."""
    boards = GpuBoards(vendor, sysfs)
    kinds: tuple[type[GpuPower | GpuClock], ...] = (GpuPower, GpuClock)
    return [kind(boards, vendor.clock) for kind in kinds if kind.knob in knobs]
