"""Decisions of load tracking, on a server whose latency depends on load and setting by numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from testbed.saved_state import saved

from wattspan.model import MILLISECOND, SECOND, DecisionReason
from wattspan.tuning.decisions.load import LoadSample
from wattspan.tuning.decisions.load_cells import LatencyObjective, RequestTimes
from wattspan.tuning.decisions.load_tracking import (
    LOWERING_TIME,
    LoadObservation,
    TrackingPolicy,
    TrackingState,
    begin_tracking,
    headroom,
    release,
    resume_tracking,
    track,
)
from wattspan.tuning.decisions.values import EnergyPoint

TTFT = LatencyObjective(True, 400 * MILLISECOND, 0.01)
TBT = LatencyObjective(False, 100 * MILLISECOND, 0.01)
SETTINGS = (1980, 1590, 1185)


def policy(**more: object) -> TrackingPolicy:
    return TrackingPolicy((TTFT, TBT), SETTINGS, **more)  # type: ignore[arg-type]


@dataclass
class NumberedServer:
    """``rate`` requests arrive in a second and take a second; ``ttft`` is their milliseconds.

    Energy is a joule per token at the original, and less at lower settings.
    """

    rate: int = 8
    ttft: Callable[[int, int], int] = lambda setting, rate: 50
    state: TrackingState = field(default_factory=lambda: begin_tracking(policy(), 0))
    now: int = 0
    energy: float = 0.0
    saving: float = 0.1  # at each setting
    in_force: bool = True
    metered: bool = True
    mute: bool = False
    backlog: int = 0
    settings: list[int] = field(default_factory=list)

    def run(self, seconds: int, until: Callable[[], bool] = lambda: False) -> int:
        """Run so long, or until a condition; returns the seconds."""
        for second in range(seconds):
            if until():
                return second
            start, self.now = self.now, self.now + SECOND
            setting = self.state.setting
            self.energy += 1e6 * self.rate * 10 * (1 - self.saving * setting)
            ttft = self.ttft(setting, self.rate) * MILLISECOND
            requests = [
                RequestTimes(start, self.now, ttft, 10 * MILLISECOND, 500, 10)
                for _ in range(0 if self.mute else self.rate - self.backlog)
            ]
            sample = LoadSample(
                start,
                self.now,
                float(self.rate),
                0 if self.mute else self.rate,
                len(requests),
                500.0 * len(requests),
                10.0 * len(requests),
            )
            self.state = track(
                self.state,
                LoadObservation(
                    self.now,
                    sample,
                    requests,
                    (EnergyPoint(self.now, round(self.energy)),) if self.metered else (),
                    self.in_force,
                ),
            )
            self.settings.append(self.state.setting)
        return seconds

    def tuned(self) -> NumberedServer:
        """Run until the lowest setting is certified."""
        self.run(1200, until=lambda: self.state.cells.lowest(self.state.bin) == 2)
        assert self.state.cells.lowest(self.state.bin) == 2
        return self


@saved
def tuned(rate: int = 8) -> NumberedServer:
    return NumberedServer(rate=rate).tuned()


def test_tracking_needs_an_objective_and_falling_settings() -> None:
    with pytest.raises(ValueError, match="objective"):
        begin_tracking(TrackingPolicy((), SETTINGS), 0)
    with pytest.raises(ValueError, match="settings"):
        begin_tracking(TrackingPolicy((TTFT,), (100, 200)), 0)
    with pytest.raises(ValueError, match="settings"):
        begin_tracking(TrackingPolicy((TTFT,), ()), 0)


def test_only_setting_is_the_original() -> None:
    server = NumberedServer(state=begin_tracking(TrackingPolicy((TTFT,), (1980,)), 0))
    server.run(300)
    assert set(server.settings) == {0}


def test_setting_is_lowered_one_step_a_minute() -> None:
    server = tuned()
    steps = [
        place
        for place, (one, after) in enumerate(
            zip(server.settings, server.settings[1:], strict=False)
        )
        if one != after
    ]
    assert [server.settings[place + 1] for place in steps] == [1, 2]
    assert steps[1] - steps[0] >= LOWERING_TIME // SECOND
    assert server.state.committed is not None
    assert server.state.reason is DecisionReason.CERTIFIED


def test_short_surge_is_undone_without_a_dwell_time() -> None:
    server = tuned(6)
    server.run(70)
    assert server.state.setting == 2
    server.rate = 20
    server.run(2)
    assert server.state.setting == 0
    server.rate = 6
    assert server.run(30, until=lambda: server.state.setting > 0) <= 15
    assert server.state.setting == 2
    assert server.state.may_lower_at == server.now + server.state.dwell


def test_setting_after_a_lasting_surge_is_lowered_by_steps() -> None:
    server = tuned(6)
    server.run(70)
    server.rate = 20
    server.run(15)
    assert server.state.setting == 0
    server.rate = 6
    server.run(100, until=lambda: server.state.setting > 0)
    assert server.state.setting == 1


def test_setting_before_a_surge_that_is_not_certified_now_waits_for_the_dwell_time() -> None:
    state = begin_tracking(policy(dwell=300 * SECOND), 0)
    server = NumberedServer(rate=6, state=state).tuned()
    server.rate = 20
    server.run(15)
    assert server.state.before_surge == 2
    server.rate = 14  # the average is in a bin without evidence
    server.run(60, until=lambda: server.state.before_surge == 0)
    assert server.state.before_surge == server.state.setting == 0
    assert server.now < server.state.may_lower_at


def test_setting_that_is_only_tried_is_not_restored_after_a_surge() -> None:
    server = NumberedServer(rate=6)
    server.run(200, until=lambda: server.state.trial)
    server.rate = 20
    server.run(2)
    assert server.state.setting == 0
    server.rate = 6
    assert server.run(30, until=lambda: server.state.setting > 0) == 30


def test_release_forgets_the_setting_before_a_surge() -> None:
    server = tuned(6)
    server.run(70)
    server.rate = 20
    server.run(2)
    assert server.state.before_surge == 2
    state = release(server.state, LoadObservation(server.now), DecisionReason.FOREIGN_WRITER)
    assert state.before_surge == 0


def test_tracking_saves_what_the_meters_show() -> None:
    server = tuned()
    server.run(300)
    totals = server.state.totals
    assert totals.saved > 0
    assert totals.saved / (totals.saved + totals.metered) < 0.2
    assert totals.requests == (len(server.settings) - 1) * server.rate  # the first load is unknown


def test_unknown_energy_counts_no_saving() -> None:
    server = NumberedServer(metered=False).tuned()
    server.run(100)
    assert server.state.totals.saved == 0.0
    assert server.state.totals.metered == 0.0
    assert len(server.state.meters) < 20


def test_setting_without_room_in_the_latencies_is_not_tried() -> None:
    server = NumberedServer(ttft=lambda setting, rate: 390)
    server.run(200)
    assert set(server.settings) == {0}


def test_missing_latencies_are_no_evidence() -> None:
    server = NumberedServer()
    server.state = begin_tracking(
        TrackingPolicy((LatencyObjective(True, 1, 0.01)._replace(limit=10**12),), SETTINGS), 0
    )
    plain = RequestTimes
    server.ttft = lambda setting, rate: 1
    for _ in range(200):
        start, server.now = server.now, server.now + SECOND
        requests = [plain(start, server.now) for _ in range(8)]
        sample = LoadSample(start, server.now, 8.0, 8, 8)
        server.state = track(server.state, LoadObservation(server.now, sample, requests))
    assert server.state.setting == 0
    assert server.state.totals.counted == (0,)


def test_trial_that_misses_is_left_soon() -> None:
    server = NumberedServer(ttft=lambda setting, rate: (100, 100, 900)[setting])
    server.run(900, until=lambda: server.state.setting == 2)
    assert server.state.setting == 2
    assert server.run(10, until=lambda: server.state.setting == 0) < 5
    assert server.state.reason is DecisionReason.TAIL
    assert server.state.doublings == 0
    server.run(100, until=lambda: server.state.setting == 1)
    server.run(60)
    assert server.state.setting == 1  # the lower one is not tried again so soon


def test_misses_at_a_certified_setting_restore_the_original_and_double_the_dwell() -> None:
    server = tuned()
    dwell = server.state.dwell
    server.ttft = lambda setting, rate: 900
    server.run(20, until=lambda: server.state.setting == 0)
    assert server.state.setting == 0
    assert server.state.dwell == 2 * dwell
    assert server.state.cells.lowest(server.state.bin) < 2
    server.ttft = lambda setting, rate: 50
    server.run(2 * dwell // SECOND - 2)
    assert server.state.setting == 0
    server.run(6 * dwell * 5 // SECOND, until=lambda: server.state.dwell == dwell)
    assert server.state.dwell == dwell


def test_unknown_higher_load_restores_the_original_within_a_period() -> None:
    server = tuned()
    server.rate = 16
    assert server.run(30, until=lambda: server.state.setting == 0) <= 5


def test_known_higher_load_has_its_own_setting() -> None:
    def ttft(setting: int, rate: int) -> int:
        return 900 if setting == 2 and rate > 10 else 50

    server = NumberedServer(ttft=ttft).tuned()
    server.rate = 18
    server.run(60)
    server.run(600, until=lambda: server.state.cells.lowest(5) == 1 == server.state.setting)
    assert server.state.setting == 1
    server.rate = 8
    server.run(300, until=lambda: server.state.setting == 2)
    assert server.state.setting == 2
    server.rate = 18
    assert server.run(30, until=lambda: server.state.setting < 2) <= 5


def test_every_met_bin_may_be_required() -> None:
    server = NumberedServer(
        ttft=lambda setting, rate: 390 if rate > 10 else 50,
        state=begin_tracking(policy(every_bin=True), 0),
        rate=18,
    )
    server.run(60)
    server.rate = 8
    server.run(300)
    assert set(server.settings) == {0}


def test_growing_queue_restores_the_original() -> None:
    server = tuned(12)
    server.backlog = 8
    server.run(30, until=lambda: server.state.setting == 0)
    assert server.state.reason is DecisionReason.CHANGED
    assert server.state.doublings == 1


def test_silence_restores_the_original() -> None:
    server = tuned()
    server.mute = True
    server.run(60, until=lambda: server.state.setting == 0)
    assert server.state.reason is DecisionReason.PAUSED


def test_alarms_at_the_original_are_ignored() -> None:
    server = NumberedServer()
    server.run(20)
    server.mute = True
    server.run(35)
    assert server.state.load.silent(server.now)
    assert server.state.alarmed_at == 0


def test_setting_that_is_not_in_force_is_no_evidence() -> None:
    server = NumberedServer()
    server.run(120, until=lambda: server.state.setting == 1)
    server.in_force = False
    server.run(100)
    assert server.state.cells.lowest(server.state.bin) == 0


def test_headroom_is_relative_to_the_certified_load() -> None:
    server = NumberedServer()
    assert headroom(server.state) is None
    server.run(120, until=lambda: server.state.setting == 1)
    assert headroom(server.state) == 0.0  # a trial
    server.tuned()
    server.run(10)
    found = headroom(server.state)
    assert 0.9 < found < 2.1


def test_setting_that_costs_more_energy_is_not_held() -> None:
    server = NumberedServer(saving=-0.2)
    for _ in range(30):
        cells = server.state.cells.add_energy(3, 0, 8e7 * 5, 8 * 10 * 5)
        server.state = server.state._replace(cells=cells)
    server.run(120, until=lambda: server.state.setting == 1)
    assert server.state.setting == 1
    server.run(300, until=lambda: server.state.setting == 0)
    assert server.state.setting == 0
    server.run(100)
    assert server.state.setting == 0


def test_steps_without_requests_or_samples_keep_the_state() -> None:
    state = begin_tracking(policy(), 0)
    state = track(state, LoadObservation(SECOND))
    assert state.setting == 0
    state = track(state, LoadObservation(2 * SECOND, requests=[RequestTimes(-5, -1, 1, 1)]))
    assert state.totals.requests == 0


def test_late_request_counts_without_its_energy() -> None:
    server = NumberedServer()
    server.run(300)
    first = server.state.meters[0].start
    server.state = server.state._replace(meters=server.state.meters[-1:])
    before, tokens = server.state.totals.requests, server.state.meters[-1].tokens
    late = RequestTimes(first - SECOND, first - SECOND // 2, 1, 1, 10, 10)
    server.state = track(server.state, LoadObservation(server.now, requests=[late]))
    assert server.state.totals.requests == before + 1
    assert server.state.meters[-1].tokens == tokens


def test_external_reason_restores_the_original_and_keeps_the_evidence() -> None:
    server = tuned()
    before, number = server.state, server.state.bin
    observation = LoadObservation(server.now + SECOND)
    after = release(before, observation, DecisionReason.SHARED)
    assert (after.setting, after.reason, after.trial) == (0, DecisionReason.SHARED, False)
    assert after.cells.lowest(number) == 2
    assert after.may_lower_at == observation.now + after.dwell
    assert after.alarmed_at == before.alarmed_at
    server.state = after
    assert server.run(300, until=lambda: server.state.setting == 2) < 300


def test_requests_while_an_external_reason_lasts_count_for_the_original() -> None:
    server = tuned()
    state, number = server.state, server.state.bin
    for second in range(22):
        start, now = server.now + second * SECOND, server.now + (second + 1) * SECOND
        ttft = (500 if second > 1 else 50) * MILLISECOND  # the first began at the lower setting
        requests = [RequestTimes(start, now, ttft, 10 * MILLISECOND, 500, 10)] * 8
        observation = LoadObservation(now, LoadSample(start, now, 8.0, 8, 8), requests)
        state = release(state, observation, DecisionReason.THROTTLED)
    assert state.cells.cell(number, 0).counts[0].missed.misses > 100
    assert state.cells.cell(number, 2).counts[0].missed.misses == 0
    assert state.cells.lowest(number) == 2


def test_resumed_tracking_has_the_evidence_and_no_open_requests() -> None:
    server = tuned()
    before = server.state
    after = resume_tracking(before, server.now + 100 * SECOND)
    assert after.setting == 0
    assert (after.cells, after.totals, after.committed) == (
        before.cells,
        before.totals,
        before.committed,
    )
    assert (after.marks, after.meters, after.points, dict(after.tallies)) == ((), (), (), {})
    server.now, server.state = server.now + 100 * SECOND, after
    assert server.run(300, until=lambda: server.state.setting == 2) < 300


# ------------------------------------------------------------------------- tokens of an engine


class CountedServer(NumberedServer):
    """Its tokens are counted by the engine, each 5 s, and not by its requests."""

    counted = 0

    def run(self, seconds: int, until: Callable[[], bool] = lambda: False) -> int:
        for second in range(seconds):
            if until():
                return second
            start, self.now = self.now, self.now + SECOND
            self.energy += 1e6 * self.rate * 10 * (1 - self.saving * self.state.setting)
            requests = [RequestTimes(start, self.now, 50 * MILLISECOND)] * self.rate
            again = [RequestTimes(start, self.now, None, 10 * MILLISECOND, again=True)] * self.rate
            sample = LoadSample(start, self.now, float(self.rate), self.rate, self.rate)
            self.counted += 10 * self.rate
            generated = [EnergyPoint(self.now, self.counted)] if not second % 5 else []
            if not self.state.generated and generated:
                generated.insert(0, EnergyPoint(start, 0))
                self.counted = 10 * self.rate
                generated[1] = EnergyPoint(self.now, self.counted)
            self.state = track(
                self.state,
                LoadObservation(
                    self.now,
                    sample,
                    [*requests, *again],
                    (EnergyPoint(self.now, round(self.energy)),),
                    generated=generated,
                ),
            )
            self.settings.append(self.state.setting)
        return seconds


def test_energy_per_token_is_that_of_counted_tokens() -> None:
    server = CountedServer()
    server.run(600, until=lambda: server.state.setting == 2)
    server.run(60)
    cells = server.state.cells
    assert cells.cell(server.state.load.usual_bin, 0).energy_per_token == pytest.approx(
        1e6, rel=0.1
    )
    assert cells.cell(server.state.load.usual_bin, 2).energy_per_token == pytest.approx(
        8e5, rel=0.1
    )


def test_request_with_two_entries_counts_once() -> None:
    server = CountedServer()
    server.run(20)
    assert server.state.totals.requests <= 20 * server.rate
    assert server.state.totals.counted[0] == server.state.totals.counted[1]
    assert server.state.totals.requests == server.state.totals.counted[0]


def test_entries_of_one_request_alarm_by_the_missed_limit_alone() -> None:
    server = CountedServer()
    server.run(600, until=lambda: server.state.setting == 1)
    server.run(3)
    assert server.state.setting == 1
    slow = [RequestTimes(server.now, server.now, None, SECOND, again=True)] * 20
    sample = LoadSample(server.now, server.now + SECOND, 8.0, 8, 8)
    heard = LoadObservation(server.now + SECOND, sample, slow, generated=())
    assert track(server.state, heard).reason is DecisionReason.TAIL


def test_periods_before_a_change_of_the_source_have_no_energy() -> None:
    server = CountedServer()
    server.run(30)
    assert server.state.meters
    heard = LoadObservation(server.now + 1, None)
    assert track(server.state, heard).generated is None
    assert track(server.state, heard).meters == ()
    again = track(track(server.state, heard), heard._replace(generated=()))
    assert again.generated == ()


def test_tokens_that_begin_anew_are_not_counted_over_the_gap() -> None:
    server = CountedServer()
    server.run(20)
    anew = (EnergyPoint(server.now, 0), EnergyPoint(server.now + SECOND, 5))
    heard = LoadObservation(server.now + SECOND, None, generated=anew)
    assert track(server.state, heard).generated == anew


def test_energy_per_token_is_known_for_long_periods() -> None:
    server = NumberedServer(state=begin_tracking(policy(period=20 * SECOND), 0))
    server.run(600)
    cell = server.state.cells.cell(server.state.load.usual_bin, server.state.setting)
    assert cell.energy_per_token == pytest.approx(1e6 * (1 - 0.1 * server.state.setting), rel=0.1)


@pytest.mark.parametrize("begin", [-5 * SECOND, 1])
def test_long_misses_alarm_though_they_began_before_the_present_setting(begin: int) -> None:
    """Before the first known load, and at a lower setting that was left."""
    server = tuned()
    server.run(20)
    now = server.now
    marks = tuple(one._replace(setting=2) for one in server.state.marks[:1])
    state = server.state._replace(
        setting=1, changed_at=now // 4, marks=(*marks, server.state.marks[-1]._replace(setting=1))
    )
    first = marks[0].at
    slow = [RequestTimes(first + begin, now, SECOND, SECOND)] * 40
    sample = LoadSample(now, now + SECOND, 8.0, 8, 8)
    tracked = track(state, LoadObservation(now + SECOND, sample, slow))
    assert tracked.reason is DecisionReason.TAIL
    fast = [RequestTimes(first + begin, now, 1, 1)] * 40
    tracked = track(state, LoadObservation(now + SECOND, sample, fast))
    assert tracked.reason is not DecisionReason.TAIL


def test_tokens_of_the_present_period_are_not_those_of_the_period_before() -> None:
    server = NumberedServer()
    server.run(30)
    last = server.state.meters[-1].tokens
    state = server.state._replace(tokens=0.0)
    late = RequestTimes(server.now - 1, server.now, 1, 1, 10, 10)
    state = track(state, LoadObservation(server.now, requests=[late]))
    assert state.meters[-1].tokens == last
    assert state.tokens == 10
