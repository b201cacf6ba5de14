"""`wattspan top` against a real exporter, as a person and as a program run it."""

import contextlib
import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator

import pytest
from testbed.exporting import Served, serving
from testbed.reserved_port import reserved_port
from testbed.snapshots import busy_host
from testbed.waiting import eventually

from wattspan.model import Provenance

PROGRAM = [sys.executable, "-c", "from wattspan.cli import main; main()", "top"]
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("WATTSPAN_")}
ENVIRONMENT |= {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"}


def top(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *arguments],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.fixture
def agent() -> Iterator[Served]:
    with serving() as served:
        served.snapshot = busy_host(Provenance.EMULATED)
        yield served


def test_one_view_of_a_running_agent(agent: Served) -> None:
    done = top("--once", "--interval", "10ms", "--address", f"127.0.0.1:{agent.port}")
    assert done.returncode == 0, done.stderr
    for text in ("node7", "EMULATED HOST", "package-0-core *", "tritonserver", "H100"):
        assert text in done.stdout
    assert "\x1b" not in done.stdout


def test_sort_filter_and_by_select_the_rows(agent: Served) -> None:
    done = top(
        "--once", "--interval", "10ms", "--by", "group", "--sort", "name", "--filter", "e",
        "--address", f"http://127.0.0.1:{agent.port}/metrics",
    )  # fmt: skip
    rows = [line.split()[0] for line in done.stdout.splitlines() if " container" in line]
    assert rows == ["serving", "trainer-7f9c"]
    assert "DEVICE" not in done.stdout


def test_programs_get_json(agent: Served) -> None:
    done = top("--json", "--interval", "10ms", "--address", f"127.0.0.1:{agent.port}")
    told = json.loads(done.stdout)
    assert (told["host_name"], told["emulated"]) == ("node7", True)
    assert {row["pid"] for row in told["processes"]} >= {4123, 4180}


def test_top_without_an_agent_is_a_one_line_error() -> None:
    with reserved_port() as port:
        done = top("--once", "--address", f"127.0.0.1:{port}")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"wattspan: Cannot read http://127.0.0.1:{port}/v1/snapshot: connection refused. "
        "Start the agent with `wattspan run`, or name the address of a running one: --address.\n"
    )


@pytest.mark.parametrize(
    "address", ["", "no such host", "http://[::1", "ftp://x", "host:port", "http://x\ny"]
)
def test_address_that_cannot_be_is_one_sentence_too(address: str) -> None:
    done = top("--once", "--address", address)
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("wattspan: Cannot read ")
    assert "Traceback" not in done.stderr


def test_top_address_comes_from_the_configuration(agent: Served) -> None:
    done = top(
        "--once", "--interval", "10ms", "--set", f"exporters.prometheus.listen=:{agent.port}"
    )
    assert "tritonserver" in done.stdout, done.stderr


def test_top_on_a_terminal_runs_until_q(agent: Served) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*PROGRAM, "--address", f"127.0.0.1:{agent.port}"],
        env=ENVIRONMENT, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    seen = bytearray()

    def see(text: bytes) -> bool:
        with contextlib.suppress(OSError):  # Linux says so that the other end is closed
            seen.extend(os.read(ours, 65536))
        return text in seen

    try:
        eventually(lambda: see(b"tritonserver"), "the first view")
        assert b"\x1b[?1049h" in seen
        os.write(ours, b"s")
        eventually(lambda: see(b"s joules"), "the view after a key")
        os.write(ours, b"q")
        eventually(lambda: see(b"\x1b[?1049l"), "the screen given back")
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
