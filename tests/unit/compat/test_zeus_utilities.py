"""Zeus's helpers of frameworks, its trials of a function, replayed logs, and CPU packages."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic_ns
from types import SimpleNamespace
from typing import Any

import pytest
from testbed.metered_devices import MeteredDevices, gpu, package

from wattspan.compat.zeus.hardware import (
    CpuDramMeasurement,
    CPUs,
    ZeusCPUInitError,
    ZeusSoCInitError,
    get_cpus,
    get_soc,
)
from wattspan.compat.zeus.monitor import ZeusMonitor
from wattspan.compat.zeus.trials import (
    measure,
    profile_cooldown_duration,
    profile_measurement_duration,
    profile_parameters,
)
from wattspan.compat.zeus.utilities import (
    ReplayZeusMonitor,
    all_reduce,
    cupy_is_available,
    get_rank,
    get_world_size,
    is_distributed,
    jax_is_available,
    sync_execution,
    torch_is_available,
)
from wattspan.sdk import MeasurementError, NotMeasuredError


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither an agent nor a framework."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("WATTSPAN_RUN_DIR", str(tmp_path / "none"))
    for name in ("torch", "jax", "cupy"):
        monkeypatch.setitem(sys.modules, name, None)


# ---------------------------------------------------------------------------------- frameworks


@dataclass
class Tensor:
    values: list[Any]
    dtype: str
    device: str

    def tolist(self) -> list[Any]:
        return self.values


@dataclass
class Group:
    """``torch.distributed`` of the second of three processes, which have the same numbers."""

    backend: str = "nccl"
    initialized: bool = True
    reduced: list[Tensor] = field(default_factory=list)
    ReduceOp = SimpleNamespace(SUM="sum", MAX="max")

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return self.initialized

    def get_backend(self) -> str:
        return self.backend

    def get_rank(self) -> int:
        return 1

    def get_world_size(self) -> int:
        return 3

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        self.reduced.append(tensor)
        tensor.values = [3 * one if op == "sum" else one for one in tensor.values]


@dataclass
class Torch:
    distributed: Group = field(default_factory=Group)
    has_gpu: bool = True
    waited: list[int] = field(default_factory=list)
    float64, int64 = "float64", "int64"

    @property
    def cuda(self) -> Any:
        return SimpleNamespace(
            is_available=lambda: self.has_gpu,
            is_initialized=lambda: self.has_gpu,
            synchronize=self.waited.append,
        )

    def tensor(self, values: list[Any], *, dtype: str, device: str) -> Tensor:
        return Tensor(list(values), dtype, device)


def test_framework_is_available_or_named_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for check in (torch_is_available, jax_is_available, cupy_is_available):
        assert not check()
        with pytest.raises(RuntimeError, match="is not installed"):
            check(ensure_available=True)
    monkeypatch.setitem(sys.modules, "torch", Torch(has_gpu=False))
    assert torch_is_available(ensure_cuda=False)
    with pytest.raises(RuntimeError, match="torch has no GPU here"):
        torch_is_available()
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(devices=lambda _: ["gpu"]))
    assert jax_is_available()
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace())
    assert cupy_is_available()


def test_execution_is_waited_for_on_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="torch is not installed"):
        sync_execution([0])
    monkeypatch.setitem(sys.modules, "torch", torch := Torch())
    sync_execution([0, 2])
    assert torch.waited == [0, 2]
    with pytest.raises(ValueError, match="'tensorflow' is not known"):
        sync_execution([0], "tensorflow")  # type: ignore[arg-type]


@pytest.mark.parametrize(("backend", "device"), [("nccl", "cuda"), ("gloo", "cpu")])
def test_numbers_are_reduced_over_processes(
    backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = Torch(Group(backend))
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert (get_rank(), get_world_size(), is_distributed()) == (1, 3, True)
    assert all_reduce([1, 2], "sum") == [3, 6]
    assert all_reduce([1.5, 2], "max") == [1.5, 2]
    assert [(one.dtype, one.device) for one in torch.distributed.reduced] == [
        ("int64", device), ("float64", device),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="no operation 'min'"):
        all_reduce([1], "min")  # type: ignore[arg-type]


def test_single_process_keeps_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (get_rank(), get_world_size(), all_reduce([1.5], "sum")) == (0, 1, [1.5])
    with pytest.raises(RuntimeError, match="Neither torch nor jax"):
        is_distributed()
    monkeypatch.setitem(sys.modules, "torch", Torch(Group(initialized=False)))
    assert (get_rank(), get_world_size(), is_distributed()) == (0, 1, False)


def test_processes_of_jax_have_ranks_and_are_not_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"device_count": 2, "process_index": 1, "process_count": 2}
    jax = SimpleNamespace(**{name: lambda n=n: n for name, n in counts.items()})
    monkeypatch.setitem(sys.modules, "jax", jax)
    assert (get_rank(), get_world_size(), is_distributed()) == (1, 2, True)
    with pytest.raises(NotImplementedError, match="JAX"):
        all_reduce([1], "sum")
    jax.process_count = lambda: 1
    assert all_reduce([1], "sum") == [1]


# -------------------------------------------------------------------------------------- trials


class Meter(ZeusMonitor):
    """Two GPUs with 300 W each, and temperatures."""

    def __init__(self, boards: Sequence[Any] = (gpu(0), gpu(1))) -> None:
        now = monotonic_ns()
        warm = tuple((now + i * 10**8, 40 + i) for i in range(-10, 600))
        temperatures = {one.id: warm for one in boards}
        self.read_devices = MeteredDevices(  # type: ignore[misc]
            boards, energy=lambda _, mono: mono * 3 // 10, temperatures=temperatures
        )
        super().__init__()


class Iteration:
    """Counts its calls, each of which takes a while."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1
        sum(range(20_000))


