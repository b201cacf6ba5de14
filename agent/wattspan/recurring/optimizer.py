"""The batch-size optimizer of a training script.

    optimizer = BatchSizeOptimizer(
        "nightly", batch_sizes=[32, 64, 128], default_batch_size=64,
        target_metric=0.8, higher_is_better_metric=True, max_epochs=50,
    )
    batch_size = optimizer.get_batch_size()
    optimizer.on_train_begin()
    for epoch in range(50):
        ...
        optimizer.on_evaluate(accuracy)
        if optimizer.training_finished:
            break

The names of the methods and terms are those of Zeus. A script trains as before if something fails:
without an agent it uses the default batch size, and a warning says why.
"""

from __future__ import annotations

import math
import os
import socket
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from time import monotonic_ns, time
from typing import Any, NamedTuple

from wattspan.compat.zeus.devices import DeviceIndex
from wattspan.model.consumers import HOST_ROOT
from wattspan.recurring.jobs import (
    NamedTerms,
    RecurringJobTerms,
    TrainingRun,
    TrialOutcome,
    terms_facts,
)
from wattspan.recurring.run_book import (
    NoRoomError,
    RunBook,
    RunBookError,
    RunningProcess,
    TermsChangedError,
    UnknownRunError,
)
from wattspan.sdk import MeasurementError
from wattspan.sdk.client import Device, DeviceReader, read_devices, read_measurement, request_json

READ_TIMEOUT = 5.0
"""Seconds to wait for the readings of a period that has just ended."""


class AgentMeter:
    """Measures by the agent of this host: the GPUs that are visible to this program, whole.

    With ``gpu_indices``, these of them. All calls may raise MeasurementError.

    A program without GPUs is measured by its processes; then ``max_power`` is needed, as no device
    of its own states a limit.
    """

    def __init__(
        self,
        max_power: float | None = None,
        read: DeviceReader = read_devices,
        directories: tuple[str, ...] = (),
        gpu_indices: Sequence[int] | None = None,
    ) -> None:
        self._max_power, self._read, self._directories = max_power, read, directories
        self._index = DeviceIndex(read, gpu_indices, [])
        self._found: list[Device] = []
        self._began: int | None = None

    def gpus(self) -> str:
        """The number and the model of the GPUs: ``"2 x NVIDIA H100"``; "" without any."""
        boards = self._boards()
        models = Counter(board.model or board.name for board in boards)
        return ", ".join(f"{count} x {model}" for model, count in sorted(models.items()))

    def power(self) -> float:
        """The highest power of the devices in watts, to which the time of a run is compared."""
        if self._max_power is not None:
            return self._max_power
        ids = [board.id for board in self._boards()]
        if not ids:
            raise MeasurementError(
                "The highest power of a program without GPUs is not known. Give max_power in watts."
            )
        snapshot = request_json("/v1/snapshot", {}, directories=self._directories)
        limits = {one["hw_id"]: _limit(one) for one in snapshot["domains"]}
        known = [limits.get(one) for one in ids]
        if None in known:
            board = ids[known.index(None)]
            raise MeasurementError(
                f"The power limit of {board} is not known. Give max_power in watts."
            )
        return sum(limit for limit in known if limit is not None)

    def begin(self) -> None:
        if not self._boards():  # a long run is longer than the agent's history of processes
            request_json("/v1/watch", {"pid": "self", "family": "1"}, directories=self._directories)
        self._began = monotonic_ns()

    def read(self) -> tuple[float, float]:
        """Joules and seconds since ``begin``."""
        if self._began is None:
            raise MeasurementError("The run has not begun. Call on_train_begin() first.")
        start, end = self._began, monotonic_ns()
        ids = [board.id for board in self._boards()]
        seconds = (end - start) / 1e9
        if not ids:
            own = {"pid": "self", "family": "1", "start": f"mono:{start}", "end": f"mono:{end}"}
            found = read_measurement(own, READ_TIMEOUT, self._directories)
            return found.joules.total, seconds
        devices = self._read(start, end, ids, timeout=READ_TIMEOUT, directories=self._directories)
        return sum(map(_joules, devices)), seconds

    def _boards(self) -> list[Device]:
        """The GPUs of this program; they are kept once some were found."""
        if not self._found:
            ids = set(self._index.resolve().gpus.values())
            now = monotonic_ns()
            devices = self._read(now, now, directories=self._directories)
            self._found = [one for one in devices if one.id in ids]
        return self._found


