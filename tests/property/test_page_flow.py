"""Arithmetic of the live page for any events of a host: no joule invented, none lost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from operator import attrgetter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from testbed.simulated_host import World

from wattspan.attribution.ledger import Ledger, LedgerSettings
from wattspan.model import (
    SECOND,
    HwType,
    IdlePolicy,
    Microjoules,
    Nanoseconds,
    Snapshot,
    SpanAccounts,
    SpanRow,
)
from wattspan_exporters.page.flow import FlowGraph, build_flow
from wattspan_exporters.page.history import PageHistory
from wattspan_exporters.page.snapshot_delta import delta_between, limit_names, merge_deltas

MOST = 300.001
"""Watts that no device here ever draws more than."""

pids = st.integers(1, 12)
loads = st.dictionaries(pids, st.integers(0, 100), max_size=6)
turns = st.fixed_dictionaries(
    {
        "nanoseconds": st.sampled_from([10**6, SECOND // 10, SECOND, 7 * SECOND, 90 * SECOND]),
        "loads": loads,
        "gpu_loads": loads,
        "unclaimed": st.integers(0, SECOND // 10),
        "dying": st.lists(pids, max_size=3).map(tuple),
        "gpu_usage_comes": st.booleans(),
        "power": st.integers(0, 300_000),  # below MOST
    }
)
accidents = st.one_of(
    st.tuples(st.just("born"), pids),
    st.tuples(st.sampled_from(["reset", "relabel", "vanish", "return"]), st.integers(0, 3)),
    st.tuples(st.just("suspend"), st.integers(1, 3600)),
    st.tuples(st.just("step"), st.integers(-3600, 3600)),
)
histories = st.lists(st.one_of(turns, accidents), max_size=50)
rules = st.builds(
    LedgerSettings,
    idle=st.sampled_from(IdlePolicy),
    top=st.integers(1, 4),
    groups=st.integers(1, 6),
)


def lived(rules: LedgerSettings, history: Iterable[object]) -> list[Snapshot]:
    """Every snapshot of a host that all of this happened to."""
    world = World(Ledger(rules, now=0))
    snapshots = [world.ledger.snapshot(world.clock.now(), "host")]
    for event in history:
        if isinstance(event, dict):
            snapshots.append(world.turn(**event))
            continue
        assert isinstance(event, tuple)
        what, how = event
        domain = list(world.domains)[how % 4]
        match what:
            case "born":
                world.born(how)
            case "reset":
                world.reset(domain)
            case "relabel":
                world.relabel(domain)
            case "vanish" | "return":
                world.domains[domain].readable = what == "return"
            case "suspend":
                world.clock.suspend(how)
            case "step":
                world.clock.step_wall(how)
    return snapshots


def leaks(flow: FlowGraph) -> list[str]:
    """Nodes with unequal incoming and outgoing flow; expected to be empty."""
    wrong = [f"{link} is nothing" for link in flow.links if link.energy <= 0]
    pairs = [(link.source, link.target) for link in flow.links]
    if len(set(pairs)) != len(pairs):
        wrong.append("a link is drawn twice")
    for name, node in flow.nodes.items():
        into = sum(link.energy for link in flow.links if link.target == name)
        out = sum(link.energy for link in flow.links if link.source == name)
        has = flow.energy[name]
        if has < 0:
            wrong.append(f"{name} has {has}")
        if node.layer != "device" and into != has:
            wrong.append(f"{name} has {has}, and {into} flow in")
        if out not in (0, has):
            wrong.append(f"{name} has {has}, and {out} flow out")
        if node.layer in ("device", "type") and out != has:
            wrong.append(f"{name} keeps {has - out}")
    return wrong + leaking_watts(flow)


def leaking_watts(flow: FlowGraph) -> list[str]:
    """Every node whose watts are not those that flow in, or out if anything does."""
    wrong = []
    for name, watts in flow.watts.items():
        for end in ("source", "target"):
            links = [link.watts for link in flow.links if getattr(link, end) == name]
            parts = [part for part in links if part is not None]
            if not links:
                continue
            if len(parts) < len(links):
                known = None
            else:
                known = pytest.approx(sum(parts), rel=1e-6, abs=1e-9)
            if watts != known:
                wrong.append(f"{name} has {watts} W, and as {end} {links}")
    return wrong


def measured(before: Snapshot, after: Snapshot) -> int:
    old = {account.domain.id: account.energy for account in before.domains}
    return sum(account.energy - old.get(account.domain.id, 0) for account in after.cover)


@given(rules=rules, history=histories)
def test_every_measured_joule_is_drawn_once(rules: LedgerSettings, history: list[object]) -> None:
    snapshots = lived(rules, history)
    for before, after in pairwise(snapshots):
        stretch = delta_between(before, after)
        assert stretch is not None
        flow = build_flow(stretch)
        assert leaks(flow) == []
        assert flow.total == measured(before, after)
    whole = build_flow(delta_between(snapshots[0], snapshots[-1]))
    assert leaks(whole) == []
    assert whole.total == measured(snapshots[0], snapshots[-1])


@given(rules=rules, history=histories)
def test_stretches_that_follow_each_other_add_up(
    rules: LedgerSettings, history: list[object]
) -> None:
    snapshots = lived(rules, history)
    steps = [delta_between(*pair) for pair in pairwise(snapshots)]
    assume(steps)
    sum_of_all = merge_deltas(step for step in steps if step is not None)
    at_once = delta_between(snapshots[0], snapshots[-1])
    assert sum_of_all.devices == {**at_once.devices, **sum_of_all.devices}
    assert sum_of_all.consumers == at_once.consumers
    assert sum_of_all.duration == at_once.duration
    assert min(sum_of_all.unlisted) >= 0
    # a consumer with a row for part of the time is named in the sum and unlisted in the
    # difference
    for kind in range(len(HwType)):
        assert sum_of_all.unlisted[kind] <= at_once.unlisted[kind]
    assert leaks(build_flow(sum_of_all)) == []


@given(rules=rules, history=histories)
def test_truncated_names_keep_total_energy(rules: LedgerSettings, history: list[object]) -> None:
    snapshots = lived(rules, history)
    stretch = delta_between(snapshots[0], snapshots[-1])
    assert stretch is not None
    few = limit_names(stretch)
    assert few.consumers == stretch.consumers
    assert min(few.unlisted) >= 0
    assert leaks(build_flow(few)) == []


@given(rules=rules, history=histories, every=st.integers(1, 5))
def test_flow_of_the_history_conserves_energy(
    rules: LedgerSettings, history: list[object], every: int
) -> None:
    memory, snapshots = PageHistory(), lived(rules, history)
    for number, snapshot in enumerate(snapshots):
        memory.record(snapshot)
        if number % every == 0:
            recent = memory.recent(snapshot)
            for stretch in (recent.now, recent.hour):
                assert leaks(build_flow(stretch)) == []
                assert stretch is None or stretch.end == snapshot.at
            assert leaks(build_flow(recent.hour, attrgetter("mean_power"))) == []
            for spent_ in recent.now.devices.values() if recent.now is not None else ():
                assert spent_.known_power is None or 0 <= spent_.known_power <= MOST
            if recent.hour is not None and number < 12:
                assert build_flow(recent.hour).total <= measured(snapshots[0], snapshot)
        _, _, powers = memory.powers(240)
        assert len({len(series) for series in powers.values()}) <= 1
        for series in powers.values():
            assert all(power is None or 0 <= power <= 1000 * MOST for power in series)


SERVICES = st.sampled_from(["a", "b", "c"])


@given(
    rules=st.builds(LedgerSettings, top=st.integers(2, 12)),
    history=st.lists(turns, min_size=1, max_size=10),
    spans=st.lists(
        st.tuples(SERVICES, st.text(max_size=3), st.integers(0, 10**9), st.integers(0, 5)),
        max_size=12,
    ),
    senders=st.dictionaries(SERVICES, st.lists(pids, max_size=3)),
    outside=st.dictionaries(
        st.tuples(SERVICES, st.just(""), st.sampled_from(HwType)), st.integers(0, 10**9)
    ),
)
def test_spans_never_exceed_their_process(
    rules: LedgerSettings,
    history: list[object],
    spans: list[tuple[str, str, int, int]],
    senders: dict[str, list[int]],
    outside: dict[tuple[str, str, HwType], int],
) -> None:
    first, *_, last = lived(rules, [("born", pid) for pid in range(1, 13)] + history)
    payers = {row.info.payer[0]: row.info.payer for row in last.processes}
    rows = {(service, name): (energy, count) for service, name, energy, count in spans}
    accounts = SpanAccounts(
        rows=tuple(
            SpanRow(*key, {HwType.CPU: Microjoules(energy)}, Nanoseconds(1), count)
            for key, (energy, count) in rows.items()
        ),
        outside={key: Microjoules(energy) for key, energy in outside.items()},
        senders={
            service: tuple(payers[pid] for pid in pids if pid in payers)  # type: ignore[misc]
            for service, pids in senders.items()
        },
    )
    stretch = delta_between(first, replace(last, spans=accounts))
    assert stretch is not None
    flow = build_flow(stretch)
    assert leaks(flow) == []
    drawn = sum(flow.energy[name] for name, node in flow.nodes.items() if node.layer == "span")
    assert drawn <= sum(flow.energy[n] for n, node in flow.nodes.items() if node.layer == "process")


@given(rules=rules, history=histories)
def test_reopened_totals_start_a_new_interval(rules: LedgerSettings, history: list[object]) -> None:
    """Energy before a restart is history, not a burst of power after it."""
    memory = PageHistory()
    world = World(Ledger(rules, boot_id="b", now=0))
    for event in history:
        if isinstance(event, dict):
            world.turn(**event)
    now = world.clock.now()
    saved = world.ledger.checkpoint(world.ledger.snapshot(now, "h"))
    heir = Ledger(rules, checkpoint=saved, boot_id="b", now=now.mono)
    snapshot = heir.snapshot(now, "host")
    memory.record(snapshot)
    recent = memory.recent(snapshot)
    assert build_flow(recent.now).total == 0
    assert build_flow(recent.hour).total == 0
