"""One look at the agent from outside: by the kernel's account of it, and by its own metrics."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from testbed.process_costs import cpu_seconds, family
from testbed.soak.judge import Bound

MB = 1e6


@dataclass(frozen=True, slots=True)
class Quantity:
    """Something that must not grow. Memory and disk are in megabytes."""

    key: str
    name: str
    bound: Bound


MEMORY = Bound(hourly=0.25, noise=4.0)
"""Caches that the clock fills, such as the page's hour, take more than ten minutes to be full."""
ENDLESS = Bound(hourly=math.inf, noise=math.inf)
COUNT = Bound(hourly=1.0, noise=1.5)

QUANTITIES = (
    Quantity("rss", "resident memory, MB", MEMORY),
    Quantity("pss", "proportional memory, MB", MEMORY),
    Quantity("anonymous", "anonymous memory, MB", MEMORY),
    Quantity("capper_rss", "capper's resident memory, MB", MEMORY),
    Quantity("descriptors", "descriptors", COUNT),
    Quantity("sockets", "of them sockets", COUNT),
    Quantity("threads", "threads", COUNT),
    Quantity("shm_files", "names in /dev/shm", COUNT),
    Quantity("state_mb", "state directory, MB", Bound(hourly=1.0, noise=2.0)),
    Quantity("state_files", "files in it", COUNT),
    Quantity("series", "series served", Bound(hourly=50.0, noise=100.0)),
    Quantity("processes", "processes followed", Bound(hourly=5.0, noise=10.0)),
    Quantity("open_spans", "spans open", Bound(hourly=5.0, noise=10.0)),
    Quantity("announcers", "applications on the side channel", COUNT),
    Quantity("forward_mb", "queue to the collector, MB", Bound(hourly=0.1, noise=0.5)),
    Quantity("cpu", "CPU, % of one core (not judged: other programs use the machine too)", ENDLESS),
)

_GAUGES = {
    "processes": "wattspan_agent_processes",
    "open_spans": "wattspan_spans_open",
    "announcers": "wattspan_spans_announcers",
    "forward_mb": "wattspan_spans_forward_queue_bytes",
}


def memory(pid: int) -> dict[str, float]:
    """Resident, proportional and anonymous megabytes of a process."""
    told = Path(f"/proc/{pid}/smaps_rollup").read_text()
    lines = re.findall(r"^(\w+): +(\d+) kB", told, re.MULTILINE)
    found = {key: int(kilobytes) * 1024 / MB for key, kilobytes in lines}
    return {"rss": found["Rss"], "pss": found["Pss"], "anonymous": found["Anonymous"]}


def descriptors(pid: int) -> dict[str, float]:
    links = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            links.append(str(entry.readlink()))
    sockets = sum(link.startswith("socket:") for link in links)
    return {"descriptors": len(links), "sockets": sockets}


def files(directory: Path) -> dict[str, float]:
    """Size of the state directory."""
    sizes = []
    for folder, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):
                sizes.append((Path(folder) / name).stat().st_size)
    return {"state_mb": sum(sizes) / MB, "state_files": len(sizes)}


def gauges(scrape: str) -> dict[str, float]:
    """The agent's own metrics. Its ticks are the clock of the whole soak."""
    lines = [line for line in scrape.splitlines() if not line.startswith("#")]
    told: dict[str, float] = {
        "series": len(lines),
        "ticks": total(scrape, "wattspan_agent_ticks_total"),
    }
    for key, name in _GAUGES.items():
        told[key] = total(scrape, name)
    told["forward_mb"] /= MB
    return told


def total(scrape: str, name: str) -> float:
    """The sum of the samples of one name."""
    found = re.findall(rf"^{name}(?:{{.*}})? (\S+)", scrape, re.MULTILINE)
    return sum(map(float, found))


def child(pid: int, word: bytes) -> int | None:
    """The descendant of ``pid`` whose command has ``word``."""
    for one in family(pid)[1:]:
        with suppress(OSError):
            if word in Path(f"/proc/{one}/cmdline").read_bytes():
                return one
    return None


def kernel(pid: int, state: Path, shm: Path = Path("/dev/shm")) -> dict[str, float]:
    """Kernel figures of the agent, its capper and its files."""
    found = memory(pid) | descriptors(pid) | files(state)
    found["threads"] = len(list(Path(f"/proc/{pid}/task").iterdir()))
    found["shm_files"] = len(list(shm.iterdir()))
    found["cpu_seconds"] = cpu_seconds(pid)
    capper = child(pid, b"capper")
    if capper is not None:
        with suppress(OSError, KeyError):  # it has ended, or has no memory any more
            found["capper_rss"] = memory(capper)["rss"]
    return found


def with_shares(looks: list[Mapping[str, float]]) -> Iterator[dict[str, float]]:
    """The looks but the first, each with the CPU share since the one before."""
    for before, after in itertools.pairwise(looks):
        used, lasted = after["cpu_seconds"] - before["cpu_seconds"], after["at"] - before["at"]
        yield {**after, "cpu": 100 * used / lasted}
