"""For any events of a host and any checkpoint times, the history sums to the totals."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from testbed.known_totals import Books, buckets, history, totals
from testbed.simulated_host import DOMAINS, GPU, PACKAGE, World

from wattspan.attribution.ledger import Ledger, LedgerSettings
from wattspan.config import StoreSettings as Settings
from wattspan.model import SECOND, Checkpoint, GroupKind
from wattspan.model.settings import Duration
from wattspan.storage.breakdown import break_down
from wattspan.storage.database import DAY, HOUR, MINUTE
from wattspan.storage.deltas import PROCESS, delta_between
from wattspan.storage.query import NoHistory, extract_history
from wattspan.storage.store import Store

LONG = Duration.parse("100d")
EVER = 10 * 2**32

pids = st.integers(1, 12)
loads = st.dictionaries(pids, st.integers(1, 100), min_size=1, max_size=6)
turns = st.fixed_dictionaries(
    {
        "nanoseconds": st.sampled_from([SECOND // 10, SECOND, 7 * SECOND]),
        "loads": loads,
        "gpu_loads": loads,
        "unclaimed": st.integers(0, SECOND // 10),
        "dying": st.lists(pids, max_size=3).map(tuple),
    }
)
hops = st.sampled_from([0, 60, 60, 60, 120, 3600, 40_000, 100_000, -60, -3600, -100_000])
accidents = st.one_of(
    st.tuples(st.just("reset"), st.sampled_from([PACKAGE.id, GPU.id])),
    st.tuples(st.sampled_from(["pass", "suspend"]), st.integers(1, 90_000)),
    st.tuples(st.sampled_from(["restart", "reboot", "crash"]), st.just(0)),
)
steps = st.tuples(
    turns,
    hops,  # of the wall clock, so that few writes fill many buckets
    st.one_of(st.none(), st.none(), accidents),
    st.sampled_from([True, True, False]),
)
"""Random energy, clock steps, faults and checkpoints."""

bounds = st.builds(
    Settings,
    minutes=st.sampled_from([Duration.parse("2m"), Duration.parse("2d")]),
    hours=st.sampled_from([Duration.parse("3h"), LONG]),
    days=st.just(LONG),
    processes=st.integers(1, 3),
    groups=st.integers(1, 3),
)


class Agent:
    """A ledger and a store that start and end together, on a host that keeps running."""

    def __init__(self, state_dir: Path, settings: Settings, rules: LedgerSettings) -> None:
        self.state_dir, self.settings, self.rules = state_dir, settings, rules
        self.boots = 0
        self.world = World(Ledger(rules, boot_id="0"))
        self.store = Store(state_dir, settings, self.world.clock)

    def write(self) -> None:
        snapshot = self.world.ledger.snapshot(self.world.clock.now(), "h")
        self.store.write(self.world.ledger.checkpoint(snapshot))

    def restart(self, *, reboot: bool = False, crash: bool = False) -> None:
        if not crash:
            self.write()
        self.store.close()
        self.boots += reboot
        self.store = Store(self.state_dir, self.settings, self.world.clock)
        self.world.ledger = Ledger(
            self.rules,
            checkpoint=self.store.last_checkpoint(),
            boot_id=str(self.boots),
            now=self.world.clock.monotonic(),
        )
        self.world.apply(domains=DOMAINS)

    def turn(self, turn: dict[str, Any]) -> None:
        for pid in {*turn["loads"], *turn["gpu_loads"]} - set(self.world.alive):
            self.world.born(pid)
        self.world.turn(**turn)

    def happen(self, accident: tuple[str, Any] | None) -> None:
        match accident:
            case ("reset", domain):
                self.world.reset(domain)
            case ("pass", seconds):
                self.world.clock.advance(seconds)
            case ("suspend", seconds):
                self.world.clock.suspend(seconds)
            case (how, _):
                self.restart(reboot=how == "reboot", crash=how == "crash")


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(bounds=bounds, top=st.integers(1, 4), story=st.lists(steps, min_size=8, max_size=30))
def test_history_sums_to_the_totals_at_every_step(
    bounds: Settings, top: int, story: list[tuple[Any, ...]]
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        agent = Agent(Path(directory), bounds, LedgerSettings(top=top, groups=4))
        for turn, hop, accident, written in story:
            agent.turn(turn)
            agent.world.clock.step_wall(hop)
            agent.happen(accident)
            if written:
                agent.write()
        agent.write()
        books, path = agent.store.last_checkpoint(), agent.store.path
        assert agent.store.health.failures == ()
        assert history(path) == totals(books)
        assert len(buckets(path, MINUTE)) <= max(1, bounds.minutes // (MINUTE * SECOND)) + 60
        assert len(buckets(path, HOUR)) <= max(1, bounds.hours // (HOUR * SECOND)) + 24
        _every_report_adds_up(path)
        roll_everything_up(agent.store, MINUTE)
        assert history(path, MINUTE) == {}
        assert history(path) == totals(books)
        roll_everything_up(agent.store, HOUR)
        assert history(path, DAY) == totals(books)
        _every_report_adds_up(path)
        agent.store.close()


def roll_everything_up(store: Store, step: int) -> None:
    rows = store._opened.history
    coarser = {MINUTE: HOUR, HOUR: DAY}[step]
    while (oldest := rows._oldest(step)) is not None:
        rows._roll_bucket(step, oldest // coarser * coarser)


def _every_report_adds_up(path: Path) -> None:
    kinds = (PROCESS, *GroupKind)
    found = extract_history(path, 0, EVER, kinds)
    if isinstance(found, NoHistory):
        return
    for limit in (0, 1):
        breakdown = break_down(found, kinds, limit=limit)
        for section in breakdown.sections:
            lines = [*section.lines, *breakdown.unattributed]
            assert all(energy > 0 for line in lines for energy in line.energy.values())
            assert sum(line.total for line in lines) == breakdown.total.total
            for hw_type, energy in breakdown.total.energy.items():
                assert sum(line.energy.get(hw_type, 0) for line in lines) == energy


@given(
    top=st.integers(1, 4), story=st.lists(turns, min_size=5, max_size=25), every=st.integers(1, 4)
)
def test_deltas_are_nonnegative_and_within_their_domain(
    top: int, story: list[dict[str, Any]], every: int
) -> None:
    world = World(Ledger(LedgerSettings(top=top, groups=3)))
    last: Checkpoint | None = None
    for number, turn in enumerate(story):
        world.born(number % 12 + 1)
        world.turn(**turn)
        if number % every:
            continue
        books = world.ledger.checkpoint(world.ledger.snapshot(world.clock.now(), "h"))
        delta = delta_between(last, books)
        for spent in delta.domains:
            assert min(spent.energy, spent.consumers, spent.idle, spent.unattributed) >= 0
        for hw_type in {owner.hw_type for owner in delta.owners}:
            consumers = sum(s.consumers for s in delta.domains if s.domain.hw_type is hw_type)
            for kind in (PROCESS, *GroupKind):
                claims = [
                    energy
                    for owner, energy in delta.owners.items()
                    if owner.kind == kind and owner.hw_type is hw_type
                ]
                assert all(claim > 0 for claim in claims)
                assert sum(claims) == consumers if kind == PROCESS else sum(claims) <= consumers
        last = books


@settings(max_examples=15)
@given(
    names=st.lists(st.text(), min_size=1, max_size=5),
    wall=st.integers(-(2**62), 2**62),
)
def test_arbitrary_names_and_wall_clocks_are_stored(names: list[str], wall: int) -> None:
    """Also lone surrogates, which is how Python shows undecodable bytes; and years before 1970."""
    host = Books()
    opening = host.spend(dict.fromkeys(range(len(names)), 3))
    odd = [f"\udcff{name}" for name in names]
    rows = tuple(
        replace(row, info=replace(row.info, command=name))
        for row, name in zip(opening.processes, odd, strict=True)
    )
    with tempfile.TemporaryDirectory() as directory:
        store = Store(Path(directory), Settings(), host.clock)
        at = opening.at._replace(wall=wall)
        assert store.write(replace(opening, at=at, processes=rows))
        store.close()
        again = Store(Path(directory), Settings(), host.clock)
        kept = again.last_checkpoint()
        again.close()
    assert kept.at == at
    assert [row.info.command for row in kept.processes] == odd
