"""The part of the demo that is tuned: which job, how, and what a step of it costs just now."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from wattspan.cli import figures
from wattspan.config import AutotuneSettings, CapsSettings, Config, TunedJobSettings
from wattspan.model import SECOND, DomainAccount, Knob, Microjoules, Snapshot
from wattspan.model.settings import Duration

if TYPE_CHECKING:
    from wattspan.emulation.profiles import DemoJob, HostProfile

BUDGET = 0.05
STEP = "train_step"
JUST_NOW = 15 * SECOND
"""Steps of so long are enough for a mean, and few enough to see it fall."""

WATCH = (
    "Watch {span} of {service}: within some minutes each step costs less energy, while the job "
    "stays within {budget:.0%} of its speed; TUNING says how and why."
)


def tuned_job(profile: HostProfile) -> DemoJob | None:
    """The training job of a profile: the first that tells of steps."""
    return next((job for job in profile.jobs if job.spans == "steps"), None)


def service_of(job: DemoJob) -> str:
    return job.service or job.name


def with_tuning(config: Config, profile: HostProfile) -> Config:
    """``config``, and the profile's training job is tuned: in short blocks, for short patience."""
    job = tuned_job(profile)
    if job is None:
        return config
    named = TunedJobSettings(service=service_of(job), span=STEP, work="samples")
    tuned = AutotuneSettings(
        mode="apply",
        max_slowdown=BUDGET,
        knobs=(Knob.GPU_POWER,) if profile.gpus else (Knob.CPU_POWER,),
        job=(named,),
        block=Duration.parse("2s"),
        block_units=5,
        settle=Duration.parse("500ms"),
        settle_units=3,
        dwell=Duration.parse("1m"),
    )
    return replace(config, autotune=tuned, caps=CapsSettings(capper=True, users=()))


def what_to_watch(profile: HostProfile) -> str:
    """One sentence for the viewer; "" where nothing is tuned."""
    job = tuned_job(profile)
    if job is None:
        return ""
    return WATCH.format(span=STEP, service=service_of(job), budget=BUDGET)


class _Sum(NamedTuple):
    """What had come up to a time: steps, how long they took, and the devices' accounts."""

    at: int  # all of the devices are settled up to here
    steps: int
    time: int
    accounts: tuple[DomainAccount, ...]


@dataclass(slots=True)
class StepCost:
    """What a step costs its devices just now, idle power included, beside what one cost at first.

    Steps follow one another without a break, so that is power times how long a step takes; what
    spans tell late, and energy that nobody can be charged with, then makes no difference. Power
    is energy over how far it is settled: that may be further behind the clock now than before.
    """

    service: str
    _sums: deque[_Sum] = field(default_factory=deque)
    _first: tuple[float, float] | None = None

    def see(self, snapshot: Snapshot) -> str:
        """One line about the newest steps; "" while there are too few."""
        now = self._sum(snapshot)
        if now is None:
            return ""
        self._sums.append(now)
        while len(self._sums) > 2 and now.at - self._sums[1].at >= JUST_NOW:
            self._sums.popleft()
        since = self._sums[0]
        steps, elapsed = now.steps - since.steps, now.at - since.at
        power = _power(since, now)
        if elapsed < JUST_NOW or not steps or power is None:
            return ""
        time = (now.time - since.time) / steps
        cost = power * time, time
        self._first = self._first or cost
        return f"A step just now: {_each(cost)}; at first: {_each(self._first)}."

    def _sum(self, snapshot: Snapshot) -> _Sum | None:
        tuned = (row for row in snapshot.tuning.rows if row.service == self.service)
        devices = next((row.devices for row in tuned), ())
        steps = (r for r in snapshot.spans.rows if (r.service, r.name) == (self.service, STEP))
        row = next(steps, None)
        if row is None or not devices:
            return None
        accounts = tuple(one for one in snapshot.domains if one.domain.id in devices)
        settled = [one.settled.mono for one in accounts if one.settled is not None]
        if not settled or len(settled) < len(devices):
            return None
        return _Sum(min(settled), row.count, row.time, accounts)


def _power(since: _Sum, now: _Sum) -> float | None:
    """Microjoules a nanosecond of all devices, while it is known; None if it never is of one."""
    power, before = 0.0, {account.domain.id: account for account in since.accounts}
    for account in now.accounts:
        past = before.get(account.domain.id)
        if past is None or past.settled is None or account.settled is None:
            return None
        gaps = sum(account.gaps.values()) - sum(past.gaps.values())
        known = account.settled.mono - past.settled.mono - gaps
        if known < SECOND:
            return None
        power += (account.energy - past.energy) / known
    return power


def _each(cost: tuple[float, float]) -> str:
    energy, time = cost
    return f"{figures.joules(Microjoules(round(energy)))} in {time / 1e6:.0f} ms"
