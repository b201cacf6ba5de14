"""The static powers of the GPUs of the host, and the facts for advice.

The static power of a board is the operator's figure, else the fit of windows with different shares
of waiting time (:mod:`wattspan.advice.static_power`), else its learned idle power, which is a
lower bound. The poller adds ticks, the joiner adds waiting spans; results may be read from any
thread. Without waiting spans no window is kept.

Spans have names and times that their sender chooses. The time of a process is kept only while it is
a user of a board, which the driver tells, and only if it may be in a window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from wattspan.advice.rules import BoardClockSample, BoardFacts, BoardUse, UseFacts
from wattspan.advice.static_power import (
    BoardStaticPower,
    StaticPowerFit,
    WaitingWindow,
)
from wattspan.model import (
    MILLISECOND,
    SECOND,
    Attribution,
    Consumer,
    Domain,
    DomainAccount,
    GpuStatus,
    HwType,
    Milliwatts,
    Payer,
    Principal,
    Snapshot,
    StaticBasis,
    StaticPower,
    Tick,
)
from wattspan.sharing.fair_pool import FairPool, Overflow, share_path
from wattspan.spans.values import Period, SpanColumns, merged_periods

WINDOW = 4 * SECOND
"""Longer than most steps: a window has a part of a step at each edge, which is noise."""

WINDOW_DELAY = 10 * SECOND
"""The delay after which a window is evaluated: exporters send spans every five seconds."""

ACTIVE_TIME = 60 * SECOND
"""Windows are kept this long after the last waiting span."""

UPDATE_EVERY = SECOND

PAUSE = 3 * SECOND
"""A user that does not use its board for this time has left it."""

_ALONE = 0.95
"""The least share of a board's energy of its idle power and its only user.