pytestmark = pytest.mark.filterwarnings("ignore:Windows do not wait for GPU work")


def test_trial_has_the_energy_of_an_iteration() -> None:
    function = Iteration()
    found = measure(function, Meter(), 0.05, 0.0, 3, 20)
    assert function.calls == 3 + 20 + 3 + found.iterations
    assert found.total_energy == pytest.approx(600 * found.total_time, rel=1e-3)
    assert found.energy_per_iter == pytest.approx(found.total_energy / found.iterations)
    assert found.time_per_iter == pytest.approx(found.total_time / found.iterations)
    assert 30 <= found.temperature_before <= found.temperature_after


class Unread(Meter):
    """Its windows cannot be read."""

    def end_window(self, *_: Any, **__: Any) -> Any:
        raise MeasurementError("gone")


class Fails(Iteration):
    """Fails in one of its calls."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.last = call

    def __call__(self) -> None:
        super().__call__()
        if self.calls == self.last:
            raise MeasurementError("gone")


class Ranks(Group):
    """Rank 1 of three, the others of which have failed from their reduction number ``fails`` on."""

    fails: int | None = None

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        super().all_reduce(tensor, op)
        if self.fails is not None and op == "max" and len(self.reduced) >= self.fails:
            tensor.values = [math.inf] * len(tensor.values)


@pytest.mark.parametrize(
    ("function", "meter", "reduced"),
    [
        pytest.param(Iteration(), Unread, 2, id="window"),
        pytest.param(Fails(2), Meter, 1, id="warming up of the calibration"),
        pytest.param(Fails(3 + 20), Meter, 1, id="calibration"),
        pytest.param(Fails(3 + 20 + 1), Meter, 2, id="warming up"),
        pytest.param(Fails(3 + 20 + 3 + 1), Meter, 2, id="trial"),
        pytest.param(Iteration(), lambda: Meter(()), 1, id="no board"),
    ],
)
def test_rank_that_fails_reduces_once_and_fails(
    function: Iteration,
    meter: Callable[[], ZeusMonitor],
    reduced: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = Ranks("gloo")
    monkeypatch.setitem(sys.modules, "torch", Torch(group, has_gpu=False))
    with pytest.raises((MeasurementError, ValueError), match=r"gone|has no GPU"):
        measure(function, meter(), 0.05, 0.0, 3, 20)
    assert len(group.reduced) == reduced
    assert group.reduced[-1].values == [math.inf]


@pytest.mark.parametrize("fails", [1, 2])
def test_trial_that_failed_in_another_rank_fails_here(
    fails: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Ranks("gloo")
    group.fails = fails
    monkeypatch.setitem(sys.modules, "torch", Torch(group, has_gpu=False))
    with pytest.raises(MeasurementError, match="another rank"):
        measure(Iteration(), Meter(), 0.05, 0.0, 3, 20)
    assert len(group.reduced) == fails


def test_sweeps_vary_one_duration_each() -> None:
    function = Iteration()
    lengths, pauses = profile_parameters(
        function, Meter(), [0.01, 0.02], [0.0, 0.005], 2, 1, 1e9, 1, 10
    )
    assert lengths.sweep_param == ("measurement_duration", [0.01, 0.02])
    assert lengths.fixed_param == ("cooldown_duration", 0.005)
    assert [one.cooldown_duration for one in lengths.entries] == [0.005, 0.005]
    assert pauses.sweep_param == ("cooldown_duration", [0.0, 0.005])
    assert [one.measurement_duration for one in pauses.entries] == [0.02, 0.02]
    assert all(one.is_valid and len(one.trials) == 2 for one in lengths.entries)
    assert "0.02 s, cooldown 0.005 s" in str(lengths)
    trials = [one for entry in (*lengths.entries, *pauses.entries) for one in entry.trials]
    measured = sum(one.iterations for one in trials)
    warmed_up = 1 + 10 + len(trials) * 1
    assert function.calls > measured + warmed_up  # the first trial, which only warms up


def test_result_with_scattered_energies_is_not_valid() -> None:
    for profile in (profile_measurement_duration, profile_cooldown_duration):
        report = profile(Iteration(), Meter(), [0.0], 0.0, 2, 0, 0.0, 0, 0, 0.001)
        (entry,) = report.entries
        assert not entry.is_valid
        assert entry.energy_mean == pytest.approx(
            sum(one.energy_per_iter for one in entry.trials) / 2
        )


def test_function_that_fails_leaves_no_window_open() -> None:
    monitor = Meter()

    def fails() -> None:
        raise RuntimeError("out of memory")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            profile_cooldown_duration(fails, monitor, [0.0], 0.0, 1, 0, 0.0, 0, 0, 1.0)
    assert profile_cooldown_duration(int, monitor, [0.0], 0.0, 1, 0, 0.0, 0, 0, 1.0).entries


def test_monitor_without_a_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="has no GPU"):
        measure(int, Meter(()), 0.01, 0.0)


# -------------------------------------------------------------------------------------- replay

LOG = """start_time,window_name,elapsed_time,gpu0_energy,gpu10_energy
1.5,"epoch, first",2.5,100.0,50.5
2.0,step,0.5,20.0,10.0
2.5,lost,0.5,,10.0
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.csv"
    path.write_text(LOG)
    return path


