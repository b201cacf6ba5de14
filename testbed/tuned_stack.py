"""An agent that tunes, its capper and a job, on an emulated host that outlives all of them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar

from prometheus_client.parser import text_string_to_metric_families
from pynvml import NVMLError_GpuIsLost

from testbed.agent_on_host import Standing
from testbed.capper_process import Gpu
from testbed.emulated_faults import FaultyHost
from testbed.journals import journal_entries
from testbed.program import ENVIRONMENT, alive, descendants, wattspan
from testbed.requirements import ROOT
from testbed.waiting import eventually
from wattspan.capper.workers import PROCESS_NAME
from wattspan.clock import SystemClock
from wattspan.emulation.control import Closeable, ControlClient
from wattspan.emulation.host import EmulatedHost, profile_named
from wattspan.sdk import MeasurementError
from wattspan.sdk.client import request_json

T = TypeVar("T")

PROFILE, ORIGINAL, THEIRS = "one-socket-h100", 650_000, 333_000
JOB = "trainer/train_step"
LEASE = 2.0  # seconds
QUICK = {"step": 0.04, "noise": 0.003}  # settings of a short training job
_STACK = """\
[agent]
state_dir = "{state}"
run_dir = "{sockets}"
[spans]
http = "HTTP"
[exporters.prometheus]
listen = "127.0.0.1:0"
[caps]
users = []
lease = "2s"
largest_step = 1.0
capper = {capper}
[autotune]
mode = "apply"
knobs = ["gpu_power"]
floor = {floor}
block = "{block}"
"""


def stack_config(tuning: str, *, http: str = "") -> str:
    """The configuration of a stack; ``tuning`` is the rest of [autotune], with its jobs."""
    return _STACK.replace("HTTP", http) + tuning


CONFIG = stack_config("""\
max_slowdown = 0.15
confidence = 0.9
block_units = 5
settle = "100ms"
settle_units = 1
dwell = "1s"
[[autotune.job]]
service = "trainer"
span = "train_step"
kind = "steps"
""")


class Limited:
    """A host identified by the limit of its board."""

    sockets: Path
    emulated: EmulatedHost | Standing
    gpu: Gpu

    @property
    def limit(self) -> int | None:
        """Limit shown by the board; None while the board is lost."""
        try:
            return self.gpu.limit
        except NVMLError_GpuIsLost:
            return None

    def capped(self) -> bool:
        return (self.limit or ORIGINAL) < ORIGINAL

    def restored(self) -> bool:
        return self.limit == ORIGINAL


class TunedHost(Limited, Closeable):
    """An emulated host whose trainer runs as long as the host, unless ``trains`` is False.

    The agent listening in ``sockets`` receives its steps.
    """

    def __init__(self, *, trains: bool = True, profile: str = PROFILE) -> None:
        self._sockets = tempfile.TemporaryDirectory(prefix="wattspan-", ignore_cleanup_errors=True)
        self.sockets = Path(self._sockets.name)
        self.emulated: EmulatedHost = FaultyHost(profile_named(profile))
        self.gpu = Gpu(self.emulated)
        self.gpu.set(ORIGINAL)
        if trains:
            self.emulated.start_jobs(self.sockets / "otlp.sock")
            self.emulated.ask(do="steer", job="trainer", **QUICK)

    def fault(self, fault: str, on: object) -> None:
        self.emulated.ask(do="fault", gpu=0, fault=fault, on=on)

    def close(self) -> None:
        self.gpu.close()
        self.emulated.close()
        self._sockets.cleanup()


class OwnHost(Limited):
    """The emulated host that a `wattspan run --emulate` has started, kept alive after its end."""

    def __init__(self) -> None:
        self._sockets = tempfile.TemporaryDirectory(prefix="wattspan-", ignore_cleanup_errors=True)
        self.sockets = Path(self._sockets.name)
        self._pipe = -1
        self._engine: frozenset[int] = frozenset()

    def find(self, agent: int) -> bool:
        """True if the agent ``agent`` has a host; its trainer is started then."""
        for pid in alive(descendants(agent)):
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if b"wattspan.emulation.engine" in words and (self.sockets / "otlp.sock").exists():
                    directory = words[words.index(b"wattspan.emulation.engine") + 2].decode()
                    self._take(pid, Path(directory))
                    return True
        return False

    def _take(self, engine: int, directory: Path) -> None:
        # The host runs until its standard input ends: until the last holder closes that pipe.
        self._pipe = os.open(f"/proc/{engine}/fd/0", os.O_WRONLY)
        self._engine = frozenset({engine})
        self.emulated: Standing = Standing(directory, profile_named(PROFILE))
        self.gpu = Gpu(self.emulated)
        self.gpu.set(ORIGINAL)
        talk = ControlClient(directory)
        talk.ask(do="start-jobs", agent=str(self.sockets / "otlp.sock"))
        talk.ask(do="steer", job="trainer", **QUICK)
        talk.close()

    def let_go(self) -> None:
        """From now on it ends with its agent."""
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1

    def close(self) -> None:
        self.let_go()
        eventually(lambda: not alive(self._engine), "the emulated host has ended")
        self._sockets.cleanup()


class Tuned(Closeable):
    """A `wattspan run` that tunes the host's trainer, with its files in ``folder``."""

    def __init__(
        self,
        host: Limited,
        folder: Path,
        *,
        within: Sequence[str] = (),
        program: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        capper: str = "true",
        block: str = "500ms",
        floor: float = 0.5,
        config: str = CONFIG,
        job: str = JOB,
        profile: str = PROFILE,
    ) -> None:
        """``config`` is a template of the configuration, in which ``job`` is tuned."""
        self.host, self.folder, self._job = host, folder, job
        self.state_dir = folder / "state"
        self.config = folder / "config.toml"
        self.config.write_text(
            config.format(
                state=self.state_dir, sockets=host.sockets, capper=capper, block=block, floor=floor
            )
        )
        self._log = folder / "agent.stderr"
        self._begins = self._log.stat().st_size if self._log.exists() else 0
        if not program:
            program = [sys.executable, "-m", "testbed.agent_on_host", str(host.emulated.directory)]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [*within, *program, "run", "--emulate", profile, "--config", str(self.config)],
                env={**ENVIRONMENT, "PYTHONPATH": str(ROOT), **(environ or {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )
        self._family: frozenset[int] = frozenset()

    # ------------------------------------------------------------------------------ queries

    @property
    def said(self) -> str:
        """Log of the agent and its cappers."""
        return self._log.read_bytes()[self._begins :].decode()

    @property
    def endpoint(self) -> str:
        """The HTTP address of the agent's receiver; "" before it listens."""
        words = (word.rstrip(".,") for word in self.said.split())
        found = (w for w in words if w.startswith("http://") and w.endswith("/v1/traces"))
        return next(found, "")

    def begin(self, script: str, *others: Tuned) -> subprocess.Popen[str]:
        """A program with the directory of the host and the receiver, once it has said "ready".

        Those of ``others`` follow.
        """
        words = []
        for one in (self, *others):
            endpoint = one.until(lambda one=one: one.endpoint, "the agent receives spans")
            words += [str(one.host.emulated.directory), endpoint]
        process = subprocess.Popen(
            [sys.executable, "-c", script, *words],
            env={**ENVIRONMENT, "WATTSPAN_RUN_DIR": str(self.host.sockets)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout.readline() == "ready\n"
        return process

    @property
    def kept(self) -> Path:
        """The capper's directory, as the agent sees it."""
        return self.state_dir / "capper-emulated"

    def journal(self) -> list[dict[str, Any]]:
        """Entries of the journal, if it exists."""
        return journal_entries(self.kept)

    def told(self) -> dict[str, Any]:
        """The agent's report of its job; empty while the agent does not respond."""
        with suppress(MeasurementError, KeyError):
            rows = request_json("/v1/tuning", {}, directories=(str(self.host.sockets),))["jobs"]
            return next((row for row in rows if row["job"] == self._job), {})
        return {}

    def reason(self) -> str:
        return str(self.told().get("decision", {}).get("reason", ""))

    def metrics(self, name: str) -> dict[str, float]:
        """The samples of one metric, by their labels."""
        found = re.search(r"Serving (http://\S+/metrics)\n", self.said)
        assert found is not None, self.said
        with urllib.request.urlopen(found[1], timeout=20) as answer:
            text = answer.read().decode()
        return {
            " ".join(str(value) for value in sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name
        }

    @property
    def capper(self) -> int | None:
        """The pid of the capper that runs as a child of the agent, if one does."""
        family = alive(descendants(self.process.pid))
        self._family |= family
        for pid in family:
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                # workers have the same arguments and another name
                if b"capper" in words and not _is_worker(pid):
                    return pid
        return None

    def explain(self) -> str:
        return f"\nsaid: {self.said}\ntold: {self.told()}\nlimit: {self.host.limit}"

    # ------------------------------------------------------------------------------ actions

    def until(self, holds: Callable[[], T | None], what: str, within: float = 60.0) -> T:
        """The first truthy result; the AssertionError quotes all state."""
        try:
            return eventually(holds, what, within)
        except AssertionError as error:
            raise AssertionError(f"{error}{self.explain()}") from None

    def caps(self) -> Self:
        """Wait for the next cap to be in force; return self."""
        self.until(self.host.restored, "the original stands")
        self.until(self.host.capped, "a cap is in force")
        assert self.capper is not None or "capper = false" in self.config.read_text()
        return self

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def ended(self) -> int:
        """Its exit code, after it and its children have ended."""
        self._family |= descendants(self.process.pid)
        code = self.process.wait(60)
        eventually(lambda: not alive(self._family), "nothing is left running")
        return code

    def restoring(self, act: Callable[[], object]) -> float:
        """Run an action that restores the original; return the seconds until the restore."""
        clock = SystemClock()
        began = clock.monotonic()
        act()
        self.until(self.host.restored, "the original is back")
        return (clock.monotonic() - began) / 1e9

    def restore(self) -> str:
        """Run `wattspan caps restore`, as a service manager does after the capper ended."""
        return self._run("restore")

    def accept(self) -> str:
        """Run `wattspan caps accept`, as an operator does after setting another limit."""
        return self._run("accept")

    def _run(self, verb: str) -> str:
        words = ["--config", str(self.config), "--emulated", str(self.host.emulated.directory)]
        done = wattspan("caps", verb, *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def close(self) -> None:
        """Gently, or, if a test has left anything stopped, by force."""
        mine = str(self.host.emulated.directory).encode()
        if self.process.poll() is None:
            self._family |= descendants(self.process.pid)
            self.send(signal.SIGCONT)
            self.send(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
            self.process.kill()
            self.process.wait()
        for pid in alive(self._family):
            with suppress(OSError):
                if mine in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)


def _is_worker(pid: int) -> bool:
    return Path(f"/proc/{pid}/comm").read_text().strip() == PROCESS_NAME
