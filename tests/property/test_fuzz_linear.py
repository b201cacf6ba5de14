"""No parser of text takes time squared: four times as long an input takes about four times as long.

CPU time of this thread, the shortest of some tries, and a bound that only a square breaks.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from fuzz.registry import targets

TARGETS = targets()
TEXTS = (
    *("ceiling-file", "cgroup-paths", "collector-http", "config-file", "decision-book", "http"),
    *("otlp-json", "otlp-protobuf", "proc-stat", "rate-answer", "retry-after", "scrape-headers"),
    "tariff",
)
FEW, MANY = 8_000, 32_000
GENERIC = (
    b"a",
    b".",
    b" ",
    b"\n",
    b"-",
    b":",
    b"/",
    b"[",
    b"{",
    b'"',
    b",",
    b"\\x41",
    b"\xff",
    b"0",
)


def seconds(run: Callable[[bytes], None], data: bytes) -> float:
    began = time.thread_time()
    run(data)
    return time.thread_time() - began


@pytest.mark.slow
@pytest.mark.parametrize("name", TEXTS)
def test_repeated_input_takes_linear_time(name: str) -> None:
    target = TARGETS[name]
    begin = target.samples[0]
    for word in (*GENERIC, *target.words):
        few, many = (begin + word * (size // len(word)) for size in (FEW, MANY))
        if seconds(target.run, many) < 0.1:
            continue  # quick however it grows
        short = min(seconds(target.run, few) for _ in range(3))
        long = min(seconds(target.run, many) for _ in range(3))
        assert long < 10 * short + 0.05, f"{word!r}: {short:.3f} s, then {long:.3f} s"
