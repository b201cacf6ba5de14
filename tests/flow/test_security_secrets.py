"""No output or file of an agent holds a command line or an environment.

Not even with script names enabled: those stand among secrets.
"""

from __future__ import annotations

import gzip
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
from testbed.collector import HttpCollector
from testbed.program import Running, wattspan
from testbed.waiting import eventually

ARGUMENT, VARIABLE = "s3cret-of-the-command-line", "s3cret-of-the-environment"
NAME = "keeper-of-it"
WORK = "import time\nwhile True:\n    sum(range(20000))\n    time.sleep(0.02)\n"
BUSY = f"open('/proc/self/comm', 'w').write({NAME!r})\n{WORK}"


FORMS = {
    "train.py": [sys.executable, "-I", "-X", ARGUMENT, "{folder}/train.py", f"--key={ARGUMENT}"],
    "-m trainer": [sys.executable, f"-X{ARGUMENT}", "-m", "trainer", ARGUMENT],
    "-c": [sys.executable, "-Ic", f"{WORK}# {ARGUMENT}", ARGUMENT],
    "job.sh": ["sh", "-o", "noglob", "{folder}/job.sh", ARGUMENT],
}
"""Published part of a command line besides the interpreter, with script names enabled."""


@contextmanager
def running(folder: Path, command: list[str]) -> Iterator[int]:
    """A working process that received secrets at its start."""
    words = [word.format(folder=folder) for word in command]
    environ = {**os.environ, "API_TOKEN": VARIABLE, "PYTHONPATH": str(folder)}
    with subprocess.Popen(words, env=environ) as process:
        try:
            yield process.pid
        finally:
            process.kill()


@contextmanager
def keeper() -> Iterator[int]:
    """One of them that has chosen a name for itself."""
    command = [sys.executable, "-I", "-c", BUSY, f"--password={ARGUMENT}"]
    with running(Path("/"), command) as pid:
        yield pid


@contextmanager
def interpreters(folder: Path) -> Iterator[dict[str, str]]:
    """A process of each form, and its name with script names enabled."""
    for name in ("train.py", "trainer.py"):
        (folder / name).write_text(WORK)
    (folder / "job.sh").write_text("while :; do sleep 0.02; done\n")
    with ExitStack() as stack:
        for command in FORMS.values():
            stack.enter_context(running(folder, command))
        yield {form: f"{Path(command[0]).name} {form}" for form, command in FORMS.items()}


def asked(sock: Path, target: str) -> bytes:
    with closing(socket.socket(socket.AF_UNIX)) as one:
        one.settimeout(20)
        one.connect(str(sock))
        one.sendall(f"GET {target} HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n".encode())
        # The agent may acknowledge a query that waits for others.
        return one.makefile("rb").read().removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")


def kept_in(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in folder.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            yield str(path), content
            if path.suffix == ".gz":
                yield f"{path}, decompressed", gzip.decompress(content)


@pytest.mark.parametrize("names", ["command", "script"])
def test_command_lines_and_environments_are_never_published(tmp_path: Path, names: str) -> None:
    files = tmp_path / "files"
    with HttpCollector() as collector, keeper() as pid, interpreters(tmp_path) as scripts:
        settings = {
            "agent__log_level": "debug",
            "store__interval": "1s",
            "exporters__files__directory": files,
            "exporters__files__interval": "500ms",
            "exporters__otlp__endpoint": collector.url,
            "exporters__otlp__interval": "1s",
            "autotune__mode": "advise",
            "processes__names": names,
            "processes__top": 1000,
        }
        with Running(tmp_path, **settings) as agent:
            agent.measuring()
            eventually(lambda: NAME in agent.scrape(), "the process is charged")
            eventually(lambda: NAME.encode() in b"".join(bodies(collector)), "it is pushed")
            if names == "script":
                for name in scripts.values():
                    told_of = f'command="{name}"'
                    eventually(lambda told_of=told_of: told_of in agent.scrape(), told_of)
            told = {"/metrics": agent.scrape().encode()}
            base = agent.address().removesuffix("/metrics")
            for path in ("/", "/live.json", "/healthz"):
                with urllib.request.urlopen(base + path, timeout=20) as answer:
                    told[path] = answer.read()
            sock = agent.run_dir / "api.sock"
            for target in ("/v1/status", "/v1/tuning", f"/v1/energy?start=-1s&pid={pid}&family=1"):
                told[target] = asked(sock, target)
                assert told[target].startswith(b"HTTP/1.1 200"), told[target]
            top = wattspan("top", "--once", "--address", agent.address())
            told["top"] = (top.stdout + top.stderr).encode()
            assert agent.end() == 0
            told["the log"] = agent.said.encode()
            state = agent.state_dir
        report = wattspan("report", "--json", "--set", f"agent.state_dir={state}")
        told["report"] = (report.stdout + report.stderr).encode()
        for number, body in enumerate(bodies(collector)):
            told[f"push {number}"] = body
    told |= dict(kept_in(state)) | dict(kept_in(files))
    assert NAME.encode() in told["/metrics"]
    for form in ("train.py", "-m trainer", "job.sh"):
        assert (form.encode() in told["/metrics"]) == (names == "script")
    assert any(NAME.encode() in content for where, content in told.items() if str(files) in where)
    for where, content in told.items():
        for secret in (ARGUMENT, VARIABLE):
            assert secret.encode() not in content, f"{where} tells a secret of another process"


def bodies(collector: HttpCollector) -> list[bytes]:
    return [one.message.SerializeToString() for one in list(collector.seen)]


def test_secret_fixture_process_runs() -> None:
    """The search finds the secrets in the places that hold them."""
    with keeper() as pid:
        line = Path(f"/proc/{pid}/cmdline")
        eventually(lambda: ARGUMENT.encode() in line.read_bytes(), "it has begun")
        assert VARIABLE.encode() in Path(f"/proc/{pid}/environ").read_bytes()
