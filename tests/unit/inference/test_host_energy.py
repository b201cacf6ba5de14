"""The energy of an engine beyond its GPUs: equal parts of active requests, unknown parts."""

from __future__ import annotations

from collections import Counter

import pytest

from wattspan.inference.division import RequestDivision
from wattspan.inference.host_energy import EngineHost, HostCounter, HostShare, ReadMarks
from wattspan.inference.requests import MAX_ACTIVE, ActiveClock, InferenceRequest
from wattspan.inference.step_queue import StepQueue
from wattspan.inference.token_power import TokenPowerModel
from wattspan.model import SECOND
from wattspan.spans.interval_pool import CounterStep

S = SECOND
CPU, OTHER_CPU = HostCounter("package-0", "cpu"), HostCounter("package-1", "cpu")
MEMORY = HostCounter("dram", "memory")


def _request(start: float, end: float) -> InferenceRequest:
    times = round(start * S), round(start * S), round(end * S)
    return InferenceRequest._make([b"r" * 8, "m", *times, 1, 1, 1, True, "", 2, ""])


def _steps(
    start: float, end: float, watts: float, *, blurred: bool = False, length: float = 1.0
) -> list[CounterStep]:
    count, step = round((end - start) / length), round(length * S)
    first, energy = round(start * S), round(watts * 1e6 * length)
    return [
        CounterStep(first + i * step, first + (i + 1) * step, energy, blurred) for i in range(count)
    ]


def _host(*counters: tuple[HostCounter, list[CounterStep]]) -> EngineHost:
    host = EngineHost()
    host.add_steps(dict(counters), 0)
    return host


def test_active_requests_have_equal_parts_of_the_time() -> None:
    one, two, never, later = _request(0, 4), _request(2, 6), _request(3, 3), _request(8, 9)
    clock = ActiveClock([later, two, never, one])
    assert clock.parts(0, 8 * S) == [(one, 3 * S), (two, 3 * S)]
    assert clock.parts(S, 3 * S) == [(one, 1.5 * S), (two, 0.5 * S)]
    assert clock.parts(7 * S, 8 * S) == []
    assert clock.parts(7 * S, 10 * S) == [(later, S)]
    assert ActiveClock([]).parts(0, S) == []


def test_energy_of_an_instant_is_divided_equally_among_active_requests() -> None:
    one, two = _request(0, 4), _request(2, 6)
    host = _host((CPU, _steps(0, 6, 10)), (MEMORY, _steps(0, 6, 1)))

    idle = host.settle(6 * S, [one, two])

    assert idle == Counter({"cpu": 0, "memory": 0})
    assert host.take(one) == ({"cpu": 30_000_000, "memory": 3_000_000}, True)
    assert host.take(two) == ({"cpu": 30_000_000, "memory": 3_000_000}, True)


def test_counters_of_one_type_are_one_part() -> None:
    one = _request(0, 2)
    host = _host((CPU, _steps(0, 2, 10)), (OTHER_CPU, _steps(0, 2, 5)))
    host.settle(2 * S, [one])
    assert host.take(one) == ({"cpu": 30_000_000}, True)


def test_time_without_requests_has_its_mean_power() -> None:
    one = _request(2.25, 3)
    host = _host((CPU, [*_steps(0, 2, 4), *_steps(2, 3, 10)]))

    idle = host.settle(3 * S, [one])

    assert idle["cpu"] == 8_000_000 + 1_000_000
    assert host.take(one).energy == {"cpu": 9_000_000}


def test_first_step_with_a_request_has_no_known_idle_power() -> None:
    one = _request(0.5, 1)
    host = _host((CPU, _steps(0, 1, 10)))
    assert host.settle(S, [one])["cpu"] == 0
    assert host.take(one).energy == {"cpu": 10_000_000}


def test_single_microjoule_among_many_requests_is_the_engines() -> None:
    many = [_request(0, 1) for _ in range(4096)]
    host = _host((CPU, [CounterStep(0, S, 1, False)]))
    assert host.settle(S, many)["cpu"] == 1