Not a share of the active energy alone: at little power that is smaller than its own noise.
"""

_IDLE_NOISE = 0.1  # unattributed part of the energy of a board without a user
_MAX_WAITS = 4096  # periods of a process that are kept until their windows are evaluated
_MAX_OUTSIDE = 0.5  # share of time outside of spans, above which a window is another activity
_MAX_CLOCKS = 1024  # samples of the clock and the power of a busy board
_MAX_USERS = 512  # of all boards, with facts; beyond it the owner with most loses its oldest
_MAX_WAITING = 64  # processes whose time in spans is kept, 1 MB of each at most
_MAX_FUTURE = MILLISECOND  # the permitted end of a span after its receipt: an error of the clocks
_STEADY_CLOCKS = 16  # samples of the clock of which the median selects the bin


@dataclass(slots=True)
class _WaitingProcess:
    """The recent time of a process in waiting spans and in any span, as periods.

    ``works``: it has sent other spans, so that its time outside of spans is known.
    """

    works: bool = False
    waits: deque[Period] = field(default_factory=lambda: deque(maxlen=_MAX_WAITS))
    spans: deque[Period] = field(default_factory=lambda: deque(maxlen=_MAX_WAITS))

    def expire(self, before: int) -> bool:
        """Forget earlier periods; True if no waiting time is left."""
        for periods in (self.waits, self.spans):
            while periods and periods[0][1] < before:
                periods.popleft()
        return not self.waits


class _BoardInterval(NamedTuple):
    start: int
    end: int
    energy: int
    user: Payer | None  # the only user


@dataclass(slots=True)
class _Board:
    """One GPU: intervals of which windows are made, and sums for advice."""

    domain: Domain
    fits: BoardStaticPower = field(default_factory=BoardStaticPower)
    intervals: deque[_BoardInterval] = field(default_factory=deque)
    clocks: deque[int] = field(default_factory=lambda: deque(maxlen=_STEADY_CLOCKS))
    samples: deque[BoardClockSample] = field(default_factory=lambda: deque(maxlen=_MAX_CLOCKS))
    status: GpuStatus | None = None
    uses: dict[Payer, BoardUse] = field(default_factory=dict)
    unused_energy: int = 0
    unused_time: int = 0
    observed_time: int = 0
    last_user: int = -PAUSE  # the time of the last use
    user: Payer | None = None  # the only user at that time

    @property
    def clock(self) -> int | None:
        """The median of the recent clocks while the board was used."""
        return sorted(self.clocks)[len(self.clocks) // 2] if self.clocks else None


class StaticPowerLearner:
    """Learns static powers; ``powers`` are the present ones, by domain."""

    def __init__(
        self,
        waiting: Iterable[str],
        view: Callable[[], Snapshot],
        lock: AbstractContextManager[object] = nullcontext(),  # noqa: B008 - without state
        principal: Callable[[Consumer], Principal | None] = lambda _: None,
    ) -> None:
        """``waiting`` are the names of spans in which a process waits for others.

        ``lock`` is held while the state is changed or read, for threads that share it. Each
        ``principal`` has a share of the remembered users of boards.
        """
        self.waiting = frozenset(waiting)
        self._view = view
        self._lock = lock
        self._principal = principal
        self._boards: dict[str, _Board] = {}
        self._users: FairPool[tuple[str, Payer]] = FairPool(_MAX_USERS, Overflow.REPLACE)
        self._processes: dict[Consumer, _WaitingProcess] = {}
        self._places: FairPool[Consumer] = FairPool(_MAX_WAITING, Overflow.REPLACE)  # of those
        self._services: dict[Payer, str] = {}  # of users of boards, also after their exit
        self._active_until = 0
        self._updated = 0
        self._powers: Mapping[str, StaticPower] = MappingProxyType({})

    def powers(self) -> Mapping[str, StaticPower]:
        """The present static power of each GPU with a known one, by domain."""
        return self._powers

    # ----------------------------------------------------------------- for the joiner's thread

    def add_spans(self, process: Consumer, spans: SpanColumns, now: int) -> None:
        """Add the waiting spans among those that were received at ``now`` from a board's user.

        Spans that end later, or too early for a window, are ignored.
        """
        if not self._boards:
            return
        received = [
            (name in self.waiting, (start, end))
            for name, start, end in zip(spans.name, spans.start, spans.end, strict=True)
            if now - ACTIVE_TIME <= end <= now + _MAX_FUTURE
        ]
        waits = [period for waits, period in received if waits]
        if not waits and process not in self._processes:
            return
        with self._lock:
            known = self._known(process)
            if known is None:
                return
            if waits:
                self._active_until = now + ACTIVE_TIME
                known.works = known.works or len(waits) < len(received)
            known.waits.extend(merged_periods(waits))
            known.spans.extend(merged_periods(period for _, period in received))

    def _known(self, process: Consumer) -> _WaitingProcess | None:
        """The recent time of a process; None for one that is no user of a board."""
        if process in self._processes:
            self._places.touch(process)
            return self._processes[process]
        if not any(process in board.uses for board in self._boards.values()):
            return None
        admission = self._places.admit(process, share_path(self._principal(process)))
        for displaced in admission.displaced:
            del self._processes[displaced]
        return self._processes.setdefault(process, _WaitingProcess()) if admission else None

    # ----------------------------------------------------------------- for the poller's thread

    def apply(self, tick: Tick, settled: Sequence[Attribution]) -> None:
        """Add a tick and the attributions that it has settled."""
        for domains in tick.domains.values():
            for domain in domains:
                if domain.hw_type is HwType.GPU and domain.resource is not None:
                    known = self._boards.get(domain.id)
                    if known is None:
                        self._boards[domain.id] = _Board(domain)
                    else:
                        known.domain = domain
        if not self._boards:
            return
        with self._lock:
            for attribution in settled:
                board = self._boards.get(attribution.interval.domain_id)
                if board is not None:
                    self._add(board, attribution, tick.at.mono)
            if tick.at.mono - self._updated >= UPDATE_EVERY:
                self._updated = tick.at.mono
                self._update(tick.at.mono)

    def _add(self, board: _Board, attribution: Attribution, now: int) -> None:
        interval = attribution.interval
        board.observed_time += interval.duration
        user: Payer | None = None
        if attribution.shares:
            user, energy = max(attribution.shares, key=lambda share: share.energy)
            board.last_user = now
            if attribution.idle + energy < _ALONE * interval.energy:
                user = None
            board.user = user
        elif now - board.last_user < PAUSE:  # the host prepares the next step
            user = board.user
        elif attribution.unattributed <= _IDLE_NOISE * interval.energy:
            board.unused_energy += interval.energy
            board.unused_time += interval.duration
        if user is not None:
            use = self._use(board, user)
            if use is not None:
                use.energy += interval.energy
                use.time += interval.duration
                if board.status is not None and board.status.utilisation is not None:
                    use.busy += round(interval.duration * board.status.utilisation)
                    use.metered += interval.duration
        if self._active_until > now:
            board.intervals.append(
                _BoardInterval(interval.start.mono, interval.end.mono, interval.energy, user)
            )
        elif board.intervals:
            board.intervals.clear()

    def _use(self, board: _Board, user: Payer) -> BoardUse | None:
        """The use of a board by ``user``, perhaps in the place of one that is unused for longer."""
        item = board.domain.id, user
        if user in board.uses:
            self._users.touch(item)
            return board.uses[user]
        principal = self._principal(user) if isinstance(user, Consumer) else None
        admission = self._users.admit(item, share_path(principal))
        for key, displaced in admission.displaced:
            del self._boards[key].uses[displaced]
        return board.uses.setdefault(user, BoardUse()) if admission else None

    def _update(self, now: int) -> None:
        """Evaluate windows, and renew the static powers."""
        view = self._view()
        self._remember_services(view)
        statuses = {status.domain_id: status for status in view.gpus}
        accounts = {account.domain.id: account for account in view.domains}
        for key, board in self._boards.items():
            status = statuses.get(key)
            if status is not None and (board.status is None or status.at != board.status.at):
                self._add_status(board, status, accounts.get(key), now)
            account = accounts.get(key)
            self._evaluate(board, now, None if account is None else account.idle_power)
        for process, known in list(self._processes.items()):
            if known.expire(now - ACTIVE_TIME):
                del self._processes[process]
                self._places.remove(process)
        self._powers = MappingProxyType(
            {
                key: power
                for key, board in self._boards.items()
                if (power := _static_power(board, accounts.get(key))) is not None
            }
        )

    def _remember_services(self, view: Snapshot) -> None:
        users = {user for board in self._boards.values() for user in board.uses}
        self._services = {one: name for one, name in self._services.items() if one in users}
        for service, processes in view.spans.senders.items():
            self._services.update((one, service) for one in processes if one in users)

    def _add_status(
        self, board: _Board, status: GpuStatus, account: DomainAccount | None, now: int
    ) -> None:
        board.status = status
        if status.sm_clock_hz is None or now - board.last_user > 3 * SECOND:
            return
        if status.utilisation:
            board.clocks.append(status.sm_clock_hz)
            power = status.power_instant or (None if account is None else account.power)
            if power is not None:
                capped = "power_cap" in (status.throttling or ())
                board.samples.append(BoardClockSample(status.sm_clock_hz, power, capped))

    def _evaluate(self, board: _Board, now: int, idle: Milliwatts | None) -> None:
        """Make windows of the intervals whose spans have been received."""
        intervals = board.intervals
        while intervals and intervals[-1].end - intervals[0].start >= WINDOW:
            edge = intervals[0].start + WINDOW
            count, end = next((i, one.end) for i, one in enumerate(intervals, 1) if one.end >= edge)
            if end > now - WINDOW_DELAY:
                return
            self._add_window(board, [intervals.popleft() for _ in range(count)], idle)

    def _add_window(
        self, board: _Board, parts: Sequence[_BoardInterval], idle: Milliwatts | None
    ) -> None:
        start, end, user = parts[0].start, parts[-1].end, parts[0].user
        length = sum(one.end - one.start for one in parts)
        alone = user is not None and all(one.user == user for one in parts)
        if not alone or not isinstance(user, Consumer) or length < end - start:
            return
        known = self._processes.get(user) or _WaitingProcess()
        waiting = _covered(known.waits, start, end)
        outside = 1 - _covered(known.spans, start, end) / length if known.works else 0.0
        if outside <= _MAX_OUTSIDE:
            power = sum(one.energy for one in parts) * 1e6 / length
            celsius = None if board.status is None else board.status.temperature_celsius
            window = WaitingWindow.of(waiting / length, outside, power, idle, celsius)
            board.fits.add(board.clock, window)
        use = board.uses.get(user)
        if use is not None:
            use.waiting += waiting
            use.windows += length

    # ----------------------------------------------------------------------------- for queries

    def facts(self, may_see: Callable[[Consumer], bool] = lambda _: True) -> tuple[BoardFacts, ...]:
        """The facts about each board since the start of the agent; uses of visible processes."""
        powers = self._powers
        view = self._view()
        now = view.at.mono
        accounts = {account.domain.id: account for account in view.domains}
        owners = {row.owner for row in view.spans.rows if row.owner}
        only = f"@{owners.pop()}" if len(owners) == 1 else ""  # tells nothing apart

        def service(user: Payer) -> str:
            return self._services.get(user, "").removesuffix(only)

        with self._lock:
            self._remember_services(view)
            return tuple(
                BoardFacts(
                    board=key,
                    name=board.domain.name,
                    provenance=board.domain.provenance,
                    observed=board.observed_time,
                    unused=board.unused_time,
                    unused_energy=board.unused_energy,
                    in_use=board.last_user > 0 and now - board.last_user < ACTIVE_TIME,
                    static=powers.get(key),
                    fit=board.fits.fit(board.clock),
                    idle_power=account.idle_power if (account := accounts.get(key)) else None,
                    samples=tuple(board.samples),
                    uses=tuple(
                        UseFacts(service(user), use.copy())
                        for user, use in board.uses.items()
                        if isinstance(user, Consumer) and may_see(user)
                    ),
                )
                for key, board in self._boards.items()
            )


def _static_power(board: _Board, account: DomainAccount | None) -> StaticPower | None:
    """The operator's figure, else the fit, else the idle power; None if none is known."""
    if board.domain.static_power is not None:
        return StaticPower(board.domain.static_power, StaticBasis.CONFIGURED)
    fit = board.fits.fit(board.clock)
    if isinstance(fit, StaticPowerFit):
        return StaticPower(fit.power, StaticBasis.FITTED)
    if account is not None and account.idle_power is not None:
        return StaticPower(account.idle_power, StaticBasis.LOWER_BOUND)
    return None


def _covered(periods: Iterable[Period], start: int, end: int) -> int:
    """The nanoseconds from ``start`` to ``end`` that are inside any of the periods."""
    parts = ((max(begin, start), min(stop, end)) for begin, stop in merged_periods(periods))
    return sum(stop - begin for begin, stop in parts if stop > begin)
