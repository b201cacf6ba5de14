"""One attack after the other on a stage: each attack is measured and judged by its rule."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from testbed.hostile.judge import MEGABYTE, Finding, Rule, services, verdict
from testbed.hostile.result import Judged
from testbed.hostile.stage import HostileStage

SETTLED = 10.0  # megabytes above the size before the attack
HURRIED = 5.0  # seconds, for the 99th percentile of the few requests in a quick run
WARM_UP = 0.25  # of the attack's time
PATIENCE = 8.0  # seconds in which the agent may give memory back


@dataclass(frozen=True)
class Terms:
    """Duration of a run, and its random seed."""

    quick: bool = False
    seed: int = 1
    part: float = 1.0  # of the time of each attack

    def seconds(self, full: float) -> float:
        return (min(full, 1.5) if self.quick else full) * self.part

    def count(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    def draw(self) -> random.Random:
        return random.Random(self.seed)


@dataclass(frozen=True)
class Done:
    """Findings of the attack itself."""

    answers: Mapping[str, int] = field(default_factory=dict)
    note: str = ""
    faults: Sequence[str] = ()
    ended: float | None = None
    """The end of the attack itself, where looking at what it did took longer."""


@dataclass(frozen=True)
class Attack:
    """A name, the action on a stage, and the permitted effects."""

    name: str
    topic: str
    run: Callable[[HostileStage, Terms], Done]
    rule: Rule = field(default_factory=Rule)
    stage: Callable[[], HostileStage] = HostileStage


@dataclass(frozen=True)
class Chapter:
    """Attacks with a table of their own, and the file of their result."""

    name: str
    kept: Path
    attacks: Sequence[Attack]


def judged(stage: HostileStage, attack: Attack, terms: Terms) -> Judged:
    """Run one attack, and judge it by its rule."""
    found = undergo(stage, attack, terms)
    rule = replace(attack.rule, p99=HURRIED) if terms.quick else attack.rule
    return Judged(found, verdict(found, rule))


def undergo(stage: HostileStage, attack: Attack, terms: Terms) -> Finding:
    """Run one attack on a healthy stage; the agent is restarted if it did not recover.

    If the remaining size is judged, a part of the attack runs first: modules loaded at its
    first request are not a leak.
    """
    if attack.rule.growth is not None:
        attack.run(stage, replace(terms, part=WARM_UP))
        if not stage.recovers():
            stage.start_anew()
    before = stage.size()
    stage.forget_peak()
    kills = stage.kills()
    begun = time.monotonic()
    done = attack.run(stage, terms)
    ended = done.ended or time.monotonic()
    recovered = stage.recovers()
    killed = not stage.alive or stage.kills() > kills
    peak = stage.peak_size() or stage.peak() or 0
    after = _settled_size(stage, before, terms.seconds(PATIENCE))
    found = Finding(
        attack.name,
        attack.topic,
        ended - begun,
        wedged=not recovered and not killed,
        killed=killed,
        before=before,
        peak=peak,
        after=after,
        others=services(one for one in stage.other.since(begun) if one.at <= ended),
        answers=done.answers,
        note=done.note,
        faults=tuple(done.faults),
    )
    if not recovered or killed:
        stage.start_anew()
    return found


def _settled_size(stage: HostileStage, before: int, patience: float) -> int:
    """The size once it is near the size before, or after some seconds."""
    deadline = time.monotonic() + patience
    while (now := stage.size()) - before > SETTLED * MEGABYTE and time.monotonic() < deadline:
        time.sleep(0.2)
    return now


def eventually(holds: Callable[[], object], within: float) -> float | None:
    """The seconds until something holds; None if it does not."""
    begun = time.monotonic()
    while time.monotonic() - begun < within:
        with contextlib.suppress(OSError, ValueError):
            if holds():
                return time.monotonic() - begun
        time.sleep(0.01)
    return None
