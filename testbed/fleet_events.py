"""A fleet in virtual time whose hosts join, stop, crash and lose their coordination service."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from testbed.fleet_plant import (
    Fleet,
    Host,
    W,
)
from wattspan.fleet.allotment import (
    drain_host,
    remove_host,
)
from wattspan.fleet.records import FleetState
from wattspan.model import SECOND

RESTART = 5
"""Seconds from a crash until the service manager starts the agent again, as in its unit."""
SETTINGS = ((10, 5), (6, 3), (4, 2), (3, 1))
"""Seconds of ``contact`` and ``fallback``; the last are the least that are permitted."""
OUTAGES = (1, 2, 3, 5)
"""Seconds without the service, as while etcd elects a leader."""


def simulate(fleet: Fleet, seconds: int, quiet: int, events: int) -> dict[str, str]:
    """The figures of a fleet by name: at its start, without faults, at events, under faults."""
    rows = {}
    while any(host.joined is not None for host in fleet.hosts):  # it counts from then on
        fleet.run(1)
    rows["first allotment, all agents start at once"] = _times(fleet.join_times)
    fleet.ratios.clear()
    rows |= _message_rates(fleet, quiet)
    for name, measure in EVENTS.items() if events else ():
        rows[f"{name} ({events})"] = _times([measure(fleet) for _ in range(events)])
    if seconds:
        fleet.join_times.clear()
        fleet.begin_faults()
        fleet.run(seconds)
        joins = fleet.join_times
        rows["faults"] = f"{fleet.count.total()} of {len(fleet.count)} kinds"
        rows[f"first allotment after a start under faults ({len(joins)})"] = _times(joins)
    place, ratio = max(fleet.ratios.items(), key=lambda item: item[1])
    rows[f"largest sum of enforced limits / budget, of {len(fleet.budgets)} budgets"] = (
        f"{ratio:.9f} at {place or 'the fleet'}"
    )
    steps = [seconds * 1_000 for seconds in fleet.step_times]
    rows["CPU time of a leader's step"] = f"median {median(steps):.0f} ms, max {max(steps):.0f} ms"
    return rows


def _message_rates(fleet: Fleet, seconds: int) -> dict[str, str]:
    """Calls, bytes and the service's CPU time in each second of virtual time without faults."""
    service = fleet.service
    before, written, cpu = service.calls.copy(), service.bytes_written, service.cpu_seconds()
    fleet.run(seconds)
    calls = service.calls - before
    rates = {
        "calls of the service per second without faults": f"{calls.total() / seconds:.0f}",
        "bytes written per second": f"{(service.bytes_written - written) / seconds / 1000:.0f} kB",
    }
    if used := service.cpu_seconds() - cpu:
        rates["CPU time of etcd's members per second of virtual time"] = f"{used / seconds:.2f} s"
    return rates


def _times(seconds: Sequence[float]) -> str:
    if len(seconds) < 2:
        return "none"
    return f"median {median(seconds):.1f} s, max {max(seconds):.1f} s"


def _join(fleet: Fleet) -> float:
    """Seconds from the start of an agent on a new host until it has 95 % of its share."""
    if not fleet.ask_for_all:  # others' demands would change the share meanwhile
        fleet.ask_for_all = True
        fleet.run(20)
    host = fleet.random.choice([one for one in fleet.hosts if one.has_agent])
    fleet.stop_agent(host)
    fleet.run(5)  # until its session has ended
    host.switch_off()
    fleet.change(lambda book: remove_host(book, host.name, None))
    host.is_counted = False
    fleet.run(10)  # until others use its power
    host.switch_on()
    began, limits = fleet.clock.monotonic(), []
    for _ in range(100):
        fleet.run(0.1)
        limits.append((fleet.clock.monotonic() - began, host.limit))
    return next(at for at, limit in limits if limit >= 0.95 * limits[-1][1]) / SECOND


def _drain(fleet: Fleet) -> float:
    host = _rich(fleet)
    fleet.change(lambda book: drain_host(book, host.name))
    taken = _seconds_until_allotted(
        fleet, lambda state: state.present_reports()[host.name].limit <= host.floor
    )
    fleet.change(lambda book: drain_host(book, host.name, drained=False))
    fleet.run(5)
    return taken


def _stop(fleet: Fleet) -> float:
    host = _rich(fleet)
    fleet.stop_agent(host)
    return _seconds_until_left(fleet, host)


def crash(fleet: Fleet) -> float:
    host = _rich(fleet)
    fleet.run(fleet.random.uniform(0, 2.5))  # at any time between two beats
    host.has_agent = False
    return _seconds_until_left(fleet, host)


def _rich(fleet: Fleet) -> Host:
    """A host with much more than its safe allotment, which others can use."""
    fleet.ask_for_all = False
    while True:
        found = [one for one in fleet.hosts if one.has_agent and one.limit - one.safe >= 500 * W]
        if found:
            return fleet.random.choice(found)
        fleet.run(1)


def _seconds_until_left(fleet: Fleet, host: Host) -> float:
    taken = _seconds_until_allotted(fleet, lambda state: host.name not in state.reports)
    host.start_agent()
    fleet.run(5)
    return taken


def _restart(fleet: Fleet) -> float:
    """Seconds from the start of an agent that follows a crash until it has an allotment."""
    host = _rich(fleet)
    host.has_agent = False
    fleet.run(RESTART)
    host.start_agent()
    fleet.join_times.clear()
    while host.joined is not None:
        fleet.run(0.1)
    return fleet.join_times[-1]


def _seconds_until_allotted(fleet: Fleet, is_free: Callable[[FleetState], bool]) -> float:
    """Seconds until the leader has changed allotments after a host's power is free."""
    began, held_at = fleet.clock.monotonic(), fleet.state().book.revision
    while fleet.clock.monotonic() - began < 60 * SECOND:
        fleet.run(0.1)
        state = fleet.state()
        if not is_free(state):
            held_at = state.book.revision
        elif state.book.revision > held_at:
            break
    return (fleet.clock.monotonic() - began) / SECOND


EVENTS = {
    "power of an agent that stops in order is allotted to others": _stop,
    "power of a drained host is allotted to others": _drain,
    "power of an agent that crashes is allotted to others": crash,
    f"allotment of an agent that follows a crash, from its start {RESTART} s later": _restart,
    "share of a new host while all ask for all their power": _join,
}