def _limit(domain: Mapping[str, Any]) -> float | None:
    """The power limit of a GPU before any cap, in watts."""
    gpu = domain.get("gpu") or {}
    limit: float | None = gpu.get("default_limit_watts") or gpu.get("limit_watts")
    return limit


def _joules(device: Device) -> float:
    if device.joules is None:
        raise MeasurementError(
            f"The energy of {device.name} is not known for this run: {device.coverage:.0%} of its "
            "time was measured."
        )
    return device.joules


# --------------------------------------------------------------------------------------- optimizer


FILE_OWNER = HOST_ROOT
"""The owner in a file of one's own: the permissions of the file decide about its users."""


class StartedRun(NamedTuple):
    """A run, its batch size, and the cost in joules above which it is stopped."""

    key: int
    batch_size: int
    stop_cost: float | None


def ask_agent(
    name: str, body: Mapping[str, Any], directories: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The answer to ``POST /v1/recurring/NAME``. MeasurementError."""
    path, margin = f"/v1/recurring/{name}", 15.0  # the file may be locked by another run
    return request_json(path, {}, method="POST", body=body, margin=margin, directories=directories)


class AgentRuns:
    """The runs in the store of the agent of this host. All calls may raise MeasurementError."""

    def __init__(self, directories: tuple[str, ...] = ()) -> None:
        self._directories = directories

    def begin(self, terms: RecurringJobTerms, gpus: str) -> StartedRun:
        """Begin a run of this process."""
        body = {"job": terms.name, "gpus": gpus, "terms": terms_facts(terms)}
        begun = ask_agent("next", body, self._directories)
        return StartedRun(begun["run"], begun["batch_size"], begun["stop_cost_joules"])

    def end(self, key: int, ended: TrainingRun) -> None:
        """Record the end of a run."""
        facts = {
            "run": key,
            "outcome": ended.outcome,
            "energy_joules": ended.energy,
            "seconds": ended.seconds,
            "power_watts": ended.power,
            "epochs": ended.epochs,
        }
        ask_agent("report", facts, self._directories)


class FileRuns:
    """The runs in a file, for jobs that move between hosts; otherwise as AgentRuns."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self, terms: RecurringJobTerms, gpus: str) -> StartedRun:
        try:
            with closing(RunBook(self._path)) as book:
                book.tidy(wall := int(time()))
                book.end_lost(FILE_OWNER, is_alive)
                begun = book.begin(FILE_OWNER, terms, gpus, this_process(), wall)
        except TermsChangedError as error:
            raise MeasurementError(
                f"{self._path}: earlier runs of job {terms.name} had other terms: {error}. Use the "
                "same terms or another name, or forget the earlier runs."
            ) from None
        except NoRoomError as error:
            raise MeasurementError(
                f"{self._path} has {error} already. Report or forget some of them."
            ) from None
        except RunBookError as error:
            raise MeasurementError(str(error)) from None
        return StartedRun(begun.key, begun.choice.batch_size, begun.choice.stop_cost)

    def end(self, key: int, ended: TrainingRun) -> None:
        try:
            with closing(RunBook(self._path)) as book:
                book.end(FILE_OWNER, key, ended)
        except UnknownRunError:
            raise MeasurementError(f"{self._path} has no run {key}: it was forgotten.") from None
        except RunBookError as error:
            raise MeasurementError(str(error)) from None


def this_host() -> str:
    """The name of this host in a file of runs."""
    return socket.gethostname()


def this_process() -> RunningProcess:
    """This process, as in the records of runs."""
    return RunningProcess(this_host(), os.getpid(), _started(os.getpid()) or 0)


def is_alive(process: RunningProcess) -> bool:
    """True if a process of this host runs; those of other hosts are not known to have ended."""
    if process.host != this_host():
        return True
    return _started(process.pid) == process.started


def _started(pid: int) -> int | None:
    """The start time of a process in clock ticks after boot; None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[19])


class BatchSizeOptimizer:
    """Chooses the batch size of a recurring training, and ends runs that cost too much.

    ``eta_knob`` is the weight of energy in the cost, 1 - ``eta_knob`` that of time. A run is
    stopped when its cost exceeds ``beta_knob`` times the lowest one so far. ``window_size`` is the
    number of last runs of a size that count, 0 for all. ``store`` is a file for jobs that move
    between hosts; by default the agent keeps the runs. ``max_power`` in watts is the highest power
    of the devices, by default the sum of the power limits of the GPUs.
    """

    def __init__(
        self,
        job: str,
        batch_sizes: Sequence[int],
        default_batch_size: int,
        target_metric: float,
        higher_is_better_metric: bool,
        max_epochs: int,
        eta_knob: float = 0.5,
        beta_knob: float = 2.0,
        num_pruning_rounds: int = 2,
        window_size: int = 0,
        seed: int = 0,
        *,
        store: str | os.PathLike[str] | None = None,
        max_power: float | None = None,
        meter: AgentMeter | None = None,
        runs: AgentRuns | FileRuns | None = None,
    ) -> None:
        """ValueError for terms that make no sense."""
        self._terms = NamedTerms(
            list(batch_sizes),
            default_batch_size,
            target_metric,
            higher_is_better_metric,
            max_epochs,
            eta_knob,
            beta_knob,
            num_pruning_rounds,
            window_size,
            seed,
        ).terms(job)
        if max_power is not None and not (math.isfinite(max_power) and max_power > 0):
            raise ValueError(f"max_power {max_power} is not a positive number of watts")
        self._meter = meter or AgentMeter(max_power)
        self._runs = runs or (AgentRuns() if store is None else FileRuns(Path(store)))
        self._run: StartedRun | None = None
        self._failed = False
        self._power = 0.0
        self._epochs = 0
        self.training_finished = False
        """True once the target metric is reached, or the run is not worth its further cost."""

    def get_batch_size(self) -> int:
        """The batch size of this run; the default one without a store of runs."""
        if self._run is None and not self._failed:
            try:
                self._power = self._meter.power()
                self._run = self._runs.begin(self._terms, self._meter.gpus())
            except MeasurementError as error:
                self._fail(f"This run uses the default batch size. {error}")
        return self._terms.policy.default if self._run is None else self._run.batch_size

    def on_train_begin(self) -> None:
        """Begin to measure the run."""
        self.get_batch_size()
        self._epochs, self.training_finished = 0, False
        try:
            self._meter.begin()
        except MeasurementError as error:
            self._fail(str(error))

    def on_evaluate(self, metric: float) -> None:
        """Record the metric after an epoch, and decide if the training is finished."""
        self._epochs += 1
        reached = self._terms.reaches(metric)
        ended = reached or self._epochs >= self._terms.max_epochs
        if self._run is None:
            self.training_finished = self.training_finished or ended
            return
        try:
            energy, seconds = self._meter.read()
        except MeasurementError as error:
            self._run = None
            self._fail(f"This run does not count. {error}")
            self.training_finished = ended
            return
        cost = self._terms.cost(energy, seconds, self._power)
        dear = self._run.stop_cost is not None and cost > self._run.stop_cost
        if not (ended or dear):
            return
        missed = TrialOutcome.STOPPED if dear else TrialOutcome.MISSED
        outcome = TrialOutcome.CONVERGED if reached else missed
        run, self._run = self._run, None
        self.training_finished = True
        figures = energy, seconds, self._power, self._epochs
        try:
            self._runs.end(run.key, TrainingRun(run.batch_size, outcome, *figures))
        except MeasurementError as error:
            self._fail(f"This run is not recorded. {error}")

    def _fail(self, text: str) -> None:
        self._failed = True
        warnings.warn(f"Job {self._terms.name}: {text}", RuntimeWarning, stacklevel=3)
