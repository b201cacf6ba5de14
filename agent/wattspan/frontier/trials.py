"""Trials of settings, and the versioned file that keeps them.

The file is replaced as a whole after every trial, so an interrupted study continues from its last
complete trial.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from wattspan.frontier.settings import Setting
from wattspan.ports import WattspanError
from wattspan.util.files import UnsuitableFileError, read_regular, replace_file

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
