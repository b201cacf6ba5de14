"""A day of a fleet as blocks of Prometheus: output of its recording rules, one host's scrapes."""

from __future__ import annotations

import random
import re
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from testbed.recorded_labels import BLOCK, JOB, RULES, SCRAPES, Labels, host

# -------------------------------------------------------------------------------- as it is written


@dataclass(frozen=True)
class Series:
    """One series: how it is written, how often there is a sample, and whether it only grows."""

    name: str
    step: int
    grows: bool = False


def written(name: str, labels: Labels) -> str:
    inside = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return f"{name}{{{inside}}}"


def scraped(page: str) -> Iterator[Series]:
    """The series of one agent's scrape, as Prometheus keeps those of the first host."""
    counters = set(re.findall(r"^# TYPE (\S+) counter$", page, re.MULTILINE))
    for line in page.splitlines():
        if line and not line.startswith("#"):
            found = re.match(r"([a-zA-Z_:]+)(?:\{(.*)\})? \S+$", line)
            assert found, line
            own = re.sub(r'(^|,)job="', r'\1exported_job="', found[2] or "")
            inside = f'{own},job="{JOB}",instance="{host(0)}"'.lstrip(",")
            yield Series(f"{found[1]}{{{inside}}}", SCRAPES, found[1] in counters)


def block(folder: Path, promtool: str, series: Iterable[Series], start: int, since: int) -> int:
    """Add the block that begins at ``start`` to a database that begins at ``since``; its samples.

    Values wander as powers do, with all the digits of a quotient: they are equally expensive to
    store.
    """
    text, count = folder / "block.txt", 0
    wander = _walks(start)
    stamps = {
        step: [f" {at}\n" for at in range(start, start + BLOCK, step)] for step in (RULES, SCRAPES)
    }
    with text.open("w", encoding="ascii") as out:
        for index, one in enumerate(series):
            ends = stamps[one.step]
            if one.grows:
                begun, slope = start - since, 1 + index % 97
                values = [f"{(begun + n * one.step) * slope:.1f}" for n in range(len(ends))]
            else:
                offset = index * 37 % 4096
                values = wander[offset : offset + len(ends)]
            out.writelines([f"{one.name} {v}{at}" for v, at in zip(values, ends, strict=True)])
            count += len(ends)
        out.write("# EOF\n")
    subprocess.run(
        [promtool, "tsdb", "create-blocks-from", "openmetrics", "-q", text, folder / "data"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    text.unlink()
    return count


def _walks(seed: int) -> list[str]:
    chance, level, values = random.Random(seed), 400.0, []
    for _ in range(8192):
        level = min(max(level + chance.gauss(0.0, 8.0), 100.0), 900.0)
        values.append(f"{level:.9f}")
    return values
