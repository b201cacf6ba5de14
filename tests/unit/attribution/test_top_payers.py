"""Rows of the payers with the most energy."""

from wattspan.attribution.top_n import EXITED_ROW_LIFETIME, MIN_LISTED_TIME, TopPayers
from wattspan.model import SECOND, Consumer, HwType


def test_row_of_an_exited_payer_is_retired_after_its_lifetime() -> None:
    listing, who = TopPayers(1), Consumer(1, 1)
    listing.credit(who, HwType.CPU, 5)
    listing.rank(0)
    listing.credit(who, HwType.CPU, 70)
    listing.exit(who, 0)
    listing.rank(EXITED_ROW_LIFETIME - 1)
    assert listing.rows[who].energy == {HwType.CPU: 70}
    listing.rank(EXITED_ROW_LIFETIME)
    assert who not in listing.rows
    assert listing.retired == {HwType.CPU: 70}
    assert listing.other == {HwType.CPU: 5}


def test_row_is_displaced_after_its_safe_time_by_twice_the_energy() -> None:
    listing, old, new = TopPayers(1), Consumer(1, 1), Consumer(2, 2)
    listing.credit(old, HwType.CPU, 1000)
    listing.rank(0)
    listing.credit(new, HwType.CPU, 5000)
    listing.rank(MIN_LISTED_TIME - 1)
    assert old in listing.rows
    listing.credit(old, HwType.CPU, 4000)
    listing.rank(MIN_LISTED_TIME)
    assert old in listing.rows
    listing.credit(new, HwType.CPU, 50_000)
    listing.rank(MIN_LISTED_TIME + 1)
    assert set(listing.rows) == {new}
    assert listing.retired == {HwType.CPU: 4000}


def test_dominant_payer_displaces_a_safe_row_at_once() -> None:
    listing, small = TopPayers(2), [Consumer(1, 1), Consumer(2, 2)]
    for who, energy in zip(small, (1000, 2000), strict=True):
        listing.credit(who, HwType.CPU, energy)
    listing.rank(0)
    listing.credit(trainer := Consumer(3, 3), HwType.GPU, 600_000)
    listing.rank(2 * SECOND)
    assert set(listing.rows) == {small[1], trainer}


def test_many_small_payers_do_not_displace_safe_rows() -> None:
    listing, rows = TopPayers(2), {Consumer(1, 1), Consumer(2, 2)}
    for who in rows:
        listing.credit(who, HwType.CPU, 1000)
    listing.rank(0)
    listing.credit(Consumer(1, 1), HwType.CPU, 10**9)  # the other rests: its score decays
    for number in range(3, 28):
        listing.credit(Consumer(number, 1), HwType.CPU, 10**6)
        listing.rank(2 * SECOND * (number - 2))
    assert set(listing.rows) == rows


def test_exited_payers_with_late_usage_are_not_listed() -> None:
    listing, who = TopPayers(3), Consumer(1, 1)
    listing.exit(who, 0)
    listing.credit(who, HwType.GPU, 9)
    listing.rank(SECOND)
    assert not listing.rows
    assert listing.other == {HwType.GPU: 9}
