"""Whose an announced span is stays known for as long as the span is awaited."""

from __future__ import annotations

from wattspan.model import Consumer
from wattspan.service.joiner_protocols import SpanOrigins

APP, OTHER = Consumer(10, 1), Consumer(11, 1)
MEMORY = 100


def nobody(whose: Consumer, span: bytes) -> bool:
    return False


def test_who_announced_a_span_first_is_believed() -> None:
    origins = SpanOrigins(1000)
    origins.remember(b"a", APP)
    origins.remember(b"a", OTHER)
    assert origins.of(b"a") == APP
    assert origins.of(b"b") is None
    origins.age(MEMORY, MEMORY, nobody)
    origins.remember(b"a", OTHER)
    assert origins.of(b"a") == APP


def test_what_came_long_ago_is_forgotten_and_what_came_of_late_is_not() -> None:
    origins = SpanOrigins(1000)
    origins.age(MEMORY, MEMORY, nobody)
    origins.remember(b"early", APP)
    origins.age(2 * MEMORY - 1, MEMORY, nobody)
    origins.remember(b"late", OTHER)
    origins.age(2 * MEMORY, MEMORY, nobody)
    assert origins.of(b"early") == APP
    origins.age(3 * MEMORY - 1, MEMORY, nobody)
    assert origins.of(b"late") == OTHER
    origins.age(3 * MEMORY, MEMORY, nobody)
    assert len(origins) == 0


def test_a_span_that_is_still_open_is_known_however_long_ago_it_began() -> None:
    origins = SpanOrigins(1000)
    origins.remember(b"open", APP)
    origins.remember(b"closed", APP)
    for now in range(1, 50):
        origins.age(now * MEMORY, MEMORY, lambda whose, span: (whose, span) == (APP, b"open"))
    assert origins.of(b"open") == APP
    assert origins.of(b"closed") is None


def test_so_many_at_once_are_forgotten_before_their_time() -> None:
    origins = SpanOrigins(limit=10)
    for number in range(200):
        origins.remember(bytes([number]), APP)
        origins.age(1, MEMORY, nobody)
        assert len(origins) <= 22
    assert origins.of(bytes([199])) == APP


def test_what_is_kept_because_it_is_open_does_not_fill_the_place_of_others() -> None:
    origins = SpanOrigins(limit=10)
    asked = []

    def everything(whose: Consumer, span: bytes) -> bool:
        asked.append(span)
        return True

    for number in range(100):
        origins.remember(bytes([number]), APP)
        origins.age(1, MEMORY, everything)
    assert len(origins) == 100
    assert len(asked) < 1000  # and not a hundred times a hundred