@pytest.mark.parametrize(
    ("counters", "known"),
    [
        ([], False),
        ([(MEMORY, _steps(0, 10, 1))], False),
        ([(CPU, _steps(0, 10, 1))], True),
        ([(CPU, _steps(0, 10, 1, blurred=True))], False),  # the idle power is unknown
        ([(CPU, _steps(0, 10, 1)), (MEMORY, _steps(0, 9, 1))], False),  # lost
        ([(CPU, _steps(2, 10, 1))], False),
        ([(CPU, _steps(0, 10, 1)), (OTHER_CPU, [])], False),  # never read
        ([(CPU, [*_steps(0, 4, 1), *_steps(5, 10, 1)])], False),  # a gap
        ([(CPU, [*_steps(0, 4.5, 1, length=0.5), *_steps(5, 10, 1)])], True),  # a short one
    ],
)
def test_share_is_known_if_its_counters_are_nearly_all_the_time(
    counters: list[tuple[HostCounter, list[CounterStep]]], known: bool
) -> None:
    one = _request(0, 10)
    host = _host(*counters)
    host.settle(10 * S, [one])
    assert host.take(one).known is known


def test_steps_wait_for_their_requests() -> None:
    one = _request(0, 4)
    host = _host((CPU, _steps(0, 4, 1)))
    assert host.settle(2 * S, [one])["cpu"] == 0
    assert host.front(0) == 2 * S
    assert host.front(9 * S) == 2 * S  # not lost: there are steps
    host.settle(4 * S, [one])
    assert host.front(9 * S) == 8 * S  # a step may still come
    assert EngineHost().front(0) is None
    assert host.take(one).energy == {"cpu": 4_000_000}


