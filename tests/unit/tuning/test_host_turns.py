"""Hosts of a synchronous job compare settings in turn, each beside those of the hosts before it."""

from __future__ import annotations

import pytest

from wattspan.fleet.job_records import RECORD_LIFETIME, JobRecord, JobView, RankSetting, SeenRecord
from wattspan.model import SECOND
from wattspan.tuning.host_turns import HostTurn, host_part, judged

NOW = 100 * SECOND
ORIGINAL = RankSetting()
COMPARING = RankSetting(since=5, lost=0.002)
HOLDING = RankSetting(since=5, setting="560 W", lost=0.004)


def seen(
    ranks: RankSetting | None, host: str = "b", *, session: str = "1", age: int = 0
) -> SeenRecord:
    return SeenRecord(host, NOW - age, JobRecord(session=session, sent=9, ranks=ranks))


def turn(
    *records: SeenRecord,
    hosts: int = 3,
    before: dict[str, tuple[str, int]] | None = None,
    **view: object,
) -> HostTurn:
    return judged(JobView(records, **view), hosts, before, NOW)  # type: ignore[arg-type]


@pytest.mark.parametrize("hosts", [1, 2, 3, 64])
@pytest.mark.parametrize("budget", [0.001, 0.05, 1.0])
def test_parts_of_all_hosts_are_the_budget(hosts: int, budget: float) -> None:
    part = host_part(budget, hosts)
    assert hosts * part / (1 + part) == pytest.approx(budget / (1 + budget))
    assert (1 + part) ** hosts <= 1 + budget + 1e-12


def test_only_host_gets_the_turn() -> None:
    assert turn() == HostTurn(may_explore=True)
    assert turn(may_explore=False) == HostTurn()


def test_host_waits_for_the_one_that_compares() -> None:
    found = turn(seen(COMPARING), may_explore=False, explorer="b")
    assert (found.may_explore, found.holders) == (False, {})
    assert found.waits == "b compares settings for this job"
    (figures,) = found.figures
    assert (figures.host, figures.used) == ("b", True)
    assert figures.sentence == "It compares settings, which has cost at most 0.2% of its time."


def test_holder_is_before_the_host_that_compares_after_it() -> None:
    found = turn(seen(HOLDING), seen(ORIGINAL, "c"))
    assert found.may_explore
    assert not found.later
    assert found.holders == {"b": ("1", 5)}
    assert [one.sentence for one in found.figures] == [
        "It holds 560 W, which has cost at most 0.4% of its time.",
        "It has the original setting.",
    ]
    unchanged = turn(seen(HOLDING), before=found.holders)
    assert (unchanged.may_explore, unchanged.later, unchanged.trouble) == (True, False, "")
    assert not unchanged.last
    assert turn(seen(HOLDING), before=found.holders, hosts=2).last
    assert not turn(before=found.holders, hosts=2).last


def test_later_holder_ends_the_comparisons_of_those_before_it() -> None:
    found = turn(seen(HOLDING), before={})
    assert (found.may_explore, found.later, found.trouble) == (False, True, "")
    assert turn(seen(COMPARING), before={}, may_explore=False, explorer="b").later


@pytest.mark.parametrize(
    "now",
    [
        (),
        (seen(ORIGINAL),),
        (seen(RankSetting(since=6, setting="560 W")),),
        (seen(HOLDING, session="2"),),
        (seen(HOLDING, age=RECORD_LIFETIME + 1),),
    ],
)
def test_changed_setting_of_a_host_before_ends_this_one(now: tuple[SeenRecord, ...]) -> None:
    found = turn(*now, before={"b": ("1", 5)})
    assert not found.may_explore
    assert found.trouble == "b has another setting than in the comparisons of this host."


@pytest.mark.parametrize(
    ("record", "cause"),
    [
        (seen(ORIGINAL, age=RECORD_LIFETIME + 1), "Its last record came 8 s ago"),
        (SeenRecord("b", NOW, None, "Its record has another schema."), "another schema"),
        (seen(None), "configure the same `hosts` on it"),
    ],
)
def test_unknown_host_permits_no_comparison(record: SeenRecord, cause: str) -> None:
    found = turn(record)
    assert not found.may_explore
    assert (found.waits, found.trouble) == ("b is unknown", "")
    (figures,) = found.figures
    assert not figures.used
    assert cause in figures.sentence


def test_lost_contact_permits_the_original_setting_only() -> None:
    found = turn(contact=False, trouble="No endpoint answers.")
    assert not found.may_explore
    assert found.trouble == "the other hosts of this job are out of contact. No endpoint answers."
    (figures,) = found.figures
    assert (figures.host, figures.used, figures.sentence) == ("", False, "No endpoint answers.")
    assert turn(contact=False).trouble == "the other hosts of this job are out of contact."


def test_more_hosts_than_configured_have_the_original_setting() -> None:
    found = turn(seen(ORIGINAL), seen(ORIGINAL, "c"), hosts=2)
    assert not found.may_explore
    assert found.trouble == "3 hosts have such a job, more than `hosts` (2)."
