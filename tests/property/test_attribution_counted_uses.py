"""Energy divided by counters that may say anything is conserved, and nobody has too much."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from testbed.simulated_host import PACKAGE

from wattspan.attribution.ledger import Ledger, LedgerSettings
from wattspan.model import (
    SECOND,
    Consumer,
    Counts,
    Instant,
    Microjoules,
    Payer,
    Reading,
    Tick,
    Usage,
)

numbers = st.one_of(
    st.sampled_from([0, 1, -1, SECOND, 2 * SECOND, 2**63, 2**200]), st.integers(0, 10**10)
)
believable = st.builds(
    lambda time, clock, retired, misses: Counts(
        time, int(time * clock), time, int(time * retired), int(time * misses)
    ),
    st.integers(10**8, 10**9),
    st.floats(0.2, 5),
    st.floats(0.1, 8),
    st.floats(0, 0.9),
)
counts = st.one_of(st.builds(Counts, *[numbers] * 5), believable)
payers = st.integers(1, 5).map(lambda pid: Consumer(pid, 1))
seconds = st.tuples(
    st.dictionaries(payers, st.integers(0, SECOND), max_size=5),
    st.one_of(st.none(), st.dictionaries(payers, counts, max_size=5)),
    st.integers(0, SECOND),
    st.integers(0, 300_000_000),
    st.sampled_from([0, 0, 0, SECOND // 20, SECOND // 2]),
)


@given(st.lists(seconds, min_size=1, max_size=40))
def test_energy_is_conserved_whatever_counters_say(
    history: list[tuple[dict[Payer, int], dict[Payer, Counts] | None, int, int, int]],
) -> None:
    ledger, at, energy = Ledger(LedgerSettings()), int(SECOND), 0
    first = Reading(PACKAGE.id, Instant(at, 0), Microjoules(0))
    ledger.apply(Tick(Instant(at, 0), {"rapl": (PACKAGE,)}, (first,)))
    for spent, counted, unclaimed, more, uncovered in history:
        start, at, energy = Instant(at + uncovered, 0), at + SECOND, energy + more
        now = Instant(at, 0)
        usage = Usage(
            "cpu:0", start, now, spent, unclaimed, 16 * SECOND, frozenset(), None, (), counted
        )
        reading = Reading(PACKAGE.id, now, Microjoules(energy))
        for one in ledger.apply(Tick(now, {}, (reading,), (), (usage,))):
            charged = sum(share.energy for share in one.shares)
            assert charged + one.idle + one.unattributed == more
            assert all(0 <= doubt <= more for doubt in one.doubts)
            assert {share.payer for share in one.shares} <= spent.keys()
    account = ledger.snapshot(Instant(at, 0), "host").account(PACKAGE.id)
    assert account.energy == energy
    assert account.energy == account.consumers + account.idle + account.unattributed
