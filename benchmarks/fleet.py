"""Budgets of a fleet in virtual time: real members and leaders, emulated hosts, random faults.

Everything but the allotment is emulated: the devices of a host are one number that follows the
limit, upwards at once and downwards up to a second late, and the coordination service is a store in
memory, or with ``--etcd 3`` a real cluster on loopback. Reports, elections, plans and deliveries
are those of the agent. Demands change at random; agents crash and restart, connections break,
answers are lost, the service is gone for half a minute, and leaders are killed or pause. The sum of
the enforced limits is compared with every budget whenever a limit rises. Then the CPU time of
one plan is measured, without a service. ``--settings`` compares sessions of other lengths.

    .venv/bin/python -m benchmarks.fleet [--hosts 1000] [--seconds 600] [--etcd 3] [--settings 200]
"""

from __future__ import annotations

import argparse
import time
from random import Random
from statistics import median

from msgspec.structs import replace
from testbed.fleet_events import OUTAGES, SETTINGS, crash, simulate
from testbed.fleet_plant import (
    BUDGET_FRACTION,
    ORIGINALS,
    PRIORITIES,
    ROWS,
    Fleet,
    W,
    place_of,
)
from testbed.fleet_services import etcd_service, memory_service
from testbed.machine import describe

from wattspan.fleet.allotment import (
    AllotmentBook,
    HostReport,
    accept_budgets,
)
from wattspan.fleet.allotment_planner import plan_allotments
from wattspan.fleet.participant import LEADER_LEASE_SECONDS
from wattspan.fleet.records import encode
from wattspan.model import SECOND
from wattspan.testing import ManualClock


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
        freed = [crash(fleet) for _ in range(events)]
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
    options.add_argument("--settings", type=int, default=0, help="hosts of the table of settings")
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
