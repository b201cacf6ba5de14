"""Calibration of the declared error, and detection delay of a change.

*Certification:* a job that every cap slows down by the same given amount. At the budget itself, a
setting that is held is held in error; that may happen in one run of twenty at a confidence of 95 %.

*Detection:* once a setting has been held for a while, the job becomes one that this cap slows down
by 8 or 15 %. Either the capped steps become longer, which shows by itself; or they stay as they
are and the job would now be faster without a cap, which only a comparison can tell.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from testbed.tuner.curves import Curve, Effect, curves
from testbed.tuner.job import Job
from testbed.tuner.plants import Plant, luck
from testbed.tuner.runner import Terms, Watch, drive

from wattspan.model import Move
from wattspan.tuning.decisions.values import CertifiedLevels

CURVE = "a40-resnet50"
SLOWDOWNS = (0.03, 0.04, 0.045, 0.05, 0.055)
NOISE = (0.01, 0.05, 0.10)
UNITS = 24_000


def level(slowdown: float) -> Curve:
    """A job whose every cap below the original costs just that much time, and saves a fifth."""
    job = curves()[CURVE]
    top = job.original
    effect = Effect(1 + slowdown, 0.8)
    return replace(
        job,
        name=f"{slowdown:.1%} at any cap",
        watts=(job.least, top - 1, top),
        effects=(effect, effect, Effect(1.0, 1.0)),
    )


@dataclass(frozen=True)
class Certification:
    """True if a run ever held a setting."""

    slowdown: float
    cv: float
    remembered: bool
    seed: int
    held: bool
    units: int

    def facts(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Detection:
    """From a jump to the release; None without a release."""

    slowdown: float
    cv: float
    hidden: bool
    seed: int
    committed: bool
    sentinels: int | None = None
    units: int | None = None
    seconds: float | None = None
    reason: str = ""
    early: bool = False  # released before the jump

    def facts(self) -> dict[str, Any]:
        return asdict(self)


def certify(slowdown: float, cv: float, seed: int, *, remembered: bool) -> Certification:
    """One run of a job that every cap slows down so much.

    A stored setting of a job with a smaller slowdown is proved first.
    """
    plant = Plant(f"level {slowdown} {cv}", level(slowdown), units=UNITS, cv=cv)
    known = CertifiedLevels(230_000, 300_000, 0.03, 0.2, 40, cv) if remembered else None
    job, watch, _ = drive(
        plant,
        luck(plant, seed),
        seed,
        Terms(),
        remembered=known,
        after=lambda job, watch: watch.commit is None,
    )
    return Certification(slowdown, cv, remembered, seed, watch.commit is not None, len(job.ends))


class _Jump:
    """Turns the job into another one when it has held a setting for a while."""

    def __init__(self, slowdown: float, *, hidden: bool) -> None:
        self.slowdown, self.hidden = slowdown, hidden
        self.at: tuple[int, float, int] | None = None
        self.over: tuple[int, float, int] | None = None
        self.early = False

    def __call__(self, job: Job, watch: Watch) -> bool:
        now, last = (len(job.ends), job.time, watch.compared), watch.last
        gone = last is not None and last.move in (Move.RELEASE, Move.DECLINE)
        if self.at is not None:
            self.over = now if gone else None
            return not gone
        if watch.commit is None or last is None:
            return True
        if gone:
            self.early = True
            return False
        if now[0] >= watch.commit[0] + 2_000 and last.move is Move.HOLD and job.slowdown() > 0:
            pace = (1 + job.slowdown()) / (1 + self.slowdown) if self.hidden else 1.0
            job.become(level(self.slowdown), pace)
            self.at = now
        return True


def detect(slowdown: float, cv: float, seed: int, *, hidden: bool) -> Detection:
    """One run in which the held setting comes to slow the job down too much."""
    plant = Plant(f"jump {cv}", curves()[CURVE], units=2 * UNITS, cv=cv)
    jump = _Jump(slowdown, hidden=hidden)
    _, watch, _ = drive(plant, luck(plant, seed), seed, Terms(), after=jump)
    found = Detection(slowdown, cv, hidden, seed, jump.at is not None, early=jump.early)
    if jump.at is None or jump.over is None:
        return found
    return replace(
        found,
        units=jump.over[0] - jump.at[0],
        seconds=jump.over[1] - jump.at[1],
        sentinels=jump.over[2] - jump.at[2],
        reason=watch.last.reason.value if watch.last else "",
    )


def tasks(runs: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """All runs there are to do: function and arguments.

    Around the budget, where a setting is held in error, there are ``runs``; elsewhere a quarter.
    """
    for seed in range(runs):
        for cv in NOISE:
            for slowdown in SLOWDOWNS:
                near = 0.05 <= slowdown <= 0.055
                for remembered in (False, True) if near else (False,):
                    if near or seed < runs // 4:
                        yield "certify", (slowdown, cv, seed, remembered)
            for slowdown in (0.08, 0.15) if seed < runs // 2 else ():
                for hidden in (False, True):
                    yield "detect", (slowdown, cv, seed, hidden)


def run_task(task: tuple[str, tuple[Any, ...]]) -> Certification | Detection:
    what, (slowdown, cv, seed, flag) = task
    if what == "certify":
        return certify(slowdown, cv, seed, remembered=flag)
    return detect(slowdown, cv, seed, hidden=flag)
