"""A server whose setting follows its load: real announced spans, on an emulated board.

The server's requests take a fixed time, so that only the machine's own delays can exceed the limits
of seconds. A capper writes the limits, or locks the clock, of a board that outlives the agent.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pynvml import NVML_CLOCK_SM
from testbed.program import wattspan
from testbed.tuned_stack import ORIGINAL, Tuned, TunedHost, stack_config

from wattspan.emulation.boards import H100
from wattspan.emulation.control import EmulatedGpu

pytestmark = [pytest.mark.exhaustive, pytest.mark.long]

JOB = "llm/chat"
CONFIG = stack_config(
    """\
dwell = "3s"
[[autotune.job]]
service = "llm"
span = "chat"
kind = "requests"
control = "track"
slo = {{ttft_p90 = "20s", tbt_p90 = "20s"}}
period = "1s"
ttft = "event:first_token"
tbt = "span:decode"
""",
    http="127.0.0.1:0",
)
CLOCK_CONFIG = CONFIG.replace('["gpu_power"]', '["gpu_clock"]')
FASTEST, LOWEST = H100.silicon.max_mhz, H100.silicon.max_mhz // 2  # MHz; half of it is `floor`
SERVER = """
import sys, threading, time
from pathlib import Path
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
import wattspan.otel
from wattspan.emulation.control import EmulatedGpu

provider = TracerProvider(resource=Resource({"service.name": "llm"}))
exporter = OTLPSpanExporter(sys.argv[2])
provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=300))
trace.set_tracer_provider(provider)
assert wattspan.otel.instrument()
tracer = trace.get_tracer("server")
board = EmulatedGpu(0, host=Path(sys.argv[1]))

def client():
    while True:
        with tracer.start_as_current_span("chat") as request, board.busy(0.02):
            request.set_attribute("gen_ai.usage.input_tokens", 100)
            request.set_attribute("gen_ai.usage.output_tokens", 20)
            time.sleep(0.05)
            request.add_event("first_token")
            with tracer.start_as_current_span("decode"):
                time.sleep(0.1)

print("ready", flush=True)
for line in sys.stdin:
    for _ in range(int(line)):
        threading.Thread(target=client, daemon=True).start()
"""

PAGE_CONFIG = stack_config(
    """\
dwell = "3s"
[[serving.engine]]
name = "llm"
url = "http://127.0.0.1:PORT"
kind = "vllm"
interval = "1s"
[[autotune.job]]
engine = "llm"
kind = "requests"
control = "track"
slo = {{ttft_p90 = "20s"}}
period = "1s"
""",
    http="127.0.0.1:0",
)
PAGE_SERVER = """
import sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from wattspan.emulation.control import EmulatedGpu

board = EmulatedGpu(0, host=Path(sys.argv[1]))
lock, running, finished = threading.Lock(), 0, 0
FIRST = "vllm:time_to_first_token_seconds"

class Page(BaseHTTPRequestHandler):
    def do_GET(self):
        with lock:
            lines = [
                "vllm:cache_config_info 1",
                f"vllm:num_requests_running {running}",
                "vllm:num_requests_waiting 0",
                f"vllm:request_success_total {finished}",
                f"vllm:prompt_tokens_total {100 * finished}",
                f"vllm:generation_tokens_total {20 * finished}",
                *(f'{FIRST}_bucket{{le="{le}"}} {finished}' for le in ("10.0", "20.0", "+Inf")),
            ]
        self.send_response(200)
        self.end_headers()
        self.wfile.write("\\n".join([*lines, ""]).encode())

    def log_message(self, *_):
        pass

def client():
    global running, finished
    while True:
        with lock:
            running += 1
        with board.busy(0.02):
            time.sleep(0.15)
        with lock:
            running, finished = running - 1, finished + 1

server = ThreadingHTTPServer(("127.0.0.1", PORT), Page)
threading.Thread(target=server.serve_forever, daemon=True).start()
print("ready", flush=True)
for line in sys.stdin:
    for _ in range(int(line)):
        threading.Thread(target=client, daemon=True).start()
"""


class Server:
    """The server's process; ``clients`` adds concurrent clients."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def clients(self, number: int) -> None:
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()

    def stop(self) -> None:
        """A hang: no request begins or ends."""
        self._process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        self._process.kill()


@contextmanager
def serving(agent: Tuned, program: str = SERVER) -> Iterator[Server]:
    process = agent.begin(program)
    try:
        yield Server(process)
    finally:
        process.kill()
        process.communicate()


class Clock:
    """The SM clock of the host's board, which is the locked one while the board is busy."""

    def __init__(self, host: TunedHost) -> None:
        self._nvml = host.emulated.nvml()
        self._nvml.nvmlInit()
        self._board = self._nvml.nvmlDeviceGetHandleByIndex(0)

    @property
    def megahertz(self) -> int:
        return int(self._nvml.nvmlDeviceGetClockInfo(self._board, NVML_CLOCK_SM))

    def locked(self) -> bool:
        return LOWEST <= self.megahertz < FASTEST

    def unlocked(self) -> bool:
        return self.megahertz == FASTEST


