"""Grafana's own components, built into the page that draws the dashboards.

``python -m testbed.grafana`` installs them into ``.tools/grafana`` and builds the page there
(``make test-all`` does). Both are cached between runs and rebuilt when their sources change.
"""

from __future__ import annotations

import shutil
import subprocess
import zlib
from collections.abc import Iterable
from pathlib import Path

from testbed.requirements import GRAFANA, ROOT, find_program

DRAWING = ROOT / "testbed" / "drawing"
PAGE = GRAFANA / "dist"

_LOCKS = ("package.json", "package-lock.json", ".npmrc")
_SOURCES = ("index.html", "vite.config.js")
_STAMP = GRAFANA / "installed.txt"  # there only when all else is


def install() -> None:
    """Install the packages and build the page, as far as they are not there as they should be."""
    npm, node = find_program("npm"), find_program("node")
    if npm is None or node is None:
        raise FileNotFoundError("no node and npm")
    locked = _fingerprint(DRAWING / name for name in _LOCKS)
    sources = [DRAWING / name for name in _SOURCES] + sorted((DRAWING / "src").rglob("*.js*"))
    wanted = f"{locked} {_fingerprint(sources)}"
    have = _STAMP.read_text() if _STAMP.exists() else ""
    if have == wanted:
        return
    _STAMP.unlink(missing_ok=True)  # half a page would make tests fail rather than skip
    packages = GRAFANA / "packages.txt"  # which packages are there, complete
    if not packages.exists() or packages.read_text() != locked:
        shutil.rmtree(GRAFANA, ignore_errors=True)
        GRAFANA.mkdir(parents=True)
        for name in _LOCKS:
            shutil.copy(DRAWING / name, GRAFANA)
        _run([npm, "ci", "--silent", "--ignore-scripts", "--no-audit", "--no-fund"])
        packages.write_text(locked)
    shutil.rmtree(GRAFANA / "src", ignore_errors=True)
    shutil.copytree(DRAWING / "src", GRAFANA / "src")
    for name in _SOURCES:
        shutil.copy(DRAWING / name, GRAFANA)
    _run([node, "node_modules/vite/bin/vite.js", "build"])
    _STAMP.write_text(wanted)


def _fingerprint(files: Iterable[Path]) -> str:
    total = zlib.crc32(str(ROOT).encode())
    for file in files:
        total = zlib.crc32(file.name.encode() + file.read_bytes(), total)
    return f"{total:08x}"


def _run(command: list[str]) -> None:
    subprocess.run(command, cwd=GRAFANA, check=True)


def main() -> None:
    try:
        install()
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"No components of Grafana, tests marked needs_grafana will be skipped: {error}")


if __name__ == "__main__":
    main()
