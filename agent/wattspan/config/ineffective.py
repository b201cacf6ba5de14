"""Settings that have no effect, whatever host they are for. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from wattspan.config.settings import Config
from wattspan.config.tuning_settings import AutotuneSettings, CapsSettings
from wattspan.model import Knob
from wattspan.model.settings import quoted

_ZONE = re.compile(r"(rapl:)?package-\d+(-die-\d+)?|intel-rapl:[0-9a-f]+")
_ADDRESS = r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"
_BOARD = re.compile(rf"\d+|amd:\d+|(gpu:)?(GPU-.*|{_ADDRESS})", re.IGNORECASE)


def ineffective_settings(config: Config) -> Iterator[str]:
    """A sentence for each setting that matches nothing on any host."""
    yield from _caps(config)
    yield from _jobs(config.autotune)


def _caps(config: Config) -> Iterator[str]:
    caps = config.caps
    for one in caps.fixed:
        if one.knob is Knob.CPU_POWER and _BOARD.fullmatch(one.device):
            yield (
                f'[[caps.fixed]] device = {quoted(one.device)} with knob = "cpu_power" matches'
                ' nothing: CPU packages are zones, as "intel-rapl:0" or "package-0".'
            )
        if one.knob is Knob.GPU_POWER and _ZONE.fullmatch(one.device):
            yield (
                f"[[caps.fixed]] device = {quoted(one.device)} matches no GPU: write"
                ' knob = "cpu_power" for a zone.'
            )
    if caps.priority and not _has_budget(caps) and not config.fleet.is_enabled:
        yield (
            "[[caps.priority]] has no effect without a budget: set [caps] budget_watts, budget_file"
            " or ceiling_users, or remove it."
        )


def _has_budget(caps: CapsSettings) -> bool:
    return bool(caps.budget_watts or caps.budget_file or caps.ceiling_users)


def _jobs(tuned: AutotuneSettings) -> Iterator[str]:
    if tuned.mode == "off" and (tuned.job or tuned.gpus):
        named = "[[autotune.job]]" if tuned.job else "[autotune] gpus"
        yield f'{named} has no effect with [autotune] mode = "off": set "advise" or "apply".'
