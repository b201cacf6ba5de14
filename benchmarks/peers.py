"""The agent and its peers in the comparison. Everybody listens on loopback only."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from testbed.process_costs import LOOPBACK

from benchmarks.harness import Subject

ROOT = Path(__file__).resolve().parents[1]

_PSUTIL = """
import time, psutil
due = time.monotonic()
while True:
    for process in psutil.process_iter(["pid", "cpu_times", "create_time"]):
        process.info
    due += 0.1
    time.sleep(max(0.0, due - time.monotonic()))
"""

_CODECARBON = """
import time
from codecarbon import OfflineEmissionsTracker
tracker = OfflineEmissionsTracker(country_iso_code="FRA", measure_power_secs=1,
                                  save_to_file=False, log_level="error")
tracker.start()
while True:
    time.sleep(3600)
"""

_SENDER = """
import sys, threading
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=sys.argv[1])))
tracer, ended = provider.get_tracer("benchmark"), threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
while not ended.wait(0.1):
    with tracer.start_as_current_span("request"):
        pass
provider.shutdown()
"""

_PROCESS_EXPORTER_GROUPS = 'process_names:\n- name: "{{.Comm}}"\n  cmdline: [".+"]\n'


def agent(
    folder: Path,
    *,
    profile: str = "two-socket-h100",
    name: str = "wattspan",
    interval: str = "auto",
    sends: bool = False,
) -> Subject:
    """The agent, store and all, on the emulated host, which is a process of its own.

    With ``sends``, a process beside it sends ten spans a second with OpenTelemetry's SDK.
    """
    port, spans = free_port(), free_port()
    folder = folder / name.replace(" ", "-")
    folder.mkdir()
    config = folder / "config.toml"
    config.write_text(
        f'[agent]\ninterval = "{interval}"\nstate_dir = "{folder / "state"}"\n'
        f'run_dir = "{folder / "run"}"\n'
        f'[exporters.prometheus]\nlisten = "{LOOPBACK}:{port}"\n'
        f'[spans]\nhttp = "{LOOPBACK}:{spans}"\n'
    )
    command = [ROOT / ".venv" / "bin" / "wattspan", "run", "--emulate", profile]
    rests = interval == "auto" and not sends
    return Subject(
        name,
        [*command, "--config", config],
        f"http://{LOOPBACK}:{port}/metrics",
        with_children=False,  # its child emulates the hardware
        warm_up=60.0,  # by then the idle power of a quiet host is known in most cases
        steady=b"\nwattspan_agent_interval_seconds 1.0" if rests else b"",
        beside=[ROOT / ".venv/bin/python", "-c", _SENDER, f"http://{LOOPBACK}:{spans}/v1/traces"]
        if sends
        else (),
    )


def peers(folder: Path) -> Iterator[Subject]:
    """Those peers that this machine has; the others are named on standard error."""
    yield Subject("psutil", [sys.executable, "-c", _PSUTIL])
    if node := debian("prometheus-node-exporter"):
        port = free_port()
        yield Subject(
            "node_exporter",
            [node, f"--web.listen-address={LOOPBACK}:{port}"],
            f"http://{LOOPBACK}:{port}/metrics",
        )
    if process := debian("prometheus-process-exporter"):
        port = free_port()
        groups = folder / "process-exporter.yml"
        groups.write_text(_PROCESS_EXPORTER_GROUPS)
        address = f"{LOOPBACK}:{port}"
        yield Subject(
            "process-exporter",
            [process, "-config.path", groups, "-web.listen-address", address],
            f"http://{address}/metrics",
        )
    clients = ROOT / ".venv-clients" / "bin" / "python"
    if _has_codecarbon(clients):
        yield Subject(
            "CodeCarbon",
            [clients, "-c", _CODECARBON],
            environ={"CODECARBON_LOG_LEVEL": "error"},
        )
    else:
        print("no CodeCarbon: `make tools` installs it into .venv-clients", file=sys.stderr)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def debian(name: str) -> str | None:
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), str(ROOT / ".tools/usr/bin")])
    if shutil.which(name, path=path) is None:
        subprocess.run([ROOT / "scripts" / "debian-tool", name], check=False)
    return shutil.which(name, path=path)


def _has_codecarbon(python: Path) -> bool:
    return (
        python.exists()
        and not subprocess.run(
            [python, "-c", "import codecarbon"], capture_output=True, check=False
        ).returncode
    )
