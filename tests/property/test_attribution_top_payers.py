"""Rows, other and retired add up and never fall."""

from hypothesis import given
from hypothesis import strategies as st

from wattspan.attribution.top_n import TopPayers
from wattspan.model import SECOND, Consumer, HwType

payers = st.builds(Consumer, st.integers(1, 8), st.just(0))
events = st.lists(
    st.one_of(
        st.tuples(st.just("credit"), payers, st.integers(0, 10**6)),
        st.tuples(st.just("leave"), payers, st.just(0)),
        st.tuples(st.just("rank"), payers, st.sampled_from([0, 2, 61])),
    ),
    max_size=80,
)


@given(top=st.integers(0, 4), events=events)
def test_credits_are_in_rows_other_or_retired(
    top: int, events: list[tuple[str, Consumer, int]]
) -> None:
    listing, now, total = TopPayers(top), 0, 0
    last = (0, 0)
    for what, who, amount in events:
        if what == "credit":
            listing.credit(who, HwType.CPU, amount)
            total += amount
        elif what == "leave":
            listing.exit(who, now)
        else:
            now += amount * SECOND
            listing.rank(now)
        rows = sum(row.energy.get(HwType.CPU, 0) for row in listing.rows.values())
        accounts = (listing.other.get(HwType.CPU, 0), listing.retired.get(HwType.CPU, 0))
        assert rows + sum(accounts) == total
        assert accounts[0] >= last[0]
        assert accounts[1] >= last[1]
        assert len(listing.rows) <= top
        last = accounts
