"""One fault after the other: break it, look, mend it, and see how long the agent takes.

A fault is declared as a value; ``hardware``, ``clocks`` and ``processes`` and their siblings list
them. The course runs it on a stage and hands back a row of the table.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from testbed.faults.judge import Breach, Deviation, Well, deviations, flowing, recovery
from testbed.faults.observation import NANO, Sight
from testbed.faults.stage import CEILINGS, Stage

from wattspan.ports import WattspanError

LIMIT = 10.0  # seconds from a fault's end until figures flow again
PATIENCE = 30.0  # for required observations, and for a late recovery
LATE = 8.0  # seconds until all earlier energy is published, on a very busy machine
SILENCE = 5.0  # seconds without a response at ten requests a second
APART = 0.3  # seconds of a domain's ceiling: difference between a scrape's readings and the truth
EXACT = 1.0  # percent of a domain's energy, in addition
REST, SHORT_REST = 5.0, 1.0  # seconds after the recovery, in which a late spike would show


@dataclass(frozen=True)
class Sign:
    """Something by which an operator sees a fault: in words, and as a look at two scrapes."""

    words: str
    seen: Callable[[Sight, Sight], bool]  # before the fault, and now
    meanwhile: bool = False  # whether it is visible only during the fault


@dataclass(frozen=True)
class Claim:
    """Something that must be true all along: in words, and as a look at all that was scraped."""

    words: str
    true: Callable[[Stage, Sequence[Sight]], bool]  # from the last observation before the fault


@dataclass(frozen=True)
class Fault:
    """A fault of limited duration, and the required observations.

    ``inject`` and ``end`` act on a stage. It lasts ``lasts`` seconds, or ``short`` in a test;
    all signs must be observed, and the claims must hold at the end.
    """

    name: str
    inject: Callable[[Stage], object]
    end: Callable[[Stage], object]
    means: str  # to an operator
    signs: Sequence[Sign] = ()
    claims: Sequence[Claim] = ()
    lasts: float = 5.0
    short: float = 1.5
    how: str = "the whole agent"
    well: Well = flowing
    missing: float = EXACT  # percent of a domain's energy that may be missing, in addition to APART
    leaps: bool = False
    """True if the emulated counters catch up at once after a stall.

    No hardware draws that energy in a moment, so the agent may report a gap instead.
    """
    unanswered: str = ""
    """Reason for which scrapes may stay unanswered; "" where they may not."""
    limit: float = LIMIT
    excuses: Callable[[Breach], bool] = field(default=lambda _: False)
    """Breaches that are correct behaviour in this case only."""
    note: Callable[[Stage], str] = field(default=lambda _: "")  # a figure of its own, at the end


@dataclass(frozen=True)
class Outcome:
    """A row of the table, and everything that was wrong."""

    fault: Fault
    seen: Sequence[str]
    missed: Sequence[str]
    untrue: Sequence[str]
    gaps: Mapping[str, float]  # seconds by reason, of the domain with most
    worst: Deviation | None
    recovered: float | None
    breaches: Sequence[Breach]
    alive: bool
    unanswered: float  # seconds, the longest stretch
    note: str = ""

    @property
    def wrong(self) -> list[str]:
        """Sentences; empty for a fault that was survived."""
        return [*self.broken, *self.late]

    @property
    def broken(self) -> list[str]:
        """Violations that CPU contention cannot cause."""
        found = [f"never seen: {words}" for words in self.missed]
        found += [f"not true: {words}" for words in self.untrue]
        found += [str(breach) for breach in self.breaches]
        if not self.alive:
            found.append("the agent has ended")
        return found

    @property
    def late(self) -> list[str]:
        """Violations that a busy machine can contribute to."""
        found = []
        if self.recovered is None:
            found.append(f"not well within {PATIENCE:g} s")
        elif self.recovered > self.fault.limit:
            found.append(f"well only after {self.recovered:.1f} s")
        if self.unanswered > SILENCE and not self.fault.unanswered:
            found.append(f"no answer for {self.unanswered:.1f} s")
        if self.worst is not None and not _close(self.worst, self.fault):
            told = f"{self.worst.told:.1f} J told, {self.worst.true:.1f} J true"
            found.append(f"{self.worst.domain}: {told}, {self.worst.gaps:.2f} s in gaps")
        return found


def undergo(stage: Stage, fault: Fault, *, short: bool = False, restart: bool = False) -> Outcome:
    """Let the agent of a stage that is well go through one fault; it is mended afterwards.

    With ``restart`` the agent is killed at the end and restarted: nothing may be lost.
    """
    before = _well(stage)
    began, slept = stage.mono_of(before), stage.asleep
    true = stage.truth(began)
    stage.watcher.take_breaches()
    waiting = {sign.words: sign for sign in fault.signs}
    seen: list[str] = []

    def look() -> bool:
        for sight in stage.watcher.since(began):
            for words in [w for w, sign in waiting.items() if sign.seen(before, sight)]:
                del waiting[words]
                seen.append(words)
        return not waiting

    injected = time.monotonic_ns()
    fault.inject(stage)
    _pause(fault.short if short else fault.lasts, look)
    # An agent that has little of the processor comes to tell of it later.
    _patiently(lambda: look() or not any(s.meanwhile for s in waiting.values()), PATIENCE)
    fault.end(stage)
    ended = time.monotonic_ns()
    recovered = _recovery(stage, fault, ended, before)
    _pause(SHORT_REST if short else REST, look)
    _patiently(look, PATIENCE if waiting and recovered is not None else 0)
    after = stage.fresh() if recovered is not None else stage.last
    worst = _worst(stage, before, after, began, true, stage.asleep - slept)
    late = time.monotonic() + LATE  # on a busy machine a reading may come late: not a loss
    while (
        recovered is not None
        and worst is not None
        and not _close(worst, fault)
        and time.monotonic() < late
    ):
        time.sleep(0.2)
        after = stage.fresh()
        worst = _worst(stage, before, after, began, true, stage.asleep - slept)
    note = fault.note(stage)
    unanswered = stage.watcher.unanswered(injected)
    sights = [before, *stage.watcher.since(before.at)]
    untrue = [claim.words for claim in fault.claims if not claim.true(stage, sights)]
    seen += [claim.words for claim in fault.claims if claim.words not in untrue]
    alive = stage.alive
    if restart and alive:
        stage.restart(signal.SIGKILL)
        _pause(SHORT_REST, look)
    return Outcome(
        fault,
        seen,
        list(waiting),
        untrue,
        _gaps(before, after),
        worst,
        recovered,
        [one for one in stage.watcher.take_breaches() if not fault.excuses(one)],
        alive and stage.alive,
        unanswered,
        note,
    )


def _well(stage: Stage) -> Sight:
    """A sight of the stage when everything flows."""
    start = stage.last
    stage.until(lambda: flowing(stage.last, start, stage.last), "an agent that is well", PATIENCE)
    return stage.fresh()


def _recovery(stage: Stage, fault: Fault, ended: int, before: Sight) -> float | None:
    found: list[float | None] = [None]

    def attempt() -> bool:
        found[0] = recovery(stage.watcher.since(ended), ended, before, fault.well)
        return found[0] is not None

    _patiently(attempt, PATIENCE)
    return found[0]


def _patiently(attempt: Callable[[], bool], within: float) -> None:
    deadline = time.monotonic() + within
    while not attempt() and time.monotonic() < deadline:
        time.sleep(0.05)


def _pause(seconds: float, look: Callable[[], bool]) -> None:
    """Let time pass, with open eyes."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        look()
        time.sleep(0.05)


