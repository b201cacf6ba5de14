"""A study and a recommendation as text, configuration and JSON."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from math import floor, isfinite
from typing import Any

import msgspec

from wattspan.cli.formatting import UNKNOWN, TableColumn, table_lines, unit_prefix
from wattspan.config.writing import value_text
from wattspan.frontier.estimates import BlockModel, ConfidenceInterval
from wattspan.frontier.recommendation import Frontier, Recommendation
from wattspan.frontier.trials import MeasuredDevice, Setting, Study
from wattspan.frontier.work import UnitSpan, parse_unit
from wattspan.model import HwType, Knob

DISOBEYED, UNSTEADY = "limit not obeyed", "not steady"


def study_note(study: Study) -> str:
    """The origin of the figures in one line."""
    devices = ", ".join(sorted({device.name for device in study.devices}))
    origins = ", ".join(sorted({device.provenance for device in study.devices}))
    emulated = "emulated, " if study.emulated and "emulated" not in origins else ""
    return (
        f"{study.host}: {devices} ({emulated}{origins}); unit {study.unit}; windows of"
        f" {study.window_seconds:g} s, up to {study.repeat} trials a setting; 95 % intervals"
    )


def study_lines(found: Frontier) -> list[str]:
    """The table of all settings, and what follows from it."""
    study = found.study
    lines = [shlex.join(study.command), study_note(study), ""]
    if not found.estimates.measured:
        return [*lines, "No trial can be used.", *_troubles(study)]
    lines += table_lines(_study_columns(found), range(len(study.settings)))
    lines += [
        "",
        "Time and energy are relative to the first setting. Settings on the frontier are not beaten"
        " in both beyond chance.",
    ]
    if any(setting.parameters for setting in study.settings):
        lines.append(
            "Figures are per unit of work, not to accuracy: a batch size changes that too."
        )
    return [*lines, *_troubles(study)]


def _flags(study: Study) -> dict[Setting, list[str]]:
    """The flags of each setting: those of any of its usable trials."""
    found: dict[Setting, list[str]] = {}
    for trial in study.usable():
        flags = found.setdefault(trial.setting, [])
        for flag, applies in ((DISOBEYED, trial.disobeyed), (UNSTEADY, trial.unsteady)):
            if applies and flag not in flags:
                flags.append(flag)
    return found


def _study_columns(found: Frontier) -> list[TableColumn]:
    """The columns of a table of settings by their number."""
    study, estimates = found.study, found.estimates
    usable = [trial.setting for trial in study.usable()]
    members, pruned, flags = set(found.settings), dict(study.pruned), _flags(study)
    first = min(estimates.measured)

    def known(cell: Callable[[int], str]) -> Callable[[int], str]:
        return lambda number: cell(number) if number in estimates.measured else UNKNOWN

    def cost(model: BlockModel, unit: str) -> TableColumn:
        prefix, factor = unit_prefix(model.value(first).value)
        cell = known(lambda number: _spread(model.value(number).scaled(1 / factor)))
        return TableColumn(f"{prefix}{unit}/unit", cell)

    def change(model: BlockModel) -> Callable[[int], str]:
        return known(lambda number: _change(model.ratio(number, 0)) if number else "")

    def remark(number: int) -> str:
        setting = study.settings[number]
        beaten = "beaten" if number in estimates.measured else ""
        place = "frontier" if setting in members else pruned.get(setting, "") or beaten
        return "; ".join((place, *flags.get(setting, ()))) if place else ""

    return [
        TableColumn("setting", lambda number: str(study.settings[number]), left=True),
        TableColumn("trials", lambda number: str(usable.count(study.settings[number]))),
        cost(estimates.time, "s"),
        cost(estimates.energy, "J"),
        TableColumn("W", known(lambda number: f"{estimates.power.value(number).value:.4g}")),
        TableColumn("time", change(estimates.time)),
        TableColumn("energy", change(estimates.energy)),
        TableColumn("", remark, left=True),
    ]


def _spread(interval: ConfidenceInterval) -> str:
    """``"0.213 ±2%"``."""
    if not isfinite(interval.high):
        return f"{interval.value:.4g}"
    return f"{interval.value:.4g} ±{(interval.high - interval.low) / 2 / interval.value:.1%}"


def _change(interval: ConfidenceInterval) -> str:
    """``"+3.1% (+1.0 to +5.2)"``."""
    change = f"{interval.value - 1:+.1%}"
    if not isfinite(interval.high):
        return change
    return f"{change} ({100 * (interval.low - 1):+.1f} to {100 * (interval.high - 1):+.1f})"


def _troubles(study: Study) -> Iterator[str]:
    names = {device.id: f"{device.name} ({device.id})" for device in study.devices}
    for trial in study.trials:
        name = f"{trial.setting}, trial {trial.block + 1}"
        if not trial.usable:
            yield f"{name}: {trial.failure or trial.taint}"
        for device in trial.disobeyed:
            yield (
                f"{name}: {DISOBEYED}: {names.get(device, device)} took"
                f" {trial.device_watts[device]:.4g} W, and its enforced limit was"
                f" {trial.limits[device]:.4g} W."
            )
        if trial.unsteady:
            yield f"{name}: {UNSTEADY}: {trial.unsteady}"


def recommendation_lines(study: Study, chosen: Recommendation) -> list[str]:
    """The recommendation in sentences."""
    setting = chosen.setting
    lines = [f"Run at: {setting}"]
    if setting == study.baseline:
        lines.append("This is the baseline: no other measured setting is surely better within the"
                     " constraints.")  # fmt: skip
    else:
        lines.append(
            f"Energy {_change(chosen.energy_ratio)}, time {_change(chosen.time_ratio)} against"
            f" {study.baseline}, with 95 % confidence intervals."
        )
    cost = " and ".join(
        f"{interval.scaled(1 / factor)} {prefix}{unit}"
        for interval, unit in ((chosen.seconds, "s"), (chosen.joules, "J"))
        for prefix, factor in (unit_prefix(interval.value),)
    )
    lines.append(f"A unit of work takes {cost}.")
    if chosen.ties:
        lines.append(f"As good within chance: {'; '.join(map(str, chosen.ties))}.")
    if study.emulated:
        lines.append("The devices are emulated.")
    return lines


def configuration_lines(study: Study, setting: Setting) -> list[str]:
    """The fixed caps of ``setting`` as a fragment of the configuration."""
    lines = [f"# wattspan frontier: {setting}, measured on {study.host}"]
    if setting.clock is not None:
        lines.append(f"# A clock of {setting.clock} MHz cannot be fixed by configuration.")
    if setting.power is None:
        return [*lines, "# The original power limits: no cap is needed."]
    for device in study.devices:
        if device.original_watts is None:
            lines.append(f"# {device.name}: its original limit is unknown")
            continue
        watts = setting.power.milliwatts(round(1000 * device.original_watts)) / 1000
        lines += [
            "",
            "[[caps.fixed]]",
            f'device = "{device.id}"  # {device.name}',
            f"watts = {round(watts)}",
            f'knob = "{_power_knob(device)}"',
        ]
    return lines


def autotune_lines(
    study: Study, setting: Setting, max_slowdown: float, eta: float | None
) -> list[str]:
    """A fragment of the configuration: the tuner searches no lower than ``setting``."""
    lines = [f"# wattspan frontier: {setting}, measured on {study.host}"]
    if not setting.capped:
        return [*lines, "# The original limits are recommended: no tuning is needed."]
    shares, knobs = [], []
    for device in study.devices:
        if setting.power is not None and device.original_watts is not None:
            watts = setting.power.milliwatts(round(1000 * device.original_watts)) / 1000
            shares.append(watts / (device.default_watts or device.original_watts))
            knobs.append(_power_knob(device))
    if setting.power is not None and not shares:
        return [*lines, "# The original limits are unknown, so that there is no floor."]
    if setting.clock is not None:
        knobs.append(Knob.GPU_CLOCK)
        lines.append(
            f"# The tuner finds clocks by itself; {setting.clock} MHz cannot be its floor."
        )
    names = ", ".join(f'"{knob}"' for knob in dict.fromkeys(knobs))
    lines += [
        "",
        "[autotune]",
        'mode = "advise"  # "apply" sets limits of the jobs that are named as [[autotune.job]]',
        f"max_slowdown = {max_slowdown:g}",
        f"knobs = [{names}]",
    ]
    if shares:
        lines.append(
            f"floor = {floor(round(1000 * min(1.0, *shares), 6)) / 1000:g}  # of the default limit:"
            " the study recommends no lower one"
        )
    if eta is not None:
        lines += ['objective = "cost"', f"eta = {eta:g}"]
    return [*lines, *_job_lines(study)]


def _job_lines(study: Study) -> Iterator[str]:
    """The tuning job of a study whose units of work are spans."""
    unit = parse_unit(study.unit)
    if isinstance(unit, UnitSpan):
        yield ""
        yield "[[autotune.job]]"
        yield f"span = {value_text(unit.name)}"
        if unit.attribute:
            yield f"work = {value_text(unit.attribute)}"


def _power_knob(device: MeasuredDevice) -> Knob:
    return Knob.GPU_POWER if device.kind == HwType.GPU else Knob.CPU_POWER


# ---------------------------------------------------------------------------------------- JSON


def study_facts(found: Frontier) -> dict[str, Any]:
    """The study with its estimates and frontier."""
    study, estimates = found.study, found.estimates
    members = set(found.settings) if estimates.measured else set()
    facts: dict[str, Any] = msgspec.to_builtins(study)
    facts["command_digest"] = study.digest
    facts["estimates"] = [
        {
            "setting": str(study.settings[number]),
            "frontier": study.settings[number] in members,
            "seconds": _numbers(estimates.time.value(number)),
            "joules": _numbers(estimates.energy.value(number)),
            "watts": _numbers(estimates.power.value(number)),
        }
        for number in estimates.measured
    ]
    return facts


def recommendation_facts(chosen: Recommendation) -> dict[str, Any]:
    setting = msgspec.to_builtins(chosen.setting)
    figures = ("seconds", "joules", "time_ratio", "energy_ratio")
    return {
        "setting": setting,
        "name": str(chosen.setting),
        **{name: _numbers(getattr(chosen, name)) for name in figures},
        "ties": [str(one) for one in chosen.ties],
    }


def _numbers(interval: ConfidenceInterval) -> dict[str, float | None]:
    """JSON has no infinity."""
    return {
        "value": interval.value,
        "low": interval.low,
        "high": interval.high if isfinite(interval.high) else None,
    }


def trial_rows(study: Study) -> Iterator[tuple[object, ...]]:
    """The trials as a table, with its head."""
    yield ("setting", "block", "started_unix", "seconds", "units", "joules", "watts", "failure",
           "taint", "unsteady", "disobeyed", "elapsed_seconds")  # fmt: skip
    for one in study.trials:
        yield (str(one.setting), one.block, one.started_unix, one.seconds, one.units, one.joules,
               one.watts, one.failure, one.taint, one.unsteady,
               " ".join(one.disobeyed), one.elapsed_seconds)  # fmt: skip
