"""The whole agent as a process of its own, on an emulated host that outlives it, at work."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from testbed.emulated_faults import FaultyHost
from testbed.faults.judge import Breach, Judge
from testbed.faults.observation import NANO, Sight, parse

from wattspan.emulation.control import Closeable
from wattspan.emulation.host import profile_named

ROOT = Path(__file__).resolve().parents[2]
CEILINGS = {"cpu": 130.0, "memory": 16.0, "gpu": 760.0}
"""Watts: above what a socket, its memory and a board of the emulated host can draw, and less than
twice as much."""
KEPT = 6_000  # sights
T = TypeVar("T")


class Stage(Closeable):
    """An emulated host with its jobs, the agent that measures it, and an observer.

    ``agent`` is the process; faults act on it, on ``host`` and on the files in ``folder``.
    """

    def __init__(
        self,
        *,
        profile: str = "two-socket-h100",
        within: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        settings: Mapping[str, object] | None = None,
        jobs: bool = True,
        every: float = 0.1,
        configuration: str = "",
    ) -> None:
        """``within`` is the command that runs the agent, ``environ`` is the host's as well.

        ``configuration`` is the text of the agent's file.
        """
        self.folder = Path(tempfile.mkdtemp(prefix="wattspan-"))
        self.state, self.run = self.folder / "state", self.folder / "run"
        self.run.mkdir()
        self.profile = profile
        self.within, self.environ = list(within), dict(environ or {})
        self.settings = dict(settings or {})
        self._configuration = self.folder / "config.toml"
        self._configuration.write_text(configuration)
        self.wall_offset = 0.0  # seconds by which a fault has set the agent's wall clock
        self.asleep = 0.0  # seconds for which the host slept, as its clocks tell
        self._lives = 0
        with _environment(self.environ):
            self.host = FaultyHost(profile_named(profile))
        try:
            self.agent = self._start()
            self.watcher = Watcher(self.address, every)
            self.until(lambda: self.watcher.last or not self.alive, "the first scrape", 30)
            if jobs:
                self.jobs = self.host.start_jobs(self.run / "otlp.sock")
            self.watcher.start_judging()
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------------------ the agent

    def _start(self) -> subprocess.Popen[bytes]:
        chosen = {
            "agent.state_dir": self.state,
            "agent.run_dir": self.run,
            "spans.http": "127.0.0.1:0",
            "exporters.prometheus.listen": "127.0.0.1:0",
            **self.settings,
        }
        words = [word for key, value in chosen.items() for word in ("--set", f"{key}={value}")]
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("WATTSPAN_", "COVERAGE"))}
        path = [ROOT, *filter(None, [clean.get("PYTHONPATH")])]
        self._lives += 1
        program = [sys.executable, "-m", "testbed.agent_on_host", str(self.host.directory)]
        with self._log.open("wb") as log:
            return subprocess.Popen(
                [*self.within, *program, "run", "--emulate", self.profile, *words],
                env=clean
                | self.environ
                | {
                    "WATTSPAN_CONFIG": str(self._configuration),
                    "PYTHONPATH": os.pathsep.join(map(str, path)),
                },
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )

    @property
    def _log(self) -> Path:
        return self.folder / f"stderr-{self._lives}"

    @property
    def said(self) -> str:
        """Standard error of the agent's current run."""
        return self._log.read_text(errors="replace")

    @property
    def lives(self) -> str:
        """Standard error of all runs of the agent, in order."""
        told = (self.folder / f"stderr-{number}" for number in range(1, self._lives + 1))
        return "\n".join(path.read_text(errors="replace") for path in told)

    def address(self) -> str:
        """Address of the metrics; "" until the agent logs it."""
        found = re.search(r"Serving (http\S+/metrics)\n", self.said)
        return found[1] if found else ""

    def restart(self, number: int = signal.SIGKILL) -> int:
        """End the agent and restart it on the same state; the exit code of the old run."""
        self.agent.send_signal(number)
        code = self.agent.wait(30)
        self.begin_again()
        return code

    def begin_again(self) -> None:
        """Restart the agent after its end, and wait for its first figures."""
        before = self._born()
        self.agent = self._start()

        def told() -> bool:
            if not self.alive:
                raise RuntimeError(f"the agent ended with {self.agent.poll()}: {self.lives}")
            return self._born() != before

        self.until(told, "the next life", 30)

    def _born(self) -> int:
        """When the life began that was scraped last: its responses may arrive later."""
        return self.last.total("wattspan_agent_start_time_seconds")

    @property
    def alive(self) -> bool:
        return self.agent.poll() is None

    # ------------------------------------------------------------------------------- watching

    def until(self, attempt: Callable[[], T], what: str, within: float) -> T:
        """The first truthy result; TimeoutError that names ``what`` after ``within`` seconds."""
        deadline = time.monotonic() + within
        while not (result := attempt()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {within:g} s. The agent said: {self.lives}")
            time.sleep(0.02)
        return result

    @property
    def last(self) -> Sight:
        """The newest scrape."""
        sight = self.watcher.last
        assert sight is not None
        return sight

    def fresh(self, within: float = 20.0) -> Sight:
        """A scrape of a snapshot that is newer than now."""
        now = time.monotonic_ns()
        self.until(lambda: self.mono_of(self.last) >= now, "a new snapshot", within)
        return self.last

    def mono_of(self, sight: Sight) -> int:
        """The monotonic time of the snapshot behind a scrape."""
        wall = sight.total("wattspan_snapshot_time_seconds")
        offset = time.time_ns() - time.monotonic_ns()
        return wall - offset - round(self.wall_offset * NANO)

    def truth(self, at: int) -> dict[str, float]:
        """Joules that each domain has really spent up to a monotonic time, by ``hw_id``."""
        told = self.host.ask(do="truth", at=[at])["at"][0]
        found = {}
        names: dict[str, str] = {}
        for zone in self.host.profile.powercap.zones:
            above = zone.directory.rpartition(":")[0]
            path = f"{names[above]}/{zone.name}" if above in names else zone.name
            names[zone.directory] = path
            found[f"rapl:{path}"] = told["zones"][zone.directory] / 1e6
        for index, gpu in enumerate(told["gpus"]):
            found[f"gpu:{self.gpu(index)}"] = gpu["energy"] / 1e6
        return {domain: found[domain] for domain in self.last.domains() if domain in found}

    def gpu(self, index: int) -> str:
        """The UUID of a board."""
        nvml = self.host.nvml()
        nvml.nvmlInit()
        uuid = str(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(index)))
        nvml.nvmlShutdown()
        return uuid

    # ------------------------------------------------------------------------------------ end

    def close(self) -> None:
        if hasattr(self, "watcher"):
            self.watcher.close()
        if hasattr(self, "agent"):
            with contextlib.suppress(ProcessLookupError):
                self.agent.send_signal(signal.SIGCONT)
                self.agent.kill()
            self.agent.wait()
        self.host.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class Watcher:
    """Scrapes continuously, stores the observations, and passes them to the judge."""

    def __init__(self, address: Callable[[], str], every: float) -> None:
        self._address, self._every = address, every
        self._stop = threading.Event()
        self._judge: Judge | None = None
        self._lock = threading.Lock()
        self._sights: list[Sight] = []
        self._breaches: list[Breach] = []
        self._answered: deque[int] = deque(maxlen=KEPT)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @property
    def last(self) -> Sight | None:
        return self._sights[-1] if self._sights else None

    def start_judging(self) -> None:
        self._judge = Judge(CEILINGS)

    def since(self, mono: int) -> list[Sight]:
        """Observations from a monotonic time on, and the one before."""
        with self._lock:
            first = next((i for i, one in enumerate(self._sights) if one.at >= mono), None)
            return self._sights[max(0, first - 1) :] if first is not None else self._sights[-1:]

    def unanswered(self, since: int) -> float:
        """The longest stretch without an answer from a monotonic time until now, in seconds."""
        with self._lock:
            answered = [at for at in self._answered if at > since]
        moments = [since, *answered, time.monotonic_ns()]
        return max(later - one for one, later in itertools.pairwise(moments)) / NANO

    def take_breaches(self) -> list[Breach]:
        """Those that were found since they were last taken."""
        with self._lock:
            taken, self._breaches = self._breaches, []
            return taken

    def close(self) -> None:
        self._stop.set()
        self._thread.join(10)

    def _watch(self) -> None:
        while not self._stop.wait(self._every):
            try:
                with urllib.request.urlopen(self._address(), timeout=2) as answer:
                    text = answer.read().decode()
            except (OSError, ValueError, http.client.HTTPException):
                # no response, an empty one, or a truncated one
                continue
            now = time.monotonic_ns()
            with self._lock:
                self._answered.append(now)
            sight = parse(text, now)
            if not sight.domains():
                continue
            with self._lock:
                self._sights = [*self._sights[-KEPT:], sight]
                if self._judge is not None:
                    self._breaches += self._judge.see(sight)


@contextlib.contextmanager
def _environment(more: Mapping[str, str]) -> Iterator[None]:
    """This process's environment with some variables, for the programs that are started in it."""
    before = {name: os.environ.get(name) for name in more}
    os.environ.update(more)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
