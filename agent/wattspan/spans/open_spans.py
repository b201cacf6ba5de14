"""Announced spans of a process, which share energy from their start on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from wattspan.spans.fair_division import TICK, CoveredTime, FairDivision, exclude_covered_time
from wattspan.spans.packed_energy import SHARE
from wattspan.spans.profiles import EnergyProfile
from wattspan.spans.values import SpanEnd, SpanStart
from wattspan.spans.weights import MAX_PARENT_CHAIN, MILLION, SpanBatch, SpanWeights

_REMOVED = -2  # number of a span that was removed before its start was processed
_MAX_UNUSED = 1024  # unused numbers or events that trigger a compaction


@dataclass(slots=True, eq=False)
class OpenSpan:
    """An announced span. ``number`` is its number in the running division, -1 before its start."""

    id: bytes
    parent: bytes
    start: int
    thread: int
    began: int  # CPU time of its thread at the start
    child_until: int
    end: int | None = None
    cpu: int | None = None
    number: int = -1
    since: int = 0  # time from which it shares energy
    child_time: int = 0
    child_cpu: int = 0

    @property
    def rate(self) -> int | None:
        """The CPU usage of its thread while it was a leaf, in millionths of a core."""
        if self.end is None or self.cpu is None:
            return None
        alone = max(1, self.end - self.start - self.child_time)
        return (self.cpu - self.child_cpu) * MILLION // alone


class OpenSpans:
    """The announced spans of one process, and the running division among them.

    ``front`` is the time up to which events are processed. ``held`` is the energy that has been
    divided and not yet assigned to a received span: packed microjoules times 2**104.
    """

    def __init__(self, covered: CoveredTime, weights: SpanWeights, limit: int) -> None:
        self._covered = covered
        self._weights = weights
        self._limit = limit
        self.records: dict[bytes, OpenSpan] = {}
        self.division = FairDivision()
        self.front: int | None = None
        self.held = 0
        self._events: list[tuple[int, int, int, OpenSpan]] = []  # a heap
        self._sequence = 0
        self._numbered = 0  # spans in the division

    def __len__(self) -> int:
        return len(self.records)

    @property
    def active(self) -> bool:
        """True if there is or was an announced span."""
        return bool(self.records) or self.front is not None

    def open(self, started: SpanStart) -> bool:
        """Add an announced start; False for want of room or a known id."""
        if len(self.records) >= self._limit or started.id in self.records:
            return False
        record = self.records[started.id] = OpenSpan(*started, started.at)
        self._push(record.start, 0, record)
        return True

    def close(self, ended: SpanEnd) -> bool:
        """Add an announced end; False without an open span of its id."""
        record = self.records.get(ended.id)
        if record is None or record.end is not None:
            return False
        # Zero is CPU time that was not read.
        known = record.began and ended.cpu and ended.thread == record.thread
        cpu = max(0, ended.cpu - record.began) if known else None
        self.end(record, ended.at, cpu)
        return True

    def end(self, record: OpenSpan, at: int, cpu: int | None) -> None:
        """Set the end of a span and the CPU time of its thread, and update its parent."""
        record.end = end = max(record.start, at)
        record.cpu = cpu
        self._push(end, 1, record)
        parent = self.records.get(record.parent)
        if parent is not None:
            parent.child_time += max(0, end - max(record.start, parent.child_until))
            parent.child_until = max(parent.child_until, end)
            if cpu is not None and parent.thread == record.thread:
                parent.child_cpu += cpu

    def _push(self, at: int, closes: int, record: OpenSpan) -> None:
        self._sequence += 1
        heappush(self._events, (at, self._sequence, closes, record))

    def begin(self, profile: EnergyProfile, until: int) -> int:
        """The time up to which announced spans are settled; at first, their first start."""
        if self.front is None and self._events and self._events[0][0] < until:
            self.front = max(self._events[0][0], profile.horizon)
        if self.front is None:
            return until
        if self.division.at < self.front:
            self.division.at = self.front
            self.division.energy = profile.locate(self.front)[0]
        return self.front

    def advance(
        self,
        profile: EnergyProfile,
        until: int,
        batch: SpanBatch,
        records: Sequence[OpenSpan | None],
        numbers: list[int],
    ) -> None:
        """Settle announced spans, and the unannounced ones of a batch, up to ``until``.

        The numbers of the latter in the running division are written to ``numbers``.
        """
        front, running = self.front, self.division
        if front is None:
            return
        spans, by_weight = batch.spans, self._weights.by_weight
        weights = dict(zip(spans.id, spans.full("weight"), strict=True)) if by_weight else {}
        times, codes = self._due(front, until, weights)
        for i, record in enumerate(records):
            if record is None and batch.ends[i] > front:
                numbers[i] = running.join(1)
                times += [max(front, batch.starts[i]), min(batch.ends[i], until)]
                codes += [numbers[i], ~numbers[i]]
                self._weights.assign_one(running, numbers[i], weights.get(spans.id[i]), None)
                self._adopt(numbers[i], spans.parent[i], spans.start[i])
            elif record is not None and record.number >= 0 and (record.end or 0) > until:
                times.append(until)  # energy after this is not known
                codes.append(~record.number)
        times.append(until)
        codes.append(TICK)
        covered = self._covered.inside(front, until)
        _, beyond = self._covered.around(front, until)
        exclude_covered_time(times, codes, covered, front, until)
        before = running.passed
        order = sorted(range(len(times)), key=times.__getitem__)
        stretches = running.run(profile, times, codes, order, covered, beyond)
        divided = before - running.passed
        for stretch in stretches:
            divided += stretch.after - stretch.before
            self._covered.add(stretch)
        self.held += divided << SHARE
        self.front = until

    def _due(
        self, front: int, until: int, weights: Mapping[bytes, int | None]
    ) -> tuple[list[int], list[int]]:
        """The events of announced spans up to ``until``, and their codes."""
        times: list[int] = []
        codes: list[int] = []
        opened: list[OpenSpan] = []
        events, next_number = self._events, len(self.division.gained)
        while events and events[0][0] <= until:
            at, _, closes, record = heappop(events)
            if record.number == _REMOVED:
                continue
            if at < front:
                at = front
            times.append(at)
            if closes:
                codes.append(~record.number)
                continue
            record.number = next_number + len(opened)
            codes.append(record.number)
            record.since = at
            opened.append(record)
        self.division.join(len(opened))
        self._numbered += len(opened)
        for record in opened:
            self._adopt(record.number, record.parent, record.start)
            self._weights.assign_one(
                self.division, record.number, weights.get(record.id), record.rate
            )
        return times, codes

    def _adopt(self, number: int, parent: bytes, start: int) -> None:
        """Set the parent of a span if it is announced and the chain has no cycle."""
        above = self.records.get(parent)
        if above is None or not 0 <= above.number != number or above.start > start:
            return
        if above.start == start:
            ancestor: OpenSpan | None = above
            for _ in range(MAX_PARENT_CHAIN):
                if ancestor is None or ancestor.start != start:
                    break
                if ancestor.number == number:
                    return
                ancestor = self.records.get(ancestor.parent)
            else:
                return
        self.division.parent[number] = above.number

    def drop(self, record: OpenSpan) -> None:
        del self.records[record.id]
        self._numbered -= record.number >= 0
        record.number = _REMOVED

    def tidy(self) -> None:
        """Remove numbers and events of removed spans."""
        if not self._numbered:
            self.held = 0
        if len(self.division.gained) > 2 * self._numbered + _MAX_UNUSED:
            live = [record for record in self.records.values() if record.number >= 0]
            self.division.keep([record.number for record in live])
            for number, record in enumerate(live):
                record.number = number
        if len(self._events) > 2 * len(self.records) + _MAX_UNUSED:
            self._events = [event for event in self._events if event[3].number != _REMOVED]
            heapify(self._events)

    def expire(self, opened: int, ended: int) -> int:
        """Remove announced spans that are overdue; returns their number.

        Overdue are spans that started before ``opened`` without an end, and those that ended
        before ``ended`` and were not received. Energy held for them becomes outside energy.
        """
        overdue = [
            record
            for record in self.records.values()
            if (record.start < opened if record.end is None else record.end < ended)
        ]
        for record in overdue:
            self._discard(record)
        self.tidy()
        return len(overdue)

    def displace(self) -> None:
        """Remove the span that started last: it has the least energy, which becomes outside energy.

        Once received, it is LATE as far as others have shared the energy of its time.
        """
        self._discard(next(reversed(self.records.values())))
        self.tidy()

    def _discard(self, record: OpenSpan) -> None:
        number = record.number
        if number >= 0:
            if self.division.open[number]:
                self.division.leave(number)
            self.held -= self.division.share(number)
        self.drop(record)
