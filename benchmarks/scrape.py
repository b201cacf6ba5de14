"""Cost of a scrape of many series, next to prometheus-client on the same values.

Both get the same snapshots: in one kind of host every counter has grown since the scrape before, in
the other nine of ten processes slept. CPU time of the rendering thread, medians. prometheus-client
is handed its samples ready made, wattspan has to draw them from the snapshot.

The page of a serving engine costs the agent that reads it, and the engine that writes it by
prometheus-client.

    .venv/bin/python -m benchmarks.scrape
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import metadata
from itertools import cycle
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from tempfile import TemporaryDirectory

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from testbed.field import FOLDER, read_cases
from testbed.machine import describe
from testbed.token_host import TokenHost

from wattspan.config import ServingEngineSettings, TunedJobSettings
from wattspan.inference.latency_histograms import LATENCIES
from wattspan.model import (
    SECOND,
    Consumer,
    Group,
    GroupKind,
    HwType,
    Instant,
    Microjoules,
    PayerInfo,
    ProcessRow,
    Provenance,
    Snapshot,
)
from wattspan.model.settings import Duration
from wattspan.processes.inspector import ProcessInspector
from wattspan.service.engine_finder import EngineFinder
from wattspan.service.engine_scraper import EngineScraper
from wattspan.testing import FakeDirectory
from wattspan.tuning.engine_pages import EnginePages, EngineRequests
from wattspan_exporters.catalogue.energy import ACCOUNTS
from wattspan_exporters.prometheus.renderer import ExpositionFormat, Renderer

TYPES = (HwType.CPU, HwType.GPU, HwType.MEMORY)
ENERGY = ACCOUNTS[0]  # of processes: the family that grows with the host


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--series", type=int, default=10_000)
    options.add_argument("--repeats", type=int, default=15)
    options.add_argument("--only-engines", action="store_true")
    options.add_argument("--exposition", nargs=2, metavar=("ENGINE", "PROCESSES"))
    chosen = options.parse_args()
    if chosen.exposition:  # the engine's side of `engine_row`
        engine, processes = chosen.exposition
        print(*exposition(engine, int(processes), chosen.repeats))
        return
    print(describe())
    if not chosen.only_engines:
        print(f"\nCPU milliseconds a scrape of {chosen.series:,} series (goal: 10 for 10,000)\n")
        print("| format | changed | wattspan | prometheus-client | wattspan, first |")
        print("|---|---|---|---|---|")
        for form in ExpositionFormat:
            for awake in (1, 10):
                print(row(chosen.series, form, awake, chosen.repeats))
    print(
        "\nCPU milliseconds a scrape of a serving engine's page: of the agent (goal: 1), also with"
        " a tracked job, and of prometheus-client"
        f" {metadata.version('prometheus_client')}, in no engine, over the values of"
        f" {', '.join(map(str, PROCESSES))} processes\n"
    )
    print("| page | kB | agent | tracked | 1 | 4 | 16 |")
    print("|---|---|---|---|---|---|---|")
    for engine in ENGINES:
        print(engine_row(engine, 10 * chosen.repeats))


def row(series: int, form: ExpositionFormat, awake: int, repeats: int) -> str:
    """One line of the table; one process of ``awake`` spends energy between two scrapes."""
    snapshots = [host(series, tick, awake) for tick in range(repeats + 1)]
    renderer = Renderer([ENERGY])
    first, body = timed(lambda: renderer.render(snapshots[0], form))
    ours, theirs = [], []
    for snapshot in snapshots[1:]:
        took, body = timed(lambda world=snapshot: renderer.render(world, form))
        ours.append(took)
        theirs.append(timed(peer(snapshot, form))[0])
    assert body.count(b"wattspan_process_energy_joules_total{") == series
    mine, other = statistics.median(ours), statistics.median(theirs)
    return f"| {form.name.lower()} | {100 // awake}% | {mine:.1f} | {other:.1f} | {first:.0f} |"


def timed(work: Callable[[], bytes]) -> tuple[float, bytes]:
    began = time.thread_time_ns()
    result = work()
    return (time.thread_time_ns() - began) / 1e6, result


def peer(snapshot: Snapshot, form: ExpositionFormat) -> Callable[[], bytes]:
    """prometheus-client's writer over the same samples, drawn beforehand."""
    family = CounterMetricFamily(
        ENERGY.series.removesuffix("_total"), ENERGY.help, labels=ENERGY.labels
    )
    for labels, value in ENERGY.draw(snapshot):
        family.add_metric(labels, value / 1e6)

    class Ready:
        def collect(self) -> Iterator[Metric]:
            yield family

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Ready())
    generate = generate_openmetrics if form is ExpositionFormat.OPENMETRICS else generate_latest
    return lambda: generate(registry)


