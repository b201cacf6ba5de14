"""Prometheus query time of dashboards, over a day of a thousand hosts' recorded series.

The blocks are made by `promtool tsdb create-blocks-from openmetrics`, with a sample each 30 s, as
the recording rules leave them. Series of range queries cover the whole day; series of instant
queries the last two hours. The first host has all that its agent serves as well,
each 15 s, taken from the demo: the dashboards of one host ask that. Every query is sent as Grafana
would send it. All values of a single-choice variable are tried, and the slowest counts.

    .venv/bin/python -m benchmarks.dashboards
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import dashboards
import yaml
from dashboards import Query
from testbed.machine import describe
from testbed.process_costs import LOOPBACK, cpu_seconds
from testbed.recorded_labels import BLOCK, RULES, SCRAPES, host, labels_of

from benchmarks.harness import Subject, fetch
from benchmarks.peers import debian, free_port
from benchmarks.recorded import Series, block, written
from benchmarks.recorded import scraped as series_of_scrape

ROOT = Path(__file__).resolve().parents[1]
RECORDING = ROOT / "dashboards" / "prometheus" / "recording.yml"
POINTS = 1000  # of a graph: one per pixel, Grafana's maximum


class Took(NamedTuple):
    """One query as it was sent: the median of its times, and the samples that Prometheus read."""

    seconds: float
    cpu: float
    series: int
    query: Query


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--hosts", type=int, default=1000)
    options.add_argument("--hours", type=int, default=24)
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--keep", type=Path, help="keep the database here, or use the one there")
    options.add_argument("--all", action="store_true", help="every query, not the slowest alone")
    chosen = options.parse_args()
    prometheus, promtool = debian("prometheus"), debian("promtool")
    if prometheus is None or promtool is None:
        sys.exit("no prometheus: scripts/debian-tool prometheus")
    print(describe())
    with place(chosen.keep) as folder:
        made = folder / "made.json"
        if not made.exists():
            end = int(time.time()) // BLOCK * BLOCK
            count, samples = fill(folder, promtool, chosen.hosts, end - chosen.hours * 3600, end)
            facts = {"hosts": chosen.hosts, "hours": chosen.hours, "end": end}
            made.write_text(json.dumps({**facts, "series": count, "samples": samples}))
        facts = json.loads(made.read_text())
        print(
            f"\n{facts['hosts']:,} hosts, {facts['hours']} h: {facts['series']:,} series, "
            f"{facts['samples']:,} samples (goal: the slowest query in 1 s)\n"
        )
        port = free_port()
        subject = Subject("Prometheus", serving(prometheus, folder, port), ready(port))
        with subject.running() as pid:
            end, span = facts["end"] - SCRAPES, facts["hours"] * 3600
            asked = Asked(port, pid, end, span, chosen.repeats)
            report([asked.slowest(query) for query in dashboards.queries()], chosen.all)


@contextmanager
def place(kept: Path | None) -> Iterator[Path]:
    """Location of the database: the given folder, or a temporary one for the block."""
    if kept is not None:
        kept.mkdir(exist_ok=True)
        yield kept
        return
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        yield Path(name)


def fill(folder: Path, promtool: str, hosts: int, start: int, end: int) -> tuple[int, int]:
    """Make the database; how many series and samples there are."""
    groups = yaml.safe_load(RECORDING.read_text(encoding="utf-8"))["groups"]
    names = [rule["record"] for group in groups for rule in group["rules"]]
    over_time = {name for query in dashboards.queries() for name in names if ranges(query, name)}
    raw = list(series_of_scrape(scrape_of_a_demo()))

    def recorded(which: Sequence[str]) -> Iterator[Series]:
        for name in which:
            for labels in labels_of(name, hosts):
                yield Series(written(name, labels), RULES)

    samples = 0
    for at in range(start, end, BLOCK):
        last = at + BLOCK >= end
        wanted = [name for name in names if last or name in over_time]
        samples += block(folder, promtool, itertools.chain(recorded(wanted), raw), at, start)
    return sum(1 for _ in recorded(names)) + len(raw), samples


def ranges(query: Query, name: str) -> bool:
    """True if a query reads more than a series' newest samples."""
    return name in query.expr and (not query.instant or "$__range" in query.expr)


