"""The session with a vendor's library: its GPUs, found, lost and recovered; and its source.

The session initialises the library, finds GPUs, and recovers lost ones; it is synchronous, and a
thread of the source makes its calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock

from wattspan.model import SECOND, Domain, Failure, Reading, Trouble
from wattspan.ports import Batch, CounterSource, SourceContext
from wattspan.sources.device_power import DevicePower
from wattspan.sources.driver_thread import DriverThreadSource
from wattspan.sources.gpu.calls import (
    GPU_NOT_FOUND,
    INVALID_ARGUMENT,
    NO_PERMISSION,
    NOT_FOUND,
    SESSION_ERRORS,
    UNINITIALIZED,
    DriverError,
    GpuLostError,
    SessionLostError,
    code_of,
)
from wattspan.sources.gpu.port import BoardPlace, GpuBoard, GpuSettings, GpuVendor
from wattspan.sources.gpu.sampler import GpuFindings, GpuSampler
from wattspan.util.throttle import RetryBackoff

FIRST_DELAY = SECOND
MAX_DELAY = 8 * SECOND
"""Limit for the delay of a retry: a GPU or driver that returns is measured within ten seconds."""


SYSFS = Path("/sys")
LONGEST_PERIOD = 16
"""Where an initialisation may end the settings of boards, the periods of failures between two
of them double for a lost board, from two up to 32 minutes."""

LOOK_INTERVAL = 5 * SECOND
SETTLING = 30 * SECOND
"""A driver has a device before it can be used: it is reported again after this time."""


class BoundDevices:
    """The devices of ``driver`` in ``<sysfs>/bus/pci/drivers``; none if it is not loaded.

    A driver's library lists its boards when it is initialised. Without a board that is missing
    there is no reason to initialise it again, so that a board which is added or bound later would
    stay unknown.
    """

    def __init__(self, sysfs: Path, driver: str) -> None:
        self._directory = sysfs / "bus/pci/drivers" / driver
        self._present: frozenset[str] | None = None
        self._seen: frozenset[str] = frozenset()
        self._powers: dict[str, DevicePower] = {}
        self._due = 0
        self._settled: int | None = None

    def appeared(self, now: int) -> bool:
        """True at the first look after a device was added, and once more after ``SETTLING``.

        ``now`` is monotonic. The first call finds the devices that are there already.
        """
        if now < self._due:
            return False
        self._due = now + LOOK_INTERVAL
        before, self._present = self._present, self._look()
        self._seen |= self._present
        if before is not None and self._present - before:
            self._settled = now + SETTLING
            return True
        if self._settled is not None and now >= self._settled:
            self._settled = None
            return True
        return False

    def has_lost(self, address: str) -> bool:
        """True if the driver had the device at ``address``, and has not; see ``appeared``."""
        return address in self._seen and address not in (self._present or ())

    def has_fallen(self, address: str) -> bool:
        """True if the device is off its bus: its configuration reads as ones."""
        with (
            contextlib.suppress(OSError),
            (self._directory / address / "config").open("rb") as file,
        ):
            return file.read(4) == b"\xff" * 4
        return False

    def power(self, address: str) -> DevicePower:
        """The power of the device at ``address``; "" is of one that is always awake."""
        known = self._powers.get(address)
        if known is None:
            known = self._powers[address] = DevicePower(self._directory / (address or "unknown"))
        return known

    def suspended(self, address: str) -> bool:
        """True if the kernel has powered the device down: a call of its driver would wake it."""
        return self.power(address).is_suspended()

    def all_suspended(self) -> bool:
        """True if there are devices, and all of them are suspended."""
        present = self._look()
        return bool(present) and all(map(self.suspended, present))

    def quiet(self, now: int) -> tuple[frozenset[str], frozenset[str]]:
        """The devices that must not be used at the monotonic time ``now``, and the others."""
        present = self._look()
        quiet = frozenset(one for one in present if self.power(one).is_quiet(now))
        return quiet, present - quiet

    def _look(self) -> frozenset[str]:
        try:
            return frozenset(entry.name for entry in self._directory.iterdir() if ":" in entry.name)
        except OSError:
            return frozenset()


def _new_backoff() -> RetryBackoff:
    return RetryBackoff(FIRST_DELAY, MAX_DELAY)


@dataclass(slots=True)
class LostGpu:
    """A GPU that does not answer, the reason, and the time of the next attempt.

    It is known by its sampler, or by its place if it never answered.
    """

    known: GpuSampler | BoardPlace
    code: int
    backoff: RetryBackoff
    fallen: bool = False  # off its bus: no initialisation finds it before it is reset

    @property
    def gpu(self) -> GpuSampler | None:
        return self.known if isinstance(self.known, GpuSampler) else None


class GpuSession:
    """All GPUs of a vendor on this host. Belongs to one thread; ``sample`` raises no Exception.

    While a call of one board hangs, the session may belong to another thread (HangIsolation), which
    leaves that board alone and does not initialise the library again.
    """

    def __init__(self, vendor: GpuVendor, settings: GpuSettings, context: SourceContext) -> None:
        self.vendor = vendor
        self._clock, self._settings, self._context = vendor.clock, settings, context
        self._bound = BoundDevices(context.sysfs or SYSFS, vendor.kernel_driver)
        self._appeared = False  # a device since the last initialisation
        self._initialised = False
        self._closed: frozenset[str] = frozenset()  # addresses left out of the initialisation
        self._gpus: dict[str, GpuSampler] = {}  # by domain id: indices change when a GPU goes
        self._lost: dict[str, LostGpu] = {}  # by domain id, or by place where that is not known
        self._backoff = _new_backoff()
        self._down: Failure | None = None
        self._domains: tuple[Domain, ...] = ()
        self._found = GpuFindings()  # by calls that were given up, too
        self._hung: dict[str, tuple[str, str, int]] = {}  # by domain id
        self._handover, self._ended = Lock(), False

    def sample(self, interval: int = 0) -> Batch:
        """Make all calls that are due, and try to recover lost GPUs."""
        found = self._found
        found.failures.clear()
        now = self._clock.monotonic()
        self._appeared |= self._bound.appeared(now)
        self._appeared |= any(not self._bound.power(one).is_quiet(now) for one in self._closed)
        due = self._must_initialise and self._backoff.is_due(now)
        asleep = (due or bool(self._lost)) and self._must_sleep(now)
        if asleep or self._initialised:
            tells = asleep and (self._lost or not self._gpus)
            self._down = self._unavailable(*_ASLEEP) if tells else None
        if due and not asleep:
            self._initialise(found)
        if self._initialised and not asleep:
            self._recover_lost(now, found)
        self._ask_all(now, found, interval)
        if self._initialised and not self._gpus:
            self._shut_down()
            self._backoff.failed(now)
        if found.readings:
            self._backoff.reset()
            if not self._lost:
                models = (gpu.identity.model for gpu in self._gpus.values())
                found.failures.extend(self.vendor.unmatched(models, self._settings))
        if self._down is not None:
            found.failures.append(self._down)
        found.failures.extend(map(self._lost_failure, self._lost.values()))
        self._found = GpuFindings()
        return Batch(
            domains=self._all_domains(),
            readings=tuple(found.readings),
            failures=tuple(found.failures),
            usages=tuple(found.usages),
            gpus=tuple(found.gpus),
            calls=self.vendor.library.calls,
        )

    @property
    def current_call(self) -> tuple[str, int] | None:
        """The call under way and the time of its start; other threads may read it."""
        call = self.vendor.library.current
        return None if call is None else (call.name, call.since)

    def next_read(self, now: int) -> int | None:
        """The time of the next read of a counter or a power between samples; None without one."""
        wanted = (gpu.next_read(now) for key, gpu in self._gpus.items() if key not in self._hung)
        return min((at for at in wanted if at is not None), default=None)

    def read_between(self, now: int) -> Sequence[Reading]:
        """Make the reads between samples that are due. The next sample reports errors of a GPU."""
        found = self._found
        self._read_due(now, found)
        readings, found.readings = found.readings, []
        return readings

    def _read_due(self, now: int, found: GpuFindings, besides: GpuSampler | None = None) -> None:
        for domain_id, gpu in self._gpus.items():
            at = None if domain_id in self._hung else gpu.next_read(now)
            if at is not None and at <= now and gpu is not besides:
                # An error costs the reads of one GPU until then.
                with contextlib.suppress(Exception), self._calls_of(domain_id):
                    gpu.read_between(found, suspended=self._bound.suspended(gpu.identity.pci))

    def close(self) -> None:
        """Release the GPUs: while a process holds them they cannot be reset or unloaded.

        While a call hangs, its thread does that when it has returned.
        """
        with self._handover:
            self._ended = True
            if self._hung:
                return
        for gpu in self._gpus.values():
            gpu.close()
        self._gpus.clear()
        self._shut_down()
        self.vendor.close()

    # ------------------------------------------------------------------- hangs

    def give_up(self) -> bool:
        with self._handover:
            call = self.vendor.library.give_up(self._clock.monotonic() - self._settings.deadline)
            if call is None:
                return False
            lost = self._lost.get(call.board)
            gpu = self._gpus.get(call.board) if lost is None else lost.gpu
            name = call.board if gpu is None else gpu.domain.name
            self._hung[call.board] = name, call.name, call.since
            return True

    def take_back(self, device: str) -> None:
        with self._handover:
            del self._hung[device]
            closes = self._ended and not self._hung
        if closes:
            self.vendor.library.thread.given_up = ""
            self.close()

    @property
    def hung(self) -> Sequence[tuple[str, str, int]]:
        return [*self._hung.copy().values()]

    @contextlib.contextmanager
    def _calls_of(self, domain_id: str) -> Iterator[None]:
        """The calls in the block are of one board."""
        self.vendor.library.thread.board = domain_id
        try:
            yield
        finally:
            self.vendor.library.thread.board = ""

    # -------------------------------------------------------------------- GPUs

    def _ask_all(self, now: int, found: GpuFindings, interval: int) -> None:
        rests = False
        for domain_id, gpu in sorted(self._gpus.items(), key=lambda one: one[1].is_slow):
            if self._initialised and any(one.is_searched for one in self._gpus.values()):
                self._read_due(self._clock.monotonic(), found, besides=gpu)
            if domain_id in self._hung:
                continue
            address = gpu.identity.pci
            power = self._bound.power(address)
            try:
                if power.is_quiet(now) or address in self._closed or not self._initialised:
                    gpu.pause(found, power.rest, suspended=power.is_suspended())
                    continue
                if not gpu.is_held_back(self._clock.monotonic()):
                    with self._calls_of(domain_id):
                        gpu.sample(found, interval)
                    gpu.backoff.reset()
                found.failures.extend(gpu.failures())
                can_suspend = partial(self.vendor.can_suspend, address)
                rests |= power.observe(now, idle=gpu.idle, can_suspend=can_suspend)
            except GpuLostError as error:
                self._lose(domain_id, error.code, found)
            except SessionLostError as error:
                self._fail(error.code, found)
                return
            except Exception as error:  # noqa: BLE001 - it costs one sample of one GPU
                found.failures.append(
                    self.vendor.messages.unexpected(gpu.domain.name, error, gpu.domain.id)
                )
        if rests and self.vendor.opens_single and not self._hung:
            self._close_quiet(now, found)

    def _close_quiet(self, now: int, found: GpuFindings) -> None:
        """Close the boards that begin to rest, which the library can only do for all at once."""
        quiet, others = self._bound.quiet(now)
        if others:
            self._initialise(found)
            return
        for gpu in self._gpus.values():
            gpu.close()
        self._shut_down()
        self._closed = quiet

    def _lose(self, domain_id: str, code: int, found: GpuFindings) -> None:
        gpu = self._gpus.pop(domain_id)
        gpu.lose(found)
        gpu.backoff.failed(self._clock.monotonic())
        self._lost[domain_id] = LostGpu(gpu, code, gpu.backoff)
        with self._calls_of(domain_id):
            gpu.close()

    def _lost_failure(self, lost: LostGpu) -> Failure:
        if isinstance(lost.known, BoardPlace):
            return self.vendor.messages.failure(lost.known.name, lost.code)
        domain = lost.known.domain
        return self.vendor.messages.failure(domain.name, lost.code, domain.id)

    def _recover_lost(self, now: int, found: GpuFindings) -> None:
        """Try to get a new handle of each lost GPU: its old handle is invalid."""
        again = False
        for key, lost in list(self._lost.items()):
            known = lost.gpu
            address = "" if known is None else known.identity.pci
            away = self._bound.has_lost(address) or self._bound.power(address).is_quiet(now)
            if away or key in self._hung or not lost.backoff.is_due(now):
                continue
            fell, lost.fallen = lost.fallen, bool(address) and self._bound.has_fallen(address)
            if fell or lost.fallen:
                lost.backoff.failed(now)
                again |= not lost.fallen
                continue
            try:
                with self._calls_of(key):
                    board = self._found_again(lost)
                    gpu = None if board is None else self._sampler(board)
            except Exception as error:  # noqa: BLE001 - the other GPUs are unaffected
                lost.code = code_of(error)
                if lost.code == NOT_FOUND:
                    lost.code = GPU_NOT_FOUND
                lost.backoff.failed(now)
                if lost.code in SESSION_ERRORS:
                    self._fail(lost.code, found)
                    return
                rounds, rest = divmod(lost.backoff.failures, self.vendor.reinitialise_after)
                seldom = rounds.bit_count() > 1 and rounds % LONGEST_PERIOD
                again |= not rest and not (seldom and self._ends_settings)
                continue
            if gpu is not None:
                self._gpus[gpu.identity.domain_id] = gpu
            del self._lost[key]
        if again:
            self._initialise(found)

    @property
    def _ends_settings(self) -> bool:
        """True if an initialisation may end the settings of a board that works."""
        works = self._gpus.values()
        return self.vendor.resets_settings and not all(gpu.device.keeps_settings for gpu in works)

    def _found_again(self, lost: LostGpu) -> GpuBoard | None:
        """The board with a new handle; None if it is of another vendor."""
        if not self.vendor.finds_again:
            raise DriverError(lost.code)
        if isinstance(lost.known, BoardPlace):
            return self.vendor.open(lost.known)
        identity = lost.known.identity
        # A search by the id would open the others, or call those that hang.
        if (self._closed or self._hung) and identity.pci:
            return self.vendor.open(self.vendor.place_at(identity.pci))
        return self.vendor.find(identity.domain_id)

    def _sampler(self, board: GpuBoard) -> GpuSampler:
        lost = self._lost.get(board.identity.domain_id)
        before = None if lost is None else lost.gpu
        return GpuSampler(
            self.vendor.device(board, self._settings, self._context),
            self._settings,
            emulated=self._context.emulated,
            epoch=0 if before is None else before.epoch + 1,
            backoff=_new_backoff() if before is None else before.backoff,
        )

    # ----------------------------------------------------------------- session

    @property
    def _must_initialise(self) -> bool:
        if not self._initialised or self._appeared:
            return True
        lists_once = not self.vendor.finds_again
        return lists_once and any(gpu.device.changed for gpu in self._gpus.values())

    def _must_sleep(self, now: int) -> bool:
        """True if boards are found by an initialisation, which none of them must see."""
        if self._initialised and self.vendor.finds_again:
            return False
        quiet, others = self._bound.quiet(now)
        return bool(quiet) and not others

    def _initialise(self, found: GpuFindings) -> None:
        """Initialise the library, again if it is; GPUs that stay keep their counters."""
        if self._hung:  # it would wait for the call, or invalidate its handle
            return
        self._shut_down()
        try:
            self.vendor.begin()
            self._initialised = True
            self._enumerate(found)
            self._appeared = False
        except DriverError as error:
            self._fail(error.code, found)
        except Exception as error:  # noqa: BLE001 - the binding itself failed: try again later
            failure = self.vendor.messages.unexpected(self.vendor.messages.label, error)
            self._fail(UNINITIALIZED, found, failure)

    def _enumerate(self, found: GpuFindings) -> None:
        """Open every GPU; a GPU that cannot be opened is lost, not the others."""
        gpus: dict[str, GpuSampler] = {}
        unnamed: dict[str, LostGpu] = {}
        for place in self._places():
            try:
                board = self.vendor.open(place)
                if board is None:
                    continue
                gpu = self._gpus.get(board.identity.domain_id) or self._sampler(board)
            except Exception as error:
                code = code_of(error)
                if code in SESSION_ERRORS:
                    raise
                if self._closed and code in _NOT_HERE:
                    continue
                unnamed[place.name] = self._unopened(place, code)
                continue
            if board.identity.domain_id in self._gpus:
                gpu.rebind(board)
            gpus[board.identity.domain_id] = gpu
        for domain_id in self._gpus.keys() - gpus.keys():
            if self._gpus[domain_id].identity.pci in self._closed:
                gpus[domain_id] = self._gpus[domain_id]
            else:
                self._lose(domain_id, GPU_NOT_FOUND, found)
        self._gpus = gpus
        self._lost = self._still_lost(unnamed)
        self._down = None
        if not gpus and not self._lost:
            self._down = self._unavailable(*self.vendor.messages.no_gpu)

    def _places(self) -> list[BoardPlace]:
        """The boards to open: all of the library's, or those that are neither asleep nor rest."""
        quiet, others = self._bound.quiet(self._clock.monotonic())
        self._closed = quiet if self.vendor.opens_single else frozenset()
        if self._closed:
            return [self.vendor.place_at(address) for address in sorted(others)]
        return self.vendor.places()

    def _unopened(self, place: BoardPlace, code: int) -> LostGpu:
        """A GPU that never answered; its attempts become fewer through initialisations."""
        lost = self._lost.get(place.name)
        if lost is not None:
            lost.known, lost.code = place, code
            return lost
        backoff = _new_backoff()
        backoff.failed(self._clock.monotonic())
        return LostGpu(place, code, backoff)

    def _still_lost(self, unnamed: dict[str, LostGpu]) -> dict[str, LostGpu]:
        """The lost GPUs. One that is known by its id is not listed a second time by its place."""
        lost = {
            domain_id: entry
            for domain_id, entry in self._lost.items()
            if entry.gpu is not None and domain_id not in self._gpus
        }
        for entry in lost.values():
            if entry.code in SESSION_ERRORS:  # of the last session; this one works
                entry.code = GPU_NOT_FOUND
        return {**lost, **dict(list(unnamed.items())[len(lost) :])}

    def _fail(self, code: int, found: GpuFindings, failure: Failure | None = None) -> None:
        """End the session: the driver or the connection to it is gone, and every handle with it.

        A board that hangs is left to its thread. It is lost by the first call after that.
        """
        for domain_id in self._gpus.keys() - self._hung.keys():
            self._lose(domain_id, code, found)
        self._shut_down()
        self._backoff.failed(self._clock.monotonic())
        self._down = failure or self.vendor.messages.failure(self.vendor.messages.label, code)

    def _shut_down(self) -> None:
        if self._initialised and not self._hung:
            self._initialised = False
            with contextlib.suppress(DriverError):
                self.vendor.end()

    def _unavailable(self, cause: str, remedy: str, trouble: Trouble = Trouble.ABSENT) -> Failure:
        messages = self.vendor.messages
        return Failure(messages.source, messages.label, trouble, cause, remedy)

    def _all_domains(self) -> tuple[Domain, ...]:
        """The present and the lost; the same object while nothing about them changes."""
        present = [one for gpu in self._gpus.values() for one in (gpu.domain, *gpu.parts)]
        lost = [entry.gpu.domain for entry in self._lost.values() if entry.gpu is not None]
        domains = (*present, *lost)
        if [*map(id, domains)] != [*map(id, self._domains)]:  # callers compare by identity
            self._domains = domains
        return self._domains


_NOT_HERE = frozenset({NOT_FOUND, GPU_NOT_FOUND, INVALID_ARGUMENT, NO_PERMISSION})
"""The answers for a board of the host that a container has not."""

_ASLEEP = (
    "all GPUs are suspended, and a call would wake them",
    "They are read as soon as a program uses one.",
    Trouble.SUSPENDED,
)


def open_gpus(vendor: GpuVendor, settings: GpuSettings, context: SourceContext) -> CounterSource:
    """The source of a vendor's GPUs, read in a thread of its own.

    A driver that is not loaded is no reason for an error: it can be loaded at any time.
    """
    messages, session = vendor.messages, GpuSession(vendor, settings, context)
    source = DriverThreadSource(
        messages.source,
        session,
        vendor.clock,
        settings,
        messages.label,
        messages.hang,
        isolation=session if vendor.is_thread_safe else None,
    )
    source.start()
    return source
