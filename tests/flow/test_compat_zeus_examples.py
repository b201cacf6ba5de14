"""The scripts of ``examples/zeus`` run on the agent, and with other imports on Zeus."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from testbed.apps import app_environment
from testbed.nvml_library import build, environment
from testbed.program import ENVIRONMENT, output_of
from testbed.prometheus_server import pushgateway
from testbed.requirements import APPS, CLIENTS, ROOT
from testbed.spans.agent import SpanAgent
from testbed.waiting import eventually

from wattspan.compat.zeus import ALIASES

EXAMPLES = ROOT / "examples" / "zeus"
ZEUS_MODULE = {name: module for module, names in ALIASES.items() for name in names}
METRICS = "metrics.py"  # its figures are in a gateway, and in the scrape of the agent
HUGGING_FACE = "power_limit_huggingface.py"  # needs the training frameworks
SELECTOR = "power_limit_selector.py"
SCRIPTS = sorted({path.name for path in EXAMPLES.glob("*.py")} - {METRICS, HUGGING_FACE})


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpanAgent]:
    folder = tmp_path_factory.mktemp("agent")
    with SpanAgent(folder, profile="one-socket-h100") as running:
        yield running


def ran(command: list[str], environ: dict[str, str]) -> str:
    return output_of(*command, timeout=240, environ=environ)


def on_agent(agent: SpanAgent, script: str, *arguments: str) -> str:
    command = [sys.executable, "-W", "error", str(EXAMPLES / script), *arguments]
    return ran(command, {**ENVIRONMENT, "WATTSPAN_RUN_DIR": str(agent.run_dir)})


def without_figures(text: str) -> str:
    return re.sub(r"\d+(\.\d+)?(e-\d+)?", "#", text)


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_prints_energies_of_the_agent(agent: SpanAgent, script: str) -> None:
    printed = on_agent(agent, script)
    figures = [float(one) for one in re.findall(r"(\d+\.\d+) (?:J|W|g)\b", printed)]
    assert figures, printed
    assert all(one > 0 for one in figures), printed


def test_selector_of_a_script_chooses_from_a_profile(agent: SpanAgent, tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    # Least energy: 300 W; least time: 700 W; least product of both: 500 W.
    tried = {700: (4000.0, 10.0), 500: (3200.0, 10.5), 300: (3000.0, 13.0)}
    measurements = [
        {"power_limit": watts, "energy": energy, "time": seconds}
        for watts, (energy, seconds) in tried.items()
    ]
    profile.write_text(json.dumps({"measurements": measurements}))
    printed = on_agent(agent, SELECTOR, "--steps", "3", "--profile", str(profile))
    first, *epochs = printed.splitlines()
    assert first == "500 W is the choice from 3 limits"
    assert len(epochs) == 2
    assert json.loads(profile.read_text()) == {"measurements": measurements}


@pytest.mark.needs_apps
@pytest.mark.needs_training
@pytest.mark.exhaustive
def test_hugging_face_script_reports_each_step(agent: SpanAgent) -> None:
    environ = app_environment(
        WATTSPAN_RUN_DIR=str(agent.run_dir), HF_HUB_OFFLINE="1", PYTHONWARNINGS="ignore"
    )
    printed = ran([str(APPS), str(EXAMPLES / HUGGING_FACE), "--steps", "30"], environ)
    steps, energy = re.fullmatch(r"(?:\{.*\}\n)*(\d+) steps: (\d+\.\d) J\n", printed).groups()
    assert int(steps) == 30
    assert float(energy) > 0
    step = {"service_name": "power_limit_huggingface", "span_name": "train_step"}
    eventually(
        lambda: agent.samples("wattspan_spans_total", **step) == [30], "all steps are counted"
    )


def test_metrics_of_a_script_are_scraped_from_the_agent(agent: SpanAgent) -> None:
    assert on_agent(agent, METRICS, "--steps", "3", "--seconds", "0.4") == "3 steps are measured\n"
    step = {"service_name": "histogram", "span_name": "step"}
    eventually(
        lambda: agent.samples("wattspan_spans_total", **step) == [3], "all steps are counted"
    )
    eventually(
        lambda: sum(agent.samples("wattspan_span_energy_joules_total", **step)) > 0,
        "the steps have energy",
    )
    epoch = {"service_name": "counter", "span_name": "epoch"}
    eventually(
        lambda: agent.samples("wattspan_spans_total", **epoch) == [1], "the epoch is counted"
    )
    assert agent.samples("wattspan_spans_total", service_name="gauge") == []


@pytest.mark.needs_pushgateway
def test_metrics_of_a_script_are_pushed_while_its_windows_are_open(
    agent: SpanAgent, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    with pushgateway(tmp_path, free_port()) as gateway:
        command = [sys.executable, "-W", "error", str(EXAMPLES / METRICS), "--steps", "1"]
        command += ["--seconds", "600", "--gateway", gateway.host]
        environ = {**ENVIRONMENT, "WATTSPAN_RUN_DIR": str(agent.run_dir)}
        with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as script:
            try:
                epoch = {"job": "counter", "window": "epoch", "index": "0"}
                counter = "energy_monitor_gpu_energy_joules_total"
                first = eventually(lambda: gateway.get(counter, **epoch), "the counter is there")
                eventually(lambda: gateway.get(counter, **epoch) > first, "the counter rises")
                watts = {"job": "gauge", "window": "power", "index": "0"}
                eventually(lambda: gateway.get("power_monitor_gpu_power_watts", **watts), "power")
                step = {"job": "histogram", "window": "step", "index": "0"}
                assert not gateway.get("energy_monitor_gpu_energy_joules_count", **step)
                last = gateway.get(counter, **epoch)
                script.send_signal(signal.SIGINT)  # an exit with open windows
                assert "KeyboardInterrupt" in script.communicate(timeout=60)[1]
            finally:
                script.kill()
        assert gateway.get(counter, **epoch) > last


@pytest.mark.needs_pushgateway
def test_metrics_of_a_script_are_in_the_gateway_at_its_end(
    agent: SpanAgent, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    with pushgateway(tmp_path, free_port()) as gateway:
        options = ["--steps", "3", "--seconds", "0.4", "--gateway", f"http://{gateway.host}"]
        assert on_agent(agent, METRICS, *options) == "3 steps are measured\n"
        step = {"job": "histogram", "window": "step", "index": "0"}
        epoch = {"job": "counter", "window": "epoch", "index": "0"}
        for device in ("gpu", "cpu", "dram"):
            name = f"energy_monitor_{device}_energy_joules"
            assert gateway.get(f"{name}_count", **step) == 3
            assert gateway.get(f"{name}_bucket", **step, le="+Inf") == 3
            assert 0 < gateway.get(f"{name}_sum", **step) <= gateway.get(f"{name}_total", **epoch)
        assert gateway.get("power_monitor_gpu_power_watts", job="gauge", window="power", index="0")


def test_script_logs_each_window(agent: SpanAgent, tmp_path: Path) -> None:
    log = tmp_path / "windows.csv"
    on_agent(agent, "windows.py", "--steps", "3", "--seconds", "0.1", "--log", str(log))
    header, *lines = log.read_text().splitlines()
    assert header == "start_time,window_name,elapsed_time,gpu0_energy"
    assert [line.split(",")[1] for line in lines] == ["step", "step", "step", "epoch"]
    assert all(float(line.split(",")[3]) > 0 for line in lines)


def with_imports_of_zeus(source: str) -> str:
    def imports(found: re.Match[str]) -> str:
        names = re.findall(r"\w+", found[1])
        return "\n".join(f"from {ZEUS_MODULE[name]} import {name}" for name in names)

    pattern = r"^from wattspan\.compat\.zeus import (\([^)]*\)|.*)$"
    return re.sub(pattern, imports, source, flags=re.MULTILINE)


@pytest.mark.needs_clients
@pytest.mark.needs_cc
@pytest.mark.exhaustive
def test_script_of_zeus_needs_another_import_only(agent: SpanAgent, tmp_path: Path) -> None:
    """Windows only: Zeus's other monitors need CPU counters, or processes that start in 10 s."""
    script = "windows.py"
    source = with_imports_of_zeus((EXAMPLES / script).read_text())
    assert "import wattspan" not in source
    assert "from wattspan" not in source
    original = tmp_path / script
    original.write_text(source)
    nvml = environment(build(tmp_path / "lib"), agent.host / "gpus")
    on_zeus = ran([str(CLIENTS), "-W", "ignore", str(original)], {**ENVIRONMENT, **nvml})
    assert without_figures(on_zeus) == without_figures(on_agent(agent, script))