def test_restart_forgets_counters_of_which_nothing_was_divided() -> None:
    host = _host((CPU, _steps(0, 4, 1)), (MEMORY, _steps(0, 1, 1)))
    host.settle(S // 2, [])
    host.restart()
    host.add_steps({CPU: _steps(-2, 4, 1)}, -2 * S)
    assert host.settle(4 * S, [])["cpu"] == 6_000_000
    host.restart()
    assert host.front(0) == 4 * S


def _merged(before: float, until: float) -> tuple[Counter[str], list[HostShare]]:
    """Two engines, divided up to different times, become one; the energy that is left."""
    one, two = _request(0, 4), _request(0, 4)
    part, whole = _host((CPU, _steps(0, 4, 1))), _host((CPU, _steps(0, 4, 2)))
    part.settle(round(before * S), [one])
    whole.settle(round(until * S), [two])
    left = whole.merge(part)
    whole.settle(4 * S, [one, two])
    return left, [whole.take(one), whole.take(two)]


def test_merged_engine_has_the_requests_and_the_steps_of_its_part() -> None:
    left, shares = _merged(2, 2)
    assert not left.total()
    assert shares == [({"cpu": 2_000_000 + 3_000_000}, True), ({"cpu": 7_000_000}, True)]


def test_time_that_was_divided_for_one_of_two_engines_is_left() -> None:
    left, shares = _merged(3, 1)
    assert left == Counter(cpu=2 * 2_000_000)
    assert shares == [({"cpu": 3_000_000 + 1_500_000}, False), ({"cpu": 3_500_000}, False)]


def test_step_of_one_of_two_engines_only_has_an_unknown_part() -> None:
    one, two = _request(0, 2), _request(3, 4)
    part, whole = _host((CPU, _steps(0, 4, 1))), _host((CPU, _steps(0, 2, 2)))
    whole.merge(part)
    assert whole.settle(4 * S, [one, two])["cpu"] == 1_000_000
    assert whole.take(one) == ({"cpu": 6_000_000}, True)
    assert whole.take(two) == ({"cpu": 1_000_000}, False)


def test_engine_without_steps_continues_the_counters_of_its_part() -> None:
    one, whole = _request(0, 4), EngineHost()
    whole.add_steps({CPU: []}, 4 * S)
    whole.add_steps({MEMORY: _steps(0, 4, 1)}, 0)
    part = _host((CPU, _steps(0, 4, 1)), (MEMORY, []))
    part.settle(2 * S, [one])
    assert not whole.merge(part).total()
    whole.settle(4 * S, [one])
    assert whole.take(one).energy["cpu"] == 4_000_000


def test_energy_of_processes_that_another_engine_had_is_not_divided_again() -> None:
    marks, one, two = ReadMarks(), _request(0, 6), _request(3, 6)
    former, later = _host((CPU, _steps(0, 3, 1)), (MEMORY, [])), EngineHost()
    former.assign(frozenset("ab"), marks)
    former.assign(frozenset("a"), marks)
    assert former.restart(marks=marks.latest("a")) == {MEMORY.domain}  # the others are of both
    for steps in ([], _steps(0, 4, 1), _steps(0, 6, 1)):
        later.add_steps({CPU: steps}, 0, marks=marks.latest("b"))
    assert later.read_until == 6 * S
    assert later.settle(6 * S, [one, two])["cpu"] == 0
    assert later.take(one) == ({"cpu": 1_500_000}, False)
    assert later.take(two) == ({"cpu": 1_500_000}, True)


def test_engine_skips_the_time_of_a_process_that_joins_it_from_another() -> None:
    marks, one = ReadMarks(), _request(0, 6)
    host = _host((CPU, _steps(0, 2, 1)))
    marks.set("b", {CPU: 4 * S})
    assert host.restart(marks=marks.latest("b")) == set()
    host.add_steps({CPU: _steps(0, 6, 1)}, 0, marks=marks.latest("b"))
    host.settle(6 * S, [one])
    assert host.take(one) == ({"cpu": 4_000_000}, False)


def test_steps_that_wait_for_a_released_engine_are_returned() -> None:
    marks, host = ReadMarks(), _host((CPU, _steps(0, 4, 1)))
    host.assign(frozenset("a"), marks)
    host.settle(S, [])
    assert host.release(marks) == Counter(cpu=3_000_000)
    assert not host.release(marks).total()
    assert marks.latest("a") == {CPU: 4 * S}


def test_queue_begins_with_the_step_of_the_first_request() -> None:
    steps = _steps(0, 4, 1)
    queue = StepQueue.since(steps, 2 * S + S // 2)
    assert queue.add(steps) == queue.waiting == 2_000_000
    assert queue.add(steps) == 0
    assert StepQueue.since(steps, 9 * S).began == 9 * S
    assert queue.take(S) == []


def _division(*requests: InferenceRequest) -> RequestDivision:
    """An engine whose processes have 1 W on a CPU."""
    division = RequestDivision(lambda _: TokenPowerModel())
    division.assign("e", frozenset())
    division.add(requests, 5 * S, engine="e")
    division.add_host_steps("e", {CPU: _steps(0, 4, 1)}, 2 * S)
    return division


def test_earlier_request_has_the_steps_from_before_the_first_one() -> None:
    division = _division(_request(2, 4))
    division.add([_request(1, 3)], 5 * S, engine="e")
    division.restart([], S)
    assert division.restart_host("e", frozenset(), ()) == {CPU.domain}
    assert division.restart_host("none", frozenset(), ()) == set()
    division.add_host_steps("e", {CPU: _steps(0, 4, 1)}, S)
    settled = division.settle(60 * S)
    assert [each.host for each in settled.requests] == [({"cpu": 1_500_000}, True)] * 2
    assert settled.host_idle == Counter(cpu=0)


def test_withdrawn_request_leaves_its_energy_to_the_engine() -> None:
    one, two = _request(2, 3), _request(2, 4)
    division = _division(one, two)
    division.settle(3 * S)
    division.withdraw([two])
    assert division.settle(60 * S).host_idle == Counter(cpu=500_000 + 1_000_000)


def test_requests_of_a_forgotten_engine_end_with_unknown_energy() -> None:
    division = _division(_request(2, 4))
    division.forget("e")
    division.forget("e")
    settled = division.settle(60 * S)
    assert [each.host for each in settled.requests] == [({"cpu": 0}, False)]
    assert settled.host_idle == Counter(cpu=2_000_000)


def test_counter_that_is_read_late_has_the_step_of_the_first_request() -> None:
    one, host = _request(0.5, 2), EngineHost()
    for steps in ([], _steps(0, 1, 1), _steps(0, 2, 1)):
        host.add_steps({CPU: steps}, S // 2)
    assert host.settle(2 * S, [one])["cpu"] == 0
    assert host.take(one) == ({"cpu": 2_000_000}, True)


def test_requests_after_a_change_of_the_counter_have_known_energy() -> None:
    before, across, after = _request(0, 4), _request(3, 6), _request(6, 9)
    host = _host((CPU, _steps(0, 5, 1)))
    host.settle(4 * S, [before, across])
    left = {CPU.domain}
    host.add_steps({OTHER_CPU: _steps(5, 9, 1)}, 0, left)
    assert host.front(0) == 4 * S  # a step of the former counter waits
    host.settle(9 * S, [across, after])

    assert host.front(0) == 9 * S
    assert host.take(after) == ({"cpu": 3_000_000}, True)
    assert not host.take(across).known


def test_request_without_duration_has_no_known_energy() -> None:
    instant = _request(2, 2)
    host = _host((CPU, _steps(0, 4, 1)))
    host.settle(4 * S, [instant])
    assert host.take(instant) == ({"cpu": 0}, False)


def test_requests_are_not_read_while_no_step_is_ready() -> None:
    host, unread = _host((CPU, _steps(0, 4, 1))), iter([_request(0, 4)])
    assert not host.settle(S // 2, unread)
    assert len(list(unread)) == 1


def test_returned_engine_needs_no_steps_from_before_its_end() -> None:
    members, division = frozenset("a"), _division(_request(2, 4))
    division.assign("e", frozenset(), None, members)
    assert division.host_read_until("e", members) == 4 * S
    assert division.host_read_until("none", members) == 0
    division.forget("e")
    assert division.host_read_until("e", members) == 4 * S
    division.expire_marks(4 * S)
    assert division.host_read_until("e", members) == 0


def test_active_requests_with_energy_of_a_step_are_bounded() -> None:
    many = [_request(0, 2) for _ in range(MAX_ACTIVE)]
    late, next_one = _request(1, 2), _request(2, 3)
    parts = ActiveClock([late, *many]).parts(0, 3 * S)
    assert len(parts) == MAX_ACTIVE
    assert sum(part for _, part in parts) == pytest.approx(2 * S)

    host = _host((CPU, _steps(0, 3, 1000)))
    host.settle(3 * S, [*many, late, next_one])
    assert host.take(late) == ({"cpu": 0}, False)
    assert host.take(many[0]).known
    assert host.take(next_one) == ({"cpu": 1_000_000_000}, True)


def test_time_of_a_request_that_is_final_before_its_steps_is_not_waiting() -> None:
    early, one = _request(0, 2), _request(3.25, 4)
    host = _host((CPU, [*_steps(0, 2, 10), *_steps(2, 3, 2), *_steps(3, 4, 10)]))
    host.take(early)
    idle = host.settle(2 * S, [])["cpu"] + host.settle(4 * S, [one])["cpu"]
    assert idle == 20_000_000 + 2_000_000 + 500_000


def test_request_waits_for_a_counter_with_long_steps() -> None:
    division = RequestDivision(lambda _: TokenPowerModel())
    division.assign("e", frozenset())
    for start in (0, 45):
        division.add([_request(start + 1, start + 30)], (start + 31) * S, engine="e")
    division.add_host_steps("e", {CPU: _steps(0, 45, 1, length=45)}, S)
    (first,) = division.settle(80 * S, held=True).requests
    assert first.host.known
    assert not division.settle(130 * S, held=True).requests
    division.add_host_steps("e", {CPU: _steps(0, 90, 1, length=45)}, S)
    (second,) = division.settle(131 * S, held=True).requests
    assert second.host == ({"cpu": 45_000_000}, True)


def test_latest_mark_of_some_processes_is_found_by_counter() -> None:
    marks = ReadMarks()
    marks.set("ab", {"cpu": 5, "memory": 6})
    marks.set("b", {"cpu": 7, "memory": 2})
    assert marks.latest({"a", "b", "c"}) == {"cpu": 7, "memory": 6}
    assert marks.latest({"a"}) == {"cpu": 5, "memory": 6}
    assert marks.latest({"c"}) == {}


def test_processes_without_counters_have_no_mark() -> None:
    marks = ReadMarks()
    marks.set("a", {})
    assert len(marks) == 0


def test_expired_marks_are_removed() -> None:
    marks = ReadMarks()
    marks.set("a", {"cpu": 5, "memory": 6})
    marks.set("b", {"cpu": 5})
    marks.expire(5)
    assert marks.latest("ab") == {"memory": 6}
    assert len(marks) == 1
