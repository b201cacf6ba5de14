"""History of the last hour on the live page."""

from __future__ import annotations

from dataclasses import replace

from testbed.snapshots import CPU, J, account, process

from wattspan.model import SECOND, GapReason, Instant, Microjoules, Snapshot
from wattspan_exporters.page.flow import build_flow
from wattspan_exporters.page.history import MAX_DURATION, SLOTS, STEP, PageHistory, PowerHistory

UNIX = 1_700_000_000 * SECOND


def at(seconds: float, *, asleep: float = 0, step: float = 0) -> Instant:
    mono = round(seconds * SECOND)
    slept = round(asleep * SECOND)
    return Instant(mono, UNIX + mono + slept + round(step * SECOND), slept)


def host(
    when: Instant, watts: float = 100, since: int = 0, late: float = 0, gap: float = 0
) -> Snapshot:
    """A host whose one process drew so much from the beginning, settled up to ``late`` s ago."""
    settled = Instant(when.mono - round(late * SECOND), when.wall, when.asleep)
    joules = round(watts * (settled.mono - since) / SECOND)
    cpu = replace(
        account("cpu", CPU, "package-0", watts, (joules, 0, 0)),
        settled=settled,
        gaps={GapReason.SUSPEND: round(gap * SECOND)},
    )
    row = process(1, "worker", "", {}, {CPU: joules})
    return Snapshot(when, when.mono, "host", (cpu,), (row,))


def lived(memory: PageHistory, begin: float, end: float, every: float = 1.0) -> Snapshot:
    """The newest snapshot of a time in which the memory looked so often."""
    now = begin
    newest = host(at(begin))
    while now <= end:
        newest = host(at(now))
        memory.record(newest)
        now += every
    return newest


def test_present_is_ten_seconds_and_the_hour_is_available_history() -> None:
    memory = PageHistory()
    newest = lived(memory, 1000, 1100)
    now, hour = memory.recent(newest)
    assert 10 * SECOND <= now.duration <= 16 * SECOND
    assert hour.duration == 100 * SECOND
    assert build_flow(now).total == now.duration // SECOND * 100 * J
    assert build_flow(hour).total == 10_000 * J


def test_history_is_limited_to_an_hour() -> None:
    memory = PageHistory()
    newest = lived(memory, 0, 3 * 3600, every=2.5)
    _, hour = memory.recent(newest)
    assert MAX_DURATION - 130 * SECOND <= hour.duration <= MAX_DURATION + STEP
    assert build_flow(hour).total == hour.duration // SECOND * 100 * J
    held = len(memory._coarse) + len(memory._fine)
    assert held <= 36


def test_each_period_is_recorded_with_one_look_at_it() -> None:
    often, seldom = PageHistory(), PageHistory()
    looks, due = 0, 1000.0
    for second in range(1000, 1600):  # the newest snapshot is up to a second old
        newest = host(at(second))
        often.record(newest)
        if second + 0.5 >= due:
            seldom.record(newest)
            looks += 1
            due = second + 0.5 + seldom.pause(newest)
    assert seldom.recent(newest).hour == often.recent(newest).hour
    assert seldom.powers(240) == often.powers(240)
    assert looks <= 600 * SECOND // STEP + 6


def test_present_before_the_first_step_is_available_history() -> None:
    memory = PageHistory()
    memory.record(host(at(1000)))
    now, hour = memory.recent(host(at(1001)))
    assert now is not None
    assert now == hour
    assert now.duration == SECOND


def test_page_responds_before_the_first_snapshot() -> None:
    memory = PageHistory()
    assert memory.recent(Snapshot(at(1), 0, "host")) == (None, None)
    now, hour = memory.recent(host(at(2)))
    assert now is not None
    assert now == hour
    assert now.duration == 0
    assert memory.powers(240)[2] == {"cpu": []}


def test_out_of_order_snapshot_is_ignored() -> None:
    memory = PageHistory()
    lived(memory, 1000, 1030)
    now, _ = memory.recent(host(at(1029)))
    assert now.end == at(1030)


def test_clock_that_is_set_changes_labels_only() -> None:
    memory = PageHistory()
    lived(memory, 1000, 1050)
    for seconds in range(1051, 1100):
        memory.record(host(at(seconds, step=-86_400)))
    _, hour = memory.recent(host(at(1100, step=-86_400)))
    assert hour.duration == 100 * SECOND
    step, _, powers = memory.powers(240)
    assert step == STEP
    assert all(power == 100_000 for power in powers["cpu"][1:])


def test_sleep_is_a_hole_in_the_powers_and_no_time_of_the_flow() -> None:
    memory = PageHistory()
    lived(memory, 1000, 1050)
    for seconds in range(1051, 1101):
        memory.record(host(at(seconds, asleep=600)))
    _, hour = memory.recent(host(at(1100, asleep=600)))
    assert hour.duration == 100 * SECOND
    _, _, powers = memory.powers(240)
    watts = powers["cpu"]
    assert len(watts) == 140
    assert watts.count(None) == 119  # of one step the host was awake for a second
    assert watts[-9:] == [100_000] * 9


