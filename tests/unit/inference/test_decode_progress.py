"""The clock of an engine's decode, against requests of known progress."""

from __future__ import annotations

import random

import pytest

from wattspan.inference.requests import DecodeProgress, InferenceRequest
from wattspan.model import MILLISECOND, SECOND

S = SECOND


def _request(start: float, first: float, end: float, prefill: int, decode: int):
    times = [round(at * S) for at in (start, first, end)]
    return InferenceRequest._make(
        [b"r" * 8, "m", *times, prefill, decode, prefill, True, "", 0, ""]
    )


def _served(count: int, *, delay: float) -> list[InferenceRequest]:
    """Requests of an engine whose tokens take 10 ms, and ``delay`` seconds more a prompt token."""
    chance, found, prefills, at = random.Random(1), [], [], 0.0
    for _ in range(count):
        at += chance.uniform(0.2, 1.0)
        size = chance.randint(200, 3000)
        prefills.append((at, at + size * max(delay, 1e-6), size))
    for start, first, size in prefills:
        decode = chance.randint(20, 300)
        end = first + 0.01 * decode
        for _ in range(50):  # until all prefill in the phase is in its duration
            slower = sum(
                delay * other * max(0.0, min(end, stop) - max(first, begin)) / (stop - begin)
                for begin, stop, other in prefills
            )
            end = first + 0.01 * decode + slower
        found.append(_request(start, first, end, size, decode))
    return found


def test_time_of_prompt_tokens_is_learned() -> None:
    requests, progress = _served(120, delay=30e-6), DecodeProgress()
    progress.update(requests)
    progress.learn(requests[:-20])

    assert progress.prefill_time == pytest.approx(30_000, rel=0.15)


def test_clock_is_even_before_anything_is_learned() -> None:
    progress = DecodeProgress()
    assert progress.prefill_time == 0
    assert progress.at(7 * S) == 7 * S

    progress.update(_served(20, delay=30e-6))

    assert progress.at(9 * S) - progress.at(8 * S) == pytest.approx(S)


def test_clock_is_slow_during_prefill() -> None:
    requests, progress = _served(120, delay=30e-6), DecodeProgress()
    progress.update(requests)
    progress.learn(requests[:-20])
    one = _request(10.0, 10.1, 12.0, 3000, 50)
    progress.update([one])

    def rate(start: float, end: float) -> float:
        return (progress.at(round(end * S)) - progress.at(round(start * S))) / (end - start) / S

    assert rate(9.0, 9.5) == pytest.approx(1.0)
    assert rate(10.5, 20.0) == pytest.approx(1.0)
    assert rate(10.02, 10.08) == pytest.approx(0.1, abs=0.05)
    assert rate(11.0, 12.0) == pytest.approx(1.0)


def test_clock_never_stands_still() -> None:
    requests, progress = _served(120, delay=30e-6), DecodeProgress()
    progress.update(requests)
    progress.learn(requests[:-20])
    progress.update([_request(10.0, 10.001, 12.0, 100_000, 50)])

    assert progress.at(10 * S + MILLISECOND) > progress.at(10 * S)


def test_clock_of_no_requests_is_the_time() -> None:
    progress = DecodeProgress()
    progress.update([])

    assert progress.at(3 * S) == 3 * S


def test_short_phases_and_unknown_phases_are_not_learned() -> None:
    progress = DecodeProgress()
    short = _request(0, 1, 2, 100, 3)
    unknown = _request(0, 1, 2, 100, 300)._replace(known_phases=False)
    instant = _request(0, 1, 1, 100, 300)
    progress.update([short, unknown, _request(1.5, 1.6, 9, 100, 3)])
    progress.learn([short, unknown, instant])

    assert progress.prefill_time == 0


def test_delay_beside_other_engines_is_learned() -> None:
    chance, progress, requests = random.Random(2), DecodeProgress(), []
    others = [(100 * i * S, 100 * i * S + 50 * S) for i in range(40)]
    for number in range(200):
        start = 20 * number + chance.uniform(0, 10)
        decode = chance.randint(100, 1000)
        end, left = start, 0.01 * decode
        while left > 0:  # half as fast in the first half of 100 s
            beside = end % 100 < 50
            stretch = min(left * (2 if beside else 1), 50 - end % 50)
            end, left = end + stretch, left - stretch / (2 if beside else 1)
        requests.append(_request(start, start, end, 0, decode))
    progress.update(requests, others)
    progress.learn(requests)
    assert progress.delay == pytest.approx(0.5, abs=0.03)

    progress.update([], others)

    assert progress.at(60 * S) - progress.at(50 * S) == pytest.approx(10 * S)
    assert progress.at(20 * S) - progress.at(10 * S) == pytest.approx(5 * S, rel=0.06)
