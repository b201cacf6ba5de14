"""Labels of the series that a fleet of hosts exports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product

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
    "engine": [
        {"engine": engine, "model": model}
        for engine, model in (("chat", "llama"), ("code", "coder"))
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
