"""Cost of the agent with sleeping and with short-lived processes, next to its peers.

.venv/bin/python -m benchmarks.overhead
.venv/bin/python -m benchmarks.overhead --processes 500 --forks 1000
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from testbed.machine import describe

from benchmarks.harness import Cost, forker, measure, medians, sleepers
from benchmarks.peers import agent, peers

# Part of the figure with GPUs is the emulated NVML, which runs in the agent's process.
AGENTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("at rest, two sockets", {"profile": "two-socket"}),
    ("at rest, two sockets, two GPUs", {"profile": "two-socket-h100"}),
    ("two sockets, a sender of ten spans a second", {"profile": "two-socket", "sends": True}),
    ("always at 10 Hz, two sockets", {"profile": "two-socket", "interval": "100ms"}),
)
REFERENCE = "node_exporter"
LOADS = ((500, 0), (3000, 0), (500, 1000))
"""Sleeping processes, and short-lived ones a second."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--processes", type=int, help="sleeping ones; default: all loads")
    options.add_argument("--forks", type=int, default=0, help="short-lived processes a second")
    options.add_argument("--window", type=float, default=10.0, help="seconds measured each time")
    options.add_argument("--repeats", type=int, default=2)
    options.add_argument("--alone", action="store_true", help="the agent without its peers")
    chosen = options.parse_args()
    loads = LOADS if chosen.processes is None else ((chosen.processes, chosen.forks),)
    print(describe())
    with tempfile.TemporaryDirectory() as folder:
        subjects = [
            agent(Path(folder), name=f"wattspan, {what}", **settings) for what, settings in AGENTS
        ]
        if not chosen.alone:
            subjects += peers(Path(folder))
        costs: dict[str, dict[str, Cost]] = {}
        for count, rate in loads:
            with sleepers(count), forker(rate) as load:
                found = medians(subjects, chosen.repeats, lambda s: measure(s, chosen.window))
            costs[f"{count:,} + {load.rate:,.0f} a second" if rate else f"{count:,}"] = found
    print(f"\nMedians of {chosen.repeats} windows of {chosen.window:g} s:", end=" ")
    print(table([subject.name for subject in subjects], costs))


def table(subjects: list[str], costs: dict[str, dict[str, Cost]]) -> str:
    """The costs by load and subject in Markdown, and the most memory under any load.

    The ratios are to node_exporter, or without it to the first agent.
    """
    reference = REFERENCE if REFERENCE in subjects else subjects[0]
    lines = [
        "% of one core beside so many sleeping processes (+ short-lived ones), in brackets "
        f"relative to {reference}\n",
        f"| | {' | '.join(costs)} | most RSS, MB |",
        f"|---|---|{'---|' * len(costs)}",
    ]
    for name in subjects:
        pairs = [(one[name].cpu_percent, one[reference].cpu_percent) for one in costs.values()]
        cells = [f"{own:.2f} ({own / other:.3g})" for own, other in pairs]
        most = max(one[name].rss for one in costs.values())
        lines.append(f"| {name} | {' | '.join(cells)} | {most:.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
