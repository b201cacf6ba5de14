"""Ranks of one pipeline on several hosts: each host tells its own, and one gathers them. Pure.

A record has the iterations, clocks and energies of a host's ranks. The host that plans converts
their times by the wall clocks of both hosts. These must agree within 5 ms; where they do not, the
instructions are out of order, which the session of the pipeline notices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from wattspan.fleet.job_records import (
    RECORD_LIFETIME,
    HostRanks,
    InstructionRecord,
    JobRecord,
    JobView,
    RankRecord,
    SeenRecord,
    UnitRecord,
)
from wattspan.model import MILLISECOND, SECOND, DecisionReason, Instant
from wattspan.tuning.decisions.values import EnergyPoint, KnobRange, WorkUnit
from wattspan.tuning.pipeline.control import PipelineObservation, RemoteRank, with_clock
from wattspan.tuning.pipeline.dag import MAX_INSTRUCTIONS, InstructionKind, PipelineInstruction
from wattspan.tuning.pipeline.iterations import MAX_SKEW, ClockChange, RankInstruction, take_inside

EXCHANGE_LAG: Final = 15 * SECOND
"""Time from the last iteration that a decision needs to the iterations at other clocks.

A batch of spans takes up to 5 s, and each of two records up to 2.5 s to be written and read.
"""

_PATIENCE: Final = 60 * SECOND
"""Time for which the iterations of other ranks wait for those of a silent one."""

_LARGEST_STEP: Final = 5 * MILLISECOND
"""Change of a clock between two records beyond which it was set; NTP corrects 1 ms in 2 s."""

_LONGEST_DELAY: Final = 30 * SECOND
"""Age of a record at its first sight beyond which a wall clock is wrong."""

_TOLD_CHANGES: Final = 8
_HOST_NUMBERS: Final = 1 << 32
"""Numbers for the ranks of one host."""


class _Arrived(NamedTuple):
    """A unit of a rank, or a point of its energy, and the time since which it is told."""

    at: int
    rank: int
    value: UnitRecord | EnergyPoint


class _RankMark(NamedTuple):
    """The times of the latest unit and energy of a rank, by the clock of its host."""

    unit: int = -1
    energy: int = -1

    def after(self, record: RankRecord) -> _RankMark:
        return _RankMark(
            max([self.unit, *(unit.start for unit in record.units)]),
            max([self.energy, *(at for at, _ in record.energy)]),
        )


@dataclass(frozen=True, slots=True)
class RankHistory:
    """The latest iterations, clocks and energies of this host's ranks, for other hosts.

    Units and points of energy are ``arrived`` for as long as a record lives, because a reader may
    miss some records. ``starts`` are those of the latest units by rank, ``pending`` instructions
    without their unit.
    """

    arrived: tuple[_Arrived, ...] = ()
    starts: Mapping[int, int] = field(default_factory=dict)
    clocks: Mapping[int, tuple[ClockChange, ...]] = field(default_factory=dict)
    pending: Mapping[int, tuple[RankInstruction, ...]] = field(default_factory=dict)
    stepped: int = 0

    def add(self, observation: PipelineObservation) -> RankHistory:
        """Add the observation of one step, and forget what was told for long."""
        now, starts, clocks = observation.now, {**self.starts}, {**self.clocks}
        pending = {rank: list(of) for rank, of in self.pending.items()}
        for one in observation.instructions:
            pending.setdefault(one.rank, []).append(one)
        arrived = [one for one in self.arrived if one.at > now - RECORD_LIFETIME]
        for unit in sorted(observation.units, key=lambda unit: unit.start):
            if unit.start > starts.get(unit.rank, -1):
                starts[unit.rank] = unit.start
                arrived.append(_Arrived(now, unit.rank, _unit_record(unit, pending)))
        arrived += (_Arrived(now, rank, point) for rank, point in observation.energy.items())
        for rank, mhz in observation.clocks.items():
            changed = with_clock(clocks.get(rank, ()), mhz, self.stepped, now)
            clocks[rank] = changed[-_TOLD_CHANGES:]
        kept = {rank: tuple(of[-MAX_INSTRUCTIONS:]) for rank, of in pending.items()}
        return RankHistory(tuple(arrived), starts, clocks, kept, now)

    def record(
        self, ranges: Mapping[int, KnobRange], now: Instant, refusal: DecisionReason | None
    ) -> HostRanks:
        """The part of this host in a record of ``now``; ``ranges`` are those of its ranks."""
        ranks = (self._rank_record(rank, one) for rank, one in sorted(ranges.items()))
        return HostRanks(wall=now.wall, ranks=tuple(ranks), refusal=refusal)

    def _rank_record(self, rank: int, one: KnobRange) -> RankRecord:
        values = [of.value for of in self.arrived if of.rank == rank]
        return RankRecord(
            rank=rank,
            device=one.device,
            original=one.original,
            floor=one.floor,
            step=one.step,
            units=tuple(of for of in values if isinstance(of, UnitRecord)),
            clocks=tuple((of.since, of.mhz) for of in self.clocks.get(rank, ())),
            energy=tuple((of.at, of.energy) for of in values if isinstance(of, EnergyPoint)),
        )


def _unit_record(unit: WorkUnit, pending: dict[int, list[RankInstruction]]) -> UnitRecord:
    instructions = tuple(
        InstructionRecord(
            one.instruction.stage,
            one.instruction.kind.value,
            one.instruction.microbatch,
            one.start - unit.start,
            one.end - one.start,
        )
        for one in take_inside(unit, pending)
    )
    return UnitRecord(unit.start, unit.end, instructions)


def unready(view: JobView, hosts: int, now: Instant) -> str:
    """The reason why the other hosts do not permit a plan, as a sentence; "" for none.

    The ranks of the pipeline run on ``hosts`` hosts.
    """
    if not view.contact:
        return lost_contact(view)
    for seen in view.records:
        problem = unused(seen, now.mono) or _problem(seen, now)
        if problem:
            return f"{seen.host} is unknown: {problem}"
    known = 1 + len(view.records)
    if known != hosts:
        return f"The ranks of this pipeline run on {hosts} hosts (`hosts`), and {known} are known."
    return ""


def lost_contact(view: JobView) -> str:
    """A sentence for a host without contact to the others."""
    return f"The other hosts of this pipeline are out of contact. {view.trouble}".strip()


def _problem(seen: SeenRecord, now: Instant) -> str:
    """The reason not to plan with a record that is used, in one sentence; "" for none."""
    assert seen.record is not None  # noqa: S101 - it is used
    stages = seen.record.stages
    if stages is None:
        return "It plans this pipeline, too, until its next record."
    delay = now.wall - (now.mono - seen.seen) - stages.wall
    if -MAX_SKEW * SECOND <= delay <= _LONGEST_DELAY:
        return ""
    return (
        f"Its record was sent {delay / SECOND:.3f} s before it was seen, by the wall clocks of both"
        " hosts. Synchronise them."
    )


def unused(seen: SeenRecord, now: int) -> str:
    """The reason not to use the record of a host, in one sentence; "" for none."""
    record, reason = seen.record, seen.unused(now)
    if record is None or reason or record.stages or record.plan:
        return reason
    return "It has no ranks of this pipeline: configure the same `pipeline` and `hosts` on it."


@dataclass(frozen=True, slots=True)
class GatheredRanks:
    """The ranks of the other hosts of a pipeline, and their iterations that wait for those of all.

    ``sessions`` are those of the hosts, ``numbers`` those of the ranks here by host and number
    there, ``ranges`` by number here. ``clocks`` are the present ones by device, ``offsets`` those
    of the hosts' monotonic clocks, ``refusal`` is a host and its reason for the original clocks.
    ``latest`` are the ends of each rank's latest unit, ``marks`` what is known of its record.
    """

    sessions: Mapping[str, str]
    numbers: Mapping[tuple[str, int], int]
    ranges: Mapping[int, KnobRange]
    clocks: Mapping[str, int | None] = field(default_factory=dict)
    offsets: Mapping[str, int] = field(default_factory=dict)
    refusal: tuple[str, DecisionReason] | None = None
    units: tuple[WorkUnit, ...] = ()
    instructions: tuple[RankInstruction, ...] = ()
    latest: Mapping[int, int] = field(default_factory=dict)
    marks: Mapping[int, _RankMark] = field(default_factory=dict)

    @classmethod
    def begin(cls, records: Sequence[SeenRecord]) -> GatheredRanks:
        """The ranks of the present records, which are in use; their iterations so far are not."""
        sessions: dict[str, str] = {}
        numbers: dict[tuple[str, int], int] = {}
        ranges: dict[int, KnobRange] = {}
        marks: dict[int, _RankMark] = {}
        for place, (host, record, stages) in enumerate(_in_use(records), start=1):
            sessions[host] = record.session
            for one in stages.ranks:
                number = numbers[host, one.rank] = place * _HOST_NUMBERS + one.rank
                device = f"{host}/{one.device}"
                ranges[number] = KnobRange(device, one.original, one.floor, one.step, number)
                marks[number] = _RankMark().after(one)
        return cls(sessions, numbers, ranges, marks=marks)

    def changed(self, records: Sequence[SeenRecord], now: Instant) -> str:
        """The host whose ranks or clock have changed since the beginning, as a sentence.

        "" for none. The iterations of all hosts are not the same ones after a step of a clock.
        """
        for host, record, stages in _in_use(records):
            present = {(host, one.rank) for one in stages.ranks}
            known = {key for key in self.numbers if key[0] == host}
            if record.session != self.sessions.get(host) or present != known:
                return f"The ranks on {host} have changed."
            offset = _offset(record, stages, now)
            step = offset - self.offsets.get(host, offset)
            if abs(step) > _LARGEST_STEP:
                return (
                    f"The wall clock of {host} has changed by {step / SECOND:+.3f} s against that "
                    "of this host."
                )
        return ""

    def gather(
        self, own: PipelineObservation, records: Sequence[SeenRecord], now: Instant
    ) -> tuple[GatheredRanks, PipelineObservation]:
        """Add this host's observation and the records; returns the observation of all ranks."""
        units, instructions = [*self.units, *own.units], [*self.instructions, *own.instructions]
        clocks, offsets, marks, refusal = {**self.clocks}, {**self.offsets}, {**self.marks}, None
        remote: dict[int, RemoteRank] = {}
        for host, record, stages in _in_use(records):
            offset = offsets[host] = _offset(record, stages, now)
            if stages.refusal is not None and refusal is None:
                refusal = host, stages.refusal
            for one in stages.ranks:
                number = self.numbers[host, one.rank]
                mark, marks[number] = marks[number], marks[number].after(one)
                for unit in one.units:
                    if unit.start > mark.unit:
                        units.append(WorkUnit(unit.start + offset, unit.end + offset, rank=number))
                        instructions += _instructions(number, unit, offset)
                told = remote[number] = RemoteRank(
                    tuple(ClockChange(since + offset, mhz) for since, mhz in one.clocks),
                    tuple(
                        EnergyPoint(at + offset, spent)
                        for at, spent in one.energy
                        if at > mark.energy
                    ),
                )
                if told.clocks:
                    clocks[self.ranges[number].device] = told.clocks[-1].mhz
        latest = {**self.latest}
        for own_unit in units:
            latest[own_unit.rank] = max(own_unit.end, latest.get(own_unit.rank, 0))
        known = min(latest.get(rank, 0) for rank in (*self.ranges, *own.clocks))
        ready = _ready(units, known, own.now)
        ends = {unit.rank: unit.end for unit in ready}
        inside = tuple(one for one in instructions if one.end <= ends.get(one.rank, -1))
        waiting = tuple(one for one in instructions if one.end > ends.get(one.rank, -1))
        gathered = replace(
            self,
            clocks=clocks,
            offsets=offsets,
            refusal=refusal,
            units=tuple(unit for unit in units if unit.end > ends.get(unit.rank, -1)),
            instructions=waiting[-MAX_INSTRUCTIONS:],
            latest=latest,
            marks=marks,
        )
        return gathered, own._replace(units=tuple(ready), instructions=inside, remote=remote)


