"""Budgets of a fleet in virtual time: real members and leaders, emulated hosts, random faults.

Everything but the allotment is emulated: the devices of a host are one number that follows the
limit, upwards at once and downwards up to a second late, and the coordination service is a store in
memory. Reports, elections, plans and deliveries are those of the agent. Demands change at random;
agents crash and restart, connections break, answers are lost, the service is gone for half a
minute, and leaders are killed or pause. The sum of the enforced limits is compared with every
budget whenever a limit rises. Then the CPU time of one plan is measured, without a service.

    .venv/bin/python -m benchmarks.fleet [--hosts 1000] [--seconds 600] [--plans 1000,10000]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from random import Random
from statistics import median, quantiles

from msgspec.structs import replace

from benchmarks.fleet_plant import BUDGET_FRACTION, ORIGINALS, PRIORITIES, ROWS, Fleet, W, place_of
from benchmarks.machine import describe
from wattspan.fleet.allotment import AllotmentBook, HostReport, accept_budgets
from wattspan.fleet.allotment_planner import plan_allotments
from wattspan.fleet.records import encode, read_state
from wattspan.model import SECOND


def simulate(hosts: int, seconds: int, seed: int) -> None:
    fleet = Fleet(hosts, seed)
    fleet.run(60)  # until all hosts are registered: a host counts from then on
    assert all(host.joined is None for host in fleet.hosts), "not every host was admitted"
    quiet = fleet.join_times[:]
    fleet.join_times.clear()
    fleet.ratios.clear()
    before, written = sum(fleet.service.calls.values()), fleet.service.bytes_written
    fleet.run(60)
    calls = (sum(fleet.service.calls.values()) - before) / 60
    rate = (fleet.service.bytes_written - written) / 60
    commits = fleet.service.calls["commit"] / sum(fleet.service.calls.values())
    leaves = [_leave(fleet) for _ in range(10)]
    fleet.join_times.clear()
    fleet.begin_faults()
    fleet.run(seconds)
    joins = fleet.join_times
    place, ratio = max(fleet.ratios.items(), key=lambda item: item[1])
    faults = ", ".join(f"{count} {name}" for name, count in sorted(fleet.count.items()))
    steps = [seconds * 1_000 for seconds in fleet.step_times]
    rows = {
        f"largest sum of enforced limits / budget, of {len(fleet.budgets)} budgets": (
            f"{ratio:.9f} at {place or 'the fleet'}"
        ),
        "faults": faults,
        "first allotment, all hosts at once": _times(quiet),
        f"first allotment after a start under faults ({len(joins)})": _times(joins),
        "power of an agent that leaves allotted to others": _times(leaves),
        "calls of the service per second without faults": (
            f"{calls:.0f}, of which {commits:.0%} commits; {rate / 1000:.0f} kB/s written"
        ),
        "CPU time of a leader's step": f"median {median(steps):.0f} ms, max {max(steps):.0f} ms",
    }
    print(f"{hosts} emulated hosts, {seconds} s of faults, seed {seed}:\n\n| figure | value |")
    print("|---|---|")
    for name, value in rows.items():
        print(f"| {name} | {value} |")
    print()


def _times(seconds: Sequence[float]) -> str:
    if len(seconds) < 2:
        return "none"
    p95 = quantiles(seconds, n=20, method="inclusive")[-1]
    return f"median {median(seconds):.1f} s, p95 {p95:.1f} s, max {max(seconds):.1f} s"


def _leave(fleet: Fleet) -> float:
    """Seconds from an orderly end of an agent until others are allotted what it releases."""
    released = [one for one in fleet.hosts if one.has_agent and one.limit - one.safe >= 500 * W]
    host = fleet.random.choice(released)
    keys, operator = fleet.keys, fleet.service.client()
    before = host.limit
    host.member.leave()
    host.has_agent = False
    began = fleet.clock.monotonic()
    revision = read_state(keys, operator.read(keys.prefix)).book.revision
    if host.limit < before:
        while fleet.clock.monotonic() - began < 60 * SECOND:
            fleet.run(0.1)
            if read_state(keys, operator.read(keys.prefix)).book.revision > revision:
                break
    taken = (fleet.clock.monotonic() - began) / SECOND
    host.start_agent()
    fleet.run(5)
    return taken


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
    options.add_argument("--plans", default="1000,10000", help="sizes of the plans to time")
    chosen = options.parse_args()
    print(f"{describe()}\n")
    if chosen.hosts:
        simulate(chosen.hosts, chosen.seconds, chosen.seed)
    print("CPU time of one plan, and the number of allotments that it changes:\n")
    print("| hosts | all join | nothing changes | every demand changes | book |")
    print("|---|---|---|---|---|")
    for hosts in filter(None, chosen.plans.split(",")):
        measure_plans(int(hosts), chosen.seed)


if __name__ == "__main__":
    main()
