"""Every benchmark, one after the other, or those that are named: `make bench`.

    .venv/bin/python -m benchmarks [overhead startup ...] [--write]

With ``--write`` a script's output also replaces its section in that of ``PAGES`` which has one. A
result in ``tables.md`` is too long for its page, which copies some of its rows by hand.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "docs/benchmarks.md",
    ROOT / "docs/accuracy.md",
    ROOT / "docs/autotune.md",
    ROOT / "docs/pipelines-and-fleets.md",
    ROOT / "benchmarks/tables.md",
]


def scripts() -> list[str]:
    """The runnable modules of this package."""
    found = sorted(Path(__file__).parent.glob("[a-z]*.py"))
    return [path.stem for path in found if '__name__ == "__main__"' in path.read_text()]


def page_of(script: str) -> Path:
    """The page that has a place for the results of ``script``; ValueError if none has."""
    for page in PAGES:
        if f"<!-- begin {script} -->" in page.read_text(encoding="utf-8"):
            return page
    raise ValueError(f"no page has a place for {script}: <!-- begin {script} --> ...")


def placed(page: str, script: str, output: str) -> str:
    """``page`` with ``output`` between the marks of ``script``; ValueError if it has none."""
    begin, end = f"<!-- begin {script} -->", f"<!-- end {script} -->"
    if begin not in page or end not in page:
        raise ValueError(f"the page has no place for {script}: {begin} ... {end}")
    body = f"{begin}\n\n{output.strip()}\n\n{end}"
    return re.sub(f"{begin}.*?{end}", lambda _: body, page, flags=re.DOTALL)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("scripts", nargs="*", default=scripts())
    options.add_argument("--write", action="store_true", help="put the results into the page")
    chosen = options.parse_args()
    failed = []
    for script in chosen.scripts:
        print(f"\n## {script}\n", flush=True)
        run = subprocess.run(
            [sys.executable, "-m", f"benchmarks.{script}"],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT)},  # some simulate with its hosts
        )
        print(run.stdout, flush=True)
        if run.returncode:
            failed.append(script)
        elif chosen.write:
            page = page_of(script)
            text = placed(page.read_text(encoding="utf-8"), script, run.stdout)
            page.write_text(text, encoding="utf-8")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