def scrape_of_a_demo() -> str:
    """All that an agent serves on a host with two GPUs, two jobs, spans and tuning."""
    port = free_port()
    address = f"{LOOPBACK}:{port}"
    words = ("-m", "wattspan", "demo", "--plain", "--listen", address)
    demo = Subject("demo", (sys.executable, *words), f"http://{address}/metrics")
    deadline = time.monotonic() + 120
    with demo.running():
        while "wattspan_autotune_slowdown_ratio{" not in (page := fetch(demo.url or "").decode()):
            if time.monotonic() > deadline:
                raise RuntimeError("the demo tunes nothing")
            time.sleep(1)
    return page


def serving(prometheus: str, folder: Path, port: int) -> list[str | Path]:
    config = folder / "prometheus.yml"
    config.write_text("scrape_configs: []\n")
    return [
        prometheus,
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        "--storage.tsdb.retention.time=10y",
        "--storage.tsdb.min-block-duration=2h",  # the blocks stay as they are: no compaction
        "--storage.tsdb.max-block-duration=2h",  # takes CPU while queries are timed
        f"--web.listen-address={LOOPBACK}:{port}",
    ]


def ready(port: int) -> str:
    return f"http://{LOOPBACK}:{port}/-/ready"


class Asked:
    """A Prometheus, asked for the whole range that ends at ``end``."""

    def __init__(self, port: int, pid: int, end: int, span: int, repeats: int) -> None:
        self._api, self._pid, self._end, self._span = f"{ready(port)[:-8]}/api/v1", pid, end, span
        self._repeats = repeats
        self._step = max(span // POINTS, SCRAPES)

    def slowest(self, query: Query) -> Took:
        """The slowest of all ways to choose."""
        return max(self._time(query, chosen) for chosen in self._choices(query))

    def _time(self, query: Query, chosen: Mapping[str, str]) -> Took:
        rate = max(self._step + SCRAPES, 4 * SCRAPES)
        expr = dashboards.fill(query.expr, chosen, f"{rate}s", f"{self._span}s")
        words = {"query": expr, "time": str(self._end)}
        if not query.instant:
            words = {
                "query": expr,
                "start": str(self._end - self._span),
                "end": str(self._end),
                "step": str(self._step),
            }
        times = []
        for _ in range(self._repeats):
            began, used = time.monotonic(), cpu_seconds(self._pid)
            result = self._get("query" if query.instant else "query_range", **words)["result"]
            times.append((time.monotonic() - began, cpu_seconds(self._pid) - used))
        seconds, cpu = sorted(times)[len(times) // 2]
        return Took(seconds, cpu, len(result), query)

    def _choices(self, query: Query) -> list[dict[str, str]]:
        """Every host at once where that can be chosen; else the first host, which has all."""
        found: list[dict[str, str]] = [{}]
        for variable in query.variables:
            grown = []
            for chosen in found:
                if variable.all:
                    values = [".*"]
                elif variable.name == "instance":
                    values = [re.escape(host(0)).replace("\\", "\\\\")]
                    values = values if variable.multi else [host(0)]
                else:
                    selector = dashboards.fill(variable.selector, chosen)
                    path = f"label/{variable.label}/values"
                    since = str(self._end - 300)
                    values = self._get(path, **{"match[]": selector, "start": since})
                grown += [{**chosen, variable.name: value} for value in values]
            found = grown
        return found

    def _get(self, path: str, **parameters: str) -> Any:
        url = f"{self._api}/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=120) as answer:
            return json.load(answer)["data"]


def report(times: list[Took], every: bool) -> None:
    for took in sorted(times, reverse=True) if every else ():
        where = f"{took.query.dashboard}/{took.query.panel}/{took.query.ref}"
        print(f"{took.seconds * 1000:8,.0f} ms {took.cpu * 1000:8,.0f} ms {took.series:6} {where}")
    print("| dashboard | queries | with data | slowest, ms |")
    print("|---|---|---|---|")
    for name in sorted({took.query.dashboard for took in times}):
        own = [took for took in times if took.query.dashboard == name]
        answered = sum(took.series > 0 for took in own)
        print(
            f"| {name.removeprefix('wattspan-')} | {len(own)} | {answered} "
            f"| {max(own).seconds * 1000:,.0f} |"
        )


if __name__ == "__main__":
    main()
