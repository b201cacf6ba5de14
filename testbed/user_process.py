"""A process of another user, in a cgroup of its own if wished, that does what a test asks of it.

It speaks to the agent by hand: it sends spans, announces span ids, queries, and hands connections
on. One question and one answer a line.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from testbed.otlp import Value, attribute
from testbed.requirements import ROOT
from testbed.span_senders import ByHand, UnixConnection, made, post
from wattspan.emulation.control import Closeable
from wattspan.sdk.ring import STARTED

ATTACKER, VICTIM = 20_001, 20_004
"""Users of tests that attack and are attacked."""

Told = tuple[str, int, int, str]
"""A span: its name, its start and end in Unix nanoseconds, its id in hexadecimal digits."""

Question = tuple[str, Mapping[str, object]]
"""The name of a method of `_Answers`, and its arguments."""

_LIBC = ctypes.CDLL(None)
_CROWD_RATE = 100  # forks a second


class UserProcess(Closeable):
    """Such a process, from its starter's side. ``cgroups`` are directories that it joins first."""

    def __init__(self, user: int, run_dir: Path, cgroups: Sequence[Path] = ()) -> None:
        self.user, self._run_dir = user, str(run_dir)
        words = [sys.executable, "-m", "testbed.user_process", str(user), *map(str, cgroups)]
        self._process = subprocess.Popen(
            words,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        self.ask("ready")

    def ask(self, question: str, **details: object) -> Any:
        """The answer to a question, a method of `_Answers`."""
        self._process.stdin.write(json.dumps([question, details]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the process of user {self.user} has ended at {question!r}"
        return json.loads(line)

    @property
    def otlp(self) -> str:
        """The path of the socket for spans."""
        return f"{self._run_dir}/otlp.sock"

    def send(
        self,
        spans: Sequence[Told],
        service: str,
        to: str = "",
        *,
        attributes: Mapping[str, Value] | None = None,
        **resource: str | int,
    ) -> int:
        """Send spans, on one connection for each address; the status of the answer.

        ``to`` is HOST:PORT, or empty for the Unix socket. All spans have the ``attributes``.
        """
        details = {"spans": spans, "service": service, "resource": resource}
        return int(self.ask("send", to=to or self.otlp, attributes=attributes or {}, **details))

    def announce(self, ids: Sequence[str], at: int | None = None) -> None:
        """Announce the start of spans, on one ring of the process."""
        self.ask("announce", run_dir=self._run_dir, ids=ids, at=at or time.monotonic_ns())

    def query(self, target: str, body: Mapping[str, object] | None = None) -> tuple[int, Any]:
        """Status and answer of a query to ``api.sock``; one with a ``body`` is posted."""
        path = f"{self._run_dir}/api.sock"
        status, answer = self.ask("query", path=path, target=target, body=body)
        return int(status), answer

    def crowd(
        self, count: int, *questions: Question, containers: Sequence[Sequence[Path]] = ()
    ) -> None:
        """Fork processes that answer questions, and live as long as this one.

        Each joins the cgroups of the container at its turn first, and becomes the attacker's user,
        if there are any; the process is root's then.
        """
        paths = [list(map(str, each)) for each in containers]
        self.ask("crowd", count=count, questions=questions, containers=paths)

    def close(self) -> None:
        self._process.kill()
        self._process.stdin.close()
        self._process.stdout.read()  # until those that it forked have ended too
        self._process.stdout.close()
        self._process.wait()


class _Answers:
    """The process's side."""

    def __init__(self) -> None:
        self._connections: dict[str, http.client.HTTPConnection] = {}
        self._ring: ByHand | None = None

    def ready(self) -> bool:
        return True

    def burn(self, seconds: float) -> float:
        """Use a CPU."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            pass
        return seconds

    def rest(self, seconds: float) -> float:
        """Use no CPU."""
        threading.Event().wait(seconds)
        return seconds

    def send(
        self,
        to: str,
        spans: Sequence[Told],
        service: str,
        resource: dict[str, str | int],
        attributes: dict[str, Value] | None = None,
    ) -> int:
        whole = [made(name, start, end, id=bytes.fromhex(id)) for name, start, end, id in spans]
        for one in whole:
            for name, value in (attributes or {}).items():
                attribute(one, name, value)
        return post(self._connection(to), whole, service, **resource).status

    def announce(self, run_dir: str, ids: Sequence[str], at: int) -> int:
        if self._ring is None:
            self._ring = ByHand(Path(run_dir))
        self._ring.write([(int(one, 16), 0, at, 0, os.getpid(), STARTED) for one in ids])
        return len(ids)

    def flood(self, run_dir: str, count: int) -> int:
        """Announce so many spans that never end."""
        if self._ring is None:
            self._ring = ByHand(Path(run_dir))
        self._ring.flood(time.monotonic_ns(), count)
        return count

    def query(
        self, path: str, target: str, body: dict[str, object] | None = None
    ) -> tuple[int, Any]:
        connection = self._connection(path)
        if body is None:
            connection.request("GET", target)
        else:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", target, json.dumps(body), headers)
        answer = connection.getresponse()
        body = answer.read().decode()
        return answer.status, json.loads(body) if body.startswith("{") else body

    def crowd(
        self, count: int, questions: Sequence[Question], containers: Sequence[Sequence[str]]
    ) -> int:
        ready, done = os.pipe()
        began, parent = time.monotonic(), os.getpid()
        for number in range(count):
            if not os.fork():
                if containers:
                    _join(containers[number % len(containers)])
                    _become(ATTACKER)
                _end_with(parent)  # a change of the user would revoke it
                with contextlib.suppress(OSError, http.client.HTTPException):  # no place for it
                    answers = _Answers()
                    for question, details in questions:
                        getattr(answers, question)(**details)
                os.write(done, b".")
                signal.pause()
            threading.Event().wait(max(0.0, began + number / _CROWD_RATE - time.monotonic()))
        os.close(done)
        for _ in range(count):
            assert os.read(ready, 1), "all processes of the crowd have ended"
        return count

    def connect(self, to: str) -> bool:
        """Open a connection; it becomes the one for an address."""
        self._connection(to).connect()
        return True

    def exec(self, program: str) -> bool:
        """Execute a program; a forked accomplice answers from now on, on the same connections."""
        for one in self._connections.values():
            if one.sock is not None:
                one.sock.set_inheritable(True)
        if os.fork():
            os.execv(program, [program, "600"])
        return True

    def give(self, to: str, at: str) -> bool:
        """Pass the connection for an address to the process that waits at an address."""
        connection = self._connections.pop(to)
        with socket.socket(socket.AF_UNIX) as one:
            one.connect(at)
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [connection.sock.fileno()]))
            one.sendmsg([b"."], [rights])
        return True

    def wait_at(self, at: str) -> bool:
        """Wait at an address for a connection, which ``take`` takes."""
        self._waiting = socket.socket(socket.AF_UNIX)
        self._waiting.bind(at)
        self._waiting.listen()
        return True

    def take(self, to: str) -> bool:
        """Take a connection that somebody passed as the one for an address."""
        one, _ = self._waiting.accept()
        with one:
            _, descriptors, _, _ = socket.recv_fds(one, 1, 1)
        connection = UnixConnection(Path(to))
        connection.sock = socket.socket(fileno=descriptors[0])
        connection.sock.settimeout(20)
        self._connections[to] = connection
        return True

    def _connection(self, to: str) -> http.client.HTTPConnection:
        if to not in self._connections:
            tcp = re.fullmatch(r"([^/]*):(\d+)", to)
            self._connections[to] = (
                http.client.HTTPConnection(tcp[1], int(tcp[2]), timeout=20)
                if tcp
                else UnixConnection(Path(to))
            )
        return self._connections[to]


def _end_with(parent: int) -> None:
    """End this process with its parent."""
    _LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(0)


def _join(cgroups: Sequence[str]) -> None:
    for one in cgroups:
        Path(one, "cgroup.procs").write_text(str(os.getpid()))


def _become(user: int) -> None:
    if user != os.geteuid():
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)


def main() -> None:
    user, cgroups = int(sys.argv[1]), sys.argv[2:]
    _join(cgroups)
    "localhost".encode("idna")  # another user may not be able to read Python's own modules
    _become(user)
    answers = _Answers()
    while line := sys.stdin.readline():
        question, details = json.loads(line)
        print(json.dumps(getattr(answers, question)(**details)), flush=True)


if __name__ == "__main__":
    main()
