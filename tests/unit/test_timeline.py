"""The recent past: in order, bounded, and nobody it still names is forgotten."""

import tracemalloc

from wattspan.attribution.history import AttributionHistory
from wattspan.model import (
    SECOND,
    Attribution,
    Consumer,
    Instant,
    Interval,
    Microjoules,
    Share,
)

ME, YOU = Consumer(1, 1), Consumer(2, 2)


def settled(start: int, end: int, domain: str = "d", **shares: int) -> Attribution:
    parts = tuple(
        Share({"me": ME, "you": YOU}[who], Microjoules(energy)) for who, energy in shares.items()
    )
    energy = Microjoules(sum(shares.values()) + 3)
    interval = Interval(domain, Instant(start, 0), Instant(end, 0), energy)
    return Attribution(interval, parts, Microjoules(1), Microjoules(2))


def test_a_window_gets_the_part_of_each_entry_that_lies_in_it() -> None:
    timeline = AttributionHistory(300 * SECOND, 10**6)
    timeline.add(settled(0, 100, me=1000, you=500))
    timeline.add(settled(100, 200, me=100))
    assert timeline.spent("d", ME, 50, 150) == 550
    assert timeline.spent("d", ME, 150, 200) == 50
    assert timeline.spent("d", YOU, 0, 300) == 500
    assert timeline.spent("d", Consumer(9, 9), 0, 300) == 0
    assert timeline.spent("nowhere", ME, 0, 300) == 0


def test_watermark_and_horizon_say_what_can_be_asked() -> None:
    timeline = AttributionHistory(300 * SECOND, 10**6)
    assert timeline.watermark("d") is None
    assert timeline.horizon("d") is None
    timeline.add(settled(0, 100))
    timeline.add(settled(100, 200))
    assert timeline.watermark("d") == Instant(200, 0)
    assert timeline.horizon("d") == Instant(0, 0)
    assert timeline.domains == ("d",)


def test_what_is_older_than_the_span_goes_and_takes_its_names_along() -> None:
    timeline = AttributionHistory(SECOND, 10**6)
    timeline.add(settled(0, 100, you=5))
    size = timeline.size
    timeline.add(settled(2 * SECOND, 2 * SECOND + 100, me=5))
    assert len(timeline) == 1
    assert timeline.size == size
    assert timeline.spent("d", YOU, 0, 10 * SECOND) == 0
    assert timeline.dropped == 0


def test_what_does_not_fit_is_dropped_oldest_first_and_counted() -> None:
    timeline = AttributionHistory(300 * SECOND, 3_000)
    for i in range(20):
        timeline.add(settled(i * 100, (i + 1) * 100, domain=f"d{i % 2}", me=5))
    assert timeline.size <= 3_000
    assert timeline.dropped == 20 - len(timeline)
    watermark = timeline.watermark("d1")
    assert watermark == Instant(2000, 0)


def test_the_last_entry_of_a_domain_is_never_dropped() -> None:
    timeline = AttributionHistory(300 * SECOND, 1)
    timeline.add(settled(0, 100, domain="a", me=5))
    timeline.add(settled(0, 100, domain="b", me=5))
    assert len(timeline) == 2


def test_the_size_it_tells_is_about_the_memory_it_takes() -> None:
    timeline = AttributionHistory(300 * SECOND, 10**9)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for i in range(2_000):  # ten new processes each time: a host of short commands
            shares = tuple(
                Share(Consumer(100_000 + 10 * i + n, 10**6 + i), Microjoules(10**6 + i))
                for n in range(10)
            )
            start, end = Instant(10**12 + i, 10**18 + i), Instant(10**12 + i + 1, 10**18 + i + 1)
            energy = Microjoules(sum(share.energy for share in shares))
            interval = Interval("d", start, end, energy)
            timeline.add(Attribution(interval, shares, Microjoules(0), Microjoules(0)))
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.7 < timeline.size / taken < 1.3
