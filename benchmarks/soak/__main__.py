"""Soak the agent and say whether anything of it grows; exit 1 if so.

    .venv/bin/python -m benchmarks.soak [--minutes 10] [--hours 24] [--interval 10ms] [--docs]

Everything is this process's child or thread, on ports that the kernel chooses, and has ended when
this has. As root it has all processes and /dev/shm to itself, so that other programs change nothing
but the pace. The kernel still reports forks and exits outside: --whole-host.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from testbed.machine import describe
from testbed.process_costs import stop
from testbed.soak.agent import FINE_INTERVAL, Agent, agent, history_at
from testbed.soak.report import Soaked, as_json, compressed, conditions, sentence, table
from testbed.soak.samples import gauges, kernel, total, with_shares
from testbed.soak.traced import WHERE

from benchmarks.__main__ import ROOT, placed
from benchmarks.soak.load import Load, read
from wattspan.model.settings import Duration

LOOKS = 300
PAGE = ROOT / "docs/soak.md"
APART = "SOAK_APART"


def main(words: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    options = _parser().parse_args(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # everything is left in order
    if not options.whole_host and (code := _apart(words)) is not None:
        return code
    os.nice(options.nice)
    seconds = options.hours * 3600 if options.hours else options.minutes * 60
    soaked = soak(seconds, options.interval, options.churn, traced=options.tracemalloc)
    if options.json:
        print(json.dumps(as_json(soaked)))
    else:
        print(conditions(soaked), table(soaked), sentence(soaked), sep="\n\n")
    if options.beside:
        told = ", ".join(soaked.broken) or "nothing that a busy machine does not explain"
        print(f"\nBeside other work, wrong is: {told}.", file=sys.stderr)
    for what, count in soaked.failed.items():
        print(f"  failed: {what}, {count} times", file=sys.stderr)
    if options.docs:
        _write(soaked)
    return 1 if (soaked.broken if options.beside else not soaked.passed) else 0


def soak(seconds: float, interval: str, churn: int, *, traced: bool = False) -> Soaked:
    pace = Duration.parse(interval) / 1e9
    machine, history = describe(), history_at(pace)
    with tempfile.TemporaryDirectory(prefix="soak-") as name, _sink() as sink:
        folder, traces = Path(name), Path(name) / "traces"
        traces.mkdir()
        environ = {WHERE: str(traces)}
        looks: list[dict[str, float]] = []
        with agent(folder, interval, history, sink, environ, traced=traced) as running:
            load = Load(running.metrics, running.spans, running.run_dir, running.host, churn)
            with load.running():
                _look_on(running, seconds, looks, traces if traced else None)
            scrape = read(running.metrics).decode()
    hours = FINE_INTERVAL / 3600
    shares = [
        {**look, "hours": look["at"] / 3600 * FINE_INTERVAL / pace} for look in with_shares(looks)
    ]
    turns = round(looks[-1]["ticks"] - looks[0]["ticks"])
    totals = {
        "decisions": total(scrape, "wattspan_autotune_decisions_total"),
        "spans": total(scrape, "wattspan_spans_total"),
    }
    missed = round(total(scrape, "wattspan_agent_missed_ticks_total"))
    return Soaked(
        machine, seconds, interval, history, turns, missed, turns * hours, shares,
        load.done, load.failed, totals,
    )  # fmt: skip


def _look_on(
    running: Agent, seconds: float, looks: list[dict[str, float]], traces: Path | None
) -> None:
    """Look at even distances until the time is over."""
    began, every = time.monotonic(), max(0.5, seconds / LOOKS)
    marks = [0.4, 0.9] if traces is not None else []
    while (at := time.monotonic() - began) < seconds:
        scrape = read(running.metrics, Accept="text/plain").decode()
        looks.append({"at": at, **kernel(running.pid, running.state_dir), **gauges(scrape)})
        if len(looks) % 30 == 1:
            print(
                f"  {at:.0f} s: {looks[-1]['rss']:.1f} MB, "
                f"{looks[-1]['descriptors']:.0f} descriptors, {looks[-1]['series']:.0f} series",
                file=sys.stderr,
            )
        if marks and at > marks[0] * seconds and traces is not None:
            marks.pop(0)
            os.kill(running.pid, signal.SIGUSR2)
        time.sleep(max(0.0, began + len(looks) * every - time.monotonic()))
    if traces is not None:
        _compare(traces)


def _compare(traces: Path) -> None:
    """Report the lines with growing allocations between the two marks, and the largest at the
    end."""
    first, last = (
        tracemalloc.Snapshot.load(str(path)) for path in sorted(traces.glob("*.trace"))[:2]
    )
    print("\nMore at the second mark than at the first:", file=sys.stderr)
    for one in last.compare_to(first, "lineno")[:25]:
        print(f"  {one.size_diff / 1e3:+8.0f} kB {one.traceback}", file=sys.stderr)
    print("\nMost at the second mark:", file=sys.stderr)
    for most in last.statistics("filename")[:25]:
        print(f"  {most.size / 1e3:8.0f} kB {most.traceback}", file=sys.stderr)


@contextmanager
def _sink() -> Iterator[str]:
    """A collector that takes everything, as a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "testbed.spans.sink"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        stop(process)


def _apart(words: Sequence[str]) -> int | None:
    """The exit code of a soak that has /dev/shm and all processes to itself; None if none can be.

    Its processes end with this process in any case.
    """
    if os.geteuid() != 0 or os.environ.get(APART):
        return None
    script = (
        "mount --make-rprivate / && mount -t proc proc /proc && mount -t tmpfs soak /dev/shm"
        ' && exec "$@"'
    )
    unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", script, "sh"]
    if subprocess.run([*unshare, "true"], check=False, stderr=subprocess.DEVNULL).returncode:
        return None
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        process = subprocess.Popen(
            [*unshare, sys.executable, "-m", "benchmarks.soak", *words],
            env=os.environ | {APART: "1", "TMPDIR": folder},
        )
        try:
            return process.wait()
        finally:
            process.kill()  # and with it the first process of that world, and so all of them
            process.wait()


def _write(soaked: Soaked) -> None:
    page = PAGE.read_text(encoding="utf-8")
    page = placed(page, "compressed", compressed(soaked))
    found = "\n\n".join((conditions(soaked), table(soaked), sentence(soaked)))
    PAGE.write_text(placed(page, "soak", found), encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    options.add_argument("--minutes", type=float, default=10.0)
    options.add_argument("--hours", type=float, default=0.0, help="instead of minutes")
    options.add_argument("--interval", default="10ms", help="between the agent's turns")
    options.add_argument("--churn", type=int, default=20, help="short-lived processes a second")
    options.add_argument("--nice", type=int, default=0, help="how much to give way to others")
    options.add_argument(
        "--beside",
        action="store_true",
        help="other work: fail for what is counted and grows, and for gross memory, no more",
    )
    options.add_argument("--json", action="store_true", help="print everything as JSON")
    options.add_argument("--docs", action="store_true", help="write the figures to docs/soak.md")
    options.add_argument(
        "--whole-host", action="store_true", help="among all processes, with the kernel's events"
    )
    options.add_argument(
        "--tracemalloc", action="store_true", help="say where growing memory was asked for; slow"
    )
    return options


if __name__ == "__main__":
    sys.exit(main())