def test_another_ledger_is_another_beginning() -> None:
    memory = PageHistory()
    lived(memory, 1000, 1100)
    for seconds in range(1101, 1120):
        memory.record(host(at(seconds), since=1100 * SECOND))
    _, hour = memory.recent(host(at(1120), since=1100 * SECOND))
    assert hour.duration < 20 * SECOND
    assert build_flow(hour).total == hour.duration // SECOND * 100 * J


def test_long_histories_are_shown_in_wider_steps() -> None:
    memory = PageHistory()
    lived(memory, 0, 3600, every=2.5)
    step, end, powers = memory.powers(240)
    assert step == 3 * STEP
    assert end == 3600 * SECOND
    assert powers["cpu"] == [100_000] * 240
    lived(memory, 3602.5, 3620, every=2.5)
    assert memory.powers(240)[:2] == (step, 3615 * SECOND)


def test_slow_counter_is_delayed_and_a_gap_is_unknown() -> None:
    powers = PowerHistory()

    def take(seconds: int, settled: int, joules: int, gap: int = 0) -> None:
        cpu = replace(
            account("cpu", CPU, "package-0", None, (joules, 0, 0)),
            settled=at(settled),
            gaps={GapReason.LOST: gap * SECOND},
        )
        powers.record(Snapshot(at(seconds), seconds, "host", (cpu,)))

    take(5, 5, 0)
    take(10, 10, 500)
    take(15, 10, 500)  # no change
    take(20, 20, 1500)
    take(25, 25, 1500, gap=5)  # all of it is a gap
    take(30, 30, 1900, gap=6)  # a fifth of it is
    _, _, shown = powers.series(240)
    assert shown["cpu"] == [100_000, 100_000, 100_000, None, 100_000]


def test_steps_that_were_settled_late_have_the_mean_of_those_that_followed() -> None:
    powers = PowerHistory()
    for second in range(5, 105, 5):
        late = 11 if 40 <= second < 60 else 1
        powers.record(host(at(second), late=late))
    _, _, shown = powers.series(240)
    assert shown["cpu"] == [100_000] * 19
    powers.record(host(at(105), late=5.5))
    assert powers.series(240)[2]["cpu"] == [*[100_000] * 19, None], "half a second is no mean"


def test_suspend_during_a_step_is_a_gap() -> None:
    powers = PowerHistory()
    powers.record(host(at(5)))
    powers.record(host(at(10)))
    powers.record(host(at(15), late=5))
    powers.record(host(at(16, asleep=6), gap=6))
    _, _, shown = powers.series(240)
    assert shown["cpu"] == [100_000, None, 100_000]


def test_step_of_which_the_host_slept_the_most_is_a_hole() -> None:
    powers = PowerHistory()
    powers.record(host(at(5)))
    powers.record(host(at(10)))
    powers.record(host(at(14, asleep=601), gap=601))
    powers.record(host(at(19, asleep=601), gap=601))
    _, _, shown = powers.series(240)
    assert shown["cpu"] == [100_000, *[None] * 121, 100_000]


def test_removed_device_has_no_power_and_a_new_one_is_unknown() -> None:
    powers = PowerHistory()
    one = host(at(5))
    other = replace(one.domains[0], domain=replace(one.domains[0].domain, id="new"))
    powers.record(one)
    powers.record(host(at(10)))
    away = replace(host(at(15)).domains[0], present=False)
    powers.record(replace(host(at(15)), domains=(away, replace(other, settled=at(15)))))
    _, _, shown = powers.series(240)
    assert shown == {"cpu": [100_000, None], "new": [None, None]}


def test_history_restarts_after_a_long_suspend() -> None:
    powers = PowerHistory()
    powers.record(host(at(5)))
    powers.record(host(at(10)))
    powers.record(host(at(15, asleep=2 * MAX_DURATION / SECOND)))
    _, _, shown = powers.series(240)
    assert shown == {"cpu": []}
    assert SLOTS * STEP == MAX_DURATION


def test_process_that_ended_keeps_its_name_for_the_hour() -> None:
    memory = PageHistory()
    lived(memory, 1000, 1100)
    gone = replace(host(at(1101)), processes=(), retired={CPU: Microjoules(110_100 * J)})
    memory.record(gone)
    last = replace(host(at(1200)), processes=(), retired={CPU: Microjoules(120_000 * J)})
    memory.record(last)
    now, hour = memory.recent(last)
    assert {node.name for node in build_flow(hour).nodes.values()} >= {"worker", "unlisted"}
    assert "worker" not in {node.name for node in build_flow(now).nodes.values()}


def test_record_is_due_at_the_end_of_a_period_only() -> None:
    memory = PageHistory()
    due = []
    for second in range(3 * STEP // SECOND):
        snapshot = host(at(1000 + second))
        due.append(memory.is_due(snapshot))
        memory.record(snapshot)
        assert not memory.is_due(snapshot)
    assert [second for second, one in enumerate(due) if one] == [0, 5, 10]
