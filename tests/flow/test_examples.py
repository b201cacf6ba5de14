"""The applications of ``examples/``, unmodified, with a real agent on an emulated host."""

from __future__ import annotations

import csv
import http.client
import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from testbed.apps import EXAMPLES, app_environment, node_sources
from testbed.program import wattspan
from testbed.requirements import APPS
from testbed.spans.agent import SpanAgent
from testbed.waiting import eventually

pytestmark = pytest.mark.exhaustive

INSTRUMENT = str(APPS.parent / "opentelemetry-instrument")
FLASK = """
import time
from flask import Flask
app = Flask(__name__)

@app.get("/sum/<int:n>")
def total(n):
    return str(sum(i * i for i in range(n)))

@app.get("/wait")
def wait():
    time.sleep(0.1)
    return "done"
"""


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpanAgent]:
    folder = tmp_path_factory.mktemp("agent")
    known = {"processes__cpu_idle_watts": "62", "processes__memory_idle_watts": "7"}  # emulated
    with SpanAgent(folder, store__enabled="true", store__interval="1s", **known) as running:
        yield running


def three_variables(agent: SpanAgent, service: str) -> dict[str, str]:
    """All that a user of ``opentelemetry-instrument`` sets."""
    return {
        "OTEL_SERVICE_NAME": service,
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{agent.http_port}",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
    }


