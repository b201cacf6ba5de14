"""A real agent on an emulated host, as a process of its own, for measurements with spans."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from testbed.process_costs import cpu_seconds, family, rss_megabytes, stop

from wattspan.emulation.control import Closeable

PROGRAM = [sys.executable, "-c", "from wattspan.cli import main; main()"]


class SpanAgent(Closeable):
    """`wattspan run --emulate`, receiving spans on Unix sockets and a loopback port."""

    def __init__(
        self,
        folder: Path,
        *,
        profile: str = "two-socket-h100",
        cpus: Sequence[int] = (),
        within: float = 60.0,
        config: Path | None = None,
        **settings: object,
    ) -> None:
        """Start it. ``settings`` as in a configuration, with ``__`` for dots."""
        self.run_dir, self.state_dir = folder / "run", folder / "state"
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.http_port, self.metrics_port = free_port(), free_port()
        chosen: dict[str, object] = {
            "agent.run_dir": self.run_dir,
            "agent.state_dir": self.state_dir,
            "store.enabled": "false",
            "exporters.prometheus.listen": f"127.0.0.1:{self.metrics_port}",
            "spans.http": f"127.0.0.1:{self.http_port}",
        }
        chosen |= {key.replace("__", "."): value for key, value in settings.items()}
        words = [word for key, value in chosen.items() for word in ("--set", f"{key}={value}")]
        pinned = ["taskset", "--cpu-list", ",".join(map(str, cpus))] if cpus else []
        environ = {k: v for k, v in os.environ.items() if not k.startswith("WATTSPAN_")}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the agent
        self.process = subprocess.Popen(
            [*pinned, *PROGRAM, "run", "--emulate", profile, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            env=environ | {"WATTSPAN_CONFIG": str(config or os.devnull)},
        )
        try:
            self._wait(within)
        except BaseException:
            self.close()
            raise

    @property
    def otlp(self) -> Path:
        """The Unix socket for OTLP over HTTP."""
        return self.run_dir / "otlp.sock"

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def host(self) -> Path:
        """The directory of the emulated host."""
        for pid in family(self.pid):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"wattspan.emulation.engine" in words:
                return Path(words[words.index(b"wattspan.emulation.engine") + 2].decode())
        raise RuntimeError(f"the emulated host is gone; the agent said: {self.said()}")

    @property
    def engine(self) -> int:
        """The pid of the emulated host."""
        return next(
            pid
            for pid in family(self.pid)
            if b"wattspan.emulation.engine" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )

    def cpu_seconds(self) -> float:
        return cpu_seconds(self.pid)

    def rss_megabytes(self) -> float:
        return rss_megabytes(self.pid)

    def scrape(self) -> str:
        url = f"http://127.0.0.1:{self.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return str(answer.read().decode())

    def samples(self, name: str, **labels: str) -> list[float]:
        """A metric's samples that have these labels."""
        return [
            float(line.rpartition(" ")[2])
            for line in self.scrape().splitlines()
            if line.startswith((f"{name}{{", f"{name} "))
            and all(f'{key}="{value}"' in line for key, value in labels.items())
        ]

    def total(self, name: str, **labels: str) -> float:
        return sum(self.samples(name, **labels))

    def said(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def close(self) -> None:
        stop(self.process)
        self._log.close()

    def _wait(self, within: float) -> None:
        deadline = time.monotonic() + within
        while not (self.otlp.exists() and self._answers()):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the agent did not start: {self.said()}")
            time.sleep(0.05)

    def _answers(self) -> bool:
        try:
            return "hw_energy" in self.scrape()
        except OSError:
            return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
