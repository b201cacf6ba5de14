"""Records by which hosts tell each other about a job that runs on several of them. Pure.

Times in a record are monotonic nanoseconds of its writer. Readers use durations, and judge the age
of a record by the time at which they first saw it. Only the ranks of one pipeline on several hosts
are compared by wall clocks, and `HostRanks` has that of its writer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Annotated, Final, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from wattspan.model import SECOND, DecisionReason, JobPartner, Move, Nanoseconds

RECORD_INTERVAL: Final = 2 * SECOND
"""Least time between two records of one job and host."""

RECORD_LIFETIME: Final = 8 * SECOND
"""Time after the first sight of a record from which on it is not used."""

MAX_RECORD_BYTES: Final = 64 * 1024
MAX_HOSTS: Final = 64
"""Hosts of one job whose records are read."""
MAX_RUNS: Final = 32
MAX_SENTENCE: Final = 1000
"""Characters of a decision's sentence."""
_MAX_PIPELINES: Final = 32
_MAX_RANKS: Final = 256
_MAX_SECONDS: Final = 86_400.0

_Seconds = Annotated[float, msgspec.Meta(ge=0, le=_MAX_SECONDS)]
_Part = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Time = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
_Name = Annotated[str, msgspec.Meta(max_length=200)]
_Clock = Annotated[int, msgspec.Meta(ge=0, le=100_000)]


