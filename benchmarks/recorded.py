"""A day of a fleet as blocks of Prometheus: output of its recording rules, one host's scrapes."""

from __future__ import annotations

import random
import re
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

BLOCK = 2 * 3600  # seconds: length of one Prometheus block
RULES, SCRAPES = 30, 15  # seconds between two samples
JOB = "wattspan"
OWN = 4  # containers on each host

Labels = dict[str, str]

DIMENSIONS: dict[str, list[Labels]] = {
    "hw_type": [{"hw_type": kind} for kind in ("cpu", "memory", "gpu")],
    "hw_id": [
        {"hw_id": f"{kind}:{n}", "hw_type": kind, "hw_name": f"{kind} {n}"}
        for kind, count in (("cpu", 2), ("memory", 2), ("gpu", 8))
        for n in range(count)
    ],
    "span_name": [
        {"service_name": service, "span_name": span}
        for service in ("trainer", "server")
        for span in ("step", "chat")
    ],
    "reason": [
        {"reason": reason}
        for reason in ("reset", "suspend", "lost", "missed", "implausible", "absent")
    ],
    "currency": [{"currency": "EUR"}],
}
"""Values of each label on every host."""


def host(n: int) -> str:
    return f"node{n:04d}.example:9949"


def groups(owners: Iterable[int]) -> list[Labels]:
    """Units and users have the same names on every host; containers are each host's own."""
    shared = [("unit", f"app-{i}.service") for i in range(8)]
    shared += [("user", f"user{i}") for i in range(4)]
    own = [("container", f"{owner:04d}c{i:08x}") for owner in owners for i in range(OWN)]
    return [{"group_kind": kind, "group": name} for kind, name in (*shared, *own)]


def labels_of(name: str, hosts: int) -> Iterator[Labels]:
    """The labels of every series that a recording rule leaves, by its name."""
    level = name.partition(":")[0]
    parts = [level.partition("_")[2]]
    parts += [word for word in ("currency", "reason") if _has(name, word)]
    if level.startswith("fleet"):
        most = name.rpartition(":top")[2]  # so many of each kind, at any time
        owners = range(min(hosts, int(most) // OWN)) if most.isdigit() else range(hosts)
        for labels in _parts(parts, owners):
            yield {"job": JOB, **labels}
        return
    for n in range(hosts):
        for labels in _parts(parts, (n,)):
            yield {"job": JOB, "instance": host(n), **labels}


def _has(name: str, word: str) -> bool:
    return {"currency": "_cost_" in name or "_price_" in name, "reason": "_gap_" in name}[word]


def _parts(parts: list[str], owners: Iterable[int]) -> Iterator[Labels]:
    known = {"type": "hw_type", "device": "hw_id", "span": "span_name", "": ""}
    sets = []
    for part in parts:
        if part == "group":
            sets.append(groups(owners))
        elif known.get(part, part):
            sets.append(DIMENSIONS[known.get(part, part)])
    for chosen in product(*sets):
        yield {key: value for labels in chosen for key, value in labels.items()}


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