def _worst(
    stage: Stage,
    before: Sight,
    after: Sight,
    began: int,
    true: Mapping[str, float],
    asleep: float,
) -> Deviation | None:
    ended = stage.mono_of(after)
    try:
        later = stage.truth(ended)
    except (OSError, ValueError, WattspanError):  # the host cannot be asked: undecidable
        return None
    spent = {name: later[name] - joules for name, joules in true.items() if name in later}
    found = deviations(before, after, spent, (ended - began) / NANO, asleep)
    return max(found, key=lambda one: abs(one.percent), default=None)


def _close(one: Deviation, fault: Fault) -> bool:
    """True if reported energy is at most the true energy, and at least that without the energy
    in gaps.

    Both within a percent, and the energy between a reading and a snapshot.
    """
    ceiling, over = ceiling_of(one.domain), one.told - one.true
    apart = APART * ceiling
    if over > apart + one.true * EXACT / 100:
        return False
    refused = one.gaps > 0 if fault.leaps else False  # a leap is a gap of a moment
    return refused or over >= -apart - one.true * fault.missing / 100 - one.gaps * ceiling


def ceiling_of(domain: str) -> float:
    """Watts that a domain cannot draw more than, by its name."""
    if domain.startswith("gpu:"):
        return CEILINGS["gpu"]
    return CEILINGS["memory" if domain.endswith("/dram") else "cpu"]


def _gaps(before: Sight, after: Sight) -> dict[str, float]:
    """The seconds that were added to each reason's gaps, of the domain with the most."""
    found: dict[str, float] = {}
    earlier = {
        (s.labels["hw_id"], s.labels["reason"]): v
        for s, v in before.pick("wattspan_gap_seconds_total")
    }
    for series, value in after.pick("wattspan_gap_seconds_total"):
        reason = series.labels["reason"]
        added = (value - earlier.get((series.labels["hw_id"], reason), 0)) / NANO
        if added > 0:
            found[reason] = max(found.get(reason, 0.0), added)
    return found


# ---------------------------------------------------------------------------- signs in common


def gap(reason: str, hw_id: str = "") -> Sign:
    """Time of a domain (of any, if none is named) is booked as a gap with this reason."""
    which = {"hw_id": hw_id} if hw_id else {}
    name = "wattspan_gap_seconds_total"
    return Sign(
        f"gap `{reason}`",
        lambda before, now: (
            now.total(name, reason=reason, **which) > before.total(name, reason=reason, **which)
        ),
    )


def away(hw_id: str = "") -> Sign:
    """Its time is a gap: lost if it was a short time, absent if it was a long one."""
    lost, absent = gap("lost", hw_id), gap("absent", hw_id)
    return Sign(
        "gap `lost` or `absent`",
        lambda before, now: lost.seen(before, now) or absent.seen(before, now),
    )


def down(source: str) -> Sign:
    return Sign(
        f"`source_up` 0 of {source}",
        lambda _, now: any(v == 0 for _, v in now.pick("wattspan_source_up", source=source)),
        meanwhile=True,
    )


def unreadable(source: str, trouble: str) -> Sign:
    name = "wattspan_source_unreadable"
    return Sign(
        f"`source_unreadable` {trouble} of {source}",
        lambda before, now: (
            now.total(name, source=source, trouble=trouble)
            > before.total(name, source=source, trouble=trouble)
        ),
        meanwhile=True,
    )


def rises(name: str, **labels: str) -> Sign:
    """A counter rises, which does not otherwise."""
    return Sign(
        f"`{name.removeprefix('wattspan_')}` rises",
        lambda before, now: now.total(name, **labels) > before.total(name, **labels),
    )
