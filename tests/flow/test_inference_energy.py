"""Requests to an emulated engine: real processes, spans over a real socket, emulated GPUs."""

from __future__ import annotations

import http.client
import json
import random
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families
from testbed.inference_server import InferenceServerSettings, module_command
from testbed.program import ENVIRONMENT
from testbed.requirements import ROOT
from testbed.shown_commands import PageShell, Shown, is_shown, shown_commands
from testbed.spans.agent import SpanAgent, free_port
from testbed.waiting import eventually

from wattspan.cli import cli
from wattspan.emulation.control import ControlClient

pytestmark = [pytest.mark.long, pytest.mark.exhaustive]

REQUESTS = 60


@contextmanager
def _engine(agent: SpanAgent, port: int = 0, *, spans: bool = True) -> Iterator[int]:
    """An engine with two workers, started once the idle power of the GPUs is known; its port."""
    eventually(
        lambda: sum("gpu" in key for key in _samples(agent, "wattspan_idle_power_watts")) == 2,
        "the idle power of both GPUs is known",
    )
    settings = InferenceServerSettings(
        host=str(agent.host), agent=str(agent.otlp) if spans else "", port=port
    )
    process = subprocess.Popen(
        module_command(msgspec.json.encode(settings).decode()),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        yield int(process.stdout.readline())
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


def _ask(port: int, path: str, content: object = None) -> dict:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=120)) as connection:
        method = "GET" if content is None else "POST"
        connection.request(method, path, None if content is None else json.dumps(content))
        return json.loads(connection.getresponse().read())


def _serve(port: int, count: int) -> list[dict]:
    """The responses to requests of six clients, one after the other by each."""
    chance, left, found = random.Random(1), list(range(count)), []

    def client() -> None:
        while left:
            number = left.pop()
            prompt = " ".join([str(number)] * chance.randint(5, 2500))
            asked = {"prompt": prompt, "max_tokens": chance.randint(2, 60)}
            found.append(_ask(port, "/v1/completions", asked))

    clients = [threading.Thread(target=client) for _ in range(6)]
    for each in clients:
        each.start()
    for each in clients:
        each.join()
    return found


