"""Checks across settings: contradictory settings (faults) and ineffective ones (warnings)."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from wattspan.config.control import AutotuneSettings, CapsSettings, TunedJobSettings
from wattspan.config.footprint import CarbonSettings, CostSettings
from wattspan.model import Knob
from wattspan.model.settings import Table, quoted

SMALL_BUDGET = 0.01
"""Slowdown budget below the noise of most jobs."""

_CURRENCY = re.compile(r"[A-Za-z]{1,12}")


class ConfigFault(NamedTuple):
    """A fault in the value of a dotted key."""

    key: str
    sentence: str


def _bad_value(key: str, cause: str) -> ConfigFault:
    return ConfigFault(key, f"Bad value for {key!r}: {cause}")


def find_faults(tables: Mapping[str, Table]) -> Iterator[ConfigFault]:
    """Yield faults between tables that are each valid by themselves."""
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
                yield from _footprint(where, footprint)


def find_warnings(tables: Mapping[str, Table]) -> Iterator[str]:
    """Yield sentences about valid settings without effect."""
    match tables.get("autotune"):
        case AutotuneSettings() as autotune if autotune.mode != "off":
            yield from _ineffective_tuning(autotune)
            yield from _unapplied_tuning(autotune, tables)
        case AutotuneSettings() as autotune:
            for number, job in enumerate(autotune.job):
                if job.mode:
                    yield (
                        f"The mode of autotune.job[{number}] has no effect while [autotune] mode "
                        'is "off". Set [autotune] mode to "advise" or "apply".'
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
            yield _bad_value(
                key,
                "a budget of 0 allows no trial, because trials take time. "
                'Set a budget such as 0.02, or set [autotune] mode = "off".',
            )


def _knobs(autotune: AutotuneSettings) -> Iterator[ConfigFault]:
    key = "autotune.knobs"
    if not autotune.knobs:
        yield _bad_value(
            key,
            "the list is empty. Name a knob, such as "
            '["gpu_power"], or set [autotune] mode = "off".',
        )
    for position in _duplicate_positions(autotune.knobs):
        yield _bad_value(key, f'the list names "{autotune.knobs[position]}" twice. Remove one.')


def _jobs(jobs: Iterable[TunedJobSettings]) -> Iterator[ConfigFault]:
    """Yield faults of jobs whose spans all match an earlier job."""
    before: list[TunedJobSettings] = []
    for number, job in enumerate(jobs):
        for earlier, other in enumerate(before):
            if other.service in ("", job.service) and other.span in ("", job.span):
                key = f"autotune.job[{number}]"
                if (other.service, other.span) == (job.service, job.span):
                    why = f"autotune.job[{earlier}] is the same job. Remove one of them."
                else:
                    why = (
                        f"the earlier autotune.job[{earlier}] matches all of its spans. "
                        "Write the narrower job first."
                    )
                yield _bad_value(key, why)
                break
        before.append(job)


def _ineffective_tuning(autotune: AutotuneSettings) -> Iterator[str]:
    """Yield warnings of settings that leave the tuner little or nothing to try."""
    if autotune.max_slowdown < SMALL_BUDGET:
        yield (
            f"[autotune] max_slowdown = {autotune.max_slowdown} is within the noise of most jobs: "
            "the tuner can certify few settings, if any."
        )
    if autotune.floor == 1:
        yield (
            "[autotune] floor = 1 leaves no range between a device's default limit and the lowest "
            "cap, so the tuner can try hardly any setting."
        )
    if Knob.GPU_CLOCK in autotune.knobs:
        yield (
            '[autotune] knobs has "gpu_clock": a GPU does not report its locked clocks. The capper '
            "resets the clocks when it releases them, which also removes another program's lock."
        )
    for number, job in enumerate(autotune.job):
        if job.latency and job.kind == "steps":
            yield (
                f'autotune.job[{number}] has a latency, which applies to kind = "requests" only; '
                "it has no effect."
            )


def _unapplied_tuning(autotune: AutotuneSettings, tables: Mapping[str, Table]) -> Iterator[str]:
    """Yield warnings of settings under which the tuner applies or advises nothing."""
    if getattr(tables.get("spans"), "enabled", True) is False:
        yield (
            "[autotune] measures the speed of a job by its spans, and [spans] enabled is false: "
            "the tuner will decline every job."
        )
    applied = any((job.mode or autotune.mode) == "apply" for job in autotune.job)
    if autotune.mode == "apply" and not applied and not autotune.apply_found:
        yield (
            '[autotune] mode = "apply" applies to no job: name one as [[autotune.job]], or set '
            "apply_found = true. Until then the tuner only advises."
        )


# ------------------------------------------------------------------------------------- limits


def _fixed(caps: CapsSettings) -> Iterator[ConfigFault]:
    for number, cap in enumerate(caps.fixed):
        key = f"caps.fixed[{number}]"
        if cap.knob is Knob.GPU_CLOCK:
            yield _bad_value(
                f"{key}.knob",
                'a clock limit is not in watts. Name "gpu_power" or "cpu_power".',
            )
        if not cap.device:
            yield _bad_value(f"{key}.device", '"" names no device.')
    for number in _duplicate_positions([(cap.device, cap.knob) for cap in caps.fixed]):
        device = quoted(caps.fixed[number].device)
        yield _bad_value(
            f"caps.fixed[{number}]", f"{device} already has a cap of this knob. Remove one."
        )


def _ceiling(caps: CapsSettings) -> Iterator[ConfigFault]:
    if caps.budget_watts and caps.budget_watts <= caps.reserve_watts:
        yield _bad_value(
            "caps.budget_watts",
            f"reserve_watts = {caps.reserve_watts} leaves nothing of "
            f"{caps.budget_watts} W for devices. Raise the budget or lower the reserve.",
        )
    if caps.budget_file and not caps.budget_file.startswith("/"):
        yield _relative_path("caps.budget_file", caps.budget_file)
    for number in _duplicate_positions([priority.device for priority in caps.priority]):
        device = quoted(caps.priority[number].device)
        yield _bad_value(
            f"caps.priority[{number}]", f"{device} already has a priority. Remove one."
        )


def _ineffective_caps(caps: CapsSettings) -> Iterator[str]:
    """Yield warnings of caps settings without effect."""
    if not caps.budget_watts and not caps.budget_file:
        idle = "reserve_watts" if caps.reserve_watts else "[[caps.priority]]"
        if caps.reserve_watts or caps.priority:
            yield (
                f"{idle} has no effect without a power budget. Set [caps] budget_watts or "
                "budget_file."
            )
    for number, cap in enumerate(caps.fixed):
        if cap.watts < caps.floor_watts:
            yield (
                f"caps.fixed[{number}] asks for {cap.watts} W, below [caps] floor_watts = "
                f"{caps.floor_watts}, which applies."
            )


def _duplicate_positions(values: Sequence[Hashable]) -> Iterator[int]:
    """Yield the positions of values that also occur earlier."""
    return (position for position, value in enumerate(values) if value in values[:position])


def _relative_path(key: str, path: str) -> ConfigFault:
    return _bad_value(key, f"{quoted(path)} is a relative path. Write an absolute path.")


# --------------------------------------------------------------------------- cost and carbon


def _footprint(where: str, table: CostSettings | CarbonSettings) -> Iterator[ConfigFault]:
    rates = table.rate_keys
    for key in rates[1:]:
        yield _bad_value(
            f"{where}.{key}",
            f"{where}.{rates[0]} also sets the rate of a kilowatt-hour. Remove one of them.",
        )
    if isinstance(table, CostSettings) and not _CURRENCY.fullmatch(table.currency):
        yield _bad_value(
            "cost.currency",
            f'{quoted(table.currency)} is not a currency; write 1 to 12 letters, such as "EUR".',
        )
    for key, other in (("url", "query"), ("query", "url")):
        if getattr(table, key) and not getattr(table, other):
            yield _bad_value(f"{where}.{key}", f"{where}.{other} is empty. Set {where}.{other}.")
    if (table.url or table.file) and table.refresh > table.max_age:
        yield _bad_value(
            f"{where}.refresh",
            f"the interval {table.refresh} is longer than the validity of an answer,"
            f" {table.max_age}. Set {where}.max_age to more than the interval.",
        )
    if table.url and (cause := _url_fault(table.url)):
        yield _bad_value(f"{where}.url", f"{cause}.")
    for key in ("schedule", "file"):
        path = getattr(table, key)
        if path and not path.startswith("/"):
            yield _relative_path(f"{where}.{key}", path)


def _url_fault(url: str) -> str:
    """Return the fault of the server address ``url``; "" if it is valid."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"{quoted(url)} is not an address: {error}"
    if "@" in parts.netloc:  # the message omits the address, which may hold a password
        return "it contains a user name; wattspan sends no user names and passwords"
    plain = url.isascii() and url.isprintable() and " " not in url
    if parts.scheme not in ("http", "https") or not parts.hostname or not plain or port == 0:
        return f'{quoted(url)} is not an address such as "http://127.0.0.1:9090"'
    if parts.query or parts.fragment:
        return f"{quoted(url)} has a query or a fragment; write the query into `query`"
    return ""
