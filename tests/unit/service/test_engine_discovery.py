"""The search for serving engines, among emulated ones: real processes, pages and sockets."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner
from testbed.engine_pages import VLLM, page
from testbed.field import FOLDER, read_cases

from wattspan.cli.serving import command as serving
from wattspan.ports import Clock
from wattspan.service.engine_discovery import (
    Discovery,
    EngineDiscovery,
    FoundEngine,
    LeftOut,
    _assigned_ports,
    fragment,
)
from wattspan.testing import ManualClock

SERVER = """
import subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

_, port, path, status, gpu, asked, *worker = sys.argv
body = sys.stdin.buffer.read()

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        with open(asked, "a") as log:
            print(self.path, file=log)
        found = self.path == path
        self.send_response(int(status) if found else 404)
        self.end_headers()
        self.wfile.write(body if found else b"")

    def log_message(self, *_):
        pass

hold = f"import sys; gpu = open({gpu!r}); print('ready', flush=True); sys.stdin.read()"
if gpu and worker[:1] == ["child"]:
    child = subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE)
elif gpu:
    device = open(gpu)
server = HTTPServer(("127.0.0.1", int(port)), Handler)
print("ready", flush=True)
server.serve_forever()
"""


class Stage:
    """Processes that serve a page on a host whose GPUs are files."""

    def __init__(self, folder: Path, free_port: Callable[[], int]) -> None:
        self.folder, self.port = folder, free_port()
        (folder / "dev").mkdir()
        self.gpu = folder / "dev" / "nvidia0"
        self.gpu.touch()
        self.asked_log = folder / "asked"

    @contextmanager
    def engine(
        self,
        body: bytes,
        *words: str,
        path: str = "/metrics",
        status: int = 200,
        gpu: bool = True,
    ) -> Iterator[int]:
        """A process with a page, by its pid; ``words`` are further arguments of its program."""
        device = str(self.gpu) if gpu else ""
        own = str(self.port), path, str(status), device, str(self.asked_log)
        arguments = [sys.executable, "-c", SERVER, *own, *words]
        with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(body)
            process.stdin.close()
            for _ in range(1 + (words[:1] == ("child",))):
                assert process.stdout.readline() == b"ready\n"
            try:
                yield process.pid
            finally:
                process.kill()

    def discover(self) -> Discovery:
        return self.discovery().run()

    def discovery(
        self,
        assigned: range | None = range(0),  # those of tests are assigned
        clock: Clock | None = None,
    ) -> EngineDiscovery:
        return EngineDiscovery(devices=self.folder / "dev", assigned=assigned, clock=clock)

    def left_out(self) -> LeftOut:
        """The entry of its port."""
        found = self.discover()
        assert found.engines == ()
        (one,) = (each for each in found.left_out if str(self.port) in each.where)
        return one

    @property
    def asked(self) -> list[str]:
        return self.asked_log.read_text().split() if self.asked_log.exists() else []


@pytest.fixture
def stage(tmp_path: Path, free_port: Callable[[], int]) -> Stage:
    return Stage(tmp_path, free_port)


PAGE = page(VLLM, "meta-llama/Llama-3.1-8B")


def field_page(name: str) -> bytes:
    (found,) = (one["page"] for one in read_cases(FOLDER / "engine_pages") if one.id == name)
    return bytes(found, "utf-8")


def test_engine_with_a_gpu_is_found(stage: Stage) -> None:
    with stage.engine(PAGE) as pid:
        found = stage.discover().engines
    url = f"http://127.0.0.1:{stage.port}"
    assert found == (FoundEngine(url, "vllm", pid, frozenset({"meta-llama/Llama-3.1-8B"})),)
    assert stage.asked == ["/metrics"]


def test_engine_whose_worker_has_the_gpu_is_found(stage: Stage) -> None:
    with stage.engine(PAGE, "child") as pid:
        (found,) = stage.discover().engines
    assert found.pid == pid


def test_listener_without_a_gpu_is_not_asked(stage: Stage) -> None:
    with stage.engine(PAGE, gpu=False):
        one = stage.left_out()
    assert "no GPU open" in one.cause
    assert stage.asked == []


def test_page_of_tensorrt_llm_that_is_emptied_when_read_is_not_asked(stage: Stage) -> None:
    with stage.engine(field_page("tensorrt-llm-json"), "trtllm-serve"):
        one = stage.left_out()
    assert stage.asked == ["/prometheus/metrics"]
    assert "return_perf_metrics" in one.remedy


def test_prometheus_page_of_tensorrt_llm_is_found(stage: Stage) -> None:
    with stage.engine(field_page("tensorrt-llm"), "trtllm-serve", path="/prometheus/metrics"):
        (found,) = stage.discover().engines
    assert found.kind == "tensorrt-llm"
    assert stage.asked == ["/prometheus/metrics"]


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (("sglang.launch_server",), "Start sglang with `--enable-metrics`."),
        (("llama-server",), "Start llama.cpp with `--metrics`."),
        (("ollama",), "Ollama has none: have its requests sent as spans."),
        ((), "If it is an engine, switch its metrics on."),
    ],
)
def test_engine_without_a_page_is_told_with_its_switch(
    stage: Stage, words: tuple[str, ...], remedy: str
) -> None:
    with stage.engine(b"", *words, status=404):
        one = stage.left_out()
    assert one.cause == "it answers 404 at /metrics"
    assert one.remedy == remedy
    assert str(one).endswith(remedy)


@pytest.mark.parametrize(
    ("body", "status", "cause"),
    [
        (b"up 1\n", 200, "its page at /metrics is no engine's: "),
        (b"<html>", 200, "it has no Prometheus page at /metrics"),
        (b"", 401, "it answers 401 at /metrics"),
        (field_page("mlx-serve"), 200, "its page at /metrics is no engine's: "),
    ],
)
def test_page_that_is_no_engines_is_left_out(
    stage: Stage, body: bytes, status: int, cause: str
) -> None:
    with stage.engine(body, status=status):
        one = stage.left_out()
    assert one.cause.startswith(cause)


def test_listener_that_speaks_no_http_is_left_out(stage: Stage) -> None:
    program = (
        "import socket, sys\n"
        f"device = open({str(stage.gpu)!r})\n"
        f"server = socket.create_server(('127.0.0.1', {stage.port}))\n"
        "print('ready', flush=True)\n"
        "while True: server.accept()[0].close()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        one = stage.left_out()
        process.kill()
    assert "does not answer by HTTP" in one.cause


def test_assigned_port_is_asked_only_if_the_program_is_an_engine(stage: Stage) -> None:
    assigned = range(stage.port, stage.port + 1)
    with stage.engine(PAGE):
        found = stage.discovery(assigned).run()
    (one,) = (each for each in found.left_out if str(stage.port) in each.where)
    assert "the kernel has assigned its port" in one.cause
    assert stage.asked == []
    with stage.engine(PAGE, "vllm"):
        (engine,) = stage.discovery(assigned).run().engines
    assert engine.kind == "vllm"


def test_ports_that_the_kernel_assigns_are_those_of_procfs(tmp_path: Path) -> None:
    assert 40_000 in _assigned_ports(tmp_path)
    folder = tmp_path / "sys" / "net" / "ipv4"
    folder.mkdir(parents=True)
    (folder / "ip_local_port_range").write_text("50000\t50001\n")
    assert list(_assigned_ports(tmp_path)) == [50_000, 50_001]


def test_listeners_beyond_the_time_of_the_run_are_told(stage: Stage) -> None:

    class LateClock(ManualClock):
        def monotonic(self) -> int:
            return self.advance(60).mono

    with stage.engine(PAGE):
        found = stage.discovery(clock=LateClock()).run()
    assert found.engines == ()
    assert any(str(stage.port) in one.where and "for 60 s" in one.cause for one in found.left_out)
    assert stage.asked == []


def test_listeners_of_a_service_beyond_the_limit_are_told(stage: Stage) -> None:
    program = (
        "import socket, sys\n"
        f"device = open({str(stage.gpu)!r})\n"
        "made = [socket.create_server(('127.0.0.1', 0)) for _ in range(20)]\n"
        "print(*(one.getsockname()[1] for one in made), flush=True)\n"
        "while True:\n"
        "    for one in made:\n"
        "        one.settimeout(0.02)\n"
        "        try: one.accept()[0].close()\n"
        "        except OSError: pass\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        ports = process.stdout.readline().decode().split()
        found = stage.discover()
        process.kill()
    (omitted,) = (one for one in found.left_out if "only 16 listeners" in one.cause)
    assert sum(port in omitted.where for port in ports) == 4


def test_fragment_is_configuration_without_control_characters() -> None:
    engine = FoundEngine("http://127.0.0.1:8000", "vllm", 7, frozenset({"a\nb", "c"}))
    assert fragment(engine) == (
        '# process 7, a?b, c\n[[serving.engine]]\nurl = "http://127.0.0.1:8000"\nkind = "vllm"'
    )


# ------------------------------------------------------------------------- other hosts' processes

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid inode\n"


def listening(address: str, inode: int, state: str = "0A") -> str:
    return f"   0: {address} 00000000:0000 {state} 00000000:00000000 00:0 00000000 0 0 {inode} 1\n"


def emulated_proc(folder: Path) -> Path:
    """A procfs with the network tables of the host and of a container with a GPU."""
    root = folder / "proc"
    tables = {
        "self": listening("0100007F:1F90", 11) + listening("00000000:1F91", 12, "01"),
        "42": listening("00000000:1F92", 13),
    }
    for process, lines in tables.items():
        (root / process / "net").mkdir(parents=True)
        (root / process / "net" / "tcp").write_text(HEAD + lines)
        (root / process / "ns").mkdir()
        (root / process / "ns" / "net").symlink_to(f"net:[{process}]")
    (root / "42" / "fd").mkdir()
    (root / "42" / "fd" / "3").symlink_to(folder / "dev" / "nvidia0")
    (root / "42" / "cgroup").write_text("0::/container\n")
    fields = " ".join(["0"] * 40)
    (root / "42" / "stat").write_text(f"42 (python3) S 1 42 42 {fields}\n")
    (root / "42" / "status").write_text("Name:\tpython3\nTgid:\t42\nUid:\t9\t9\t9\t9\nNSpid:\t42\n")
    return root


def test_listeners_of_others_and_of_containers_are_told(tmp_path: Path) -> None:
    found = EngineDiscovery(emulated_proc(tmp_path), tmp_path / "dev").run()
    container, hidden = found.left_out
    assert container.where == "port 8082"
    assert "network namespace of process 42" in container.cause
    assert "`process`" in container.remedy
    assert hidden.where == "port 8080"
    assert "root" in hidden.remedy
    assert found.engines == ()


def test_command_prints_engines_and_fails_without_one() -> None:
    result = CliRunner().invoke(serving, ["discover"])
    assert result.exit_code == ("[[serving.engine]]" not in result.stdout)
    assert ("No serving engine was found." in result.stderr) == (result.exit_code == 1)
