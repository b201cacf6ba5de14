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

from benchmarks.harness import Cost, Subject, forker, measure, medians, sleepers
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

GOALS = {500: "0.5 times node_exporter at rest, 0.8 with GPUs, 1.3 with a sender",
         3000: "0.6 times node_exporter at rest"}  # fmt: skip
FORKS_GOAL = 3.0  # percent of one core, with 1,000 short-lived processes a second


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
        for count, rate in loads:
            with sleepers(count), forker(rate) as load:
                costs = medians(subjects, chosen.repeats, lambda s: measure(s, chosen.window))
            print(table(count, subjects, costs, chosen.repeats, chosen.window, load.rate))


def table(
    count: int,
    subjects: list[Subject],
    costs: dict[str, Cost],
    repeats: int,
    window: float,
    forks: float = 0.0,
) -> str:
    """The costs with ``count`` more processes, as ratios to node_exporter's, in Markdown.

    Without node_exporter, the ratios are to the first agent.
    ``forks`` is the achieved rate of short-lived processes a second.
    """
    reference = REFERENCE if REFERENCE in costs else subjects[0].name
    own = costs[reference].cpu_percent
    goal = f" (goal: {GOALS[count]})" if count in GOALS else ""
    if forks:
        goal = (
            f" and {forks:,.0f} short-lived ones a second "
            f"(goal: {FORKS_GOAL:g} % for wattspan at 1,000 a second)"
        )
    lines = [
        f"\n**{count:,} sleeping processes**{goal}; medians of {repeats} windows of {window:g} s\n",
        "| | does | % of one core | ratio | RSS MB |",
        "|---|---|---|---|---|",
    ]
    for subject in subjects:
        cost = costs[subject.name]
        lines.append(
            f"| {subject.name} | {subject.does} | {cost.cpu_percent:.2f} "
            f"| {cost.cpu_percent / own:.2f} | {cost.rss:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
