"""Another local user that occupies every available resource of a listener."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

CONNECT = """
import socket, sys
def connect(where):
    if where.startswith("/"):
        one = socket.socket(socket.AF_UNIX)
        one.connect(where)
        return one
    host, _, port = where.rpartition(":")
    return socket.create_connection((host, int(port)))
def told(text):
    if text.startswith("@"):
        with open(text[1:], "rb") as file:
            return file.read()
    return text.encode()
"""

GREEDY = (
    CONNECT
    + """
path, many, first = sys.argv[1], int(sys.argv[2]), told(sys.argv[3])
held = []
for _ in range(many):
    try:
        one = connect(path)
        one.sendall(first)
    except OSError:
        pass
    held.append(one)
print("held", flush=True)
sys.stdin.read()
"""
)

ASKING = (
    CONNECT
    + """
one = connect(sys.argv[1])
one.settimeout(20)
one.sendall(told(sys.argv[2]))
one.shutdown(socket.SHUT_WR)
print(one.makefile("rb").read().decode("latin-1"))
"""
)

PYTHON = Path(sys.base_prefix) / "bin" / "python3"


def as_user(uid: int) -> list[str]:
    """Run a command as ``uid`` without groups or capabilities of root."""
    return ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--inh-caps=-all"]


def interpreter() -> list[str]:
    """A Python that every user may run."""
    system = Path("/usr/bin/python3")
    return [str(system if system.exists() else PYTHON), "-I", "-c"]


@contextmanager
def greedy(uid: int, path: Path | str, many: int, first: str) -> Iterator[None]:
    """``uid`` holds ``many`` connections, on each of which it has sent ``first``.

    ``path`` is a Unix socket or ``HOST:PORT``; ``first`` is the data to send, or ``@`` and a file.
    """
    with holding([*as_user(uid), *interpreter(), GREEDY, str(path), str(many), first]):
        yield


@contextmanager
def holding(command: Sequence[str]) -> Iterator[None]:
    """``command`` runs, and has printed that it holds the resources that it was started for."""
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/"
    ) as process:
        try:
            assert process.stdout.readline() == "held\n"
            yield
        finally:
            process.kill()


def asks(uid: int, path: Path | str, request: str) -> str:
    """Responses to ``uid`` after an acknowledgement; the arguments are those of ``greedy``."""
    done = subprocess.run(
        [*as_user(uid), *interpreter(), ASKING, str(path), request],
        capture_output=True, text=True, check=False, timeout=60, cwd="/",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.removeprefix("HTTP/1.1 100 Continue\n\n")