@contextmanager
def tracked(folder: Path) -> Iterator[tuple[TunedHost, Tuned, Server]]:
    """A server whose limit has been lowered."""
    with (
        TunedHost(trains=False) as host,
        Tuned(host, folder, config=CONFIG, job=JOB) as agent,
        serving(agent) as server,
    ):
        server.clients(6)
        agent.until(host.capped, "a lower limit is in force", within=120)
        yield host, agent, server


def test_limit_of_a_server_follows_its_load_and_ends_with_it(tmp_path: Path) -> None:
    with tracked(tmp_path) as (host, agent, server):
        agent.until(lambda: agent.told()["decision"]["move"] == "hold", "it is certified", 120)
        load = agent.told()["load"]
        assert 2 < load["load"] <= load["bin_bound"] <= 32
        first, between = load["objectives"]
        assert (first["name"], first["misses"]) == ("ttft_p90", 0)
        assert (between["name"], between["misses"]) == ("tbt_p90", 0)
        assert first["requests"] >= 30
        assert between["requests"] >= 30
        misses = agent.metrics("wattspan_autotune_slo_miss_ratio")
        assert {labels.split()[-1]: ratio for labels, ratio in misses.items()} == {
            "ttft_p90": 0.0,
            "tbt_p90": 0.0,
        }
        agent.until(lambda: agent.metrics("wattspan_autotune_load_ratio"), "a load ratio")
        status = wattspan("tune", "status", "--config", str(agent.config)).stdout
        assert "HEADROOM" in status
        server.clients(40)
        agent.until(host.restored, "a rise of the load restores the original")
        agent.until(host.capped, "a lower limit is certified at the higher load", 180)
        server.kill()
        agent.until(host.restored, "the end of the server restores the original")


def test_clock_of_a_server_follows_its_load_and_ends_with_it(tmp_path: Path) -> None:
    with (
        TunedHost(trains=False) as host,
        Tuned(host, tmp_path, config=CLOCK_CONFIG, job=JOB) as agent,
        serving(agent) as server,
    ):
        clock = Clock(host)
        server.clients(6)
        agent.until(clock.unlocked, "the board is busy at the original clock")
        agent.until(clock.locked, "a lower clock is in force", within=120)
        told = agent.told()
        assert told["knob"] == "gpu_clock"
        assert {entry["knob"] for entry in agent.journal()} == {"gpu_clock"}
        assert host.limit == ORIGINAL
        agent.until(lambda: agent.told()["decision"]["move"] == "hold", "it is certified", 120)
        server.clients(40)
        agent.until(clock.unlocked, "a rise of the load unlocks the clock")
        agent.until(clock.locked, "a lower clock is certified at the higher load", 180)
        server.kill()
        agent.until(lambda: not agent.journal(), "the end of the server unlocks the clock")
        with EmulatedGpu(0, host=host.emulated.directory) as gpu, gpu.busy(0.5):
            agent.until(clock.unlocked, "the original clock is in force")


def test_limit_of_a_hanging_server_is_restored(tmp_path: Path) -> None:
    with tracked(tmp_path) as (host, agent, server):
        server.stop()
        agent.until(host.restored, "silence restores the original")
        agent.until(lambda: agent.reason() == "paused", "the alarm is reported")


def test_limit_of_a_tracked_server_is_restored_when_the_agent_is_killed(tmp_path: Path) -> None:
    with tracked(tmp_path) as (host, agent, _):
        agent.restoring(lambda: os.kill(agent.process.pid, signal.SIGKILL))
        assert host.limit == ORIGINAL


def test_limit_of_a_server_without_spans_follows_the_page_of_its_engine(
    tmp_path: Path, free_port: Callable[[], int]
) -> None:
    port = str(free_port())
    with (
        TunedHost(trains=False) as host,
        Tuned(host, tmp_path, config=PAGE_CONFIG.replace("PORT", port), job="llm") as agent,
        serving(agent, PAGE_SERVER.replace("PORT", port)) as server,
    ):
        server.clients(6)
        agent.until(host.capped, "a lower limit is in force", within=120)
        agent.until(lambda: agent.told()["decision"]["move"] == "hold", "it is certified", 120)
        told = agent.told()
        assert "from the page of its engine" in told["decision"]["sentence"]
        assert told["load"]["objectives"][0]["misses"] == 0
        assert 2 < told["load"]["load"] <= 32
        server.clients(40)
        agent.until(host.restored, "a rise of the load restores the original")
        agent.until(host.capped, "a lower limit is certified at the higher load", 180)
        server.kill()
        agent.until(host.restored, "the end of the server restores the original")
