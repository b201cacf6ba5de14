"""Write the dashboards and their reference page, or list outdated files.

python -m dashboards [--check]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dashboards import autotuner, fleet, gpus, host, processes, reference, spans
from dashboards.queries import GRAFANA
from wattspan.util.files import PUBLIC_ADDRESS

BOARDS = (fleet, host, processes, gpus, spans, autotuner)
PROMETHEUS = Path(__file__).with_name("prometheus")
ALERTS = (PROMETHEUS / "alerts.yml", PROMETHEUS / "tests" / "alerts.yml")
_RUNBOOK = re.compile(r"(runbook_url: '?)\S*?(?=docs/how-to/alerts\.md#)")


def documents() -> dict[str, dict[str, Any]]:
    """Every dashboard as generated from its source, by file name."""
    built = [board.document() for board in BOARDS]
    return {f"{one['uid'].removeprefix('wattspan-')}.json": one for one in built}


def made(
    folder: Path = GRAFANA, page: Path = reference.PAGE, alerts: Iterable[Path] = ALERTS
) -> dict[Path, str]:
    """Every generated file with its content; the alerts have generated addresses of the runbook."""
    built = documents()
    texts = {folder / name: json.dumps(one, indent=2) + "\n" for name, one in built.items()}
    for path in alerts:
        texts[path] = _RUNBOOK.sub(rf"\1{PUBLIC_ADDRESS}", path.read_text(encoding="utf-8"))
    return {**texts, page: reference.page(built)}


def drift(
    folder: Path = GRAFANA, page: Path = reference.PAGE, alerts: Iterable[Path] = ALERTS
) -> dict[Path, str | None]:
    """Differing files with the generated content; None for a file that must not exist."""
    wanted = made(folder, page, alerts)
    there = {path for path in (*folder.glob("*.json"), *alerts, page) if path.exists()}
    return {
        path: wanted.get(path)
        for path in sorted(wanted.keys() | there)
        if path not in there or path.read_text(encoding="utf-8") != wanted.get(path)
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if any differs")
    check = parser.parse_args().check
    stale = drift()
    for path, text in stale.items():
        if check:
            print(f"{path.name} is not what is made: run `make docs` and commit it")
        elif text is None:
            path.unlink()
            print(f"removed {path.name}")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.name}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
