"""How the service stands: its files against those of this wattspan, its units as systemd says."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wattspan.installation.looking import look
from wattspan.installation.marking import Whose, whose
from wattspan.installation.shipped import Shipped

_SAID = {
    Whose.NOBODY: "not installed",
    Whose.OURS: "as it should be",
    Whose.OUTDATED: "of an earlier installation; `wattspan service install` brings it up to date",
    Whose.EDITED: "changed by somebody since it was written",
    Whose.FOREIGN: "somebody else's",
}
_UNSHADOW = (
    "To have the package's files in force: `wattspan service uninstall`, remove what that leaves "
    "of these, `systemctl daemon-reload`, then `systemctl enable --now wattspan.service "
    "wattspan-capper.socket`."
)


@dataclass(frozen=True, slots=True)
class Standing:
    """``units`` are systemd's words for each: active state, enabled state; empty where unasked.

    ``shadowing`` are files of an earlier installation that are read in place of a package's;
    ``administrators`` are the administrator's own in /etc, which are read in place of either.
    """

    program: str
    files: dict[str, Whose]
    units: dict[str, tuple[str, str]]
    packaged: tuple[str, ...]
    shadowing: tuple[str, ...] = ()
    administrators: tuple[str, ...] = ()

    @property
    def well(self) -> bool:
        """Whether the services are there as they should be, of this installation or a package."""
        if self.packaged:
            return not self.shadowing
        return all(state is Whose.OURS for state in self.files.values())

    def facts(self) -> dict[str, Any]:
        return {
            "program": self.program,
            "package": list(self.packaged),
            "shadowing": list(self.shadowing),
            "administrators": list(self.administrators),
            "files": {path: state.value for path, state in self.files.items()},
            "units": {
                name: {"active": active, "enabled": enabled}
                for name, (active, enabled) in self.units.items()
            },
        }

    def lines(self) -> Iterator[str]:
        if self.packaged:
            yield f"Installed as a package: {', '.join(self.packaged)}"
        for path, state in self.files.items():
            if not self.packaged:
                yield f"{path}: {_SAID[state]}"
        for path in self.administrators:
            yield f"{path}: the administrator's own, which takes precedence"
        for path in self.shadowing:
            yield f"{path}: shadows the package, as it comes before the package's file of this name"
        if self.shadowing:
            yield _UNSHADOW
        for name, (active, enabled) in self.units.items():
            yield f"{name}: {active}, {enabled}"


def standing(root: Path, files: Sequence[Shipped], program: str) -> Standing:
    found = look(root, files)
    names = [file.name for file in files if file.unit]
    installed = tuple(p for p, content in found.files.items() if content is not None)
    return Standing(
        program,
        {file.path: whose(found.files[file.path], file.text) for file in files},
        {name: (_asked("is-active", name), _asked("is-enabled", name)) for name in names}
        if found.booted
        else {},
        found.packaged,
        installed if found.packaged else (),
        tuple(p for p in found.overriding if p not in found.masked),
    )


def _asked(verb: str, unit: str) -> str:
    try:
        done = subprocess.run(  # noqa: S603 - our own words, no shell
            ["systemctl", verb, unit],  # noqa: S607 - the host's own
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"
