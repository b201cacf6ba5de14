"""Settings of a command that are compared: power limits, GPU clocks and parameters of its own."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from itertools import product

import msgspec

from wattspan.ports import ConfigError

MAX_SETTINGS = 500

_RANGE = re.compile(r"(?P<first>.+?)\.\.(?P<last>.+?)/(?P<count>\d+)")
_POWER = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>%|W)", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z_]\w*")
_PLACE = re.compile(r"(?P<literal>\{\{[A-Za-z_]\w*\}\})|\{(?P<name>[A-Za-z_]\w*)\}")


class PowerLimit(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """A power limit of each device: in watts, or as a fraction of its original limit."""

    value: float
    relative: bool = True

    def __str__(self) -> str:
        return f"{self.value * 100:.4g} %" if self.relative else f"{self.value:.4g} W"

    def milliwatts(self, original: int) -> int:
        """The limit of a device with this ``original`` limit in milliwatts."""
        return round(original * self.value if self.relative else 1000 * self.value)


class Setting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One configuration of the command and of the devices.

    ``power`` None is the original limit, ``clock`` None an unlocked clock; ``clock`` is in MHz.
    """

    power: PowerLimit | None = None
    clock: int | None = None
    parameters: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        parts = [] if self.power is None else [str(self.power)]
        if self.clock is not None:
            parts.append(f"{self.clock} MHz")
        parts += [f"{name}={value}" for name, value in self.parameters]
        return ", ".join(parts) or "original limits"

    @property
    def capped(self) -> bool:
        """True if devices must be set for it."""
        return self.power is not None or self.clock is not None


def parse_powers(text: str) -> list[PowerLimit | None]:
    """``100%..60%/5``, ``300W..200W/3`` or ``100%,80%``; 100 % is the original limit, None."""
    found: list[PowerLimit | None] = []
    for part in _parts(text, "--power"):
        if match := _RANGE.fullmatch(part):
            first, last = _power(match["first"]), _power(match["last"])
            count = int(match["count"])
            if first.relative is not last.relative:
                raise ConfigError(f"--power {part}: give both ends in % or both in W.")
            if not 2 <= count <= MAX_SETTINGS:
                raise ConfigError(f"--power {part}: give 2 to {MAX_SETTINGS} limits.")
            step = (last.value - first.value) / (count - 1)
            limits = [PowerLimit(round(first.value + step * n, 6), first.relative)
                      for n in range(count)]  # fmt: skip
        else:
            limits = [_power(part)]
        found += [None if limit == PowerLimit(1.0) else limit for limit in limits]
    return list(dict.fromkeys(found))


def parse_clocks(text: str) -> list[int | None]:
    """``1980,1500`` in MHz."""
    clocks: list[int | None] = []
    for part in _parts(text, "--clock"):
        if not part.isdecimal() or not int(part):
            raise ConfigError(f"--clock {part}: give whole MHz with commas, such as 1980,1500.")
        clocks.append(int(part))
    return list(dict.fromkeys(clocks))


def parse_parameter(text: str) -> tuple[str, list[str]]:
    """``batch=8,16,32``; the first value is the baseline's."""
    name, equals, values = text.partition("=")
    if not equals or not _NAME.fullmatch(name):
        raise ConfigError(f"--param {text}: write NAME=VALUE,VALUE, such as batch=8,16,32.")
    return name, list(dict.fromkeys(_parts(values, f"--param {name}")))


def grid(
    powers: Sequence[PowerLimit | None],
    clocks: Sequence[int | None],
    parameters: Mapping[str, Sequence[str]],
) -> list[Setting]:
    """Every combination, the baseline first.

    The baseline has the original power limit, an unlocked clock and the first value of each
    parameter. Limits and clocks follow in descending order.
    """
    limits = [None, *sorted((one for one in powers if one is not None), reverse=True)]
    speeds = [None, *sorted((one for one in clocks if one is not None), reverse=True)]
    choices = [[(name, value) for value in values] for name, values in parameters.items()]
    found = [
        Setting(power, clock, chosen)
        for chosen in product(*choices)
        for clock in speeds
        for power in limits
    ]
    if len(found) > MAX_SETTINGS:
        raise ConfigError(f"{len(found)} settings are too many: give at most {MAX_SETTINGS}.")
    if len(found) < 2:
        raise ConfigError("There is nothing to compare: give --power, --clock or --param.")
    return found


def places(settings: Sequence[Setting]) -> list[tuple[float, ...]]:
    """The place of each setting on every knob that varies: from 0, its first value, to 1."""
    names = dict.fromkeys(name for one in settings for name, _ in one.parameters)
    knobs: list[Sequence[Hashable]] = [
        [one.power for one in settings],
        [one.clock for one in settings],
        *([dict(one.parameters).get(name) for one in settings] for name in names),
    ]
    columns: list[list[float]] = []
    for values in knobs:
        ranks = {value: rank for rank, value in enumerate(dict.fromkeys(values))}
        if len(ranks) > 1:
            columns.append([ranks[value] / (len(ranks) - 1) for value in values])
    return list(zip(*columns, strict=True)) if columns else [()] * len(settings)


def substituted(command: Sequence[str], parameters: Mapping[str, str]) -> list[str]:
    """The command with ``{name}`` replaced; ``{{name}}`` stands for the text ``{name}``.

    ConfigError for an unknown name, and for a parameter that the command does not use.
    """
    used: set[str] = set()

    def value(match: re.Match[str]) -> str:
        if match["literal"] is not None:
            return match["literal"][1:-1]
        name = match["name"]
        if name not in parameters:
            raise ConfigError(
                f"The command has {{{name}}}, and no --param {name}=... gives its values. "
                f"Add it, or write {{{{{name}}}}} for the text itself."
            )
        used.add(name)
        return parameters[name]

    words = [_PLACE.sub(value, word) for word in command]
    if unused := parameters.keys() - used:
        name = min(unused)
        raise ConfigError(f"--param {name} has no effect: the command does not have {{{name}}}.")
    return words


def _parts(text: str, option: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ConfigError(f"{option} {text!r}: a value is missing.")
    return parts


def _power(text: str) -> PowerLimit:
    match = _POWER.fullmatch(text.strip())
    if match is None or not float(match["number"]):
        raise ConfigError(f"--power {text}: write a limit such as 80% or 250W.")
    number = float(match["number"])
    if match["unit"] == "%":
        if number > 100:
            raise ConfigError(f"--power {text}: a limit is at most 100% of the original one.")
        return PowerLimit(number / 100)
    return PowerLimit(number, relative=False)
