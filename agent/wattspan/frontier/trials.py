"""Settings of a command, their trials, and the versioned file that keeps them.

The file is replaced as a whole after every trial, so an interrupted study continues from its last
complete trial.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Hashable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Final

import msgspec

from wattspan.ports import ConfigError, WattspanError
from wattspan.util.files import UnsuitableFileError, read_regular, replace_file

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


# ------------------------------------------------------------------------------------------- trials


VERSION: Final = 1
MAX_FILE_BYTES: Final = 64 << 20

MAX_EXCESS: Final = 0.05
"""Relative excess of the mean power over a limit that may be an error of the counters."""


class StudyFileError(WattspanError):
    """A file of trials cannot be read, written or continued."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the command at one setting: its steady window, without the warm-up.

    ``block`` is the number of the repetition. ``limits`` are the enforced power limits in watts by
    device during the window, ``watts`` the mean power of all measured devices together and
    ``device_watts`` that of each. A trial with a ``failure`` has no figures; one with a ``taint``
    has figures that are not used. ``unsteady`` says in a sentence how the speed changed inside the
    window; such figures are used. ``elapsed_seconds`` is the time of the whole trial with its
    start, warm-up and end; 0 in files of older releases.
    """

    setting: Setting
    block: int
    started_unix: float
    seconds: float = 0.0
    units: float = 0.0
    joules: float = 0.0
    watts: float = 0.0
    limits: dict[str, float] = {}
    temperatures: dict[str, float] = {}
    failure: str = ""
    taint: str = ""
    device_watts: dict[str, float] = {}
    unsteady: str = ""
    elapsed_seconds: float = 0.0

    @property
    def usable(self) -> bool:
        return not self.failure and not self.taint

    @property
    def unit_seconds(self) -> float:
        """Seconds per unit of work."""
        return self.seconds / self.units

    @property
    def unit_joules(self) -> float:
        """Joules per unit of work."""
        return self.joules / self.units

    @property
    def disobeyed(self) -> list[str]:
        """The devices with a mean power above their enforced limit, beyond errors of counters."""
        return [
            device
            for device, limit in self.limits.items()
            if self.device_watts.get(device, 0.0) > (1 + MAX_EXCESS) * limit
        ]


class MeasuredDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device whose energy is counted.

    ``original_watts`` is its power limit before the study, ``default_watts`` that of its maker.
    """

    id: str
    name: str
    kind: str
    provenance: str
    original_watts: float | None = None
    default_watts: float | None = None


class Study(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is known about one command: its settings and their trials.

    ``unit`` is the unit of work as it was given, such as ``stdout:step``. The first of the
    ``settings`` is the baseline. ``pruned`` has the reason for each setting that is not measured
    further.
    """

    version: int = VERSION
    created_unix: float
    host: str
    driver: str = ""
    emulated: bool = False
    command: list[str]
    unit: str
    devices: list[MeasuredDevice]
    settings: list[Setting]
    repeat: int
    window_seconds: float
    warm_up_seconds: float
    trials: list[Trial] = []
    pruned: list[tuple[Setting, str]] = []

    @property
    def baseline(self) -> Setting:
        return self.settings[0]

    @property
    def digest(self) -> str:
        """Identifies the command, its unit and its settings."""
        settings = msgspec.to_builtins(self.settings)
        identity = msgspec.json.encode([self.command, self.unit, settings])
        return hashlib.sha256(identity).hexdigest()[:16]

    def usable(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.usable]

    def continued(self, newer: Study) -> Study:
        """``newer`` with the trials of this study; StudyFileError if they cannot be compared."""
        differing = [
            what
            for what, mine, others in (
                ("command, unit or settings", self.digest, newer.digest),
                ("host", self.host, newer.host),
                ("devices", _ids(self.devices), _ids(newer.devices)),
                ("driver", self.driver, newer.driver),
                ("emulation", self.emulated, newer.emulated),
                ("window", self.window_seconds, newer.window_seconds),
            )
            if mine != others
        ]
        if differing:
            raise StudyFileError(
                f"The study cannot be continued: it has another {' and another '.join(differing)}."
                " Begin a new one in another file."
            )
        return msgspec.structs.replace(
            newer, created_unix=self.created_unix, trials=self.trials, pruned=self.pruned
        )


def _ids(devices: Sequence[MeasuredDevice]) -> list[str]:
    return sorted(device.id for device in devices)


class StudyFile:
    """Keeps one study in one file. Belongs to one thread."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Study:
        """The study; StudyFileError."""
        try:
            content = read_regular(self.path, MAX_FILE_BYTES).content
            study = msgspec.json.decode(content, type=Study)
        except UnsuitableFileError as error:
            raise self._unreadable(f"{error.strerror}") from None
        except OSError as error:
            raise self._unreadable((error.strerror or str(error)).lower()) from None
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise self._unreadable(f"it is no study of `wattspan frontier` ({error})") from None
        if study.version != VERSION:
            raise self._unreadable(
                f"it has version {study.version} and this release reads version {VERSION}"
            )
        if not study.settings:
            raise self._unreadable("it has no settings")
        return study

    def write(self, study: Study) -> None:
        """Replace the file; StudyFileError."""
        content = msgspec.json.format(msgspec.json.encode(study), indent=1) + b"\n"
        draft = self.path.with_name(f".{self.path.name}.draft")
        try:
            replace_file(self.path, content, draft)
        except OSError as error:
            cause = (error.strerror or str(error)).lower()
            raise StudyFileError(
                f"Cannot write {self.path}: {cause}. Name a file in a directory that can be"
                " written."
            ) from None

    def _unreadable(self, cause: str) -> StudyFileError:
        return StudyFileError(
            f"Cannot read {self.path}: {cause}. Name the file that `wattspan frontier run` wrote."
        )
