"""Ranks of one pipeline on several hosts: records of one host, and observations of another."""

from __future__ import annotations

import msgspec
import pytest
from testbed.pipelines import backward, forward

from wattspan.fleet.job_records import (
    RECORD_LIFETIME,
    HostPlan,
    HostRanks,
    JobRecord,
    JobView,
    RankRecord,
    SeenRecord,
)
from wattspan.model import SECOND, DecisionReason, Instant, Move
from wattspan.tuning.decisions.values import EnergyPoint, KnobRange, WorkUnit
from wattspan.tuning.pipeline.control import PipelineObservation
from wattspan.tuning.pipeline.iterations import ClockChange, RankInstruction
from wattspan.tuning.pipeline.remote_ranks import GatheredRanks, RankHistory, unready, unused

WALL = 1_700_000_000 * SECOND
THERE, HERE = 5000 * SECOND, 100 * SECOND
"""The monotonic clocks of the other host and of this one at the same time."""
RANGE = KnobRange("gpu:1", 1980, 990, 15, 3)
RANK = 3


def unit(rank: int, number: int, start: int = THERE) -> WorkUnit:
    """An iteration of 1.5 s every 2 s."""
    begun = start + 2 * SECOND * number
    return WorkUnit(begun, begun + 3 * SECOND // 2, rank=rank)


def observation(number: int, start: int = THERE, rank: int = RANK) -> PipelineObservation:
    """One iteration, observed at its end."""
    one = unit(rank, number, start)
    return PipelineObservation(
        one.end,
        (one,),
        (
            RankInstruction(rank, forward(1, 0), one.start, one.start + SECOND // 4),
            RankInstruction(rank, backward(1, 0), one.end - SECOND, one.end - SECOND // 2),
        ),
        {rank: 1980},
        {rank: EnergyPoint(one.end, 100 * number)},
    )


def history(*numbers: int) -> RankHistory:
    found = RankHistory()
    for number in numbers:
        found = found.add(observation(number))
    return found


def seen(
    told: RankHistory, *, host: str = "b", session: str = "s", step: int = 0,
    refusal: DecisionReason | None = None,
) -> SeenRecord:  # fmt: skip
    """The record that the host sends after its latest step; ``step`` of its wall clock before."""
    sent = told.stepped
    now = Instant(sent, WALL + sent - THERE + step, 0)
    stages = told.record({RANK: RANGE}, now, refusal)
    return SeenRecord(host, HERE, JobRecord(session=session, sent=sent, stages=stages))


def sent_rank(told: RankHistory) -> RankRecord:
    """The rank in the record that the host sends after its latest step."""
    return told.record({RANK: RANGE}, Instant(told.stepped, WALL, 0), None).ranks[0]


def at_once(told: RankHistory, step: int = 0) -> SeenRecord:
    """The record, seen when it is sent."""
    return seen(told, step=step)._replace(seen=HERE + told.stepped - THERE)


def here(mono: int) -> Instant:
    return Instant(mono, WALL + mono - HERE, 0)


def gather(
    ranks: GatheredRanks, own: PipelineObservation, *records: SeenRecord
) -> tuple[GatheredRanks, PipelineObservation]:
    return ranks.gather(own, records, here(own.now))


def begun(*records: SeenRecord) -> GatheredRanks:
    return GatheredRanks.begin(records or (seen(history(0)),))


def test_times_of_the_other_host_are_converted() -> None:
    ranks = begun()
    ranks, whole = gather(ranks, observation(1, HERE, 0), seen(history(0, 1)))
    (number,) = ranks.ranges
    own, theirs = unit(0, 1, HERE), unit(number, 1, HERE)
    assert set(whole.units) == {own, theirs}
    assert {(one.rank, one.start, one.end) for one in whole.instructions} == {
        (rank, start, end)
        for rank in (0, number)
        for start, end in (
            (own.start, own.start + SECOND // 4),
            (own.end - SECOND, own.end - SECOND // 2),
        )
    }
    assert {one.instruction for one in whole.instructions} == {forward(1, 0), backward(1, 0)}
    remote = whole.remote[number]
    assert remote.energy == (EnergyPoint(own.end, 100),)
    assert remote.clocks == (ClockChange(unit(0, 0, HERE).end, 1980),)
    assert ranks.clocks == {"b/gpu:1": 1980}
    assert ranks.ranges[number] == KnobRange("b/gpu:1", 1980, 990, 15, number)


def test_iterations_before_the_beginning_are_not_used() -> None:
    _, whole = gather(begun(), observation(0, HERE, 0), seen(history(0)))
    assert whole.units == ()
    assert all(one.energy == () for one in whole.remote.values())


def test_clock_that_was_not_read_is_unknown() -> None:
    told = RankHistory().add(observation(0)._replace(clocks={}))
    ranks, whole = gather(begun(seen(told)), observation(0, HERE, 0), seen(told))
    assert ranks.clocks == {}
    assert [one.clocks for one in whole.remote.values()] == [()]


def test_repeated_record_adds_nothing() -> None:
    record = seen(history(0, 1))
    ranks, _ = gather(begun(), observation(1, HERE, 0), record)
    later = PipelineObservation(HERE + 5 * SECOND, clocks={0: 1980})
    _, whole = gather(ranks, later, record)
    assert (whole.units, whole.instructions) == ((), ())
    assert [one.energy for one in whole.remote.values()] == [()]


def test_iteration_waits_for_the_ranks_of_all_hosts() -> None:
    ranks, whole = gather(begun(), observation(1, HERE, 0), seen(history(0)))
    assert (whole.units, whole.instructions) == ((), ())
    ranks, whole = gather(ranks, observation(2, HERE, 0), seen(history(0, 1)))
    assert {one.start for one in whole.units} == {unit(0, 1, HERE).start}
    assert len(whole.units) == 2
    assert len(whole.instructions) == 4
    _, whole = gather(ranks, observation(3, HERE, 0), seen(history(0, 1, 2, 3)))
    assert len(whole.units) == 4


def test_missed_record_loses_nothing_within_its_lifetime() -> None:
    told = history(0, 1, 2, 3)
    ranks = begun()
    for number in (1, 2):
        ranks, _ = gather(ranks, observation(number, HERE, 0))
    _, whole = gather(ranks, observation(3, HERE, 0), seen(told))
    assert len(whole.units) == 6
    assert [len(one.energy) for one in whole.remote.values()] == [3]


def test_old_iterations_are_told_no_more() -> None:
    told = history(0)
    assert len(sent_rank(told).units) == len(sent_rank(told).energy) == 1
    told = told.add(PipelineObservation(told.stepped + RECORD_LIFETIME, clocks={RANK: 1500}))
    later = sent_rank(told)
    assert (later.units, later.energy) == ((), ())
    assert [mhz for _, mhz in later.clocks] == [1980, None, 1500]


def test_silent_rank_is_not_awaited_for_ever() -> None:
    ranks = begun()
    for number in range(1, 30):
        ranks, whole = gather(ranks, observation(number, HERE, 0))
        assert whole.units == ()
    assert len(ranks.units) == 29
    ranks, whole = gather(ranks, observation(35, HERE, 0))
    assert len(whole.units) == 30
    assert ranks.units == ()


def test_unit_that_begins_no_later_is_not_told() -> None:
    """A reader could not tell it from one that it has used."""
    told = RankHistory().add(observation(1)).add(observation(0))
    assert [one.start for one in sent_rank(told).units] == [unit(RANK, 1).start]


def test_instructions_without_a_unit_are_not_told() -> None:
    one = observation(1)
    told = RankHistory().add(one._replace(units=())).add(one._replace(instructions=()))
    assert [len(of.instructions) for of in sent_rank(told).units] == [2]
    assert told.add(observation(2)).pending == {RANK: ()}


def test_refusal_of_another_host_is_gathered() -> None:
    record = seen(history(0, 1), refusal=DecisionReason.THROTTLED)
    other = seen(history(0, 1), host="c", refusal=DecisionReason.MIG)
    ranks, _ = gather(begun(record, other), observation(1, HERE, 0), record, other)
    assert ranks.refusal == ("b", DecisionReason.THROTTLED)
    ranks, _ = gather(ranks, observation(2, HERE, 0), seen(history(0, 1)))
    assert ranks.refusal is None


@pytest.mark.parametrize(
    ("record", "found"),
    [
        (seen(history(0, 1)), ""),
        (seen(history(0, 1), session="t"), "The ranks on b have changed."),
        (seen(history(0, 1), host="c"), "The ranks on c have changed."),
        (seen(history(0, 1), step=4_000_000), ""),
        (
            seen(history(0, 1), step=-6_000_000),
            "The wall clock of b has changed by -0.006 s against that of this host.",
        ),
    ],
)
def test_change_of_another_host_is_noticed(record: SeenRecord, found: str) -> None:
    ranks, _ = gather(begun(), observation(0, HERE, 0), seen(history(0)))
    assert ranks.changed([record], here(HERE + 4 * SECOND)) == found


def test_further_rank_of_another_host_is_a_change() -> None:
    record = seen(history(0)).record
    (rank,) = record.stages.ranks
    stages = HostRanks(
        wall=record.stages.wall, ranks=(rank, msgspec.structs.replace(rank, rank=RANK + 1))
    )
    more = SeenRecord("b", HERE, JobRecord(session="s", sent=record.sent, stages=stages))
    assert begun().changed([more], here(HERE)) == "The ranks on b have changed."


PLAN = HostPlan(move=Move.HOLD, reason=DecisionReason.CERTIFIED, sentence="Held.", hosts=())
PLANNER = SeenRecord("b", HERE, JobRecord(session="p", sent=1, plan=PLAN))
NEITHER = SeenRecord("b", HERE, JobRecord(session="n", sent=1))


@pytest.mark.parametrize(
    ("view", "found"),
    [
        (JobView((at_once(history(0)),)), ""),
        (JobView((), contact=False, trouble="No endpoint answers."), "out of contact. No endpoint"),
        (JobView((), contact=False), "out of contact."),
        (JobView(()), "run on 2 hosts (`hosts`), and 1 are known."),
        (
            JobView((at_once(history(0)), at_once(history(0))._replace(host="c"))),
            "and 3 are known.",
        ),
        (JobView((PLANNER,)), "b is unknown: It plans this pipeline, too"),
        (JobView((NEITHER,)), "b is unknown: It has no ranks of this pipeline"),
        (JobView((SeenRecord("b", HERE, None, "It is bad."),)), "b is unknown: It is bad."),
        (
            JobView((at_once(history(0))._replace(seen=HERE - RECORD_LIFETIME - 1),)),
            "b is unknown: Its last record came 8 s ago",
        ),
        (JobView((at_once(history(0), 3600 * SECOND),)), "sent -3600.000 s before it was seen"),
        (JobView((at_once(history(0), -60 * SECOND),)), "sent 60.000 s before it was seen"),
    ],
)
def test_plan_needs_fresh_records_of_all_hosts(view: JobView, found: str) -> None:
    reason = unready(view, 2, here(HERE))
    assert found in reason
    assert bool(found) == bool(reason)


def test_record_of_a_planner_is_used() -> None:
    assert unused(PLANNER, HERE) == ""
    assert unused(NEITHER, HERE).startswith("It has no ranks")