@contextmanager
def served(command: list[str], folder: Path, port: int, **environ: str) -> Iterator[str]:
    """A web server of an example, once it listens; its address. It ends by SIGINT."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=app_environment(**environ),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:

        def listens() -> bool:
            if process.poll() is not None:
                assert process.stderr is not None
                raise AssertionError(f"it ended: {process.stderr.read()}")
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5)
            except urllib.error.HTTPError:
                return True
            except (OSError, http.client.HTTPException):  # start or interruption
                return False
            return True

        eventually(listens, "the example serves")
        yield f"http://127.0.0.1:{port}"
        process.send_signal(signal.SIGINT)  # unsent spans are sent at shutdown
        process.communicate(timeout=30)
    finally:
        process.kill()
        process.communicate()


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


def joules(agent: SpanAgent, service: str, name: str, hw_type: str = "cpu") -> float:
    return agent.total(
        "wattspan_span_energy_joules_total", service_name=service, span_name=name, hw_type=hw_type
    )


def spans(agent: SpanAgent, service: str, name: str) -> float:
    return agent.total("wattspan_spans_total", service_name=service, span_name=name)


def come_in(agent: SpanAgent, service: str, name: str, count: int) -> None:
    try:
        eventually(lambda: spans(agent, service, name) >= count, f"{count} x {name}")
    except AssertionError as error:
        told = [line for line in agent.scrape().splitlines() if line.startswith("wattspan_span")]
        raise AssertionError("\n".join([str(error), *told, agent.said()])) from None


@pytest.mark.needs_apps
@pytest.mark.parametrize("side_channel", [False, True])
def test_unmodified_fastapi_service_appears_by_endpoint(
    agent: SpanAgent, free_port: Callable[[], int], side_channel: bool
) -> None:
    port, service = free_port(), f"shop-{side_channel}"
    environ = three_variables(agent, service)
    if side_channel:
        environ["WATTSPAN_RUN_DIR"] = str(agent.run_dir)
    command = [INSTRUMENT, "uvicorn", "app:app", "--port", str(port), "--log-level", "warning"]
    folder = EXAMPLES / "fastapi-service"
    with served(command, folder, port, **environ) as url:
        load = [sys.executable, str(folder / "load.py"), url, "--clients", "16", "--seconds", "5"]
        done = subprocess.run(load, check=True, capture_output=True, text=True)
    requests = int(done.stdout.split()[0])
    assert requests > 30
    names = ["GET /thumbnail/{number}", "GET /search", "GET /wait"]
    eventually(
        lambda: sum(spans(agent, service, name) for name in names) == requests,
        "every request is counted",
    )
    each = {name: joules(agent, service, name) / spans(agent, service, name) for name in names}
    assert each["GET /thumbnail/{number}"] > each["GET /search"] > 0, each
    outside = agent.total(
        "wattspan_span_outside_energy_joules_total", service_name=service, hw_type="cpu"
    )
    assert sum(joules(agent, service, name) for name in names) > outside


@pytest.mark.needs_apps
def test_unmodified_flask_script_appears_in_metrics_and_in_the_report(
    agent: SpanAgent, free_port: Callable[[], int], tmp_path: Path
) -> None:
    (tmp_path / "app.py").write_text(FLASK)
    port = free_port()
    command = [INSTRUMENT, "flask", "run", "--port", str(port)]
    name = "GET /sum/<int:n>"
    with served(command, tmp_path, port, **three_variables(agent, "sums")) as url:

        def charged() -> bool:
            """More requests: on a full machine the spans of the first may be late."""
            assert fetch(f"{url}/sum/100000").startswith("3333")
            return joules(agent, "sums", name) > 0

        for _ in range(20):
            charged()
        eventually(charged, "the energy of its requests is charged")
    come_in(agent, "sums", name, 21)

    def reported() -> bool:
        told = wattspan("report", "--by", "span", "--set", f"agent.state_dir={agent.state_dir}")
        return told.returncode == 0 and name in told.stdout and "sums" in told.stdout

    eventually(reported, "the report names the span")


@pytest.mark.needs_apps
def test_waiting_request_has_less_energy_than_a_computing_one(
    agent: SpanAgent, free_port: Callable[[], int], tmp_path: Path
) -> None:
    (tmp_path / "app.py").write_text(FLASK)
    port = free_port()
    environ = three_variables(agent, "threads") | {"WATTSPAN_RUN_DIR": str(agent.run_dir)}
    environ["OTEL_BSP_SCHEDULE_DELAY"] = "100"
    with (
        served([INSTRUMENT, "flask", "run", "--port", str(port)], tmp_path, port, **environ) as url,
        ThreadPoolExecutor(8) as clients,
    ):

        def known() -> bool:
            """The first spans of a new process on a new agent may have no energy."""
            with suppress(urllib.error.HTTPError):
                fetch(url)
            return spans(agent, "threads", "GET /") > 0

        eventually(known, "a span has energy")
        list(clients.map(fetch, [f"{url}/sum/1000000", f"{url}/wait"] * 40))
    computing, waiting = "GET /sum/<int:n>", "GET /wait"
    come_in(agent, "threads", computing, 40)
    come_in(agent, "threads", waiting, 40)
    assert joules(agent, "threads", computing) > 5 * joules(agent, "threads", waiting)


@pytest.mark.needs_apps
def test_gunicorn_workers_are_separate_processes(
    agent: SpanAgent, free_port: Callable[[], int], tmp_path: Path
) -> None:
    (tmp_path / "app.py").write_text(FLASK)
    port = free_port()
    command = [INSTRUMENT, "gunicorn", "--bind", f"127.0.0.1:{port}", "--workers", "2", "app:app"]
    environ = three_variables(agent, "forked") | {"WATTSPAN_RUN_DIR": str(agent.run_dir)}
    before = agent.total("wattspan_span_outcomes_total", reason="unknown_process")
    with served(command, tmp_path, port, **environ) as url:
        for _ in range(40):
            fetch(f"{url}/sum/100000")
    come_in(agent, "forked", "GET /sum/<int:n>", 40)
    assert joules(agent, "forked", "GET /sum/<int:n>") > 0
    assert agent.total("wattspan_span_outcomes_total", reason="unknown_process") == before


@pytest.mark.needs_apps
@pytest.mark.needs_torch
def test_training_loop_reports_joules_per_step(agent: SpanAgent) -> None:
    subprocess.run(
        [INSTRUMENT, str(APPS), "train.py", "--epochs", "2", "--steps", "20"],
        cwd=EXAMPLES / "training",
        env=app_environment(
            **three_variables(agent, "trainer"), WATTSPAN_RUN_DIR=str(agent.run_dir)
        ),
        check=True,
        capture_output=True,
        timeout=120,
    )
    come_in(agent, "trainer", "train_step", 40)
    assert spans(agent, "trainer", "train_step") == 40
    assert spans(agent, "trainer", "epoch") == 2
    steps, epochs = joules(agent, "trainer", "train_step"), joules(agent, "trainer", "epoch")
    assert steps > 2 * epochs > 0  # making the images is the epoch's own


@pytest.mark.needs_apps
@pytest.mark.needs_torch
def test_training_on_cpu_threads_prints_samples_of_each_step() -> None:
    """As `wattspan frontier run --unit` reads them; the script has no end of its own."""
    with subprocess.Popen(
        [str(APPS), "train_torch.py", "1", "16"],
        cwd=EXAMPLES / "settings",
        stdout=subprocess.PIPE,
        text=True,
    ) as training:
        try:
            assert training.stdout is not None
            assert [training.stdout.readline() for _ in range(3)] == ["samples=16\n"] * 3
        finally:
            training.kill()


@pytest.mark.needs_apps
@pytest.mark.needs_training
@pytest.mark.parametrize(
    ("script", "options", "steps", "epochs"),
    [
        ("train_with_transformers", ["--steps", "60"], 60, 3),
        ("train_with_trl", ["--epochs", "3"], 30, 3),
        ("train_with_lightning", ["--epochs", "6"], 18, 6),
        ("train_with_a_loop", ["--epochs", "8"], 80, 8),
    ],
)
def test_training_with_one_callback_reports_joules_per_step(
    agent: SpanAgent, script: str, options: list[str], steps: int, epochs: int
) -> None:
    """Without a variable of OpenTelemetry: the callback finds the agent of its host."""
    subprocess.run(
        [str(APPS), f"{script}.py", *options],
        cwd=EXAMPLES / "tuned-training",
        env=app_environment(
            WATTSPAN_RUN_DIR=str(agent.run_dir), HF_HUB_OFFLINE="1", PYTHONWARNINGS="ignore"
        ),
        check=True,
        capture_output=True,
        timeout=300,
    )
    come_in(agent, script, "train_step", steps)
    assert spans(agent, script, "train_step") == steps
    come_in(agent, script, "epoch", epochs)
    assert spans(agent, script, "epoch") == epochs
    assert joules(agent, script, "train_step") > 0

    def shown() -> bool:
        address = f"127.0.0.1:{agent.metrics_port}"
        told = wattspan("top", "--once", "--by", "span", "--address", address, COLUMNS="160")
        assert told.returncode == 0, told.stderr
        rows = [line.split() for line in told.stdout.splitlines()]
        return any(row[:2] == ["train_step", script] for row in rows)

    eventually(shown, "top lists the steps")


@pytest.mark.needs_apps
def test_emulated_serving_reports_joules_per_request_and_token(agent: SpanAgent) -> None:
    seconds, speed = 8.0, 4.0
    subprocess.run(
        [INSTRUMENT, str(APPS), "serve.py", "--seconds", str(seconds), "--speed", str(speed)],
        cwd=EXAMPLES / "llm-serving",
        env=app_environment(
            **three_variables(agent, "chatbot"),
            WATTSPAN_RUN_DIR=str(agent.run_dir),
            WATTSPAN_EMULATED_HOST=str(agent.host),
        ),
        check=True,
        capture_output=True,
        timeout=120,
    )
    with (EXAMPLES / "llm-serving" / "arrivals.csv").open(newline="") as file:
        rows = [r for r in csv.DictReader(file) if float(r["seconds"]) <= seconds * speed]
    come_in(agent, "chatbot", "chat", len(rows))
    for direction in ("input", "output"):
        told = agent.total(
            "wattspan_span_tokens_total", service_name="chatbot", direction=direction
        )
        assert told == sum(int(row[f"{direction}_tokens"]) for row in rows)
    spent = joules(agent, "chatbot", "chat", "gpu")
    outside = agent.total(
        "wattspan_span_outside_energy_joules_total", service_name="chatbot", hw_type="gpu"
    )
    assert spent > 10 * outside
    written = agent.total("wattspan_span_tokens_total", service_name="chatbot", direction="output")
    assert 0.05 < spent / written < 50  # joules a token: of a realistic size


@pytest.mark.needs_node
def test_spans_of_another_language_find_their_process_by_plain_otlp(
    agent: SpanAgent, free_port: Callable[[], int]
) -> None:
    port = free_port()
    environ = {
        "PORT": str(port),
        "OTEL_SERVICE_NAME": "node-server",
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{agent.http_port}",
    }
    command = ["node", "--import", "./telemetry.js", "server.js"]
    with served(command, node_sources(), port, **environ) as url:
        for _ in range(10):
            assert len(fetch(f"{url}/hash?rounds=400000")) == 64
            assert fetch(f"{url}/wait") == "done"
    come_in(agent, "node-server", "GET /hash", 10)
    come_in(agent, "node-server", "GET /wait", 10)
    computing, waiting = (joules(agent, "node-server", name) for name in ("GET /hash", "GET /wait"))
    assert computing > 2 * waiting  # consecutive: some of one leaks into the other


def test_examples_lock_files_name_no_host() -> None:
    lock = json.loads((EXAMPLES / "node-server" / "package-lock.json").read_text())
    assert not [name for name, one in lock["packages"].items() if "resolved" in one]
    requirements = (EXAMPLES.parent / "requirements" / "apps.txt").read_text()
    assert "://" not in requirements
    assert "CC-BY-4.0" in (EXAMPLES / "llm-serving" / "README.md").read_text()
