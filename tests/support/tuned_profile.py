"""The whole product on an emulated host of any profile, whose jobs it tunes."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from pynvml import NVMLError

from support.program import ENVIRONMENT
from support.requirements import ROOT
from wattspan.emulation.host import EmulatedHost
from wattspan.emulation.nvml import EmulatedNvml
from wattspan.emulation.profiles import profile_named
from wattspan.sdk import MeasurementError
from wattspan.sdk.client import request_json

CONFIG = """\
[agent]
state_dir = "{folder}/state"
run_dir = "{sockets}"
[spans]
http = ""
[exporters.prometheus]
listen = "127.0.0.1:0"
[caps]
users = []
largest_step = 1.0
[autotune]
mode = "apply"
knobs = ["gpu_power"]
{settings}
"""


class Done(NamedTuple):
    """True state of a job at a time: of its first process, and of all its boards."""

    units: int
    took: int  # nanoseconds
    ideal: int
    energy: int  # microjoules

    def since(self, before: Done) -> Done:
        return Done(*(late - early for late, early in zip(self, before, strict=True)))

    @property
    def each(self) -> float:
        """Nanoseconds that a unit took."""
        return self.took / self.units


class ProfileHost:
    """An emulated host with its jobs at work, and a `wattspan run` that tunes them."""

    def __init__(self, profile: str, folder: Path, settings: str) -> None:
        self._sockets = tempfile.TemporaryDirectory(prefix="wattspan-", ignore_cleanup_errors=True)
        self.sockets, self.folder = Path(self._sockets.name), folder
        self.profile = profile_named(profile)
        self.emulated = EmulatedHost(self.profile)
        self._nvml: Any = EmulatedNvml(self.emulated.directory / "gpus")
        self._nvml.nvmlInit()
        config = folder / "config.toml"
        config.write_text(CONFIG.format(folder=folder, sockets=self.sockets, settings=settings))
        program = [sys.executable, "-m", "support.agent_on_host", str(self.emulated.directory)]
        with (folder / "agent.stderr").open("wb") as log:
            self.process = subprocess.Popen(
                [*program, "run", "--emulate", profile, "--config", str(config)],
                env={**ENVIRONMENT, "PYTHONPATH": str(ROOT / "tests")},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )
        self.jobs = self.emulated.start_jobs(self.sockets / "otlp.sock")

    def steer(self, job: str, **changes: object) -> None:
        self.emulated.ask(do="steer", job=job, **changes)

    @property
    def limits(self) -> list[int]:
        """Each board's limit in milliwatts, as anybody sees it."""
        boards = range(len(self.profile.gpus))
        handles = [self._nvml.nvmlDeviceGetHandleByIndex(one) for one in boards]
        return [int(self._nvml.nvmlDeviceGetPowerManagementLimit(one)) for one in handles]

    def done(self, job: str) -> Done:
        """State of the host."""
        work = self.emulated.ask(do="work", job=job)
        energy = sum(one["energy"] for one in self.emulated.ask(do="truth")["gpus"])
        return Done(work["units"], work["took"], work["ideal"], energy)

    def told(self, job: str) -> dict[str, Any]:
        """The agent's report of a job; empty while the agent does not respond."""
        try:
            rows = request_json("/v1/tuning", {}, directories=(str(self.sockets),))["jobs"]
        except (MeasurementError, KeyError):
            return {}
        return next((row for row in rows if row["job"] == job), {})

    def reason(self, job: str) -> str:
        return str(self.told(job).get("decision", {}).get("reason", ""))

    def explain(self, job: str) -> str:
        said = (self.folder / "agent.stderr").read_text()
        return f"\nsaid: {said}\ntold: {self.told(job)}\nlimits: {self.limits}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        with suppress(NVMLError):
            self._nvml.nvmlShutdown()
        self.emulated.close()
        self._sockets.cleanup()