def host(series: int, tick: int, awake: int = 1) -> Snapshot:
    """A host with as many series of processes as asked, a part of them further at each tick."""
    rows = [
        ProcessRow(info(n), {kind: grown(n, kind, 0 if n % awake else tick) for kind in TYPES}, {})
        for n in range(-(-series // len(TYPES)))
    ]
    surplus = len(rows) * len(TYPES) - series
    last = dict(list(rows[-1].energy.items())[surplus:])
    rows[-1] = replace(rows[-1], energy=last)
    return Snapshot(
        at=Instant(tick, tick),
        sequence=tick,
        host="bench",
        processes=tuple(rows),
        provenance=dict.fromkeys(TYPES, Provenance.MEASURED),
    )


def info(n: int) -> PayerInfo:
    group = Group(GroupKind.CONTAINER, f"{n % 61:064x}"[-12:])
    return PayerInfo(Consumer(1_000 + n, n), f"worker-{n % 97}", (group,))


def grown(n: int, kind: HwType, tick: int) -> Microjoules:
    return Microjoules(n * 7_654_321 + len(kind) * 1_000_003 + tick * 123_457)


# ---------------------------------------------------------------------- pages of serving engines

PROCESSES = (1, 4, 16)  # of one page; several write into the files of `multiprocess` mode
ENGINES = {
    "vllm": tuple(
        f"vllm:{name}"
        for name in (
            "e2e_request_latency_seconds", "request_queue_time_seconds",
            "request_inference_time_seconds", "request_decode_time_seconds",
            "request_prompt_tokens", "request_generation_tokens",
            "request_max_num_generation_tokens", "request_params_n", "request_params_max_tokens",
        )
    ),
    "sglang": ("sglang:e2e_request_latency_seconds", "sglang:queue_time_seconds"),
}  # fmt: skip
"""The engines, with the histograms of their pages that no recorded page of tests/field has."""


class EngineMetrics:
    """The families of an engine's recorded page, with all buckets, in a real registry."""

    def __init__(self, engine: str, registry: CollectorRegistry) -> None:
        known = LATENCIES[engine]
        (case,) = (one for one in read_cases(FOLDER / "engine_pages") if one.id == engine)
        samples = [
            (one.name, one.labels)
            for family in text_string_to_metric_families(case["page"])
            for one in family.samples
            if one.name.startswith(f"{engine}:") and not one.name.endswith("_created")
        ]
        usual = next(labels for name, labels in samples if "running" in name)
        more = *known.first, *known.between, *known.tokens[:1], *ENGINES[engine]
        known_names = {name.rpartition("_")[0] for name, _ in samples}
        samples += [(f"{name}_bucket", usual) for name in more if name not in known_names]
        families: dict[str, Histogram | Counter | Gauge] = {}
        self._moving: dict[tuple[str, ...], Callable[[float], object]] = {}
        for name, labels in samples:
            base, own = re.sub("_(bucket|count|sum)$", "", name), {**labels}
            own.pop("le", None)
            if base in families:
                family = families[base]
            elif name != base:
                bounds = known.between_bounds if "_token_" in base else known.first_bounds
                family = Histogram(base, base, sorted(own), registry=registry, buckets=bounds)
            elif name.endswith("_total"):
                family = Counter(base, base, sorted(own), registry=registry)
            else:
                family = Gauge(base, base, sorted(own), registry=registry, multiprocess_mode="sum")
            families[base] = family
            one = family.labels(**own)
            key = base, *own.values()
            self._moving[key] = one.observe if isinstance(one, Histogram) else one.inc

    def move(self) -> None:
        """Let each series grow."""
        for each in self._moving.values():
            each(1)


def exposition(engine: str, processes: int, repeats: int) -> tuple[float, int]:
    """CPU milliseconds of prometheus-client for a page, and its bytes; in a process of its own."""
    registry = CollectorRegistry()
    if processes > 1:
        for _ in range(processes):
            if not (pid := os.fork()):
                EngineMetrics(engine, CollectorRegistry()).move()
                os._exit(0)
            os.waitpid(pid, 0)
        MultiProcessCollector(registry)
    else:
        EngineMetrics(engine, registry).move()
    size = len(generate_latest(registry))
    before = resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(repeats):
        generate_latest(registry)
    after = resource.getrusage(resource.RUSAGE_SELF)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return 1000 * spent / repeats, size


def expositions(engine: str, repeats: int) -> Iterator[tuple[float, int]]:
    """The same for each number of processes."""
    for processes in PROCESSES:
        with TemporaryDirectory() as folder:
            environment = {**os.environ, "PROMETHEUS_DISABLE_CREATED_SERIES": "1"}
            if processes > 1:  # prometheus-client reads it when it is imported
                environment["PROMETHEUS_MULTIPROC_DIR"] = folder
            asked = ["--exposition", engine, str(processes), "--repeats", str(repeats)]
            command = [sys.executable, "-m", "benchmarks.scrape", *asked]
            text = subprocess.run(
                command, env=environment, check=True, capture_output=True, text=True
            ).stdout
            spent, size = text.split()
            yield float(spent), int(size)


def serve(pages: Sequence[bytes], port: Connection) -> None:
    """Serve the pages in turn, as an engine that keeps its connections."""
    turn = cycle(pages)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = next(turn)
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        port.send(server.server_port)
        server.serve_forever()


def agent_cost(engine: str, repeats: int, *, tracked: bool) -> float:
    """CPU milliseconds of the agent's scraper for a page each second, its kernel's part included.

    The page comes from another process by a real connection, whose owner the kernel shows. Only
    the energy of that process is emulated. ``tracked``: a job of the tuner reads the page as well.
    """
    metrics = EngineMetrics(engine, registry := CollectorRegistry())
    pages = []
    for _ in range(repeats):
        metrics.move()
        pages.append(generate_latest(registry))
    ours, theirs = Pipe()
    server = get_context("fork").Process(target=serve, args=(pages, theirs), daemon=True)
    server.start()
    kernel = ProcessInspector()
    process = kernel.look(server.pid or 0)
    assert process is not None
    host = TokenHost([{"name": "engine", "gpu": "gpu-0"}], known={"engine": process.consumer})
    host.run(1)
    limits = {"ttft_p90": Duration(SECOND), "tbt_p90": Duration(SECOND)}
    job = TunedJobSettings(engine="e", kind="requests", control="track", slo=limits)
    work = EngineRequests(job)
    settings = ServingEngineSettings(
        url=f"http://127.0.0.1:{ours.recv()}", name="e", interval=Duration(SECOND)
    )
    kept = EnginePages({"e"})
    finder = EngineFinder(settings, host.clock, host.history, FakeDirectory(), kernel, {})
    scraper = EngineScraper(
        settings, host.clock, host.history, finder, observe=kept.offer if tracked else None
    )
    spent = []
    for _ in range(repeats):
        host.run(1)
        began = time.thread_time_ns()
        scraper.turn()
        for page in kept.newest():
            work.add(page)
            work.read(page.at)
        spent.append((time.thread_time_ns() - began) / 1e6)
        (health,) = scraper.health()
        assert health.up, health.failures
    server.kill()
    server.join()
    assert scraper.rows
    return statistics.fmean(spent[repeats // 10 :])


def engine_row(engine: str, repeats: int) -> str:
    """One line of the table of engines."""
    sides = list(expositions(engine, repeats))
    own = [agent_cost(engine, repeats, tracked=one) for one in (False, True)]
    cells = [f"{sides[0][1] / 1000:.0f}", *(f"{each:.2f}" for each in own)]
    return f"| {' | '.join([engine, *cells, *(f'{spent:.1f}' for spent, _ in sides)])} |"


if __name__ == "__main__":
    main()
