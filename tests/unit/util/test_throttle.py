"""Delays of RetryBackoff and intervals of RateLimitedLog."""

from __future__ import annotations

from wattspan.util.throttle import MAX_KEYS, RateLimitedLog, RetryBackoff


def test_delay_doubles_up_to_the_longest() -> None:
    backoff = RetryBackoff(10, 35)
    assert backoff.is_due(0)
    assert [backoff.failed(100) - 100 for _ in range(4)] == [10, 20, 35, 35]
    assert not backoff.is_due(134)
    assert backoff.is_due(135)
    assert backoff.failures == 4


def test_reset_makes_the_next_attempt_due_immediately() -> None:
    backoff = RetryBackoff(10, 40)
    backoff.failed(0)
    backoff.failed(10)
    backoff.reset()
    assert (backoff.retry_at, backoff.failures) == (0, 0)
    assert backoff.failed(100) == 110


def test_requested_delay_is_respected_and_does_not_grow() -> None:
    backoff = RetryBackoff(10, 40)
    assert backoff.failed(0, retry_after=500) == 500
    assert backoff.failed(0, retry_after=3) == 10
    assert backoff.failed(0) == 10


def test_jitter_shortens_delays_by_at_most_a_half() -> None:
    assert RetryBackoff(1000, 4000, lambda: 0.5).failed(0) == 750
    assert 500_000 < RetryBackoff(1_000_000, 4_000_000, lambda: 0.999).failed(0) < 501_000


class Log:
    def __init__(self, interval: int) -> None:
        self.now = 5
        self.lines: list[str] = []
        self.log = RateLimitedLog(lambda: self.now, self.lines.append, interval)


def test_message_is_logged_once_an_interval_per_key() -> None:
    bench = Log(100)
    for _ in range(3):
        bench.log.write("a")
        bench.log.write("b", key="other")
    assert bench.lines == ["a", "b"]
    bench.now += 99
    bench.log.write("a")
    assert bench.lines == ["a", "b"]
    bench.now += 1
    bench.log.write("a")
    assert bench.lines == ["a", "b", "a"]


def test_remembered_keys_are_bounded() -> None:
    bench = Log(100)
    for number in range(3 * MAX_KEYS):
        bench.log.write("line", key=str(number))
        assert len(bench.log._logged) <= MAX_KEYS
    assert len(bench.lines) == 3 * MAX_KEYS


def test_failure_names_the_error_and_the_line_that_raised_it() -> None:
    bench = Log(100)
    try:
        int("x")
    except ValueError as error:
        bench.log.failure("Reading", error)
    (line,) = bench.lines
    assert line.startswith(
        "Reading failed: ValueError: invalid literal for int() with base 10: 'x' (test_throttle.py:"
    )
