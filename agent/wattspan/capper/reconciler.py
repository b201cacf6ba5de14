"""Brings each knob to where it is to be: what goes down first, what failed not too often."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import NamedTuple

from wattspan.capper.audit import AuditAction, AuditEvent
from wattspan.capper.devices import is_power_knob
from wattspan.capper.journal import JournalError
from wattspan.capper.protocol import RefusalReason
from wattspan.capper.resolver import CapResolver
from wattspan.capper.writer import LimitWriter, WriteCause, foreign_limit_error
from wattspan.model import SECOND, CapKey
from wattspan.ports import CapsError, Clock

_FIRST_REST, _LONGEST_REST = SECOND, 60 * SECOND
_FIRST_OF_LASTING, _LONGEST_OF_LASTING = 60 * SECOND, 3600 * SECOND
_PERSISTENT = (RefusalReason.NO_PERMISSION, RefusalReason.LOCKED, RefusalReason.NOT_HONOURED)
"""Nobody mends a permission within seconds, and a locked register stays so until the boot."""
_ENFORCEMENT_TIMEOUT = 5 * SECOND
_UNWANTED = WriteCause(why="no cap is wanted any more")

NOTHING_PLANNED: Mapping[CapKey, int] = MappingProxyType({})

KnobErrors = dict[CapKey, CapsError]


class _RetryDelay(NamedTuple):
    until: int
    length: int
    error: CapsError


class Reconciler:
    """Moves knobs to what ``wishes`` say, as far as the devices let it."""

    def __init__(
        self,
        writer: LimitWriter,
        wishes: CapResolver,
        clock: Clock,
        record: Callable[[AuditEvent], None],
    ) -> None:
        self.journal_trouble = ""
        self._writer, self._wishes = writer, wishes
        self._clock, self._record = clock, record
        self._rests: dict[CapKey, _RetryDelay] = {}
        self._disobeyed: dict[CapKey, int] = {}

    def settle(
        self,
        keys: Iterable[CapKey],
        *,
        until: int | None = None,
        ended: Mapping[CapKey, WriteCause] | None = None,
    ) -> KnobErrors:
        """Bring ``keys`` to where they are to be: those that go down first. What failed, and why.

        A move that was not reached by ``until`` is left to the next time. ``ended`` says why
        some of them are wanted no more.
        """
        down: dict[CapKey, int] = {}
        up: dict[CapKey, int] = {}
        back: list[CapKey] = []
        troubles: KnobErrors = {}
        wanted = self._wishes.keys()
        keys = sorted(keys)
        self._writer.devices.prefetch(key for key in keys if self.resting(key) is None)
        for key in keys:
            rest = self.resting(key)
            # What needs no journal, giving back, is not kept waiting by the want of one.
            if rest is not None and rest.refusal != RefusalReason.NO_JOURNAL:
                troubles[key] = rest
                continue
            with self._trying(key, troubles):
                self._plan(key, key in wanted, down, up, back)
        self._move(down, troubles, until)
        for key, value in up.items():  # one by one: two that fit may not fit together
            if self._fits(key, value):
                self._move({key: value}, troubles, until)
        for key in back:
            original = self._writer.entries[key].original
            if self._fits(key, original):
                if self._budget is not None and original is not None:
                    self._flush({key: original})
                with self._trying(key, troubles):
                    self._writer.give_back(key, (ended or {}).get(key, _UNWANTED))
                    self._rests.pop(key, None)
        self._flush()
        return troubles

    def resting(self, key: CapKey) -> CapsError | None:
        """Why a knob is left alone for now, if it is."""
        rest = self._rests.get(key)
        return rest.error if rest is not None and self._clock.monotonic() < rest.until else None

    def broken(self, key: CapKey) -> bool:
        """Whether a knob could not be turned when that was last tried."""
        rest = self._rests.get(key)
        return rest is not None and rest.error.refusal != RefusalReason.NO_JOURNAL

    def rested(self) -> None:
        """Try everything again, whatever happened."""
        self._rests.clear()

    def see_whether_obeyed(self) -> None:
        """Take back a cap that a device shows and does not obey."""
        now = self._clock.monotonic()
        for key in list(self._writer.entries):
            if self._writer.obeyed(key):
                self._disobeyed.pop(key, None)
            elif now - self._disobeyed.setdefault(key, now) >= _ENFORCEMENT_TIMEOUT:
                state = self._writer.devices.states[key]
                error = CapsError(
                    f"{state.name} shows {state.requested} {key.knob.unit} and obeys"
                    f" {state.enforced}: the cap does nothing.",
                    RefusalReason.NOT_HONOURED,
                    key.device,
                )
                self._wishes.leases.drop([key])
                self.settle([key], ended={key: WriteCause(why=str(error))})
                self._failed(key, error, {})

    # --------------------------------------------------------------------------- inner workings

    def _plan(
        self,
        key: CapKey,
        wanted: bool,
        down: dict[CapKey, int],
        up: dict[CapKey, int],
        back: list[CapKey],
    ) -> None:
        """Look at one knob, and put it where its move belongs, if there is one. CapsError."""
        state = self._writer.look(key, wanted=wanted)
        entry = self._writer.entries.get(key)
        if entry is not None and entry.left_alone:
            raise foreign_limit_error(entry)
        target = self._wishes.target(state)
        if target is None:
            if entry is not None:
                back.append(key)
        elif entry is None or not entry.written or entry.value != target:
            present = self._wishes.present(state)
            (down if present is None or target < present else up)[key] = target
        else:
            self._rests.pop(key, None)

    def _move(self, targets: Mapping[CapKey, int], troubles: KnobErrors, until: int | None) -> None:
        waiting = {key: rest for key in targets if (rest := self.resting(key)) is not None}
        troubles |= waiting
        targets = {key: value for key, value in targets.items() if key not in waiting}
        if not targets:
            return
        try:
            self._writer.intend(targets, self._retained(targets))
        except JournalError as error:
            for key in targets:
                self._failed(
                    key, CapsError(str(error), RefusalReason.NO_JOURNAL, key.device), troubles
                )
            return
        for key in targets:
            if until is not None and self._clock.monotonic() > until:
                return
            with self._trying(key, troubles):
                self._writer.put(key, self._wishes.cause(key))
                self._rests.pop(key, None)

    @contextmanager
    def _trying(self, key: CapKey, troubles: KnobErrors) -> Iterator[None]:
        try:
            yield
        except CapsError as error:
            self._failed(key, error, troubles)

    def _failed(self, key: CapKey, error: CapsError, troubles: KnobErrors) -> None:
        """Leave the knob alone for a while."""
        troubles[key] = error
        if error.refusal in (RefusalReason.FOREIGN, RefusalReason.UNRECOVERED):
            # It is looked at every turn all the same, for nothing is written; and whoever held
            # it learns that it is not theirs any more.
            self._wishes.leases.drop([key])
            return
        lasting = error.refusal in _PERSISTENT
        first = _FIRST_OF_LASTING if lasting else _FIRST_REST
        longest = _LONGEST_OF_LASTING if lasting else _LONGEST_REST
        if self._writer.devices.stuck(key):  # asking again costs nothing: its worker still waits
            longest = _FIRST_REST
        earlier = self._rests.get(key)
        length: int = first if earlier is None else max(first, min(2 * earlier.length, longest))
        self._rests[key] = _RetryDelay(self._clock.monotonic() + length, length, error)
        if earlier is None or str(earlier.error) != str(error):
            self._record(
                AuditEvent(
                    at=self._clock.now().wall,
                    deed=AuditAction.FAIL,
                    knob=key.knob,
                    device=key.device,
                    why=str(error),
                )
            )

    def _fits(self, key: CapKey, value: int | None) -> bool:
        """Whether the budget allows ``key`` to be raised to ``value``, as the others stand now.

        What one device is to gain, another must have lost already, and have been seen to obey.
        """
        budget = self._budget
        if budget is None or value is None or not is_power_knob(key.knob):
            return True
        if self._writer.devices.hidden:  # their limits are unknown
            return False
        states = self._writer.devices.states.items()
        others = (state for one, state in states if one != key and is_power_knob(one.knob))
        return value + sum(max(s.requested or 0, s.enforced or 0) for s in others) <= budget

    @property
    def _budget(self) -> int | None:
        """The sum of the shares: the imposed limit, or more where the devices' floors take more."""
        imposed = self._wishes.imposed
        return None if imposed.limit is None else imposed.limit + imposed.short

    def _retained(self, planned: Mapping[CapKey, int]) -> dict[CapKey, int]:
        """The limit that each knob keeps, or is raised to, if this process ends from now on.

        ``planned`` are limits that are about to be written. Where going to all those limits at
        once could exceed the budget, because a device is not lowered yet or is lent the power
        that a tuned one does not use, each knob keeps the limit that it has.
        """
        states = self._writer.devices.states
        ours = {key: one for key, one in self._writer.entries.items() if not one.left_alone}
        keys = [key for key in {*ours, *planned} if key in states]
        kept = {
            key: limit
            for key in keys
            if (limit := self._wishes.imposed_limit(states[key])) is not None
        }
        kept |= {k: one.imposed for k, one in ours.items() if k not in states and one.imposed}
        budget = self._budget
        if budget is None:
            return kept
        total = 0
        for key, state in states.items():
            if is_power_knob(key.knob):
                original = ours[key].original if key in ours else None
                after = kept.get(key, original) or 0
                present = max(state.requested or 0, state.enforced or 0)
                total += max(present, planned.get(key, 0), after)
        if total <= budget:
            return kept
        values = {key: planned[key] if key in planned else ours[key].value for key in keys}
        return {key: v for key, v in values.items() if v is not None and is_power_knob(key.knob)}

    def _flush(self, planned: Mapping[CapKey, int] = NOTHING_PLANNED) -> None:
        self._writer.retain(self._retained(planned))
        try:
            self._writer.flush()
            self.journal_trouble = ""
        except JournalError as error:
            self.journal_trouble = str(error)
