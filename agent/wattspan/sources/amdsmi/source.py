"""The ``amdsmi`` source plugin: AMD GPUs, and the session with AMD SMI.

The library finds boards and their partitions when it is initialised, and never again. So it is
initialised anew, which keeps the settings and counters of all boards, to find a board that was
lost, and after a board was divided differently.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from wattspan.model import SECOND, Domain, Failure, Trouble
from wattspan.ports import Batch, Clock, CounterSource, SourceContext, SourceError, SourcePlugin
from wattspan.sources import gpu_calls
from wattspan.sources.amdsmi.calls import (
    AMD,
    LABEL,
    SOURCE,
    AmdSmiError,
    AmdSmiLibrary,
    BindingError,
    call_failure,
    load_binding,
)
from wattspan.sources.amdsmi.device import AmdSmiSettings, BoardIdentity, BoardSampler
from wattspan.sources.bound_devices import SYSFS, BoundDevices
from wattspan.sources.driver_thread import DriverThreadSource
from wattspan.sources.gpu_calls import GpuLostError, SessionLostError
from wattspan.sources.gpu_sampling import GpuFindings, unless_unchanged
from wattspan.util.text import printable
from wattspan.util.throttle import RetryBackoff

KERNEL_DRIVER = "amdgpu"
FIRST_DELAY = SECOND
MAX_DELAY = 8 * SECOND
"""Limit for the delay of an initialisation: a board that returns is measured within ten seconds."""

MAX_HANDLES = 512
_ADDRESS = re.compile(r"([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2})\.([0-7])")
_MAX_TEXT = 96


@dataclass(slots=True)
class LostBoard:
    """A board that does not answer, and the reason."""

    board: BoardSampler
    code: int

    @property
    def failure(self) -> Failure:
        domain = self.board.domain
        return call_failure(domain.name, self.code, domain.id)


def board_address(text: Any) -> tuple[str, int]:
    """The address of a board's first PCI function, and the function or partition, of a BDF.

    ValueError for any other text.
    """
    found = _ADDRESS.fullmatch(str(text).lower())
    if found is None:
        raise ValueError(f"{text!r} is not the PCI address of a GPU")
    return f"{found[1]}.0", int(found[2])


def list_boards(library: AmdSmiLibrary) -> dict[str, list[Any]]:
    """The handles of each board's partitions, in their order, by the board's address.

    A handle that does not tell its address is left out. AmdSmiError if the session fails.
    """
    boards: dict[str, list[tuple[int, Any]]] = {}
    for handle in library.call("amdsmi_get_processor_handles")[:MAX_HANDLES]:
        try:
            bdf = library.call("amdsmi_get_gpu_device_bdf", handle)
            address, function = board_address(bdf)
        except (AmdSmiError, ValueError) as error:
            if gpu_calls.code_of(error) in gpu_calls.SESSION_ERRORS:
                raise
            continue
        boards.setdefault(address, []).append((function, handle))
    return {
        address: [handle for _, handle in sorted(found, key=lambda each: each[0])]
        for address, found in boards.items()
    }


def is_amd(asic: Mapping[str, Any]) -> bool:
    """False for the chip of another vendor."""
    return bool(asic.get("vendor_id", AMD) == AMD)


def identify_board(
    address: str, index: int, asic: Mapping[str, Any], uuid: Any, driver: Any = ""
) -> BoardIdentity:
    """The identity by the library's answers."""
    return BoardIdentity(
        address,
        uuid=_printable(uuid),
        index=index,
        model=_printable(asic.get("market_name", "")),
        driver=_printable(driver),
    )


