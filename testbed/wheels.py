"""This project as a wheel, and environments that contain only the wheel."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from testbed.requirements import ROOT

LOCKED = ROOT / "requirements" / "run.txt"


def build(source: Path, out: Path, *kinds: str) -> Path:
    """Build the distributions of ``kinds`` ("wheel", "sdist"), or both, of a source tree."""
    chosen = [word for kind in kinds for word in ("-t", kind)]
    command = [sys.executable, "-m", "hatchling", "build", *chosen, "-d", str(out)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=180)
    return out


def environment(folder: Path, wheel: Path) -> Path:
    """A clean virtual environment with the wheel and the locked packages it needs; its ``bin``."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install"]
    options = ["--quiet", "--no-deps", "--no-index", "--no-compile", "--no-input"]
    subprocess.run([*pip, *options, str(wheel)], check=True, capture_output=True, timeout=120)
    (site,) = folder.glob("lib/python*/site-packages")
    link_packages(site)
    return folder / "bin"


def link_packages(site: Path) -> None:
    """Give an environment the packages of the lock file from the one that runs the tests.

    Each by itself, so that one which the lock file lacks is missed.
    """
    for name in re.findall(r"^([a-z0-9._-]+)==", LOCKED.read_text(encoding="utf-8"), re.MULTILINE):
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # for another platform or Python
            continue
        tops = {file.parts[0] for file in distribution.files or () if file.parts[0] != ".."}
        for top in tops - {"__pycache__"}:
            _link(site / top, Path(str(distribution.locate_file(top))))


def _link(place: Path, target: Path) -> None:
    """Link ``place`` to it; a namespace that several packages share is a folder of links."""
    shared = target.is_dir() and target.suffix == "" and not (target / "__init__.py").exists()
    if not shared:
        if not place.is_symlink():
            place.symlink_to(target)
        return
    place.mkdir(exist_ok=True)
    for child in target.iterdir():
        if child.name != "__pycache__":
            _link(place / child.name, child)
