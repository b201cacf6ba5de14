"""Budgets of a fleet in virtual time: real members and leaders, emulated hosts, random faults.

Everything but the allotment is emulated: the devices of a host are one number that follows the
limit, upwards at once and downwards up to a second late, and the coordination service is a store in
memory, or with ``--etcd 3`` a real cluster on loopback. Reports, elections, plans and deliveries
are those of the agent. Demands change at random; agents crash and restart, connections break,
answers are lost, the service is gone for half a minute, and leaders are killed or pause. The sum of
the enforced limits is compared with every budget whenever a limit rises. Then sessions of other
lengths are compared, and the CPU time of one plan is measured, without a service.

    .venv/bin/python -m benchmarks.fleet [--hosts 1000] [--seconds 600] [--etcd 3]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from random import Random
from statistics import median, quantiles

from msgspec.structs import replace

from benchmarks.fleet_plant import (
    BUDGET_FRACTION,
    ORIGINALS,
    PRIORITIES,
    ROWS,
    Fleet,
    Host,
    W,
    place_of,
)
from benchmarks.fleet_services import etcd_service, memory_service
from benchmarks.machine import describe
from wattspan.fleet.allotment import (
    AllotmentBook,
    HostReport,
    accept_budgets,
    drain_host,
    remove_host,
)
from wattspan.fleet.allotment_planner import plan_allotments
from wattspan.fleet.participant import LEADER_LEASE_SECONDS
from wattspan.fleet.records import FleetState, encode
from wattspan.model import SECOND
from wattspan.testing import ManualClock

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
        faults = ", ".join(f"{count} {name}" for name, count in sorted(fleet.count.items()))
        rows["faults"] = faults
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
        "calls of the service per second without faults": ", ".join(
            [f"{calls.total() / seconds:.0f}"]
            + [f"{name} {count / seconds:.0f}" for name, count in calls.most_common()]
        ),
        "bytes written per second": f"{(service.bytes_written - written) / seconds / 1000:.0f} kB",
    }
    if used := service.cpu_seconds() - cpu:
        rates["CPU time of etcd's members per second of virtual time"] = f"{used / seconds:.2f} s"
    return rates


def _times(seconds: Sequence[float]) -> str:
    if len(seconds) < 2:
        return "none"
    p95 = quantiles(seconds, n=20, method="inclusive")[-1]
    return f"median {median(seconds):.1f} s, p95 {p95:.1f} s, max {max(seconds):.1f} s"


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


def _crash(fleet: Fleet) -> float:
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
    "power of an agent that crashes is allotted to others": _crash,
    f"allotment of an agent that follows a crash, from its start {RESTART} s later": _restart,
    "share of a new host while all ask for all their power": _join,
}


def measure_settings(hosts: int, seed: int, seconds: tuple[int, int], events: int) -> None:
    """Speed and price of shorter sessions: one row for ``[fleet] contact`` and ``fallback``."""
    clock = ManualClock()
    contact, fallback = (one * SECOND for one in seconds)
    with memory_service(clock) as service:
        fleet = Fleet(hosts, seed, service, clock, contact=contact, fallback=fallback)
        fleet.run(30)
        calls = service.calls.total()
        fleet.run(60)
        rate = (service.calls.total() - calls) / 60 * 1000 / hosts
        freed = [_crash(fleet) for _ in range(events)]
        lost = [_fallbacks(fleet, outage) for outage in OUTAGES]
    cells = [f"{one} s" for one in seconds]
    cells += [f"{rate:.0f}", f"{median(freed):.1f} s, {max(freed):.1f} s"]
    print(f"| {' | '.join(cells + [f'{one:.0%}' for one in lost])} |")


def _fallbacks(fleet: Fleet, outage: int) -> float:
    """The share of hosts that fall back while the service is gone for some seconds."""
    fleet.run(20)
    sessions = {host.name: host.member.session for host in fleet.hosts}
    fleet.service.is_gone = True
    fleet.run(outage)
    fleet.service.is_gone = False
    fleet.run(20)
    changed = sum(sessions[host.name] != host.member.session for host in fleet.hosts)
    return changed / len(fleet.hosts)


def measure_plans(hosts: int, seed: int) -> None:
    """CPU time of one plan: the first, one in which every demand has changed, and one without."""
    random = Random(seed)
    reports = {}
    for number in range(hosts):
        original = random.choice(ORIGINALS)
        reports[f"host-{number:05}"] = HostReport(
            session="s",
            place=place_of(number, hosts),
            floor=original * 3 // 10,
            ceiling=original,
            limit=original * 3 // 10,
            demand=random.randrange(original),
            priority=random.choice(PRIORITIES),
        )
    whole = round(sum(report.ceiling for report in reports.values()) * BUDGET_FRACTION)
    book = accept_budgets(
        AllotmentBook(), {"": whole} | {f"row-{row}": whole * 11 // 40 for row in range(ROWS)}
    )
    times, changed = [], []
    for phase in ("all join", "nothing changes", "every demand changes"):
        if phase == "every demand changes":
            for name, one in reports.items():
                reports[name] = replace(one, demand=random.randrange(one.ceiling))
        began = time.process_time()
        plan = plan_allotments(book, reports, least_change=10 * W)
        times.append(time.process_time() - began)
        changed.append(len(plan.changed))
        if plan.book is not None:
            book = plan.book
        for name, allotment in plan.changed.items():
            reports[name] = replace(
                reports[name], acknowledged=allotment.sequence, limit=allotment.limit
            )
        plan = plan_allotments(book, reports)  # what was acknowledged is noted
        book = plan.book or book
    size = len(encode(book))
    print(
        f"| {hosts} | {times[0]:.2f} s ({changed[0]}) | {times[1]:.2f} s ({changed[1]}) "
        f"| {times[2]:.2f} s ({changed[2]}) | {size / 1024:.0f} KiB |"
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--hosts", type=int, default=1000)
    options.add_argument("--seconds", type=int, default=600)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--quiet", type=int, default=60, help="seconds without faults")
    options.add_argument("--events", type=int, default=10, help="measurements of each event")
    options.add_argument("--etcd", type=int, default=0, help="members of a real etcd, 0 for none")
    options.add_argument("--settings", type=int, default=200, help="hosts of the table of settings")
    options.add_argument("--plans", default="1000,10000", help="sizes of the plans to time")
    chosen = options.parse_args()
    print(f"{describe()}\n")
    if chosen.hosts:
        clock = ManualClock()
        service = etcd_service(chosen.etcd) if chosen.etcd else memory_service(clock)
        with service as opened:
            # A lease of etcd ends in real time, which passes faster or slower than virtual time.
            lease = 600 if chosen.etcd else LEADER_LEASE_SECONDS
            fleet = Fleet(chosen.hosts, chosen.seed, opened, clock, leader_lease=lease)
            rows = simulate(fleet, chosen.seconds, chosen.quiet, chosen.events)
        where = f"a real etcd of {chosen.etcd} members" if chosen.etcd else "a service in memory"
        print(
            f"{chosen.hosts} simulated hosts, {where}, {chosen.seconds} s of faults, seed"
            f" {chosen.seed}:\n\n| figure | value |\n|---|---|"
        )
        for name, value in rows.items():
            print(f"| {name} | {value} |")
        print()
    if chosen.settings:
        outages = " | ".join(f"fallbacks in {one} s" for one in OUTAGES)
        print(
            f"Settings of sessions, {chosen.settings} simulated hosts, calls per 1,000 hosts:\n\n"
            f"| contact | fallback | calls per second | power free after a crash | {outages} |\n"
            f"|---|---|---|---|{'---|' * len(OUTAGES)}"
        )
        for seconds in SETTINGS:
            measure_settings(chosen.settings, chosen.seed, seconds, chosen.events)
        print()
    if not chosen.plans:
        return
    print("CPU time of one plan, and the number of allotments that it changes:\n")
    print("| hosts | all join | nothing changes | every demand changes | book |")
    print("|---|---|---|---|---|")
    for hosts in filter(None, chosen.plans.split(",")):
        measure_plans(int(hosts), chosen.seed)


if __name__ == "__main__":
    main()
