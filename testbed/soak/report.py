"""Result of a soak as text: a table, a verdict, and the page docs/soak.md."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from testbed.soak.agent import COMPRESSED
from testbed.soak.judge import Verdict, judge
from testbed.soak.samples import QUANTITIES, Quantity

COUNTED = frozenset({"descriptors", "sockets", "threads", "shm_files", "announcers"})
"""Quantities without caches: ten minutes beside other work show their growth."""

CLEARLY = 5.0
"""By how much, beside other work: a slow machine has a few more of them open at a time."""

MOST_MEMORY = 192.0
"""Megabytes that no cache of the agent's explains under this load."""


@dataclass(frozen=True, slots=True)
class Soaked:
    """All that is known of one soak; ``looks`` have hours at 100 ms a cycle under ``hours``."""

    machine: str
    seconds: float
    interval: str
    history: str
    turns: int
    missed: int
    hours: float
    looks: Sequence[Mapping[str, float]]
    done: Mapping[str, int]
    failed: Mapping[str, int]
    totals: Mapping[str, float]

    def verdicts(self) -> list[tuple[Quantity, Verdict]]:
        found = []
        for quantity in QUANTITIES:
            samples = [(x["hours"], x[quantity.key]) for x in self.looks if quantity.key in x]
            if samples:
                found.append((quantity, judge(samples, quantity.bound)))
        return found

    @property
    def growing(self) -> list[str]:
        return [quantity.name for quantity, verdict in self.verdicts() if verdict.grows]

    @property
    def nobody(self) -> list[str]:
        """Parts of the load that mostly failed: required observations without a trial."""
        failures: dict[str, int] = {}
        for name, count in self.failed.items():
            part = name.partition(":")[0]
            failures[part] = failures.get(part, 0) + count
        return [part for part, count in failures.items() if count > 0.1 * self.done.get(part, 0)]

    @property
    def starved(self) -> bool:
        """True if the agent got less than half of its ticks: caches that were hardly exercised."""
        return self.turns < self.missed

    @property
    def few(self) -> list[str]:
        """Quantities with too few samples for a trend."""
        return [quantity.name for quantity, verdict in self.verdicts() if verdict.hourly is None]

    @property
    def broken(self) -> list[str]:
        """Defects at any load of the machine, and for any length of the soak."""
        wrong = [
            f"{quantity.name} rose by {verdict.rise:.0f}"
            for quantity, verdict in self.verdicts()
            if quantity.key in COUNTED and verdict.grows and verdict.rise > CLEARLY
        ]
        most = max(look["rss"] for look in self.looks)
        if most > MOST_MEMORY:
            wrong.append(f"resident memory came to {most:.0f} MB")
        if not self.totals["spans"] or not self.turns:
            wrong.append("the agent did not work")
        return wrong

    @property
    def passed(self) -> bool:
        return not (self.growing or self.nobody or self.starved or self.few)


def conditions(soaked: Soaked) -> str:
    done = ", ".join(f"{count:,} {name}" for name, count in sorted(soaked.done.items()))
    return (
        f"{soaked.machine}\n\n"
        f"{soaked.seconds / 60:.1f} minutes at an interval of {soaked.interval}: "
        f"{soaked.turns:,} cycles, equal to {soaked.hours:.2f} hours at 100 ms a cycle "
        f"({soaked.missed:,} more were due and skipped for lack of CPU time). "
        f"Load: {done}; one tuned training job with "
        f"{soaked.totals['decisions']:,.0f} decisions; "
        f"{soaked.totals['spans']:,.0f} spans joined."
    )


def table(soaked: Soaked) -> str:
    lines = [
        "| | first sample | second half: minimum | median | maximum "
        "| trend per hour at 100 ms a cycle | threshold | result |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for quantity, verdict in soaked.verdicts():
        slope = "too few samples" if verdict.hourly is None else f"{verdict.hourly:+.3f}"
        judged = math.isfinite(quantity.bound.hourly)
        word = _word(verdict) if judged else ""
        most = f"{quantity.bound.hourly:g}" if judged else ""
        lines.append(
            f"| {quantity.name} | {verdict.first:.1f} | {verdict.least:.1f} | {verdict.median:.1f} "
            f"| {verdict.most:.1f} | {slope} | {most} | {word} |"
        )
    return "\n".join(lines)


def _word(verdict: Verdict) -> str:
    if verdict.grows:
        return "**grows**"
    if verdict.hourly is None:
        return "not judged"
    return f"inconclusive, rose by {verdict.rise:.1f}" if verdict.undecided else "flat"


def sentence(soaked: Soaked) -> str:
    if soaked.growing:
        return f"Growth: {', '.join(soaked.growing)}."
    if soaked.nobody:
        return f"Inconclusive, because most of this load failed: {', '.join(soaked.nobody)}."
    if soaked.few:
        return f"Inconclusive, because of too few samples of: {', '.join(soaked.few)}."
    if soaked.starved:
        return (
            "Inconclusive: no growth was observed, but the agent "
            f"got only {soaked.turns / (soaked.turns + soaked.missed):.0%} of its cycles."
        )
    if undecided := [quantity.name for quantity, one in soaked.verdicts() if one.undecided]:
        return (
            "No quantity grows as with a leak; inconclusive without a longer soak: "
            f"{', '.join(undecided)}."
        )
    return "No growth."


def compressed(soaked: Soaked) -> str:
    lines = ["| | default | in this soak |", "|---|---|---|"]
    for what, default, here in COMPRESSED:
        now = here.format(interval=soaked.interval, history=soaked.history)
        lines.append(f"| {what} | {default} | {now} |")
    return "\n".join(lines)


def as_json(soaked: Soaked) -> dict[str, Any]:
    return {
        "machine": soaked.machine,
        "seconds": soaked.seconds,
        "interval": soaked.interval,
        "turns": soaked.turns,
        "missed": soaked.missed,
        "hours_at_default_pace": soaked.hours,
        "done": dict(soaked.done),
        "failed": dict(soaked.failed),
        "totals": dict(soaked.totals),
        "passed": soaked.passed,
        "quantities": {
            quantity.key: asdict(verdict) | {"bound": asdict(quantity.bound)}
            for quantity, verdict in soaked.verdicts()
        },
        "looks": [dict(look) for look in soaked.looks],
    }
