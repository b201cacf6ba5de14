"""A training job as its author writes it, and the whole product that tunes it.

The job is a process of its own that traces its steps with OpenTelemetry's own SDK and exporter,
as they come. Its steps run on a board of an emulated host, so that a cap lengthens them and the
true values are known.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from testbed import emulated_training
from testbed.program import Running, host_of, wattspan
from testbed.requirements import APPS, ROOT
from testbed.waiting import eventually
from wattspan.emulation.control import ControlClient
from wattspan.emulation.nvml import EmulatedNvml
from wattspan.sdk import MeasurementError
from wattspan.sdk.client import request_json

TRAINING = (
    f"{Path(emulated_training.__file__).read_text()}\n"
    + """
import json, sys, time
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
trace.set_tracer_provider(provider)
tracer = trace.get_tracer("training")
truth, exact = open(sys.argv[1], "w"), sys.argv[2] == "exact"
if sys.argv[3:]:
    from wattspan.sdk.jobs import declare
    declare(name="train", service="trainer", span="train_step", **json.loads(sys.argv[3]))
offset = time.time_ns() - time.monotonic_ns()
with EmulatedTraining(step=0.05, noise=0.01) as training:
    while True:
        for _ in range(10):
            if exact:  # as by a device's own events, whatever else this machine has to do
                began, ended = training.step()
                span = tracer.start_span("train_step", start_time=began + offset)
                span.end(end_time=ended + offset)
            else:
                with tracer.start_as_current_span("train_step"):
                    training.step()
        print(json.dumps({"at": time.monotonic_ns(), **training.truth()}), file=truth, flush=True)
"""
)

CONFIG = """\
[autotune]
mode = "apply"
block = "300ms"
block_units = 5
settle = "100ms"
settle_units = 1
[[autotune.job]]
span = "train_step"
"""
"""Only settings that determine the length of a search differ from the defaults."""

JOB = "trainer/train_step"


class Done(NamedTuple):
    """True values of a job's steps up to a time. Nanoseconds, microjoules of its board."""

    at: int
    units: int
    took: int
    ideal: int
    energy: int

    def since(self, before: Done) -> Done:
        return Done(*(late - early for late, early in zip(self, before, strict=True)))

    @property
    def slowdown(self) -> float:
        return self.took / self.ideal - 1

    def saving(self, free: Done) -> float:
        """The part of the energy for the same work that was saved against ``free``."""
        return 1 - (self.energy / self.ideal) / (free.energy / free.ideal)


class Training:
    """The job; its spans go to ``endpoint``, and it declares itself with the terms ``declared``."""

    def __init__(
        self,
        folder: Path,
        host: Path,
        endpoint: str,
        *,
        exact: bool,
        declared: Mapping[str, object] | None = None,
        **environ: str,
    ) -> None:
        self._truth = folder / "truth.jsonl"
        self._truth.unlink(missing_ok=True)
        self._conversation = ControlClient(host)
        terms = [] if declared is None else [json.dumps(declared)]
        self.process = subprocess.Popen(
            [APPS, "-c", TRAINING, str(self._truth), "exact" if exact else "measured", *terms],
            env={
                "PATH": os.environ["PATH"],
                "PYTHONPATH": str(ROOT / "agent"),
                "OTEL_SERVICE_NAME": "trainer",
                "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
                "WATTSPAN_EMULATED_HOST": str(host),
                **environ,
            },
        )

    def done(self) -> Done:
        """The truth, some moments ago."""

        def last() -> dict[str, int]:
            assert self.process.poll() is None
            lines = self._truth.read_text().splitlines() if self._truth.exists() else []
            return json.loads(lines[-1]) if lines and lines[-1].endswith("}") else {}

        told = eventually(last, "some steps are done")
        answer = self._conversation.ask(do="truth", at=[told["at"]])
        energy = answer["at"][0]["gpus"][0]["energy"]
        return Done(told["at"], told["units"], told["took"], told["ideal"], energy)

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(20)
        self._conversation.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.wait()
        self._conversation.close()


class TuningAgent:
    """A `wattspan run` on an emulated host with one GPU; its files are in ``folder``.

    Without a ``config`` its settings are in the ``environ`` alone.
    """

    def __init__(
        self, folder: Path, config: str = CONFIG, environ: Mapping[str, str] | None = None
    ) -> None:
        self.folder = folder
        self.config = folder / "config.toml"
        words = []
        if config:
            self.config.write_text(config)
            words = ["--config", str(self.config)]
        self.running = Running(
            folder, *words, emulate="one-socket-h100", environ=environ
        ).measuring()
        self.host = host_of(self.running.process.pid)
        self._nvml: Any = EmulatedNvml(self.host / "gpus")
        self._nvml.nvmlInit()
        self._handle = self._nvml.nvmlDeviceGetHandleByIndex(0)

    @property
    def limit(self) -> int:
        """The board's limit in milliwatts, as anybody on the host sees it."""
        return int(self._nvml.nvmlDeviceGetPowerManagementLimit(self._handle))

    def train(
        self,
        *,
        exact: bool = False,
        declared: Mapping[str, object] | None = None,
        **environ: str,
    ) -> Training:
        """Start the job. The spans are as long as it measures, or exactly as long as its steps."""
        endpoint = self.running.spans_address()
        environ["WATTSPAN_RUN_DIR"] = str(self.running.run_dir)
        return Training(self.folder, self.host, endpoint, exact=exact, declared=declared, **environ)

    def told(self) -> dict[str, Any]:
        """The agent's report of the job; empty before its discovery."""
        try:
            rows = request_json("/v1/tuning", {}, directories=(str(self.running.run_dir),))["jobs"]
        except MeasurementError:
            return {}
        return next((row for row in rows if row["job"] == JOB), {})

    @property
    def reason(self) -> str:
        return str(self.told().get("decision", {}).get("reason", ""))

    def says(self, *words: str) -> str:
        """Output of `wattspan` commands for this agent."""
        place = f"agent.run_dir={self.running.run_dir}"
        done = wattspan(*words, "--set", place, WATTSPAN_RUN_DIR=str(self.running.run_dir))
        assert done.returncode == 0, done.stderr
        return done.stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.running.process.poll() is None:
            self.running.end()
        self._nvml.nvmlShutdown()
        self.running.close()