def test_windows_are_replayed_in_the_order_of_their_ends(log: Path) -> None:
    replay = ReplayZeusMonitor(log_file=log, ignore_sync_execution=True)
    assert isinstance(replay, ZeusMonitor)
    assert (replay.gpu_indices, replay.cpu_indices) == ([0, 10], [])
    for key in ("step", "epoch, first", "other"):
        replay.begin_window(key)
    replay.begin_window("step", restart=True)
    assert replay.end_window("other", cancel=True).gpu_energy == {0: 0.0, 10: 0.0}
    first = replay.end_window("epoch, first")
    assert (first.time, first.gpu_energy) == (2.5, {0: 100.0, 10: 50.5})
    assert replay.end_window("step").total_energy == 30.0
    replay.begin_window("lost")
    with pytest.raises(NotMeasuredError, match="'lost'"):
        replay.end_window("lost")
    replay.begin_window("more")
    with pytest.raises(RuntimeError, match="no line for window 'more'"):
        replay.end_window("more")


def test_window_that_the_log_does_not_have_next_is_refused(log: Path) -> None:
    replay = ReplayZeusMonitor(log_file=log)
    replay.begin_window("step", sync_execution=False)
    with pytest.raises(RuntimeError, match="open already"):
        replay.begin_window("step", sync_execution=False)
    with pytest.raises(RuntimeError, match="of window 'epoch, first', not 'step'"):
        replay.end_window("step", sync_execution=False)
    with pytest.raises(RuntimeError, match="'step' is not open"):
        replay.end_window("step", sync_execution=False)
    named = ReplayZeusMonitor([0], log_file=log, match_window_name=False)
    named.begin_window("a", sync_execution=False)
    with pytest.raises(RuntimeError, match=r"has 2 GPUs, not \[0\]"):
        named.end_window("a", sync_execution=False)


def test_replay_without_a_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="log_file is missing"):
        ReplayZeusMonitor()
    (tmp_path / "empty").write_text("")
    with pytest.raises(ValueError, match="not enough values"):
        ReplayZeusMonitor(log_file=tmp_path / "empty")


# ------------------------------------------------------------------------------------ packages


def test_energy_of_packages_counts_from_the_construction() -> None:
    devices = (package(0), package(1), package(1, "memory"))
    meter = MeteredDevices(devices, energy=lambda _, mono: mono * 1000)  # a megawatt
    cpus = CPUs(meter)
    assert [len(cpus), *(one.cpu_index for one in cpus.cpus)] == [2, 0, 1]
    assert not cpus.supports_get_dram_energy_consumption(0)
    assert cpus.get_total_energy_consumption(0).dram_mj is None
    before = cpus.get_total_energy_consumption(1)
    began = meter.calls[-1][1]
    after = cpus.get_total_energy_consumption(1)
    spent = after - before
    assert spent.dram_mj == pytest.approx((meter.calls[-1][1] - began) * 1.0, rel=1e-6)
    assert before.cpu_mj > 0
    assert spent.cpu_mj > 0
    assert spent / 2 == CpuDramMeasurement(spent.cpu_mj / 2, spent.dram_mj / 2)


def test_missing_packages_and_chips_are_named_errors() -> None:
    with pytest.raises(ZeusCPUInitError, match="No wattspan agent answers"):
        get_cpus()
    with pytest.raises(ZeusSoCInitError, match="all_energy"):
        get_soc()