class AmdSmiSession:
    """All boards of the host. Belongs to one thread; ``sample`` never raises."""

    near_an_edge = False  # accumulators move every millisecond

    def __init__(self, amdsmi: Any, settings: AmdSmiSettings, context: SourceContext) -> None:
        self._clock = context.clock
        self._context = context
        self._settings = settings
        self._library = AmdSmiLibrary(amdsmi, context.clock)
        self._bound = BoundDevices(context.sysfs or SYSFS, KERNEL_DRIVER)
        self._appeared = False  # a device since the last initialisation
        self._initialised = False
        self._boards: dict[str, BoardSampler] = {}  # by address: indices change when one goes
        self._lost: dict[str, LostBoard] = {}
        self._unopened: dict[str, int] = {}  # addresses of boards that never answered, with codes
        self._backoff = RetryBackoff(FIRST_DELAY, MAX_DELAY)
        self._down: Failure | None = None
        self._domains: tuple[Domain, ...] = ()

    def sample(self) -> Batch:
        """Make all calls that are due, and look for lost boards."""
        found = GpuFindings()
        now = self._clock.monotonic()
        self._appeared |= self._bound.appeared(now)
        if self._backoff.is_due(now) and self._must_initialise:
            if self._bound.all_suspended():
                self._down = _ASLEEP
            else:
                self._initialise(now, found)
        if self._initialised:
            self._ask_all(now, found)
        return Batch(
            domains=self._all_domains(),
            readings=tuple(found.readings),
            failures=(*found.failures, *self._failures()),
            usages=tuple(found.usages),
            gpus=tuple(found.gpus),
        )

    @property
    def current_call(self) -> tuple[str, int] | None:
        """The call under way and the time of its start; other threads may read it."""
        return self._library.current

    def next_edge_read(self, now: int) -> int | None:
        """None: an accumulator needs no extra reads."""
        del now
        return None

    def read_edges(self, now: int) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Release the boards."""
        self._boards.clear()
        self._shut_down()

    # ------------------------------------------------------------------------------ session

    @property
    def _must_initialise(self) -> bool:
        missing = self._lost or self._unopened or self._appeared or not self._boards
        return bool(missing) or any(board.changed for board in self._boards.values())

    def _initialise(self, now: int, found: GpuFindings) -> None:
        """Initialise the library, again if it is; boards that stay keep their counters."""
        self._shut_down()
        try:
            self._library.call("amdsmi_init")
            self._initialised = True
            self._enumerate(found)
            self._appeared = False
        except AmdSmiError as error:
            self._fail(error.value, now, found)
        except Exception as error:  # noqa: BLE001 - the package itself failed: try again later
            self._fail(gpu_calls.UNINITIALIZED, now, found, _unexpected(LABEL, error))
        else:
            self._down = None if self._boards or self._lost or self._unopened else _NO_GPU
            if self._must_initialise:
                self._backoff.failed(now)
            else:
                self._backoff.reset()

    def _enumerate(self, found: GpuFindings) -> None:
        """Open every board; a board that cannot be opened does not affect the others."""
        handles = list_boards(self._library)
        boards: dict[str, BoardSampler] = {}
        self._unopened.clear()
        for index, (address, partitions) in enumerate(handles.items()):
            known = self._boards.get(address)
            if known is not None:
                known.rebind(partitions)
                boards[address] = known
                continue
            try:
                board = self._open(address, partitions, index)
            except AmdSmiError as error:
                if error.value not in gpu_calls.GPU_ERRORS:
                    raise
                self._unopened[address] = error.value
            else:
                if board is not None:
                    boards[address] = board
        for address in self._boards.keys() - boards.keys():
            self._lose(address, gpu_calls.GPU_NOT_FOUND, found)
        self._boards = boards
        for address in boards:
            self._lost.pop(address, None)

    def _open(self, address: str, partitions: list[Any], index: int) -> BoardSampler | None:
        """The board at ``address``; None for one of another vendor."""
        first = partitions[0]
        asic = self._optional("amdsmi_get_gpu_asic_info", first) or {}
        if not is_amd(asic):
            return None
        uuid = self._optional("amdsmi_get_gpu_device_uuid", first) or ""
        driver = self._optional("amdsmi_get_gpu_driver_info", first) or {}
        identity = identify_board(address, index, asic, uuid, driver.get("driver_version", ""))
        lost = self._lost.get(address)
        epoch = 0 if lost is None else lost.board.epoch + 1
        return BoardSampler(
            self._library, partitions, identity, self._context, self._settings, epoch
        )

    def _optional(self, name: str, handle: Any) -> Any:
        """The answer of a call that may fail without consequences; None if it does.

        AmdSmiError if the board or the session is lost.
        """
        try:
            return self._library.call(name, handle)
        except AmdSmiError as error:
            if error.value in gpu_calls.GPU_ERRORS | gpu_calls.SESSION_ERRORS:
                raise
        except ValueError:  # the package cannot parse what the library tells
            pass
        return None

    def _ask_all(self, now: int, found: GpuFindings) -> None:
        for address, board in list(self._boards.items()):
            if self._bound.suspended(address):
                board.pause(found)
                continue
            try:
                board.sample(found)
            except GpuLostError as error:
                self._lose(address, error.code, found)
            except SessionLostError as error:
                self._fail(error.code, now, found)
                return
            except Exception as error:  # noqa: BLE001 - it costs one sample of one board
                found.failures.append(_unexpected(board.domain.name, error, board.domain.id))
            else:
                found.failures.extend(board.failures())

    def _lose(self, address: str, code: int, found: GpuFindings) -> None:
        board = self._boards.pop(address)
        board.flush_usage(found)
        self._lost[address] = LostBoard(board, code)

    def _fail(
        self, code: int, now: int, found: GpuFindings, failure: Failure | None = None
    ) -> None:
        """End the session: the driver or the connection to it is gone, and every handle with it."""
        for address in list(self._boards):
            self._lose(address, code, found)
        for lost in self._lost.values():
            lost.code = code
        self._shut_down()
        self._backoff.failed(now)
        self._down = failure or call_failure(LABEL, code)

    def _shut_down(self) -> None:
        if self._initialised:
            self._initialised = False
            with contextlib.suppress(AmdSmiError):
                self._library.call("amdsmi_shut_down")

    def _failures(self) -> Iterator[Failure]:
        if self._down is not None:
            yield self._down
        for lost in self._lost.values():
            yield lost.failure
        for address, code in self._unopened.items():
            yield call_failure(f"AMD GPU {address}", code)

    def _all_domains(self) -> tuple[Domain, ...]:
        """The present and the lost; the same object while nothing about them changes."""
        lost = (entry.board.domain for entry in self._lost.values())
        present = (board.domain for board in self._boards.values())
        self._domains = unless_unchanged((*present, *lost), self._domains)
        return self._domains


_ASLEEP = Failure(
    SOURCE,
    LABEL,
    Trouble.ABSENT,
    "all GPUs are suspended, and a call would wake them",
    "They are read as soon as a program uses one.",
)
_NO_GPU = Failure(
    SOURCE,
    LABEL,
    Trouble.ABSENT,
    "the library finds no GPU",
    "Look at lspci and dmesg, and at the rights of /dev/kfd and /dev/dri/renderD*; the agent keeps"
    " trying.",
)


def _unexpected(thing: str, error: Exception, domain_id: str | None = None) -> Failure:
    cause = f"an unexpected {type(error).__name__}: {error}"
    remedy = "Please report it with the versions of ROCm and of the package amdsmi."
    return Failure(SOURCE, thing, Trouble.MALFORMED, cause, remedy, domain_id)


def _printable(value: Any) -> str:
    """Text of the driver, printable; "" for "N/A"."""
    text = printable(str(value)[:_MAX_TEXT])
    return "" if text == "N/A" else text


class AmdSmiSource(DriverThreadSource):
    """The boards of an AmdSmiSession, read in a thread of their own."""

    name = SOURCE

    def __init__(self, session: AmdSmiSession, clock: Clock, settings: AmdSmiSettings) -> None:
        super().__init__(session, clock, settings, LABEL, "Look for messages of amdgpu in dmesg")


def open_amdsmi(settings: AmdSmiSettings, context: SourceContext) -> CounterSource | None:
    """The AMD GPUs of this host; None without the package or its library, unless enabled is true.

    A driver that is not loaded is no reason for None: it can be loaded at any time.
    """
    if settings.enabled is False:
        return None
    try:
        amdsmi = _amdsmi_of(context)
    except BindingError as error:
        if settings.enabled is True:
            raise SourceError(
                f'Cannot read AMD GPUs: {error} Or set sources.amdsmi.enabled to "auto".'
            ) from None
        return None
    if amdsmi is None:
        return None
    source = AmdSmiSource(AmdSmiSession(amdsmi, settings, context), context.clock, settings)
    source.start()
    return source


def _amdsmi_of(context: SourceContext) -> Any:
    """The AMD SMI to ask: an emulated host's own, and never the real one in its stead."""
    if context.emulated or context.amdsmi is not None:
        return context.amdsmi
    return load_binding()


def has_driver(context: SourceContext) -> bool:
    """True if the kernel has the driver; a search for the package takes 20 ms."""
    return ((context.sysfs or SYSFS) / "bus/pci/drivers" / KERNEL_DRIVER).is_dir()


plugin = SourcePlugin(settings=AmdSmiSettings, open=open_amdsmi, present=has_driver)
