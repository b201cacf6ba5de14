"""Descriptors and memory that run out."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import resource
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import psutil
from testbed.descriptors import drop_process_events, forbid_descriptors, permit_descriptors
from testbed.faults.memory_limit import MEMORY_MAX, MemoryLimit, resident
from testbed.faults.observation import NANO
from testbed.faults.schedule import Claim, Fault, Sign
from testbed.faults.stage import Stage

from wattspan.api.snapshot_document import ListedProcess, SnapshotDocument, decode_snapshot


def flood(stage: Stage, seconds: float, senders: int = 4, spans: int = 5_000) -> dict[str, int]:
    """Send as many spans as are taken, from several connections; the answers by status."""
    found = re.search(r"Serving http://(\S+)/v1/traces", stage.said)
    assert found is not None
    answers: Counter[str] = Counter()
    until = time.monotonic() + seconds
    body = _spans(spans)

    def send() -> None:
        while time.monotonic() < until:
            try:
                with contextlib.closing(
                    http.client.HTTPConnection(found[1], timeout=5)
                ) as connection:
                    while time.monotonic() < until:
                        headers = {"Content-Type": "application/json"}
                        connection.request("POST", "/v1/traces", body, headers)
                        answer = connection.getresponse()
                        answer.read()
                        answers[str(answer.status)] += 1
            except (OSError, http.client.HTTPException) as error:
                answers[type(error).__name__] += 1
                time.sleep(0.05)

    threads = [threading.Thread(target=send) for _ in range(senders)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return dict(answers)


def _spans(count: int) -> bytes:
    now = time.time_ns()
    spans = [
        {
            "traceId": os.urandom(16).hex(),
            "spanId": os.urandom(8).hex(),
            "name": f"flood {n}",
            "kind": 1,
            "startTimeUnixNano": str(now - 10**9),
            "endTimeUnixNano": str(now),
            "attributes": [{"key": "padding", "value": {"stringValue": "x" * 100}}],
        }
        for n in range(count)
    ]
    service = {"key": "service.name", "value": {"stringValue": "flood"}}
    told = {"resource": {"attributes": [service]}, "scopeSpans": [{"spans": spans}]}
    return json.dumps({"resourceSpans": [told]}).encode()


# --------------------------------------------------------------------------------- descriptors


def no_descriptors() -> Fault:
    """The agent may open nothing, while clients ask for connections.

    The kernel drops events of processes, so that the agent has to look for each of them.
    """
    used: dict[str, float] = {}
    api = http.client.HTTPConnection("localhost")
    living: set[tuple[int | None, int | None]] = set()

    def key(one: ListedProcess) -> tuple[int | None, int | None]:
        return one.pid, one.started

    def spent(stage: Stage) -> float:
        return sum(psutil.Process(stage.agent.pid).cpu_times()[:2])

    def ask() -> SnapshotDocument:
        api.request("GET", "/v1/snapshot")
        return decode_snapshot(api.getresponse().read())

    def settled(since: float) -> SnapshotDocument | None:
        document = ask()
        return document if document.at_mono_ns > since * NANO else None

    def inject(stage: Stage) -> None:
        api.sock = socket.socket(socket.AF_UNIX)
        api.sock.connect(str(stage.run / "api.sock"))
        living.update(key(one) for one in ask().processes if one.alive)
        for _ in range(40):  # those of connections and files are free again when they are closed
            forbid_descriptors(stage.agent.pid)
            time.sleep(0.025)
        dropped = drop_process_events(stage.agent.pid)
        assert dropped, "the agent has no events of processes"
        used.update(began=time.monotonic(), spent=-spent(stage))

    def end(stage: Stage) -> None:
        document = stage.until(lambda: settled(used["began"] + 2), "a snapshot", 20)
        ended = [one.pid for one in document.processes if not one.alive and key(one) in living]
        used["ended"] = len([pid for pid in ended if pid is not None and psutil.pid_exists(pid)])
        told = [one.failures for one in document.sources if one.source == "processes"]
        used["told"] = "LimitNOFILE" in str(told)
        api.close()
        used["share"] = (used["spent"] + spent(stage)) / (time.monotonic() - used["began"])
        permit_descriptors(stage.agent.pid)

    return Fault(
        "no descriptors are left",
        inject,
        end,
        "Open connections continue; new ones are not served until descriptors are available.",
        claims=[
            Claim("at most half a CPU meanwhile", lambda *_: used["share"] < 0.5),
            Claim("no living process counts as ended", lambda *_: not used["ended"]),
            Claim("the failure names the limit", lambda *_: bool(used["told"])),
        ],
        unanswered="each scrape is a connection, and a connection is a descriptor",
        lasts=10.0,
        short=3.0,
        note=lambda _: f"{100 * used['share']:.0f} % of a CPU",
    )


# -------------------------------------------------------------------------------------- memory


_ENDS = (None, 1, 5, 70, -signal.SIGABRT, -signal.SIGSEGV)
"""None is an agent that went on. Where a stack's next frame gets no memory, Python 3.11 aborts
("Cannot recover from stack overflow"), and what is written in C may not look whether it got any."""


def no_more_memory() -> Fault:
    """The kernel gives the agent no more memory, and somebody floods it with spans."""
    found: dict[str, object] = {}

    def inject(stage: Stage) -> None:
        pid = stage.agent.pid
        most = resident(pid, "VmData") + (4 << 20)
        resource.prlimit(pid, resource.RLIMIT_DATA, (most, resource.RLIM_INFINITY))
        flood(stage, 4.0)

    def end(stage: Stage) -> None:
        """An agent that could not go on has ended: a service manager restarts it."""
        endless = resource.RLIM_INFINITY
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(stage.agent.pid, resource.RLIMIT_DATA, (endless, endless))
        now = time.monotonic_ns()
        with contextlib.suppress(TimeoutError):
            stage.until(lambda: not stage.alive or stage.mono_of(stage.last) > now, "a sign", 20)
        doomed = re.search(r"^wattspan: The .* failed: ", stage.said, re.MULTILINE)
        with contextlib.suppress(subprocess.TimeoutExpired):
            stage.agent.wait(30 if doomed else 1)
        found["code"] = stage.agent.poll()
        if found["code"] is not None:
            stage.begin_again()

    return Fault(
        "memory allocations fail during a flood of spans",
        inject,
        end,
        "A failed allocation fails the part that requested it; if that is the poller, the "
        "agent ends, in order or by Python's fatal error, and the service manager restarts it"
        " with the last published totals.",
        [Sign("it went on, or ended by itself", lambda *_: found.get("code", "unknown") in _ENDS)],
        lasts=0.1,
        short=0.1,
        missing=100.0,  # no measurement between two runs
        unanswered="it may end, and is started anew",
        note=lambda _: "went on" if found["code"] is None else f"exit code {found['code']}",
    )


class LimitStage(Stage):
    """A stage whose agent has, where that can be, a control group with the unit's MemoryMax."""

    def __init__(self, *, within: Sequence[str] = (), **chosen: Any) -> None:
        self.memory = MemoryLimit("wattspan-faults")
        try:
            super().__init__(within=[*self.memory.within, *within], **chosen)
        except BaseException:
            self.memory.close()
            raise

    def peak(self) -> int | None:
        """Peak memory of the group in bytes."""
        return self.memory.peak()

    def close(self) -> None:
        super().close()
        self.memory.close()


def _flooded() -> Fault:
    """A flood of spans, within the memory that the unit allows."""
    found: dict[str, int] = {}

    def inject(stage: Stage) -> None:
        found.update(flood(stage, 8.0))

    def note(stage: Stage) -> str:
        assert isinstance(stage, LimitStage)
        peak, most = stage.peak(), resident(stage.agent.pid, "VmHWM")
        group = (
            f"{peak / 1e6:.0f} MB of {MEMORY_MAX / 1e6:.0f} in its group" if peak else "no group"
        )
        return f"{most / 1e6:.0f} MB resident at the most, {group}; answers: {found}"

    return Fault(
        f"a flood of spans under a memory limit of {MEMORY_MAX >> 20} MiB",
        inject,
        lambda _: None,
        "The batches are well-formed; hostile ones take more (docs/security.md). "
        "Senders are asked to retry; no more than `spans.buffer` is kept.",
        [Sign("the flood is answered", lambda *_: bool(found))],
        lasts=0.1,
        short=0.1,
        note=note,
    )


FAULTS = [
    _flooded(),
    no_descriptors(),
    no_more_memory(),
]
