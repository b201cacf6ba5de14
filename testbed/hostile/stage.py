"""The host that is attacked: an agent within its memory limit, a capper, and another user."""

from __future__ import annotations

import contextlib
import re
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager

from testbed.capper_process import CapperProcess
from testbed.faults.limits import LimitStage
from testbed.faults.memory_limit import SizeWatch, reset_peak, resident
from testbed.faults.power_limits import Limits
from testbed.hostile.actor import Actor
from testbed.hostile.judge import SERVED, Reply, Sample
from testbed.program import ENVIRONMENT, PROGRAM
from testbed.requirements import ROOT

ATTACKER, OTHER, TUNER = 20_001, 20_002, 20_003
"""Users: one that attacks, one that behaves well, and one that [caps] users names."""
LIVELY = 10.0  # seconds within which an agent that was not wedged serves everything again
BATCH = 2_000
"""Spans of a large export of the other user, 270 bytes each: it is decoded as a large request."""
UNIT = ROOT / "systemd" / "wattspan-capper.service"


def free_ports(count: int) -> list[int]:
    """Loopback ports that are free now; a restarted agent keeps them."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


class OtherUser:
    """A well-behaved client of another uid, at work until it is closed."""

    def __init__(self, stage: HostileStage, pace: float) -> None:
        self._lock = threading.Lock()
        self._replies: list[Reply] = []
        self._actor = Actor(
            OTHER,
            "honest",
            spans=[stage.unix, stage.tcp],
            grpc=[stage.grpc],
            metrics=stage.metrics,
            capper=str(stage.capper_socket),
            pace=pace,
            batch=BATCH,
        )
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def since(self, at: float) -> list[Reply]:
        """The replies to requests that were sent from a moment on."""
        with self._lock:
            return [one for one in self._replies if one.at >= at]

    def served_since(self, at: float) -> bool:
        """Every kind of request was served at least once since."""
        with self._lock:
            kinds = {one.kind for one in self._replies}
            served = {one.kind for one in self._replies if one.at > at and one.status == SERVED}
        return bool(served) and kinds == served

    def close(self) -> None:
        self._actor.end()
        self._thread.join(10)

    def _listen(self) -> None:
        with contextlib.suppress(ValueError):  # the pipe is closed at the end
            for line in self._actor.lines():
                kind, at, seconds, status = line.split()
                with self._lock:
                    self._replies.append(Reply(kind, float(at), float(seconds), int(status)))


class HostileStage(LimitStage):
    """Two GPUs and two packages, with services as systemd would run them.

    The capper is not a child of the agent, and survives it.
    """

    def __init__(
        self,
        *,
        budget: int = 0,
        pace: float = 0.1,
        lease: str = "2s",
        within: Sequence[str] = (),
        settings: Mapping[str, object] | None = None,
        configuration: str = "",
    ) -> None:
        """``budget`` is that of [caps], in watts; 0 imposes none. The rest is the agent's."""
        http, grpc, metrics = free_ports(3)
        self.caps = {
            "caps.users": f'["{TUNER}", "{OTHER}"]',
            "caps.budget_watts": budget,
            "caps.lease": lease,
            "caps.largest_step": 1.0,
            "autotune.knobs": '["gpu_power", "cpu_power"]',
        }
        self.sizes: SizeWatch | None = None
        super().__init__(
            within=within,
            jobs=False,
            configuration=configuration,
            settings={
                "spans.http": f"127.0.0.1:{http}",
                "spans.grpc": f"127.0.0.1:{grpc}",
                "exporters.prometheus.listen": f"127.0.0.1:{metrics}",
                "caps.capper": "false",
                **self.caps,
                **(settings or {}),
            },
        )
        try:
            for folder in (self.folder, self.run):
                folder.chmod(0o755)
            self.tcp, self.unix = f"tcp:127.0.0.1:{http}", f"unix:{self.run}/otlp.sock"
            self.grpc = f"tcp:127.0.0.1:{grpc}"
            self.grpc_unix = f"unix:{self.run}/otlp-grpc.sock"
            self.metrics = f"tcp:127.0.0.1:{metrics}"
            self.api, self.feed = f"unix:{self.run}/api.sock", f"unix:{self.run}/feed.sock"
            self.capper_socket = self.run / "capper.sock"
            self.limits = Limits(self.host.directory)
            self.capper = self.start_capper()
            self.until(self.capper_answers, "the capper", 30)
            self.other = OtherUser(self, pace)
            self.until(lambda: self.other.served_since(0), "the other user is served", 30)
            if self.memory.kind == "none":
                self.sizes = SizeWatch(self.memory.most)
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------------------- the capper

    def start_capper(self) -> CapperProcess:
        """Another capper on the same state, as its service manager starts it."""
        return CapperProcess(
            self.host,
            self.folder,
            sockets=self.run,
            **{key.replace(".", "__"): value for key, value in self.caps.items()},
        )

    def capper_answers(self) -> bool:
        if self.capper.process.poll() is not None:
            raise RuntimeError(f"the capper has ended: {self.capper.said[-2000:]}")
        return bool(self.capper.rows())

    def stop_post(self, within: float = 60.0) -> subprocess.CompletedProcess[str]:
        """ExecStopPost of the unit: its ExecStopPost, on the emulated host."""
        found = re.search(
            r"^ExecStopPost=[^/]*/usr/bin/wattspan (.*)$", UNIT.read_text(), re.MULTILINE
        )
        assert found is not None
        return self.caps_command(*shlex.split(found[1]), within=within)

    def caps_command(self, *words: str, within: float = 60.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*PROGRAM, *words, *self.capper.words],
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            check=False,
            timeout=within,
            cwd="/",
        )

    def original(self) -> bool:
        return not self.limits.turned()

    # --------------------------------------------------------------------------------- the agent

    def serves(self, since: float) -> bool:
        """True if everything was served since a moment, and a snapshot is newer than it."""
        return self.alive and self.other.served_since(since) and self.shows(since)

    def shows(self, since: float) -> bool:
        return self.watcher.last is not None and self.mono_of(self.last) > since * 1e9

    def recovers(self, within: float = LIVELY) -> bool:
        """True if the agent serves everybody, and its figures advance, within some seconds."""
        since = time.monotonic()
        with contextlib.suppress(TimeoutError):
            return (
                self.until(lambda: self.serves(since) or not self.alive, "", within) and self.alive
            )
        return False

    def start_anew(self) -> None:
        """Kill the rest of the agent and restart it on its state."""
        with contextlib.suppress(ProcessLookupError):
            self.agent.send_signal(signal.SIGKILL)
        self.agent.wait(30)
        for _ in range(3):  # the port of an agent that was just killed may be taken for a moment
            try:
                self.begin_again()
            except RuntimeError:
                time.sleep(1.0)
            else:
                break
        if not self.recovers(60):
            raise RuntimeError(f"an agent that was started anew does not serve: {self.said}")

    def kills(self) -> int:
        """Number of times the agent was killed for memory."""
        return self.memory.kills() + (self.sizes.kills if self.sizes is not None else 0)

    @property
    def limited_by(self) -> str:
        """Mechanism of the memory limit."""
        return self.memory.kind if self.sizes is None else "a watch on its resident size"

    def size(self) -> int:
        """Resident bytes of the agent; 0 once it has ended."""
        try:
            return resident(self.agent.pid)
        except (OSError, KeyError):
            return 0

    def peak_size(self) -> int:
        """The most resident bytes since ``forget_peak``."""
        try:
            return resident(self.agent.pid, "VmHWM")
        except (OSError, KeyError):
            return 0

    def forget_peak(self) -> None:
        reset_peak(self.agent.pid)
        if self.sizes is not None:
            self.sizes.follow(self.agent.pid)

    def close(self) -> None:
        for part in ("other", "limits", "sizes"):
            if (one := getattr(self, part, None)) is not None:
                one.close()
        if hasattr(self, "capper"):
            self.capper.close()
        super().close()


class Sampler:
    """Reads all limits in force many times a second."""

    def __init__(self, limits: Limits, rate: float = 100.0) -> None:
        self._limits, self._every = limits, 1 / rate
        self.samples: list[Sample] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self._every):
            with contextlib.suppress(ValueError):  # a limit that is being written is an empty file
                self.samples.append(Sample(time.monotonic(), self._limits.watts()))


@contextmanager
def sampling(limits: Limits) -> Iterator[Sampler]:
    with closing(Sampler(limits)) as sampler:
        yield sampler


def tuner(stage: HostileStage, watts: dict[str, int]) -> Actor:
    """A process of the tuner's user that holds caps; ``watts`` are by knob and device."""
    return Actor(TUNER, "hold", socket_path=str(stage.capper_socket), watts=watts)


def lower_caps(stage: HostileStage) -> dict[str, int]:
    """A cap at seven tenths of the default for each GPU and package."""
    return {
        f"{row.state.key.knob} {row.state.key.device}": round((row.state.default or 0) * 0.7 / 1000)
        for row in stage.capper.rows()
        if str(row.state.key.knob) in {"gpu_power", "cpu_power"}
    }
