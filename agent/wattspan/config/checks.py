"""What no single value shows: settings that cannot work together, or that do nothing.

A fault is a dotted key and a sentence; a warning is a sentence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from wattspan.config.control import AutotuneSettings, CapsSettings, TunedJobSettings
from wattspan.config.footprint import CarbonSettings, CostSettings, footprint_faults
from wattspan.model import Knob
from wattspan.model.settings import Table, quoted

SMALL_BUDGET = 0.01
"""A slowdown that is within the noise of most jobs."""


class ConfigFault(NamedTuple):
    """What is wrong with the value of a dotted key."""

    key: str
    sentence: str


def find_faults(tables: Mapping[str, Table]) -> Iterator[ConfigFault]:
    """What cannot be, among tables that are each right by themselves."""
    match tables.get("autotune"):
        case AutotuneSettings() as autotune:
            yield from _budgets(autotune)
            yield from _knobs(autotune)
            yield from _jobs(autotune.job)
    match tables.get("caps"):
        case CapsSettings() as caps:
            yield from _fixed(caps)
            yield from _ceiling(caps)
    for where in ("cost", "carbon"):
        match tables.get(where):
            case CostSettings() | CarbonSettings() as footprint:
                yield from (ConfigFault(*fault) for fault in footprint_faults(where, footprint))


def find_warnings(tables: Mapping[str, Table]) -> Iterator[str]:
    """What can be, and is hardly meant so."""
    match tables.get("autotune"):
        case AutotuneSettings() as autotune if autotune.mode != "off":
            yield from _ineffective_tuning(autotune)
            yield from _unapplied_tuning(autotune, tables)
        case AutotuneSettings() as autotune:
            for number, job in enumerate(autotune.job):
                if job.mode:
                    yield (
                        f"The mode of autotune.job[{number}] changes nothing while [autotune] mode "
                        'is "off". Set that to "advise" or "apply".'
                    )
    match tables.get("caps"):
        case CapsSettings() as caps:
            yield from _ineffective_caps(caps)


# ---------------------------------------------------------------------------------- the tuner


def _budgets(autotune: AutotuneSettings) -> Iterator[ConfigFault]:
    budgets = {"autotune.max_slowdown": autotune.max_slowdown}
    for number, job in enumerate(autotune.job):
        if job.max_slowdown is not None:
            budgets[f"autotune.job[{number}].max_slowdown"] = job.max_slowdown
    for key, budget in budgets.items():
        if budget == 0:
            yield ConfigFault(
                key,
                f"Bad value for {key!r}: with 0 nothing may be tried, for trying takes time. Allow "
                'something, such as 0.02, or set [autotune] mode = "off".',
            )


def _knobs(autotune: AutotuneSettings) -> Iterator[ConfigFault]:
    key = "autotune.knobs"
    if not autotune.knobs:
        yield ConfigFault(
            key,
            f"Bad value for {key!r}: no knob is left to turn. Name one, such as "
            '["gpu_power"], or set [autotune] mode = "off".',
        )
    for knob in _has_duplicates(autotune.knobs):
        yield ConfigFault(key, f'Bad value for {key!r}: it names "{knob}" twice. Name it once.')


def _jobs(jobs: Iterable[TunedJobSettings]) -> Iterator[ConfigFault]:
    """Jobs that get no span, for a job before them takes every one of theirs."""
    before: list[TunedJobSettings] = []
    for number, job in enumerate(jobs):
        for earlier, other in enumerate(before):
            if other.service in ("", job.service) and other.span in ("", job.span):
                key = f"autotune.job[{number}]"
                if (other.service, other.span) == (job.service, job.span):
                    why = f"it is the same job as autotune.job[{earlier}]. Remove one of them."
                else:
                    why = (
                        f"autotune.job[{earlier}], which stands before it, takes all of its spans. "
                        "Write the narrower job first."
                    )
                yield ConfigFault(key, f"Bad value for {key!r}: {why}")
                break
        before.append(job)


def _ineffective_tuning(autotune: AutotuneSettings) -> Iterator[str]:
    """What the tuner will hardly be able to do anything with."""
    if autotune.max_slowdown < SMALL_BUDGET:
        yield (
            f"[autotune] max_slowdown = {autotune.max_slowdown} is within the noise of most jobs: "
            "few settings, if any, can be proved to keep it."
        )
    if autotune.floor == 1:
        yield (
            "[autotune] floor = 1 leaves nothing between a device's default limit and the lowest "
            "cap, so hardly anything can be tried."
        )
    if Knob.GPU_CLOCK in autotune.knobs:
        yield (
            '[autotune] knobs has "gpu_clock": a locked clock cannot be read back from a GPU. So '
            "it is reset when it is let go, and a lock of somebody else's is lost with it."
        )
    for number, job in enumerate(autotune.job):
        if job.latency and job.kind == "steps":
            yield (
                f'autotune.job[{number}] has a latency, which only kind = "requests" is held to; '
                "it changes nothing."
            )


def _unapplied_tuning(autotune: AutotuneSettings, tables: Mapping[str, Table]) -> Iterator[str]:
    """Why nothing would be applied, or even advised."""
    if getattr(tables.get("spans"), "enabled", True) is False:
        yield (
            "[autotune] needs spans to see how fast a job is, and [spans] enabled is false: it "
            "will decline every job."
        )
    applied = any((job.mode or autotune.mode) == "apply" for job in autotune.job)
    if autotune.mode == "apply" and not applied and not autotune.apply_found:
        yield (
            '[autotune] mode = "apply" applies to no job: name one as [[autotune.job]], or set '
            "apply_found = true. Until then there is only advice."
        )


# ------------------------------------------------------------------------------------- limits


def _fixed(caps: CapsSettings) -> Iterator[ConfigFault]:
    for number, cap in enumerate(caps.fixed):
        key = f"caps.fixed[{number}]"
        if cap.knob is Knob.GPU_CLOCK:
            yield ConfigFault(
                f"{key}.knob",
                f"Bad value for '{key}.knob': a clock is not set in watts. Name \"gpu_power\" or "
                '"cpu_power".',
            )
        if not cap.device:
            yield ConfigFault(
                f"{key}.device", f"Bad value for '{key}.device': \"\" names no device."
            )
    for number in _duplicate_positions([(cap.device, cap.knob) for cap in caps.fixed]):
        key, device = f"caps.fixed[{number}]", quoted(caps.fixed[number].device)
        yield ConfigFault(
            key, f"Bad value for {key!r}: {device} has such a cap already. Remove one of them."
        )


def _ceiling(caps: CapsSettings) -> Iterator[ConfigFault]:
    if caps.budget_watts and caps.budget_watts <= caps.reserve_watts:
        key = "caps.budget_watts"
        yield ConfigFault(
            key,
            f"Bad value for {key!r}: of {caps.budget_watts} W nothing is left for devices after "
            f"reserve_watts = {caps.reserve_watts}. Raise the one or lower the other.",
        )
    if caps.budget_file and not caps.budget_file.startswith("/"):
        key = "caps.budget_file"
        yield ConfigFault(
            key,
            f"Bad value for {key!r}: {quoted(caps.budget_file)} depends on where the capper was "
            "started. Write the whole path, from /.",
        )
    for number in _duplicate_positions([priority.device for priority in caps.priority]):
        key, device = f"caps.priority[{number}]", quoted(caps.priority[number].device)
        yield ConfigFault(
            key, f"Bad value for {key!r}: {device} has a priority already. Remove one of them."
        )


def _ineffective_caps(caps: CapsSettings) -> Iterator[str]:
    """What is set and changes nothing."""
    if not caps.budget_watts and not caps.budget_file:
        idle = "reserve_watts" if caps.reserve_watts else "[[caps.priority]]"
        if caps.reserve_watts or caps.priority:
            yield (
                f"{idle} changes nothing without a power budget. Set [caps] budget_watts or "
                "budget_file."
            )
    for number, cap in enumerate(caps.fixed):
        if cap.watts < caps.floor_watts:
            yield (
                f"caps.fixed[{number}] asks for {cap.watts} W, and [caps] floor_watts = "
                f"{caps.floor_watts} is what stands."
            )


def _has_duplicates(values: Iterable[Knob]) -> list[Knob]:
    listed = list(values)
    return [value for value in dict.fromkeys(listed) if listed.count(value) > 1]


def _duplicate_positions(values: list[tuple[str, Knob]] | list[str]) -> Iterator[int]:
    """The places of values that stood before already."""
    return (place for place, value in enumerate(values) if value in values[:place])
