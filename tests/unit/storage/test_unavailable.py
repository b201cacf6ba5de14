"""A store that is unavailable at the start is used once available, without duplicates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from testbed.known_totals import Books, Totals, history, totals

from wattspan.config import StoreSettings as Settings
from wattspan.model import Checkpoint
from wattspan.ports import StoreError
from wattspan.storage.store import DeferredStore, Store


class Late:
    """An agent that begins while another program has the store that ``earlier`` was written to."""

    def __init__(self, state_dir: Path, closing: Checkpoint | None = None) -> None:
        self.state_dir, self.said = state_dir, list[str]()
        self.others = Books()
        self.host = Books(self.others.clock)
        self.other = self.open()
        self.other.write(self.others.spend({1: 1000}))
        self.path = next(state_dir.glob("*.sqlite"))
        with pytest.raises(StoreError) as refused:
            self.open()
        self.books = DeferredStore(self.open, refused.value, self.said.append, closing=closing)

    def open(self) -> Store:
        return Store(self.state_dir, Settings(), Books().clock)

    def spend(self, joules: int) -> bool:
        opening = self.host.spend({2: joules})
        self.books.write_latest(opening)
        return self.books.write(opening)

    def history(self) -> Totals:
        return history(self.path)


@pytest.fixture
def late(tmp_path: Path) -> Iterator[Late]:
    late = Late(tmp_path)
    with closing(late.books), closing(late.other):
        yield late


def together(*openings: Checkpoint) -> Totals:
    return dict(sum((Counter(totals(one)) for one in openings), Counter()))


def test_unavailable_store_is_down_with_a_cause(late: Late) -> None:
    assert not late.spend(1)
    health = late.books.health
    assert (health.up, health.failed) == (False, 2)
    (failure,) = health.failures
    assert f"Cannot open the store {late.path}: process " in str(failure)
    assert late.books.previous is None


def test_available_store_receives_the_energy_of_the_outage(late: Late) -> None:
    assert not late.spend(1)
    assert not late.spend(2)
    late.other.close()
    assert late.spend(3)
    assert late.books.health.up
    assert late.spend(4)
    assert late.history() == together(late.others.now(), late.host.now())
    (said,) = late.said
    assert said.endswith("Its history covers the time since this agent began.")


def test_totals_larger_than_those_before_are_counted_from_their_beginning(late: Late) -> None:
    late.spend(5000)
    late.other.close()
    assert late.spend(1)
    assert late.history() == together(late.others.now(), late.host.now())


def test_energy_written_by_another_agent_is_not_repeated(late: Late) -> None:
    late.spend(10)
    late.other.write(late.others.spend({1: 10}))
    before = late.history()
    late.other.close()
    late.spend(20)
    assert late.history() == before
    between = late.host.now()
    assert late.spend(30)
    spent = Counter(totals(late.host.now()))
    spent.subtract(totals(between))
    assert late.history() == dict(Counter(before) + spent)
    (said,) = late.said
    assert said.endswith("Its history covers the time from now on.")


def test_checkpoint_of_another_agent_is_left_unchanged(tmp_path: Path) -> None:
    late = Late(tmp_path)
    carried = late.host.spend({2: 100})
    books = DeferredStore(late.open, StoreError("no"), late.said.append, closing=carried)
    late.other.close()
    with closing(books):
        assert books.write(late.host.spend({2: 1}))
    spent = Counter(totals(late.host.now()))
    spent.subtract(totals(carried))
    assert late.history() == dict(Counter(totals(late.others.now())) + spent)


def test_next_run_continues_from_a_late_checkpoint(late: Late) -> None:
    late.spend(1)
    late.other.close()
    late.spend(2)
    late.spend(3)
    late.books.close()
    with closing(late.open()) as kept:
        assert kept.previous is not None
        assert totals(kept.previous) == totals(late.host.now())


def test_never_available_store_is_skipped_at_shutdown(late: Late) -> None:
    late.spend(1)
    late.other.close()
    late.books.close()
    assert not late.spend(2)
    with closing(late.open()) as kept:
        assert totals(kept.previous) == totals(late.others.now())
