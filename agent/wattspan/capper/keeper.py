"""What stands on each knob: the least of what tuner, operator and budget want, or the original."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

from wattspan.capper.audit import Deed, Event
from wattspan.capper.bounds import Bounds, Rules, bounds, stepped
from wattspan.capper.devices import is_power, named
from wattspan.capper.journal import JournalError
from wattspan.capper.leases import Grant, Leases
from wattspan.capper.protocol import Refusal
from wattspan.capper.writer import Cause, Writer, foreign
from wattspan.model import MILLISECOND, SECOND, CapKey, CapRow, KnobState
from wattspan.ports import CapsError, Clock

LOOK_EVERY = 10 * SECOND
"""How often devices that nobody holds are looked at, and new ones looked for."""
_FIRST_REST, _LONGEST_REST = SECOND, 60 * SECOND
_OBEYS_WITHIN = 5 * SECOND
_UNWANTED = Cause(why="no cap is wanted any more")
_NONE: Mapping[CapKey, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Imposed:
    """What holds without a lease: the operator's ``fixed`` caps, and each device's share.

    ``limit`` is the budget of which the ``shares`` are, in milliwatts.
    """

    fixed: Mapping[CapKey, int] = field(default_factory=lambda: _NONE)
    shares: Mapping[CapKey, int] = field(default_factory=lambda: _NONE)
    limit: int | None = None


class Peer(NamedTuple):
    """Who asks, as the kernel proves it."""

    pid: int | None = None
    uid: int | None = None


NOBODY = Peer()


class _Rest(NamedTuple):
    until: int
    length: int
    error: CapsError


class Keeper:
    """The one place where caps are decided; belongs to one thread.

    ``turn`` is to be called every second or so, whatever else happens.
    """

    def __init__(
        self,
        writer: Writer,
        clock: Clock,
        rules: Rules,
        *,
        longest: int,
        record: Callable[[Event], None],
        tunable: Collection[str] = (),
    ) -> None:
        """``tunable`` names the devices a tuner may hold; none named: all."""
        self.leases = Leases(longest)
        self.imposed = Imposed()
        self.journal_trouble = ""
        self.suspended = False
        """Whether what was imposed is let go as well, for somebody has asked for everything."""
        self._writer, self._devices = writer, writer.devices
        self._clock, self._rules, self._record = clock, rules, record
        self._tunable = tunable
        self._rests: dict[CapKey, _Rest] = {}
        self._disobeyed: dict[CapKey, int] = {}
        self._peers: dict[int, Peer] = {}
        self._looked: int | None = None

    # ---------------------------------------------------------------------------- what is asked

    def hold(
        self,
        holder: int,
        job: str,
        wishes: Mapping[CapKey, int],
        why: str,
        *,
        lease: int = 0,
        peer: Peer = NOBODY,
        within: int = 500 * MILLISECOND,
    ) -> None:
        """Hold exactly ``wishes`` for ``job``, or nothing: CapsError says what was refused.

        It returns after about ``within`` nanoseconds even if not every device is set by then; the
        next turn goes on.
        """
        now = self._clock.now()
        self._refuse(holder, job, wishes)
        had = self.leases.grant_of(holder, job)
        self._peers[holder] = peer
        caps = {key: self._one_step(key, value) for key, value in wishes.items()}
        since = had.since if had is not None and had.asked == wishes else now
        grant = Grant(job, why, since, dict(wishes), caps)
        self.leases.grant(holder, grant, length=lease, now=now.mono)
        concerned = {*wishes, *(had.caps if had is not None else ())}
        troubles = self._settle(concerned, until=now.mono + within)
        refused = next((troubles[key] for key in wishes if key in troubles), None)
        if refused is not None:
            self._give_up(self.leases.release(holder, job))
            raise refused

    def renew(self, holder: int) -> None:
        """The holder's loop runs."""
        self.leases.renew(holder, self._clock.monotonic())

    def release(self, holder: int, job: str = "") -> None:
        """Give back what ``holder`` holds for ``job``, or all it holds."""
        self._give_up(self.leases.release(holder, job))

    def gone(self, holder: int) -> None:
        """The connection has ended, and its leases with it."""
        self.release(holder)
        self._peers.pop(holder, None)

    def restore(self, *, accept: bool = False) -> tuple[CapsError, ...]:
        """Give everything back, imposed caps too; what could not be given back, and why.

        What somebody else has written is left, and with ``accept`` is the original from now on.
        """
        self.suspended = True
        self.leases.clear()
        self._rests.clear()
        writer = self._writer
        for key, entry in list(writer.entries.items()):
            if accept and entry.foreign is not None:
                writer.accept(key)
        troubles = self._settle(set(writer.entries))
        return tuple(e for e in troubles.values() if e.refusal != Refusal.FOREIGN)

    # ------------------------------------------------------------------------ what time brings

    def turn(self) -> None:
        """Let leases lapse, look at every knob that anybody holds, and set what is to be set."""
        now = self._clock.monotonic()
        self.leases.lapse(now)
        self.look()
        self._settle({*self._writer.entries, *self._wanted()})
        self._see_whether_obeyed(now)

    def look(self) -> None:
        """Look for devices, if that was not done of late."""
        now = self._clock.monotonic()
        if self._looked is None or now - self._looked >= LOOK_EVERY:
            self._looked = now
            self._devices.look()

    def standing(self) -> dict[CapKey, KnobState]:
        """Every knob with its range as it was before we wrote, ``requested`` being the original."""
        found = {}
        for key, state in self._devices.states.items():
            entry = self._writer.entries.get(key)
            ours = entry is not None and entry.foreign is None
            original = entry.original if entry is not None and ours else state.requested
            found[key] = replace(self._ranged(state), requested=original)
        return found

    @property
    def stuck(self) -> dict[CapKey, int]:
        """Knobs that cannot be turned now, somebody else's or broken, and what stands on them."""
        found = {}
        for key, state in self._devices.states.items():
            entry, rest = self._writer.entries.get(key), self._rests.get(key)
            theirs = entry is not None and entry.foreign is not None
            if theirs or (rest is not None and rest.error.refusal != Refusal.NO_JOURNAL):
                found[key] = max(state.requested or 0, state.enforced or 0)
        return found

    def wants(self) -> dict[CapKey, int]:
        """What tuners hold, where that is lower than what the device might have."""
        held = ((key, self.leases.holding(key)) for key in self.leases.held())
        return {key: grant[2].caps[key] for key, grant in held if grant is not None}

    def rows(self) -> tuple[CapRow, ...]:
        """Every knob as it was last seen, and who holds it."""
        return tuple(self._row(state) for _, state in sorted(self._devices.states.items()))

    # --------------------------------------------------------------------------- inner workings

    def _refuse(self, holder: int, job: str, wishes: Mapping[CapKey, int]) -> None:
        """CapsError if the wishes cannot be granted; nothing has been changed then."""
        if any(key not in self._devices.states for key in wishes):
            self._devices.look()
        for key, value in wishes.items():
            self._devices.refresh(key)
            state = self._devices.states.get(key)
            if state is None:
                raise CapsError(
                    f"No {key.knob} of {key.device!r} can be set here; `wattspan caps status`"
                    " lists what can.",
                    Refusal.UNKNOWN_DEVICE,
                    key.device,
                )
            if self._tunable and not named(self._tunable, state):
                raise CapsError(
                    f"{state.name} is not to be tuned: [autotune] gpus does not name it.",
                    Refusal.NOT_ALLOWED,
                    key.device,
                )
            if value <= 0:
                raise CapsError(
                    f"A cap of {value} {key.knob.unit} on {state.name} makes no sense.",
                    Refusal.MALFORMED,
                    key.device,
                )
            held = self.leases.holding(key)
            if held is not None and (held[0], held[2].job) != (holder, job):
                raise CapsError(
                    f"{state.name} is held for {held[2].job!r}; one job at a time holds a device.",
                    Refusal.HELD,
                    key.device,
                )
            entry = self._writer.entries.get(key)
            if entry is not None and entry.foreign is not None:
                raise foreign(entry)

    def _one_step(self, key: CapKey, value: int) -> int:
        """What is granted of a wish: within bounds, and not too far down at once."""
        state = self._ranged(self._devices.states[key])
        allowed = self._bounds(state, tuned=True)
        if allowed is None:
            return value
        present = self._present(state)
        return stepped(state, present, allowed.clamp(value), self._rules)

    def _present(self, state: KnobState) -> int | None:
        entry = self._writer.entries.get(state.key)
        if entry is not None and entry.written and entry.foreign is None:
            return entry.value
        return state.requested if state.requested is not None else state.maximum

    def _ranged(self, state: KnobState) -> KnobState:
        """With the range that was found before we wrote: some drivers derive it from the limit."""
        entry = self._writer.entries.get(state.key)
        if entry is None:
            return state
        return replace(state, minimum=entry.minimum, default=entry.default, maximum=entry.maximum)

    def _bounds(self, state: KnobState, *, tuned: bool) -> Bounds | None:
        entry = self._writer.entries.get(state.key)
        original = state.requested if entry is None else entry.original
        return bounds(state, original, self._rules, tuned=tuned)

    def _wanted(self) -> set[CapKey]:
        """Every knob that anybody wants a cap on."""
        wanted = self.leases.held()
        if not self.suspended:
            wanted |= {*self.imposed.fixed, *self.imposed.shares}
        return {key for key in wanted if key in self._devices.states}

    def _target(self, state: KnobState) -> int | None:
        """What is to stand on a knob that is as ``state`` says; None for the original."""
        state = self._ranged(state)
        tuned, static = self._bounds(state, tuned=True), self._bounds(state, tuned=False)
        if tuned is None or static is None:
            return None
        wishes = []
        held = self.leases.holding(state.key)
        if held is not None:
            wishes.append(tuned.clamp(held[2].caps[state.key]))
        if not self.suspended:
            for imposed in (self.imposed.fixed, self.imposed.shares):
                if state.key in imposed:
                    value = static.clamp(imposed[state.key])
                    wishes.append(stepped(state, self._present(state), value, self._rules))
        least = min(wishes, default=static.highest)
        return None if least >= static.highest else least

    def _cause(self, key: CapKey) -> Cause:
        held, fixed, share = self._wishes(key)
        if held is not None:
            peer = self._peers.get(held[0], NOBODY)
            return Cause(held[1].job, held[1].why, peer.pid, peer.uid)
        if fixed is not None and (share is None or fixed <= share):
            return Cause("operator", "fixed by [caps] fixed")
        if share is not None:
            return Cause("budget", "its share of the host's power budget")
        return Cause()

    def _wishes(self, key: CapKey) -> tuple[tuple[int, Grant] | None, int | None, int | None]:
        held = self.leases.holding(key)
        grant = None if held is None else (held[0], held[2])
        if self.suspended:
            return grant, None, None
        return grant, self.imposed.fixed.get(key), self.imposed.shares.get(key)

    def _settle(
        self, keys: Iterable[CapKey], *, until: int | None = None
    ) -> dict[CapKey, CapsError]:
        """Bring ``keys`` to where they are to be: those that go down first. What failed, and why.

        A move that was not reached by ``until`` is left to the next turn.
        """
        down: dict[CapKey, int] = {}
        up: dict[CapKey, int] = {}
        back: list[CapKey] = []
        troubles: dict[CapKey, CapsError] = {}
        wanted = self._wanted()
        for key in sorted(keys):
            rest = self._resting(key)
            # What needs no journal, giving back, is not kept waiting by the want of one.
            if rest is not None and rest.refusal != Refusal.NO_JOURNAL:
                troubles[key] = rest
                continue
            try:
                state = self._writer.look(key, wanted=key in wanted)
                entry = self._writer.entries.get(key)
                if entry is not None and entry.foreign is not None:
                    raise foreign(entry)
            except CapsError as error:
                self._failed(key, error, troubles)
                continue
            target = self._target(state)
            if target is None:
                back += [key] if entry is not None else []
            elif entry is None or not entry.written or entry.value != target:
                present = self._present(state)
                (down if present is None or target < present else up)[key] = target
            else:
                self._rests.pop(key, None)
        self._move(down, troubles, until)
        self._move({k: v for k, v in up.items() if self._fits(k, v)}, troubles, until)
        for key in back:
            if self._fits(key, self._writer.entries[key].original):
                with self._trying(key, troubles):
                    self._writer.give_back(key, _UNWANTED)
        self._flush()
        return troubles

    def _move(
        self, targets: Mapping[CapKey, int], troubles: dict[CapKey, CapsError], until: int | None
    ) -> None:
        waiting = {key: rest for key in targets if (rest := self._resting(key)) is not None}
        troubles |= waiting
        targets = {key: value for key, value in targets.items() if key not in waiting}
        if not targets:
            return
        try:
            self._writer.intend(targets)
        except JournalError as error:
            for key in targets:
                self._failed(key, CapsError(str(error), Refusal.NO_JOURNAL, key.device), troubles)
            return
        for key in targets:
            if until is not None and self._clock.monotonic() > until:
                return
            with self._trying(key, troubles):
                self._writer.put(key, self._cause(key))

    def _resting(self, key: CapKey) -> CapsError | None:
        """Why a knob is left alone for now, if it is."""
        rest = self._rests.get(key)
        return rest.error if rest is not None and self._clock.monotonic() < rest.until else None

    @contextmanager
    def _trying(self, key: CapKey, troubles: dict[CapKey, CapsError]) -> Iterator[None]:
        try:
            yield
            self._rests.pop(key, None)
        except CapsError as error:
            self._failed(key, error, troubles)

    def _failed(self, key: CapKey, error: CapsError, troubles: dict[CapKey, CapsError]) -> None:
        """Leave the knob alone for a while; its tuner learns of it, and holds it no more."""
        troubles[key] = error
        if error.refusal == Refusal.FOREIGN:
            self.leases.drop([key])  # it is looked at every turn all the same: nothing is written
            return
        earlier = self._rests.get(key)
        length = _FIRST_REST if earlier is None else min(2 * earlier.length, _LONGEST_REST)
        self._rests[key] = _Rest(self._clock.monotonic() + length, length, error)
        if earlier is None or str(earlier.error) != str(error):
            self._record(
                Event(
                    at=self._clock.now().wall,
                    deed=Deed.FAIL,
                    knob=key.knob,
                    device=key.device,
                    why=str(error),
                )
            )

    def _fits(self, key: CapKey, value: int | None) -> bool:
        """Whether the budget allows ``key`` to be raised to ``value``, as the others stand now.

        What one device is to gain, another must have lost already, and have been seen to obey.
        """
        limit = self.imposed.limit
        if limit is None or self.suspended or value is None or not is_power(key.knob):
            return True
        others = (s for k, s in self._devices.states.items() if k != key and is_power(k.knob))
        return value + sum(max(s.requested or 0, s.enforced or 0) for s in others) <= limit

    def _see_whether_obeyed(self, now: int) -> None:
        """Take back a cap that the device shows and does not obey."""
        for key in list(self._writer.entries):
            if self._writer.obeyed(key):
                self._disobeyed.pop(key, None)
            elif now - self._disobeyed.setdefault(key, now) >= _OBEYS_WITHIN:
                state = self._devices.states[key]
                error = CapsError(
                    f"{state.name} shows {state.requested} {key.knob.unit} and obeys"
                    f" {state.enforced}: the cap does nothing.",
                    Refusal.NOT_HONOURED,
                    key.device,
                )
                self.leases.drop([key])
                self._settle([key])
                self._failed(key, error, {})

    def _give_up(self, grants: Iterable[Grant]) -> None:
        self._settle({key for grant in grants for key in grant.caps})

    def _flush(self) -> None:
        try:
            self._writer.flush()
            self.journal_trouble = ""
        except JournalError as error:
            self.journal_trouble = str(error)

    def _row(self, state: KnobState) -> CapRow:
        key, entry = state.key, self._writer.entries.get(state.key)
        held = self.leases.holding(key)
        cause, share = self._cause(key), self._wishes(key)[2]
        fixed = self._wishes(key)[1]
        rest = self._rests.get(key)
        theirs = entry is not None and entry.foreign is not None
        trouble = str(foreign(entry)) if entry is not None and theirs else ""
        if rest is not None:
            trouble = str(rest.error)
        denied = (Refusal.NO_PERMISSION, Refusal.LOCKED, Refusal.LOST, Refusal.NOT_HONOURED)
        return CapRow(
            state=self._ranged(state),
            original=entry.original if entry is not None else state.requested,
            wanted=held[2].asked[key] if held is not None else fixed,
            ceiling=share,
            holder=cause.job,
            why=cause.why,
            since=held[2].since if held is not None else None,
            expires=held[1].until if held is not None else None,
            foreign=theirs,
            usable=rest is None or rest.error.refusal not in denied,
            trouble=trouble,
        )