def _offset(record: JobRecord, stages: HostRanks, now: Instant) -> int:
    """The time here when the monotonic clock of the other host was zero."""
    return (stages.wall - record.sent) - (now.wall - now.mono)


def _ready(units: Iterable[WorkUnit], known: int, now: int) -> list[WorkUnit]:
    """The units whose iteration is complete: those of all ranks are ``known`` up to some time.

    An iteration waits for a silent rank for some time only, and is without it then.
    """
    ordered = sorted(units, key=lambda unit: unit.end)
    if ordered and now - ordered[0].end > _PATIENCE:
        return ordered
    return [unit for unit in ordered if (unit.start + unit.end) // 2 < known]


def _in_use(records: Iterable[SeenRecord]) -> list[tuple[str, JobRecord, HostRanks]]:
    """The hosts with ranks of the pipeline, in the order of their names."""
    found = [
        (seen.host, seen.record, seen.record.stages)
        for seen in records
        if seen.record is not None and seen.record.stages is not None
    ]
    return sorted(found, key=lambda one: one[0])


def _instructions(number: int, unit: UnitRecord, offset: int) -> list[RankInstruction]:
    return [
        RankInstruction(
            number,
            PipelineInstruction(one.stage, InstructionKind(one.kind), one.microbatch),
            unit.start + offset + one.after,
            unit.start + offset + one.after + one.lasted,
        )
        for one in unit.instructions
    ]