class LossRun(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive time in which a pipeline has lost this part of its time, and at most ``bound``.

    Time without a loss has no run.
    """

    start: _Time
    end: _Time
    mean: _Part
    bound: _Part


class PipelineSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The latest iterations of one pipeline: medians in seconds.

    ``whole`` is an iteration with all waiting, ``computed`` the time from its start to the end of
    the last instruction if all ranks had their original clocks, ``tail`` the time from the actual
    end of that instruction to the end of the iteration. ``noise`` is the coefficient of variation
    of ``computed``. ``waiting`` are the parts of the time for which the ranks wait, ``clocks`` the
    requested ones in MHz, none for the original ones. ``state`` is the phase of its session.
    """

    name: _Name
    whole: _Seconds
    computed: _Seconds
    tail: _Seconds
    noise: _Part
    state: _Name
    waiting: Annotated[tuple[_Part, ...], msgspec.Meta(max_length=_MAX_RANKS)] = ()
    clocks: Annotated[tuple[_Clock, ...], msgspec.Meta(max_length=_MAX_RANKS)] = ()

    def finishes(self, start: int, end: int) -> int:
        """The end of its last instruction, at most, in an iteration as measured on another host.

        Pipelines begin and end each iteration together. The end as measured there shows at once
        that this one has become faster; the record, that it has lower clocks.
        """
        return min(start + round(self.computed * SECOND), end - round(self.tail * SECOND))


class RankSetting(msgspec.Struct, frozen=True, kw_only=True):
    """The present part of a host with ranks of a synchronous job.

    Since ``since`` it compares settings, or holds ``setting``, which is in words and "" before; 0
    for the original setting. ``lost`` is the part of its time so far that this has cost at most.
    """

    since: _Time = 0
    setting: _Name = ""
    lost: _Part = 0.0


class InstructionRecord(msgspec.Struct, frozen=True, array_like=True):
    """An executed instruction, ``after`` the start of its unit; ``kind`` is that of its span."""

    stage: _Time
    kind: Literal["forward", "backward"]
    microbatch: _Time
    after: _Time
    lasted: _Time


class UnitRecord(msgspec.Struct, frozen=True, array_like=True):
    """One iteration of a rank."""

    start: _Time
    end: _Time
    instructions: tuple[InstructionRecord, ...]


class RankRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of a pipeline on several hosts, and the range of its GPU's clock in MHz.

    ``units`` and ``energy``, points of time and cumulative microjoules, are those of the lifetime
    of a record. ``clocks`` are the latest changes of the clock; None is an unknown one.
    """

    rank: _Time
    device: _Name
    original: _Clock
    floor: _Clock
    step: _Clock
    units: tuple[UnitRecord, ...] = ()
    clocks: tuple[tuple[_Time, _Clock | None], ...] = ()
    energy: tuple[tuple[_Time, _Time], ...] = ()


class HostRanks(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks of a host in a pipeline on several hosts.

    ``wall`` is the host's wall clock when the record was sent. ``refusal`` is its reason for the
    original clocks, None without one.
    """

    wall: _Time
    ranks: Annotated[tuple[RankRecord, ...], msgspec.Meta(max_length=_MAX_RANKS)]
    refusal: DecisionReason | None = None


class PlannedRanks(msgspec.Struct, frozen=True, array_like=True):
    """The lower clocks in MHz of some ranks, each by its number, of a host in one ``session``."""

    session: _Name
    clocks: Annotated[tuple[tuple[_Time, _Clock], ...], msgspec.Meta(max_length=_MAX_RANKS)]


class HostPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The decision of the host that plans a pipeline on several hosts, for each of the others.

    The nanoseconds are those of the run: ``elapsed``, in so many ``units``, of which were ``lost``
    ``lost_bound`` at most.
    """

    move: Move
    reason: DecisionReason
    sentence: Annotated[str, msgspec.Meta(max_length=MAX_SENTENCE)]
    hosts: Annotated[tuple[PlannedRanks, ...], msgspec.Meta(max_length=MAX_HOSTS)]
    elapsed: _Time = 0
    units: _Time = 0
    lost: Annotated[float, msgspec.Meta(gt=-1e18, lt=1e18)] = 0.0
    lost_bound: Annotated[float, msgspec.Meta(gt=-1e18, lt=1e18)] = 0.0

    def clocks(self, session: str) -> dict[int, int] | None:
        """The lower clocks of the ranks of a session; None unless the plan includes it."""
        return next((dict(one.clocks) for one in self.hosts if one.session == session), None)


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One host's part in a job, as of ``sent``.

    ``session`` differs for each run of the host's tuner. ``losses`` are those of the half minute
    before ``covered``, the time up to which they are known; runs of several pipelines overlap.
    ``ranks`` is the part of a host without pipelines. Of a pipeline on several hosts, one host has
    the ``plan``, and each of the others its ``stages``.
    """

    schema: Literal[1] = 1
    session: _Name
    sent: _Time
    covered: _Time = 0
    pipelines: Annotated[tuple[PipelineSummary, ...], msgspec.Meta(max_length=_MAX_PIPELINES)] = ()
    losses: Annotated[tuple[LossRun, ...], msgspec.Meta(max_length=MAX_RUNS)] = ()
    ranks: RankSetting | None = None
    stages: HostRanks | None = None
    plan: HostPlan | None = None


class SeenRecord(NamedTuple):
    """The record of another host, first seen at ``seen`` in monotonic nanoseconds of this one.

    ``record`` is None if it is refused, with the reason in one sentence.
    """

    host: str
    seen: int
    record: JobRecord | None
    refusal: str = ""

    def unused(self, now: int) -> str:
        """The reason not to use the record at all, in one sentence; "" for none."""
        age = now - self.seen
        if self.record is None:
            return self.refusal
        if age > RECORD_LIFETIME:
            return f"Its last record came {age // SECOND} s ago, and is not used any more."
        return ""


class JobView(NamedTuple):
    """A job as the other hosts tell it.

    ``explorer`` is the other host whose turn it is to measure lower settings, "" if there is none;
    ``may_explore`` is True if this one may. ``trouble`` is the reason of the latest failure, in one
    sentence. ``contact`` is False if nothing was exchanged for the lifetime of a record.
    """

    records: tuple[SeenRecord, ...] = ()
    explorer: str = ""
    may_explore: bool = True
    trouble: str = ""
    contact: bool = True

    def figures(
        self, problems: Sequence[str], sentence: Callable[[SeenRecord], str], now: int
    ) -> tuple[JobPartner, ...]:
        """The figures of the contact and of each record.

        ``problems`` are the reasons not to use the records, "" for none; a used one has its
        ``sentence``.
        """
        contact = (JobPartner("", used=False, sentence=self.trouble),) if self.trouble else ()
        hosts = (
            JobPartner(
                seen.host,
                used=not problem,
                sentence=problem or sentence(seen),
                age=Nanoseconds(now - seen.seen),
            )
            for seen, problem in zip(self.records, problems, strict=True)
        )
        return (*contact, *hosts)


class RefusedRecordError(ValueError):
    """A record is not used; the message is a sentence."""


def encode_record(record: JobRecord) -> bytes:
    """The record in JSON; without the figures of ranks, and older units, if it is too large.

    RefusedRecordError if it is too large without them too.
    """
    value = msgspec.json.encode(record)
    if len(value) > MAX_RECORD_BYTES:
        pipelines = tuple(replace(one, waiting=(), clocks=()) for one in record.pipelines)
        value = msgspec.json.encode(replace(record, pipelines=pipelines))
    stages = record.stages
    if stages is not None:
        kept = max((len(one.units) for one in stages.ranks), default=0)
        while len(value) > MAX_RECORD_BYTES and kept > 1:
            kept //= 2
            ranks = (replace(one, units=one.units[-kept:]) for one in stages.ranks)
            value = msgspec.json.encode(replace(record, stages=replace(stages, ranks=tuple(ranks))))
    if len(value) > MAX_RECORD_BYTES:
        raise RefusedRecordError(_too_large(len(value)))
    return value


def decode_record(value: bytes) -> JobRecord:
    """The record; RefusedRecordError if it is too large, of another schema, or contradictory."""
    if len(value) > MAX_RECORD_BYTES:
        raise RefusedRecordError(_too_large(len(value)))
    try:
        record = msgspec.json.decode(value, type=JobRecord)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RefusedRecordError(
            f"Its record has another schema: {error}. Are all agents of one version?"
        ) from None
    problem = _contradiction(record)
    if problem:
        raise RefusedRecordError(f"Its record contradicts itself: {problem}.")
    return record


def bounded_runs(runs: Sequence[LossRun]) -> tuple[LossRun, ...]:
    """At most MAX_RUNS runs in the order of their starts: the earliest ones become one."""
    ordered = sorted(runs, key=lambda run: run.start)
    first, later = ordered[: 1 - MAX_RUNS], ordered[1 - MAX_RUNS :]
    if len(ordered) <= MAX_RUNS:
        return tuple(ordered)
    joined = LossRun(
        first[0].start,
        max(run.end for run in first),
        max(run.mean for run in first),
        max(run.bound for run in first),
    )
    return (joined, *later)


def _too_large(size: int) -> str:
    return f"Its record has {size} bytes, more than the permitted {MAX_RECORD_BYTES}."


def _contradiction(record: JobRecord) -> str:
    names = [one.name for one in record.pipelines]
    if len(set(names)) < len(names):
        return "two of its pipelines have one name"
    for one in record.pipelines:
        if not 0 < one.computed <= one.whole or one.tail > one.whole:
            return f"an iteration of pipeline {one.name} is shorter than its work"
    for run in record.losses:
        if not run.start < run.end <= record.covered or run.mean > run.bound:
            return "a loss has no time, or is larger than its bound"
    if record.covered > record.sent:
        return "its losses are later than itself"
    if any(after.start < before.start for before, after in pairwise(record.losses)):
        return "its losses are not in the order of time"
    return "" if record.stages is None else _contradiction_of_ranks(record.stages)


def _contradiction_of_ranks(stages: HostRanks) -> str:
    """The contradiction in the ranks of a host; "" for none."""
    if len({one.rank for one in stages.ranks}) < len(stages.ranks):
        return "two of its ranks have one number"
    for one in stages.ranks:
        if not 0 < one.floor <= one.original or not one.step:
            return f"the clocks of its rank {one.rank} have no range"
        if any(unit.end <= unit.start for unit in one.units):
            return f"an iteration of its rank {one.rank} has no time"
        for times in ([unit.start for unit in one.units], [at for at, _ in one.energy]):
            if any(later <= earlier for earlier, later in pairwise(times)):
                return f"the figures of its rank {one.rank} are not in the order of time"
    return ""
