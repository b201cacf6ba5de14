"""The agent of a soak: the real program, with everything on, at a compressed pace."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from testbed.process_costs import family, stop

FINE_INTERVAL = 0.1  # seconds between ticks while a consumer needs them

CONFIG = """\
[agent]
interval = "{interval}"
state_dir = "{folder}/state"
run_dir = "{folder}/run"
history = "{history}"
[store]
enabled = true
interval = "1s"
minutes = "1h"
max_size = "1MiB"
processes = 20
groups = 20
spans = 50
[spans]
http = "127.0.0.1:0"
names = 200
forward = "{sink}"
forward_spool = true
[exporters.prometheus]
listen = "127.0.0.1:0"
[exporters.files]
directory = "{folder}/state/files"
interval = "1s"
rotate = "10s"
keep = 5
compression = "gzip"
[exporters.otlp]
endpoint = "{sink}"
interval = "1s"
[sources.nvml]
interval = "{interval}"
usage_interval = "50ms"
process_interval = "1s"
status_interval = "100ms"
[cost]
price = 0.3
[carbon]
intensity = 300
[caps]
users = []
log_size = "64KiB"
[autotune]
mode = "apply"
block = "300ms"
block_units = 5
settle = "100ms"
settle_units = 1
dwell = "5s"
[[autotune.job]]
service = "trainer"
span = "train_step"
"""

COMPRESSED = (
    ("interval of the poller", "1 s, 100 ms while spans arrive", "{interval}"),
    ("energy history", "5 min", "{history}"),
    ("store: write interval / maximum size", "5 s / 256 MiB", "1 s / 1 MiB"),
    ("files: write interval / rotation / kept", "10 s / 1 h / all", "1 s / 10 s / 5"),
    ("OTLP push", "10 s", "1 s"),
    ("interval of GPU usage / limits and clocks", "500 ms / 1 s", "50 ms / 100 ms"),
    ("tuner: minimum block / time between searches", "5 s / 10 min", "300 ms / 5 s"),
    ("scrape interval, two scrapers and a page", "15 s each", "1 s each"),
)
"""Intervals that the soak shortens: name, default, value in the soak."""


@dataclass(frozen=True, slots=True)
class Agent:
    """A running agent and where it is reached."""

    pid: int
    metrics: str
    spans: str
    run_dir: Path
    state_dir: Path
    host: Path


def history_at(interval: float) -> str:
    """As many ticks as five minutes of the default interval."""
    return f"{max(1, round(300 * interval / FINE_INTERVAL))}s"


@contextmanager
def agent(
    folder: Path,
    interval: str,
    history: str,
    sink: str,
    environ: Mapping[str, str],
    *,
    traced: bool,
) -> Iterator[Agent]:
    """Start it; it has ended afterwards. RuntimeError if it ends by itself."""
    config, log = folder / "config.toml", folder / "log"
    config.write_text(CONFIG.format(interval=interval, history=history, folder=folder, sink=sink))
    program = (
        ["-m", "testbed.soak.traced"] if traced else ["-c", "from wattspan.cli import main; main()"]
    )
    words = ["run", "--emulate", "one-socket-h100"]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("WATTSPAN_", "COVERAGE_"))}
    with log.open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, *program, *words, "--config", config],
            env=clean | dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
        )
    try:
        metrics, spans = _served(process, log)
        yield Agent(
            process.pid, metrics, spans, folder / "run", folder / "state", _host(process.pid)
        )
        if process.poll() is not None:
            raise RuntimeError(f"the agent ended by itself: {log.read_text()[-1000:]}")
    finally:
        stop(process)
    if process.returncode:
        raise RuntimeError(f"the agent ended with {process.returncode}: {log.read_text()[-1000:]}")


def _served(process: subprocess.Popen[bytes], log: Path) -> tuple[str, str]:
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        told = log.read_text()
        metrics = re.search(r"Serving (http://\S+/metrics)\n", told)
        spans = re.search(r"Serving (http://\S+)/v1/traces\n", told)
        if metrics and spans:
            return metrics[1], spans[1]
        time.sleep(0.05)
    raise RuntimeError(f"the agent did not start: {log.read_text()[-1000:]}")


def _host(pid: int) -> Path:
    """The directory of the emulated host that the agent plays on."""
    for one in family(pid):
        try:
            words = Path(f"/proc/{one}/cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if b"wattspan.emulation.engine" in words:
            return Path(words[words.index(b"wattspan.emulation.engine") + 2].decode())
    raise RuntimeError("the agent has started no emulated host")
