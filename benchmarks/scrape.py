"""Cost of a scrape of many series, next to prometheus-client on the same values.

Both get the same snapshots: in one kind of host every counter has grown since the scrape before, in
the other nine of ten processes slept. CPU time of the rendering thread, medians. prometheus-client
is handed its samples ready made, wattspan has to draw them from the snapshot.

    .venv/bin/python -m benchmarks.scrape
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from testbed.machine import describe

from wattspan.model import (
    Consumer,
    Group,
    GroupKind,
    HwType,
    Instant,
    Microjoules,
    PayerInfo,
    ProcessRow,
    Provenance,
    Snapshot,
)
from wattspan_exporters.catalogue.energy import ACCOUNTS
from wattspan_exporters.prometheus.renderer import ExpositionFormat, Renderer

TYPES = (HwType.CPU, HwType.GPU, HwType.MEMORY)
ENERGY = ACCOUNTS[0]  # of processes: the family that grows with the host


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--series", type=int, default=10_000)
    options.add_argument("--repeats", type=int, default=15)
    chosen = options.parse_args()
    print(describe())
    print(f"\nCPU milliseconds a scrape of {chosen.series:,} series (goal: 10 for 10,000)\n")
    print("| format | changed | wattspan | prometheus-client | wattspan, first |")
    print("|---|---|---|---|---|")
    for form in ExpositionFormat:
        for awake in (1, 10):
            print(row(chosen.series, form, awake, chosen.repeats))


def row(series: int, form: ExpositionFormat, awake: int, repeats: int) -> str:
    """One line of the table; one process of ``awake`` spends energy between two scrapes."""
    snapshots = [host(series, tick, awake) for tick in range(repeats + 1)]
    renderer = Renderer([ENERGY])
    first, body = timed(lambda: renderer.render(snapshots[0], form))
    ours, theirs = [], []
    for snapshot in snapshots[1:]:
        took, body = timed(lambda world=snapshot: renderer.render(world, form))
        ours.append(took)
        theirs.append(timed(peer(snapshot, form))[0])
    assert body.count(b"wattspan_process_energy_joules_total{") == series
    mine, other = statistics.median(ours), statistics.median(theirs)
    return f"| {form.name.lower()} | {100 // awake}% | {mine:.1f} | {other:.1f} | {first:.0f} |"


def timed(work: Callable[[], bytes]) -> tuple[float, bytes]:
    began = time.thread_time_ns()
    result = work()
    return (time.thread_time_ns() - began) / 1e6, result


def peer(snapshot: Snapshot, form: ExpositionFormat) -> Callable[[], bytes]:
    """prometheus-client's writer over the same samples, drawn beforehand."""
    family = CounterMetricFamily(
        ENERGY.series.removesuffix("_total"), ENERGY.help, labels=ENERGY.labels
    )
    for labels, value in ENERGY.draw(snapshot):
        family.add_metric(labels, value / 1e6)

    class Ready:
        def collect(self) -> Iterator[Metric]:
            yield family

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Ready())
    generate = generate_openmetrics if form is ExpositionFormat.OPENMETRICS else generate_latest
    return lambda: generate(registry)


def host(series: int, tick: int, awake: int = 1) -> Snapshot:
    """A host with as many series of processes as asked, a part of them further at each tick."""
    rows = [
        ProcessRow(info(n), {kind: grown(n, kind, 0 if n % awake else tick) for kind in TYPES}, {})
        for n in range(-(-series // len(TYPES)))
    ]
    surplus = len(rows) * len(TYPES) - series
    last = dict(list(rows[-1].energy.items())[surplus:])
    rows[-1] = replace(rows[-1], energy=last)
    return Snapshot(
        at=Instant(tick, tick),
        sequence=tick,
        host="bench",
        processes=tuple(rows),
        provenance=dict.fromkeys(TYPES, Provenance.MEASURED),
    )


def info(n: int) -> PayerInfo:
    group = Group(GroupKind.CONTAINER, f"{n % 61:064x}"[-12:])
    return PayerInfo(Consumer(1_000 + n, n), f"worker-{n % 97}", (group,))


def grown(n: int, kind: HwType, tick: int) -> Microjoules:
    return Microjoules(n * 7_654_321 + len(kind) * 1_000_003 + tick * 123_457)


if __name__ == "__main__":
    main()
