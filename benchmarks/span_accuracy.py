"""Accuracy of span energy: against the known truth of an emulated host, and next to Zeus.

A real agent, real processes with real load, spans over a real socket; the agent's figures are read
from the spans it forwards. The emulated host's model gives the energy of a CPU second, its boards
the energy of each process, so the truth about every span is known.

    .venv/bin/python -m benchmarks.span_accuracy [--quick] [--no-zeus]
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence

from testbed.machine import describe
from testbed.spans.accuracy import (
    CLIENTS,
    KINDS,
    LENGTHS,
    PROFILE,
    QUICK,
    REPEATS,
    WANDERING,
    Judged,
    judged_host,
    measure,
    neighbour,
    quantile,
)

# ------------------------------------------------------------------------------------ the table


def table(judged: Sequence[Judged], title: str) -> str:
    """Errors by kind of span and length."""
    zeus = any(one.zeus is not None for one in judged)
    heads = ["spans", "length", "n", "bias", "median", "p95", "worst", "inclusive p95",
             "within stated", "stated / p95"]  # fmt: skip
    if zeus:
        heads += ["Zeus median", "Zeus p95", "Zeus 0 J"]
    rows = []
    for kind in KINDS:
        for seconds in LENGTHS:
            those = [one for one in judged if (one.kind, one.seconds) == (kind, seconds)]
            if those:
                rows.append(_row(kind, seconds, those, zeus))
    lines = [
        f"**{title}**",
        "",
        "| " + " | ".join(heads) + " |",
        "|---|" + "---:|" * (len(heads) - 1),
    ]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _row(kind: str, seconds: float, those: Sequence[Judged], zeus: bool) -> list[str]:
    errors = [abs(one.error) for one in those]
    absolute = [abs(one.inclusive - one.true_inclusive) for one in those]
    stated = statistics.median(one.uncertainty for one in those)
    row = [
        kind,
        f"{seconds:g} s",
        str(len(those)),
        _percent(statistics.fmean(one.error for one in those), sign=True),
        _percent(statistics.median(errors)),
        _percent(quantile(errors, 0.95)),
        _percent(max(errors)),
        _percent(quantile([abs(one.inclusive_error) for one in those], 0.95)),
        f"{sum(one.within for one in those) / len(those):.0%}",
        f"{stated / max(1.0, quantile(absolute, 0.95)):.1f}",
    ]
    if zeus:
        found = [abs(one.zeus) for one in those if one.zeus is not None]
        row += (
            [_percent(statistics.median(found)), _percent(quantile(found, 0.95)),
             f"{sum(one.zeus == -1 for one in those) / len(found):.0%}"]
            if found
            else ["", "", ""]
        )  # fmt: skip
    return row


def _percent(value: float, *, sign: bool = False) -> str:
    digits = 2 if abs(value) < 0.1 else 1 if abs(value) < 1 else 0
    return f"{value * 100:{'+' if sign else ''}.{digits}f} %"


def report(repeats: Mapping[str, Sequence[int]], *, zeus: bool) -> Iterator[str]:
    """Everything, in Markdown."""
    yield describe()
    with judged_host(PROFILE) as (agent, collector):
        with neighbour(agent, None):
            known = {kind: repeats[kind] for kind in KINDS if kind != "recurring"}
            found = measure(agent, collector, gpu=None, repeats=known, zeus=zeus)
        yield table(found, "CPU package, with a neighbour on the same CPUs")
        found = measure(agent, collector, gpu=0, repeats=repeats, zeus=zeus, seed=2)
        yield table([one for one in found if one.device == "gpu"], "GPU, one process on the board")
        with neighbour(agent, 0):
            found = measure(agent, collector, gpu=0, repeats=repeats, seed=3)
        yield table([one for one in found if one.device == "gpu"], "GPU, shared with a neighbour")
    with judged_host(WANDERING) as (agent, collector), neighbour(agent, None):
        some = {kind: repeats[kind] for kind in ("single", "inside")}
        found = measure(agent, collector, gpu=None, repeats=some, seed=4)
        yield table(found, "CPU packages of two sockets with one CPU each, with a neighbour")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="fewer spans, none of 5 s")
    options.add_argument("--no-zeus", action="store_true")
    chosen = options.parse_args()
    zeus = not chosen.no_zeus and CLIENTS.exists() and os.geteuid() == 0
    for part in report(QUICK if chosen.quick else REPEATS, zeus=zeus):
        print(part, end="\n\n", flush=True)


if __name__ == "__main__":
    main()
