"""Stored runs are reused while their inputs are unchanged.

Ours are kept by a digest of the tuner's core and of the bench, the others by one of the bench
alone; so scores of two versions of anything never meet in one table. A bench that was interrupted
goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "tuner-bench"

_HERE = Path(__file__).parent
_BENCH = ("curves", "plants", "job", "truth", "runner", "baselines", "calibration")
_CORE = ROOT / "agent" / "wattspan" / "tuning" / "decisions"


class Kept:
    """Facts by key, in one file of lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.facts: dict[str, Any] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    key, facts = json.loads(line)
                except ValueError:  # the end of an interrupted run
                    continue
                self.facts[key] = facts

    def put(self, key: str, facts: Any) -> None:
        """Keep one, at once."""
        self.facts[key] = facts
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([key, facts]) + "\n")


def core_digest() -> str:
    """Of the core and the benchmark together."""
    return _digest([*_core_files(), *_bench_files()])


def bench_digest() -> str:
    """Of the benchmark alone."""
    return _digest(_bench_files())


def _core_files() -> list[Path]:
    return sorted(_CORE.glob("*.py"))


def _bench_files() -> list[Path]:
    return [*(_HERE / f"{name}.py" for name in _BENCH), *sorted((_HERE / "data").glob("*.csv"))]


def _digest(files: Iterable[Path]) -> str:
    found = hashlib.sha256()
    for path in files:
        found.update(path.name.encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:12]
