"""The attribution history: order, bounds, and the numbers of payers."""

import tracemalloc
from array import array
from random import Random

import pytest

from wattspan.attribution.packed_attributions import (
    HistoryEntry,
    PackedAttributions,
    doubt_of,
    group_step,
    share_of,
)
from wattspan.model import (
    SECOND,
    Attribution,
    Consumer,
    Instant,
    Interval,
    Microjoules,
    Nanoseconds,
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


def test_watermark_is_the_end_of_the_last_entry() -> None:
    history = PackedAttributions(300 * SECOND, 10**6)
    assert history.watermark("d") is None
    history.add(settled(0, 100))
    history.add(settled(100, 200))
    assert history.watermark("d") == Instant(200, 0)
    assert [one.interval.end.mono for one in history.entries("d", 0, 100)] == [100]


def test_entries_of_a_period_are_those_that_overlap_it() -> None:
    history, draw, at, periods = PackedAttributions(300 * SECOND, 10**6), Random(4), 0, []
    for _ in range(50):
        at += draw.choice((0, 0, 30))  # a gap now and then
        periods.append((at, at + draw.randrange(1, 60)))
        at = periods[-1][1]
        history.add(settled(*periods[-1], me=5))
    for start in range(-10, at + 20, 7):
        for end in (start, start + 1, start + 40, start + 900):
            found = [one.interval for one in history.entries("d", start, end)]
            overlapping = [(a, b) for a, b in periods if a < end and b > start]
            assert [(one.start.mono, one.end.mono) for one in found] == overlapping


def test_entries_older_than_the_span_are_removed_with_their_payers() -> None:
    history = PackedAttributions(SECOND, 10**6)
    history.add(settled(0, 100, you=5))
    size = history.size
    history.add(settled(2 * SECOND, 2 * SECOND + 100, me=5))
    assert len(history) == 1
    assert history.size == size
    assert history.numbers([ME, YOU]) == history.numbers([ME])
    assert history.dropped == 0


def test_entries_beyond_the_byte_limit_are_dropped_oldest_first_and_counted() -> None:
    history = PackedAttributions(300 * SECOND, 1_500)
    for i in range(20):
        history.add(settled(i * 100, (i + 1) * 100, domain=f"d{i % 2}", me=5))
    assert history.size <= 1_500
    assert history.dropped == 20 - len(history) > 0
    watermark = history.watermark("d1")
    assert watermark == Instant(2000, 0)


def test_last_entry_of_a_domain_is_never_dropped() -> None:
    history = PackedAttributions(300 * SECOND, 1)
    history.add(settled(0, 100, domain="a", me=5))
    history.add(settled(0, 100, domain="b", me=5))
    assert len(history) == 2


@pytest.mark.parametrize("doubt", [7, 2**33])
def test_doubts_of_an_entry_are_kept(doubt: int) -> None:
    history = PackedAttributions(300 * SECOND, 10**6)
    start, end = Instant(10**12, 10**18, 7), Instant(10**12 + 1, 10**18 + 1, 8)
    shares = (Share(ME, Microjoules(3)), Share(YOU, Microjoules(1)))
    doubts = (Microjoules(0), Microjoules(doubt))
    zero = Microjoules(0)
    interval = Interval("d", start, end, Microjoules(4))
    history.add(Attribution(interval, shares, zero, zero, doubts=doubts))
    (found,) = history.entries("d", 0, 2**62)
    assert list(found.doubts) == list(doubts)
    assert list(found.shares[1::2]) == [3, 1]
    assert {history.payer(number) for number in found.shares[::2]} == {ME, YOU}


@pytest.mark.parametrize(
    ("stale", "kept"), [(None, None), (0, 0), (4_000_000, 4_000_000), (2**31, None)]
)
def test_entry_is_returned_as_it_was_added(stale: Nanoseconds | None, kept: int | None) -> None:
    history = PackedAttributions(300 * SECOND, 10**6)
    small, large = 2**32 - 1, 2**32
    start, end = Instant(10**12, 10**18, 7), Instant(10**12 + 1, 10**18 + 1, 8)
    for energy in (small, large):
        shares = (Share(ME, Microjoules(energy)), Share(YOU, Microjoules(1)))
        interval = Interval("d", start, end, Microjoules(energy + 6), stale)
        added = Attribution(interval, shares, Microjoules(2), Microjoules(3))
        history.add(added)
        found = history.entries("d", 0, 2**62)[-1]
        assert found[:3] == (interval._replace(stale=kept), 2, 3)
        assert [
            Share(history.payer(number), Microjoules(energy))
            for number, energy in zip(found.shares[::2], found.shares[1::2], strict=True)
        ] == list(shares)


def test_number_of_a_removed_payer_is_used_again_for_another_one() -> None:
    history = PackedAttributions(SECOND, 10**6)
    history.add(settled(0, 100, me=5))
    (number,) = history.numbers([ME])
    history.add(settled(2 * SECOND, 2 * SECOND + 100))
    assert history.numbers([ME]) == set()
    history.add(settled(3 * SECOND, 3 * SECOND + 100, you=5))
    assert history.numbers([ME, YOU]) == {number}
    assert history.payer(number) == YOU


def test_entry_takes_less_than_a_fifth_of_a_kilobyte() -> None:
    history = PackedAttributions(300 * SECOND, 10**9)
    history.add(settled(0, 100, me=5, you=6))
    before = history.size
    history.add(settled(100, 200, me=5, you=6))
    assert history.size - before < 200


def test_size_is_close_to_the_memory_in_use() -> None:
    history = PackedAttributions(300 * SECOND, 10**9)
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
            history.add(Attribution(interval, shares, Microjoules(0), Microjoules(0)))
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.7 < history.size / taken < 1.3


@pytest.mark.parametrize("most", [2000, 2**40])
@pytest.mark.parametrize("doubtful", [False, True])
def test_shares_of_payers_are_found_among_those_of_others(most: int, doubtful: bool) -> None:
    """Numbers of payers are small, so energies, doubts and their parts may equal them."""
    history, draw = PackedAttributions(300 * SECOND, 10**8), Random(most)
    crowd = [Consumer(pid, 1) for pid in range(300)]
    shares: dict[int, dict[Consumer, tuple[int, int]]] = {}
    for end in range(1, 200):
        chosen = draw.sample(crowd, draw.randrange(0, 40))
        spent = {one: (draw.randrange(most), draw.randrange(400)) for one in chosen}
        shares[end] = spent
        whole = Microjoules(sum(energy for energy, _ in spent.values()))
        interval = Interval("d", Instant(end - 1, 0), Instant(end, 0), whole)
        history.add(
            Attribution(
                interval,
                tuple(Share(one, Microjoules(energy)) for one, (energy, _) in spent.items()),
                Microjoules(0),
                Microjoules(0),
                doubts=tuple(Microjoules(doubt) for _, doubt in spent.values()) * doubtful,
            )
        )
    assert history.begin("d") == 0
    for members in ([one] for one in crowd[:50]):
        assert history.shares(members, "d", 0, 200) == [
            (end, spent[one][0], spent[one][1] * doubtful)
            for end, spent in shares.items()
            for one in members
            if one in spent
        ]
    pair = crowd[:2]
    assert sum(energy for _, energy, _ in history.shares(pair, "d", 100, 200)) == sum(
        spent[one][0] for end, spent in shares.items() if end > 100 for one in pair if one in spent
    )
    assert history.shares([Consumer(-1, 1)], "d", 0, 200) == []


def test_domain_without_entries_has_no_begin() -> None:
    assert PackedAttributions(SECOND, 10**6).begin("d") is None


@pytest.mark.parametrize("asked", [(), (3,), (3, 99), (0, 1, 2, 3, 4), tuple(range(40))])
def test_energy_of_some_payers_is_the_sum_of_their_shares(asked: tuple[int, ...]) -> None:
    energies, doubts = {one: one * one for one in range(9)}, [7 * one for one in range(9)]
    shares = array("q", [number for pair in energies.items() for number in pair])
    interval = settled(0, 100).interval
    entry = HistoryEntry(interval, Microjoules(0), Microjoules(0), shares, doubts=doubts)
    known = [one for one in asked if one in energies]
    assert share_of(entry, set(asked)) == sum(energies[one] for one in known)
    assert doubt_of(entry, set(asked)) == sum(doubts[one] for one in known)


@pytest.mark.parametrize(
    ("shares", "doubts", "error", "expected"),
    [
        ((1, 100), (), 0.0, 0.0),
        ((1, 100), (), 500.0, 50.0),  # 0.5 W for 100 us
        ((1, 80, 2, 20), (), 500.0, 60.0),  # 80 % of it, and the energy of the other one
        ((1, 80, 2, 20), (7, 7), 0.0, 7.0),
        ((1, 80, 2, 20), (0, 7), 0.0, 0.0),
        ((2, 100), (), 500.0, 0.0),
    ],
)
def test_step_of_a_group_has_the_errors_of_division_and_idle_power(
    shares: tuple[int, ...], doubts: tuple[int, ...], error: float, expected: float
) -> None:
    interval = Interval("d", Instant(0, 0), Instant(100_000, 0), Microjoules(103))
    none = Microjoules(0)
    entry = HistoryEntry(interval, Microjoules(1), none, array("q", shares), Microjoules(2), doubts)
    step = group_step(entry, [{1}], error)
    assert step.doubts == [pytest.approx(expected)]


@pytest.mark.parametrize(("idle", "withheld"), [(10, 0), (9, 2)])
def test_step_of_a_group_has_its_proportion_of_the_idle_energy(idle: int, withheld: int) -> None:
    interval = Interval("d", Instant(0, 0), Instant(100_000, 0), Microjoules(100 + idle + withheld))
    shares = array("q", (1, 40, 2, 39, 3, 1))  # 20 of unclaimed use
    known = Microjoules(idle), Microjoules(20 + withheld), shares, Microjoules(withheld)
    step = group_step(HistoryEntry(interval, *known), [{1}, {2, 3}, {4}], 0.0)
    assert step.idles == [idle * 40 // 100, idle * 40 // 100, 0]
    assert step.withheld is (withheld > 0)


def test_step_without_active_energy_has_no_share_of_the_idle_energy() -> None:
    interval = Interval("d", Instant(0, 0), Instant(100_000, 0), Microjoules(5))
    entry = HistoryEntry(interval, Microjoules(5), Microjoules(0), array("q"))
    assert group_step(entry, [{1}], 0.0).idles == [0]
