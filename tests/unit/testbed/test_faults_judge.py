"""The judge of the fault suite is itself judged: it detects every violation."""

from __future__ import annotations

import pytest
from testbed.faults.judge import Deviation, Judge, deviations, flowing, measured, recovery
from testbed.faults.observation import NANO, Sight, billionths, parse

WELL = """\
# TYPE hw_energy_joules_total counter
hw_energy_joules_total{{hw_id="p",hw_type="cpu"}} {energy:.6f}
hw_energy_joules_total{{hw_id="c",hw_type="cpu",hw_parent="p"}} 99999999
# TYPE wattspan_group_energy_joules_total counter
wattspan_group_energy_joules_total{{hw_type="cpu",group_kind="user",group="eva"}} {users:.6f}
wattspan_group_energy_joules_total{{hw_type="cpu",group_kind="unit",group="x"}} 0.5
# TYPE wattspan_process_energy_joules_total counter
wattspan_process_energy_joules_total{{hw_type="cpu",pid="7",command="a b"}} {rows:.6f}
wattspan_idle_energy_joules_total{{hw_id="p",hw_type="cpu"}} 1
wattspan_unattributed_energy_joules_total{{hw_id="p",hw_type="cpu"}} 0
wattspan_pending_energy_joules{{hw_id="p",hw_type="cpu"}} 0.25
# TYPE wattspan_gap_seconds_total counter
wattspan_gap_seconds_total{{hw_id="p",reason="reset"}} {gaps:.9f}
# TYPE wattspan_agent_ticks_total counter
wattspan_agent_ticks_total {ticks}
wattspan_agent_start_time_seconds {life}
wattspan_domain_up{{hw_id="p"}} {up}
wattspan_source_up{{source="rapl"}} 1
"""


def sight(seconds: float, energy: float, **changes: float) -> Sight:
    values = {"users": energy - 1, "rows": 0, "gaps": 0, "ticks": 5, "life": 1, "up": 1, **changes}
    return parse(WELL.format(energy=energy, **values), round(seconds * NANO))


def breaches(*sights: Sight) -> list[str]:
    judge = Judge({"cpu": 100.0}, slack=1.0)
    return [breach.what for one in sights for breach in judge.see(one)]


def test_numbers_are_read_exactly() -> None:
    assert billionths("12.000000001") == 12_000_000_001
    assert billionths("-0.5") == -500_000_000
    assert billionths("1e-3") == 1_000_000


def test_balanced_monotonic_counters_pass() -> None:
    assert breaches(sight(0, 10), sight(1, 90), sight(2, 190), sight(9, 700)) == []


def test_spike_is_caught() -> None:
    assert "spike" in breaches(sight(0, 10), sight(1, 212))


def test_stalled_counter_may_catch_up() -> None:
    still = [sight(second, 10) for second in range(10)]
    assert breaches(*still, sight(10, 1000)) == []
    assert "spike" in breaches(*still, sight(10, 1200))


def test_counter_that_falls_is_caught() -> None:
    assert "fall" in breaches(sight(0, 10), sight(1, 9.999999))


def test_imbalance_of_a_microjoule_is_caught() -> None:
    assert breaches(sight(0, 10, users=8.999999)) == ["imbalance"]
    assert breaches(sight(0, 10, users=9.000001)) == ["imbalance"]


def test_processes_that_spent_more_than_their_users_are_caught() -> None:
    assert breaches(sight(0, 10, rows=9.000001)) == ["imbalance"]
    assert breaches(sight(0, 10, rows=9)) == []


def test_series_that_is_there_twice_is_caught() -> None:
    line = 'wattspan_domain_up{hw_id="p"} 1\n'
    assert breaches(parse(line + line, 0)) == ["twice in a scrape"]


def test_restart_may_reset_ticks_and_no_durable_counter() -> None:
    assert breaches(sight(0, 10, ticks=5), sight(1, 10, ticks=1)) == ["fall"]
    assert breaches(sight(0, 10, ticks=5), sight(1, 10, ticks=1, life=2)) == []
    assert "fall" in breaches(sight(0, 10), sight(1, 9, life=2))


def test_missing_domain_counter_is_detected() -> None:
    gone = parse("wattspan_agent_start_time_seconds 1\n", NANO)
    assert set(breaches(sight(0, 10), gone)) == {"loss"}


def test_recovery_is_when_every_domain_is_up_and_has_moved() -> None:
    before = sight(0, 10)
    course = [
        sight(4, 20, up=0),
        sight(6, 20, up=0),
        sight(7, 20),
        sight(8.5, 21),
        sight(9, 30),
    ]
    assert recovery(course, 5 * NANO, before) == pytest.approx(3.5)
    assert recovery(course[:3], 5 * NANO, before) is None


def test_domain_that_is_missing_is_not_well() -> None:
    before, now = sight(0, 10), sight(1, 20)
    assert flowing(before, before, now)
    assert not flowing(before, before, parse('wattspan_source_up{source="rapl"} 1\n', 0))


def test_energy_in_gaps_is_not_a_deviation() -> None:
    before, after = sight(0, 10), sight(10, 910, gaps=1.0)
    assert measured(after, "p") == 910_250_000_000
    (one,) = deviations(before, after, {"p": 1000.0}, seconds=10.0)
    assert one == Deviation("p", told=900.0, true=1000.0, gaps=1.0, seconds=10.0)
    assert one.unexplained == pytest.approx(0)
    (slept,) = deviations(before, sight(10, 910, gaps=3601.0), {"p": 1000.0}, 10.0, asleep=3600)
    assert slept.percent == pytest.approx(0)
