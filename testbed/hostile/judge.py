"""Verdicts on the effect of an attack on the agent and on other users.

Pure: replies and figures come in, a finding and its faults go out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

SERVED = 200
NO_ANSWER = 0
MEGABYTE = 1e6


@dataclass(frozen=True)
class Reply:
    """One request of the well-behaved user: when it was sent, its duration and its status.

    Times are seconds of the monotonic clock. Status 0 means no response.
    """

    kind: str
    at: float
    seconds: float
    status: int

    @property
    def served_after(self) -> float:
        """The duration of a request that was served; a refused one is never served."""
        return self.seconds if self.status == SERVED else math.inf


@dataclass(frozen=True)
class Service:
    """Service of one kind of request."""

    requests: int = 0
    refused: int = 0
    unanswered: int = 0
    p99: float = 0.0
    worst: float = 0.0  # of the answered requests


def service(replies: Sequence[Reply]) -> Service:
    """The figures of replies of one kind.

    The 99th percentile leaves out one request of a hundred, and one where there are fewer.
    """
    if not replies:
        return Service()
    times = sorted((one.served_after for one in replies), reverse=True)
    left_out = min(len(times) - 1, max(1, len(times) // 100))
    return Service(
        len(replies),
        sum(one.status not in (SERVED, NO_ANSWER) for one in replies),
        sum(one.status == NO_ANSWER for one in replies),
        times[left_out],
        max((one.seconds for one in replies if one.status != NO_ANSWER), default=0.0),
    )


def services(replies: Iterable[Reply]) -> dict[str, Service]:
    """The figures of every kind of request."""
    kinds: dict[str, list[Reply]] = {}
    for one in replies:
        kinds.setdefault(one.kind, []).append(one)
    return {kind: service(found) for kind, found in sorted(kinds.items())}


def worst_service(found: Mapping[str, Service]) -> tuple[str, Service]:
    """The kind of request with the largest 99th percentile."""
    return max(
        found.items(), key=lambda item: (item[1].p99, item[1].worst), default=("", Service())
    )


@dataclass(frozen=True)
class Rule:
    """Bounds on the effect of an attack; ``p99`` and ``others`` are of the other user."""

    others: bool = True
    """The other user's requests are judged; not where the attack itself ends the agent."""
    p99: float = 1.0  # seconds
    growth: float | None = None  # MB of resident memory that may remain
    memory: bool = True  # a kill for memory is a fault


@dataclass(frozen=True)
class Finding:
    """Measurements of one attack. Sizes are in bytes, times in seconds."""

    attack: str
    topic: str
    seconds: float
    wedged: bool = False
    killed: bool = False
    before: int = 0
    peak: int = 0
    after: int = 0
    others: Mapping[str, Service] = field(default_factory=dict)
    answers: Mapping[str, int] = field(default_factory=dict)  # received by the attacker
    note: str = ""
    faults: Sequence[str] = ()  # reported by the attack itself

    @property
    def growth(self) -> float:
        """Megabytes that remain after the attack."""
        return (self.after - self.before) / MEGABYTE


def verdict(finding: Finding, rule: Rule) -> list[str]:
    """One sentence for each thing that is not allowed; none for an attack that was withstood."""
    wrong = list(finding.faults)
    if finding.killed and rule.memory:
        wrong.append("the agent was killed")
    if finding.wedged:
        wrong.append("the agent did not recover")
    if rule.others:
        wrong += _not_served(finding.others, rule.p99)
    if rule.growth is not None and finding.growth > rule.growth:
        wrong.append(f"{finding.growth:.0f} MB remain, at most {rule.growth:g}")
    return wrong


def _not_served(others: Mapping[str, Service], most: float) -> Iterable[str]:
    for kind, found in others.items():
        if found.p99 > most:
            lost = found.refused + found.unanswered
            late = f"p99 {found.p99:.2f} s" if math.isfinite(found.p99) else "p99 not served"
            yield f"{kind}: {late}, {lost} of {found.requests} not served"


@dataclass(frozen=True)
class Sample:
    """The limits in force at one moment, in watts by device."""

    at: float
    watts: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.watts.values())


def above_budget(samples: Sequence[Sample], budget: float) -> list[Sample]:
    """The samples above a budget after the first one within it."""
    first = next((n for n, one in enumerate(samples) if one.total <= budget), len(samples))
    return [one for one in samples[first:] if one.total > budget]


def mean_rate(samples: Sequence[Sample]) -> float:
    """Samples a second, over the whole time."""
    if len(samples) < 2:
        return 0.0
    return (len(samples) - 1) / (samples[-1].at - samples[0].at)
