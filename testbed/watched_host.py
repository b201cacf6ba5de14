"""An emulated host with everything at work that a dashboard shows, as a program of its own.

``python -m testbed.watched_host FOLDER``: two GPUs, a trainer that is tuned and a
server of tokens, both sending spans, and a price. Its memory and CPU time are the agent's alone, as
in production.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from testbed.program import ENVIRONMENT
from testbed.requirements import ROOT
from testbed.waiting import eventually

CONFIG = """\
[cost]
currency = "EUR"
price = 0.30

[carbon]
intensity = 400.0

[sources.nvml]
static_watts = {H100 = 115}

[autotune]
mode = "apply"
block = "300ms"
block_units = 5
settle = "100ms"
settle_units = 1
dwell = "1m"

[[autotune.job]]
service = "trainer"
span = "train_step"
work = "samples"
"""
AT_REST = 4.5  # seconds: enough for the idle baselines, as in the demo


class WatchedHost:
    """The running program, and where its agent is scraped."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self._log, self.process = folder / "host.log", process

    @property
    def said(self) -> str:
        return self._log.read_text()

    def address(self) -> str:
        """HOST:PORT, once the host is at work."""

        def told() -> str:
            assert self.process.poll() is None, self.said
            lines = [line for line in self.said.splitlines() if line.startswith("at work ")]
            return lines[0].removeprefix("at work ") if lines else ""

        return eventually(told, "the emulated host is at work", within=60)


@contextmanager
def watched_host(folder: Path) -> Iterator[WatchedHost]:
    """It runs during the block."""
    with (folder / "host.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "testbed.watched_host", str(folder)],
            env={**ENVIRONMENT, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield WatchedHost(folder, process)
        process.terminate()
        assert process.wait(30) == 0, (folder / "host.log").read_text()
    finally:
        process.kill()
        process.wait()


def main() -> None:
    from wattspan.cli.demo import metrics_addresses, run_dir
    from wattspan.config import FlagValue, load
    from wattspan.emulation.host import EmulatedHost, profile_named
    from wattspan.plugins import discover
    from wattspan.service.assembly import build_agent
    from wattspan.service.systemd import stop_on_signals

    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(CONFIG)
    plugins = discover()
    with stop_on_signals() as request, EmulatedHost(profile_named("two-socket-h100")) as host:
        places = {
            "agent.state_dir": folder / "state",
            "agent.run_dir": run_dir(host),
            "spans.http": "127.0.0.1:0",
            "exporters.prometheus.listen": "127.0.0.1:0",
            "exporters.prometheus.exemplars": "all",
        }
        flags = {key: FlagValue("test", str(place)) for key, place in places.items()}
        config = load(
            folder / "config.toml",
            environ={},
            flags=flags,
            schema=plugins.schema,
            default=Path(os.devnull),
        )
        agent = build_agent(config, plugins, log=tell, emulated=host)
        request.register(agent.request_stop, wake=agent.wake)
        agent.start()
        try:
            if agent.wait(AT_REST):
                return
            host.start_jobs(run_dir(host) / "otlp.sock")
            (address,) = metrics_addresses(agent)
            tell(f"at work {address.removeprefix('http://').removesuffix('/metrics')}")
            agent.wait()
        finally:
            agent.stop()


def tell(sentence: str) -> None:
    print(sentence, flush=True)


if __name__ == "__main__":
    main()