def _samples(agent: SpanAgent, name: str) -> dict[tuple[str, ...], float]:
    with closing(
        http.client.HTTPConnection("127.0.0.1", agent.metrics_port, timeout=60)
    ) as connection:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    return {
        tuple(sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


def _reported_divisions(state_dir: Path) -> dict[str, int]:
    """The requests of the only model by the division of their energy, as `report` shows them."""
    arguments = ["report", "--state-dir", str(state_dir), "--by", "model", "--json"]
    report = json.loads(CliRunner().invoke(cli, arguments).stdout)
    (found,) = (line for line in report["lines"] if line["role"] == "named")
    return found["requests_by_division"]


def test_energy_of_workers_is_divided_among_the_requests_of_the_server(tmp_path: Path) -> None:
    with (
        SpanAgent(tmp_path, profile="two-socket-h100", store__enabled="true") as agent,
        ControlClient(agent.host) as host,
        _engine(agent) as port,
    ):
        assert "error" in _ask(port, "/v1/completions", {"prompt": "", "max_tokens": 3})
        responses = _serve(port, REQUESTS)
        truth = _ask(port, "/truth")
        assert len(truth) == REQUESTS

        def settled() -> bool:
            # A request that ended before the driver reported its process has no energy.
            names = "wattspan_gen_ai_requests_total", "wattspan_gen_ai_unmetered_requests_total"
            return sum(sum(_samples(agent, name).values()) for name in names) >= REQUESTS

        eventually(settled, "all requests have their energy", within=120)
        energy = sum(_samples(agent, "wattspan_gen_ai_token_energy_joules_total").values())
        energy += sum(_samples(agent, "wattspan_gen_ai_idle_energy_joules_total").values())
        tokens = _samples(agent, "wattspan_gen_ai_tokens_total")
        unmetered = _samples(agent, "wattspan_gen_ai_unmetered_tokens_total")
        requests = _samples(agent, "wattspan_gen_ai_requests_total")
        boards = host.ask(do="truth")["gpus"]

    assert all(each["usage"]["prompt_tokens"] > 0 for each in responses)
    assert sum(requests.values()) >= 0.9 * REQUESTS
    assert sum(tokens.values()) + sum(unmetered.values()) == sum(
        each["usage"]["prompt_tokens"] + each["usage"]["completion_tokens"] for each in responses
    )
    divisions = _reported_divisions(agent.state_dir)
    assert divisions.pop("unknown") == 0
    for division, count in divisions.items():
        assert count == sum(number for key, number in requests.items() if division in key)
    spent = sum(sum(board["processes"].values()) for board in boards) / 1e6
    assert energy == pytest.approx(spent, rel=0.05)
    assert spent == pytest.approx(sum(truth.values()), rel=0.25)  # iterations wait for the CPU


def test_how_to_gives_the_energy_of_tokens_of_an_engine_without_spans(tmp_path: Path) -> None:
    """The block and the commands of the how-to, with the ports of this engine and this agent."""
    port = free_port()
    config = tmp_path / "config.toml"
    block, commands = _how_to()
    config.write_text(block.replace("127.0.0.1:8000", f"127.0.0.1:{port}"))
    name = "wattspan_gen_ai_engine_token_energy_joules"
    with (
        SpanAgent(tmp_path, profile="two-socket-h100", config=config) as agent,
        ControlClient(agent.host) as host,
        _engine(agent, port, spans=False),
    ):
        done = threading.Event()
        load = threading.Thread(target=_load, args=(port, done))
        load.start()
        try:
            eventually(lambda: _samples(agent, name), "the joules per token are known", within=240)
            environ = ENVIRONMENT | {
                "WATTSPAN_EXPORTERS_PROMETHEUS_LISTEN": f"127.0.0.1:{agent.metrics_port}",
                "PYTHONPATH": str(ROOT / "agent"),
            }
            with PageShell(tmp_path, tmp_path / "bin", environ) as shell:
                for one in commands:
                    output = shell.run(
                        one.command.replace("127.0.0.1:9949", f"127.0.0.1:{agent.metrics_port}")
                    )
                    assert [line for line in one.lines if not is_shown(line, output)] == [], output
        finally:
            done.set()
            load.join()
        truth = _ask(port, "/truth")
        found = _samples(agent, name)
        tokens = _samples(agent, "wattspan_gen_ai_engine_tokens_total")
        energy = sum(_samples(agent, "wattspan_gen_ai_engine_energy_joules_total").values())
        boards = host.ask(do="truth")["gpus"]
        assert not _samples(agent, "wattspan_gen_ai_tokens_total")  # no spans, no requests of spans
    labels = {label for key in found for label in key}
    assert {"chat", "emulated-8b", "all", "engine_metrics", "emulated"} <= labels
    assert tokens
    spent = sum(sum(board["processes"].values()) for board in boards) / 1e6
    assert 0 < energy <= 1.05 * spent
    per_token = next(value for key, value in found.items() if "all" in key)
    assert per_token == pytest.approx(energy / sum(tokens.values()), rel=0.3)
    assert sum(truth.values()) > 0


def _how_to() -> tuple[str, list[Shown]]:
    """The configuration and the commands of *Joules per token of vLLM in five minutes*."""
    text = (ROOT / "docs" / "how-to" / "measure-llm-requests.md").read_text()
    chapter = text.split("\n## ")[1]
    (block,) = re.findall(r"^```toml\n(.*?)^```$", chapter, re.MULTILINE | re.DOTALL)
    return block, list(shown_commands(chapter))


def _load(port: int, done: threading.Event) -> None:
    """Requests of two clients until ``done``."""

    def client(seed: int) -> None:
        chance = random.Random(seed)
        while not done.is_set():
            prompt = " ".join([str(chance.random())] * chance.randint(5, 600))
            _ask(port, "/v1/completions", {"prompt": prompt, "max_tokens": chance.randint(2, 40)})

    clients = [threading.Thread(target=client, args=(seed,)) for seed in range(2)]
    for each in clients:
        each.start()
    for each in clients:
        each.join()
