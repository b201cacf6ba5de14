"""Pipelines of a job on other hosts: their records are judged, and those of this host are made.

A record is used while it is fresh, and if its iterations last as long as those of this host: all
pipelines of a job wait for each other. Its figures count within the iterations that are measured
here. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, pstdev
from typing import Final

from wattspan.fleet.job_records import JobView, PipelineSummary, SeenRecord
from wattspan.model import SECOND, JobPartner
from wattspan.tuning.pipeline.assembly import PartnerTimes
from wattspan.tuning.pipeline.control import PipelineControl

_SUMMARIZED: Final = 8
"""Latest iterations in a summary."""

_LEAST: Final = 4
_SAME_JOB: Final = 0.25
"""Relative difference of iteration times from which on these are not the same iterations.

A record is some iterations old, and their time may have changed since.
"""

_STATES: Final = {
    "observe": "is observed",
    "profile": "measures lower clocks",
    "hold": "holds its clocks",
    "straggle": "waits for a slower one",
    "declined": "has the original clocks",
}


@dataclass(frozen=True, slots=True)
class JobPartners:
    """The other hosts of a job at one step.

    ``records`` are those in use, and ``pipelines`` all in these. ``explorer`` and ``may_explore``
    are those of the view. ``figures`` has a sentence for each host.
    """

    pipelines: tuple[PartnerTimes, ...] = ()
    records: tuple[SeenRecord, ...] = ()
    explorer: str = ""
    may_explore: bool = True
    figures: tuple[JobPartner, ...] = ()

    def beside(self, followed: Collection[str]) -> tuple[JobPartner, ...]:
        """The figures with the stragglers among the ``followed`` pipelines, named as in times."""
        stragglers = {
            seen.host: one.name
            for seen in self.records
            for one in _pipelines(seen)
            if _full_name(one, seen) in followed
        }
        return tuple(replace(one, straggler=stragglers.get(one.host, "")) for one in self.figures)


NO_PARTNERS: Final = JobPartners()


def judged(view: JobView, own: Sequence[PipelineSummary], now: int) -> JobPartners:
    """The partners by the present records, beside the ``own`` pipelines of this host."""
    present = [(seen, _refusal(seen, own, now)) for seen in view.records]
    names = Counter(one.name for one in own)
    for seen, refusal in present:
        if not refusal:
            names.update(one.name for one in _pipelines(seen))
    problems = [refusal or _repeated(seen, names) for seen, refusal in present]
    used = [seen for seen, problem in zip(view.records, problems, strict=True) if not problem]
    return JobPartners(
        tuple(
            PartnerTimes(
                _full_name(one, seen), round(one.computed * SECOND), round(one.tail * SECOND)
            )
            for seen in used
            for one in _pipelines(seen)
        ),
        tuple(used),
        view.explorer,
        view.may_explore,
        view.figures(problems, lambda seen: _sentence(_pipelines(seen)), now),
    )


def _pipelines(seen: SeenRecord) -> tuple[PipelineSummary, ...]:
    return () if seen.record is None else seen.record.pipelines


def _full_name(pipeline: PipelineSummary, seen: SeenRecord) -> str:
    return f"{pipeline.name} of {seen.host}"


def summarized(controls: Mapping[str, PipelineControl]) -> tuple[PipelineSummary, ...]:
    """The latest iterations of each pipeline of this host that has some."""
    return tuple(
        _summary(name, control)
        for name, control in controls.items()
        if len(control.recent) >= _LEAST
    )


def _summary(name: str, control: PipelineControl) -> PipelineSummary:
    latest = control.recent[-_SUMMARIZED:]
    computed = [(times.computed - times.start) / SECOND for times in control.times()[-_SUMMARIZED:]]
    session = control.session
    return PipelineSummary(
        name=name,
        whole=median((one.end - one.start) / SECOND for one in latest),
        computed=median(computed),
        tail=median((one.end - one.computed) / SECOND for one in latest),
        noise=min(pstdev(computed) / fmean(computed), 1.0),
        state=session.phase.value,
        waiting=tuple(round(part, 4) for part in control.statistics.waiting),
        clocks=session.decision.clocks,
    )


def _refusal(seen: SeenRecord, own: Sequence[PipelineSummary], now: int) -> str:
    """The reason not to use a record, in one sentence; "" for none."""
    record, unused = seen.record, seen.unused(now)
    if record is None or unused:
        return unused
    if not record.pipelines:
        return "It has no complete iterations yet."
    if not own:
        return "Its iterations are not compared yet: this host has none."
    here = median(one.whole for one in own)
    for one in record.pipelines:
        if abs(one.whole - here) > _SAME_JOB * here:
            return (
                f"An iteration of its pipeline {one.name} lasts {one.whole:.3g} s, and one here"
                f" {here:.3g} s: these are not the same iterations."
            )
    return ""


def _repeated(seen: SeenRecord, names: Counter[str]) -> str:
    """The sentence on a pipeline that several hosts have; "" if there is none."""
    name = next((one.name for one in _pipelines(seen) if names[one.name] > 1), None)
    if name is None:
        return ""
    return (
        f"Another host has a pipeline {name}, too: give each pipeline of the job a name of its own,"
        " and each run a service of its own; a pipeline over several hosts is not tuned."
    )


def _sentence(pipelines: Sequence[PipelineSummary]) -> str:
    slowest = max(pipelines, key=lambda one: one.computed)
    count = len(pipelines)
    state = _STATES.get(slowest.state, slowest.state)
    subject = f"Its pipeline {slowest.name}"
    if count > 1:
        subject = f"The slowest of its {count} pipelines, {slowest.name},"
    return (
        f"{subject} takes {slowest.computed:.3g} s of an iteration of {slowest.whole:.3g} s at the"
        f" original clocks, with a noise of {slowest.noise:.1%}, and {state}."
    )
