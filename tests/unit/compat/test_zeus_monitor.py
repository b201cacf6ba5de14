"""ZeusMonitor: windows, lazy energies, threads, forks, the log file."""

from __future__ import annotations

import copy
import csv
import dataclasses
import json
import math
import multiprocessing
import os
import pickle
import random
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from testbed.constant_history import GPU, PACKAGE, ConstantPast
from testbed.forks import in_child
from testbed.metered_devices import MeteredDevices, gpu, package, rough_energy
from testbed.query_server import FAR, QueryServer
from testbed.waiting import eventually

from wattspan.compat.zeus.devices import CudaEnvironment, DeviceIndex, DeviceMappingError
from wattspan.compat.zeus.log_file import WindowLog
from wattspan.compat.zeus.monitor import (
    DeviceSynchronizer,
    Measurement,
    WindowMeasurement,
    ZeusMonitor,
)
from wattspan.model import GpuStatus, Instant, Provenance
from wattspan.sdk import AgentUnavailableError, NotMeasuredError
from wattspan.sdk.client import DeviceReader, read_devices
from wattspan.sdk.ring import OwnedDescriptor

GPUS = (gpu(0), gpu(1))
HOST = (*GPUS, package(0), package(1), package(0, "memory"), package(1, "memory"))


@pytest.fixture(autouse=True)
def no_cuda_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    monkeypatch.setenv("WATTSPAN_RUN_DIR", str(tmp_path / "none"))


@pytest.fixture
def meter() -> MeteredDevices:
    return MeteredDevices(HOST)


def monitor_of(meter: DeviceReader) -> type[ZeusMonitor]:
    """A ZeusMonitor that asks ``meter`` instead of an agent, and never waits for a GPU."""

    class Monitor(ZeusMonitor):
        read_devices = staticmethod(meter)

        def begin_window(
            self, key: str, sync_execution: bool = False, restart: bool = False
        ) -> None:
            super().begin_window(key, sync_execution, restart)

        def end_window(
            self, key: str, sync_execution: bool = False, cancel: bool = False
        ) -> Measurement:
            return super().end_window(key, sync_execution, cancel)

    return Monitor


@pytest.fixture
def monitor(meter: MeteredDevices) -> ZeusMonitor:
    return monitor_of(meter)()


def measured(monitor: ZeusMonitor, key: str = "step") -> WindowMeasurement:
    monitor.begin_window(key)
    ended = monitor.end_window(key)
    assert isinstance(ended, WindowMeasurement)
    return ended


# --------------------------------------------------------------------------------- values


def test_window_has_the_energy_of_each_device(monitor: ZeusMonitor, meter: MeteredDevices) -> None:
    window = measured(monitor)
    assert window.time == (window.period[1] - window.period[0]) / 1e9 > 0
    assert window.gpu_energy == {i: meter.joules(GPUS[i].id, *window.period) for i in (0, 1)}
    assert window.total_energy == sum(window.gpu_energy.values())
    assert window.cpu_energy == {
        i: meter.joules(f"rapl:package-{i}", *window.period) for i in (0, 1)
    }
    assert window.dram_energy == {
        i: meter.joules(f"rapl:package-{i}/dram", *window.period) for i in (0, 1)
    }
    assert window.soc_energy is None


def test_begin_and_end_ask_no_agent(monitor: ZeusMonitor, meter: MeteredDevices) -> None:
    asked = len(meter.calls)
    window = measured(monitor)
    assert window.time > 0
    assert len(meter.calls) == asked
    _ = window.gpu_energy, window.gpu_energy, window.total_energy
    assert [ids for *_, ids in meter.calls[asked:]] == [(GPUS[0].id, GPUS[1].id)]


def test_extensions_have_uncertainty_coverage_provenance_and_all_energy(
    monitor: ZeusMonitor, meter: MeteredDevices
) -> None:
    window = measured(monitor)
    assert window.uncertainty == {i: pytest.approx(j / 100) for i, j in window.gpu_energy.items()}
    assert window.coverage == 1.0
    assert window.certainty == window.all_energy.certainty == "known"
    assert window.provenance == {
        **{one.name: "emulated" for one in GPUS},
        "package-0": "measured",
        "package-1": "measured",
    }
    assert set(window.all_energy) == {"gpu", "cpu", "memory"}
    assert window.all_energy["gpu"] == pytest.approx(window.total_energy)
    with pytest.raises(AgentUnavailableError):
        _ = window.process_energy


def test_asked_indices_only_are_measured(meter: MeteredDevices) -> None:
    one = monitor_of(meter)(gpu_indices=[1], cpu_indices=[0])
    assert (one.gpu_indices, one.cpu_indices) == ([1], [0])
    window = measured(one)
    assert list(window.gpu_energy) == [1]
    assert list(window.cpu_energy or ()) == list(window.dram_energy or ()) == [0]


def test_monitor_without_devices_measures_none(meter: MeteredDevices) -> None:
    window = measured(monitor_of(meter)(gpu_indices=[], cpu_indices=[]))
    assert (window.gpu_energy, window.cpu_energy, window.dram_energy) == ({}, None, None)
    assert window.coverage == 0.0


def test_visible_devices_are_numbered_from_zero(
    meter: MeteredDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    one = monitor_of(meter)()
    assert one.gpu_indices == [0]
    window = measured(one)
    assert window.gpu_energy == {0: meter.joules(GPUS[1].id, *window.period)}


@pytest.mark.parametrize(
    ("indices", "sentence"),
    [
        ({"gpu_indices": [0, 2]}, "GPU 2 does not exist here; known indices: 0, 1"),
        ({"cpu_indices": [7]}, "CPU package 7 does not exist here; known indices: 0, 1"),
    ],
)
def test_missing_index_is_a_value_error(
    meter: MeteredDevices, indices: dict[str, list[int]], sentence: str
) -> None:
    index = DeviceIndex(meter, **{"gpu_indices": None, "cpu_indices": None, **indices})
    with pytest.raises(ValueError, match=sentence):
        index.check("ZeusMonitor", patience=0.0)


def test_devices_of_a_starting_agent_are_waited_for(meter: MeteredDevices) -> None:
    meter.devices = HOST[2:]
    index = DeviceIndex(meter, [0], None)
    threading.Timer(0.05, lambda: setattr(meter, "devices", HOST)).start()
    index.check("ZeusMonitor", patience=60.0)
    assert index.resolve().gpus == {0: GPUS[0].id}


def test_gpus_that_appear_later_are_measured(meter: MeteredDevices) -> None:
    meter.devices = HOST[2:]
    one = monitor_of(meter)()
    assert one.gpu_indices == []
    meter.devices = HOST
    assert list(measured(one).gpu_energy) == one.gpu_indices == [0, 1]


def test_domains_of_one_package_are_added(meter: MeteredDevices) -> None:
    die = package(0)._replace(id="rapl:package-0-die-1")
    meter.devices = (package(0), die)
    window = measured(monitor_of(meter)())
    both = (meter.joules(key, *window.period) for key in ("rapl:package-0", die.id))
    assert window.cpu_energy == {0: pytest.approx(sum(both))}


def test_packages_without_numbers_are_not_merged(meter: MeteredDevices) -> None:
    """Two sockets of Ampere Altra; a numbered one beside them keeps its number."""
    names = ("a", "b", "c")
    meter.devices = tuple(
        package(0)._replace(id=f"hwmon:{name}", name="CPU power", number=number)
        for name, number in zip(names, (None, 1, None), strict=True)
    )
    window = measured(monitor_of(meter)())
    found = {i: meter.joules(f"hwmon:{name}", *window.period) for i, name in enumerate("abc")}
    assert window.cpu_energy == found
    assert monitor_of(meter)(cpu_indices=[2]).cpu_indices == [2]


def test_reported_mig_instance_is_found_without_its_name_in_a_variable() -> None:
    """Before torch has initialised CUDA, the one that index 0 means is known if it is the only."""
    uuids = [f"MIG-1111000{i}-aaaa-5555-8888-000000000003" for i in range(2)]
    parts = [gpu(3, uuid)._replace(parent=GPUS[0].id) for uuid in uuids]
    ready: list[bool] = []
    cuda = SimpleNamespace(
        is_initialized=lambda: bool(ready),
        device_count=lambda: 1,
        get_device_properties=lambda _: SimpleNamespace(uuid=uuids[1].removeprefix("MIG-")),
    )
    meter = MeteredDevices((GPUS[0], *parts, package(0)))
    modules = {"torch": SimpleNamespace(cuda=cuda)}
    index = DeviceIndex(meter, None, None, CudaEnvironment(), modules)
    with pytest.warns(RuntimeWarning, match="2 MIG instances, of which CUDA shows one"):
        index.check("ZeusMonitor")
    assert list(index.resolve().packages) == [0]  # the fault of GPUs is theirs alone
    ready.append(True)
    assert index.resolve().gpus == {0: parts[1].id}
    meter.devices = (GPUS[0], parts[0])
    assert DeviceIndex(meter, [0], None, CudaEnvironment(), {}).resolve().gpus == {0: parts[0].id}


def test_ambiguous_order_warns_and_fails_at_reading(meter: MeteredDevices) -> None:
    meter.devices = (gpu(0), gpu(1, model="NVIDIA A40"), package(0))
    with pytest.warns(RuntimeWarning, match=r"order of CUDA's devices is not known"):
        one = monitor_of(meter)()
    with pytest.raises(DeviceMappingError, match="CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        _ = measured(one).total_energy
    assert list(measured(one).cpu_energy or ()) == [0]


# --------------------------------------------------------------------- failures and partial


def test_missing_agent_warns_once_and_fails_at_reading(meter: MeteredDevices) -> None:
    meter.error = AgentUnavailableError("No wattspan agent answers at /run/wattspan.")
    with pytest.warns(RuntimeWarning, match=r"Monitor measures nothing yet.* No wattspan agent"):
        one = monitor_of(meter)()
    assert one.gpu_indices == []
    window = measured(one)
    assert window.time > 0
    for name in ("gpu_energy", "total_energy", "cpu_energy", "dram_energy", "all_energy"):
        with pytest.raises(AgentUnavailableError):
            getattr(window, name)
    assert "without energy: No wattspan agent answers" in repr(window)
    meter.error = None
    assert list(window.gpu_energy) == one.gpu_indices == [0, 1]


def test_partial_energy_warns_and_states_its_coverage(
    monitor: ZeusMonitor, meter: MeteredDevices
) -> None:
    window = measured(monitor)
    began, ended = window.period
    meter.lost[GPUS[1].id] = began + (ended - began) // 4
    with pytest.warns(RuntimeWarning, match=r"window 'step' is partial: 2\d% of .* was measured"):
        assert window.gpu_energy[1] == meter.joules(GPUS[1].id, began, meter.lost[GPUS[1].id])
    assert window.coverage == pytest.approx(0.25, abs=0.01)
    assert window.certainty == "lower_bound"


def test_unmeasured_energy_is_an_error_and_never_zero(
    monitor: ZeusMonitor, meter: MeteredDevices
) -> None:
    window = measured(monitor)
    meter.lost[GPUS[0].id] = window.period[0]
    with pytest.raises(NotMeasuredError, match="in window 'step' is unknown"):
        _ = window.total_energy


def test_unsettled_energy_is_an_error_and_a_later_read_succeeds(
    monitor: ZeusMonitor, meter: MeteredDevices
) -> None:
    window = measured(monitor)
    meter.settled = False
    with pytest.raises(NotMeasuredError, match=r"not known yet after 5 s\. Read it again"):
        _ = window.gpu_energy
    meter.settled = True
    assert window.total_energy > 0


# ------------------------------------------------------------------------------------- keys


def test_duplicate_key_is_a_value_error_that_names_it(monitor: ZeusMonitor) -> None:
    monitor.begin_window("epoch")
    with pytest.raises(ValueError, match=r"^Measurement window 'epoch' already exists$"):
        monitor.begin_window("epoch")
    assert monitor.end_window("epoch").time > 0


def test_unknown_key_is_a_value_error_that_names_it(monitor: ZeusMonitor) -> None:
    with pytest.raises(ValueError, match=r"^Measurement window 'step' does not exist$"):
        monitor.end_window("step")
    measured(monitor)
    with pytest.raises(ValueError, match="'step' does not exist"):
        monitor.end_window("step")


def test_restarted_window_begins_anew(monitor: ZeusMonitor) -> None:
    monitor.begin_window("cell")
    first = monitor._windows["cell"].window._begun
    monitor.begin_window("cell", restart=True)
    window = monitor.end_window("cell")
    assert isinstance(window, WindowMeasurement)
    assert window.period[0] > first
    monitor.begin_window("new", restart=True)
    assert monitor.end_window("new").time > 0


def test_cancelled_window_is_zero_as_in_zeus(monitor: ZeusMonitor, tmp_path: Path) -> None:
    monitor.begin_window("step")
    assert monitor.end_window("step", cancel=True) == Measurement(
        time=0.0, gpu_energy={0: 0.0, 1: 0.0}, cpu_energy={0: 0.0, 1: 0.0}
    )
    with pytest.raises(ValueError, match="does not exist"):
        monitor.end_window("step", cancel=True)


def test_reset_discards_open_windows(monitor: ZeusMonitor) -> None:
    monitor.begin_window("a")
    monitor.begin_window("b")
    monitor.reset_windows()
    monitor.begin_window("a")
    with pytest.raises(ValueError, match="'b' does not exist"):
        monitor.end_window("b")


def test_failing_synchronisation_leaves_no_window(meter: MeteredDevices) -> None:
    class Broken(ZeusMonitor):
        read_devices = staticmethod(meter)

        def synchronize(self) -> None:
            raise RuntimeError("CUDA error")

    one = Broken()
    with pytest.raises(RuntimeError, match="CUDA error"):
        one.begin_window("step")
    one.begin_window("step", sync_execution=False)


# ------------------------------------------------------------------------ threads and forks


@pytest.mark.slow
def test_ten_thousand_nested_windows_in_eight_threads_are_exact() -> None:
    meter = MeteredDevices(GPUS, energy=rough_energy)
    monitor = monitor_of(meter)()
    ended: list[tuple[str, WindowMeasurement]] = []
    together = threading.Barrier(8)

    def work(number: int) -> None:
        source = random.Random(number)
        together.wait(60)
        open_keys: list[str] = []
        for i in range(1250):
            key = f"{number}/{i}"
            monitor.begin_window(key)
            open_keys.append(key)
            while open_keys and source.random() < 0.55:
                # overlapping as often as nested
                chosen = open_keys.pop(source.choice((-1, 0)))
                ended.append((chosen, monitor.end_window(chosen)))
        ended.extend((key, monitor.end_window(key)) for key in open_keys)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({key for key, _ in ended}) == len(ended) == 10_000
    total = 0
    for _, window in ended:
        for i, joules in window.gpu_energy.items():
            true = rough_energy(GPUS[i].id, window.period[1]) - rough_energy(
                GPUS[i].id, window.period[0]
            )
            assert round(joules * 1e6) == true
            total += true
    whole = math.fsum(window.total_energy for _, window in ended)
    assert round(whole * 1e6) == total


def test_one_key_in_many_threads_is_begun_once(monitor: ZeusMonitor) -> None:
    refused: list[ValueError] = []
    together = threading.Barrier(8)

    def work() -> None:
        together.wait(60)
        try:
            monitor.begin_window("shared")
        except ValueError as error:
            refused.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 7


def test_forked_child_owns_none_of_its_parents_windows(monitor: ZeusMonitor) -> None:
    monitor.begin_window("epoch")

    def child() -> str:
        try:
            monitor.end_window("epoch")
        except ValueError as error:
            monitor.begin_window("epoch")
            return f"{error} / {monitor.end_window('epoch').total_energy > 0}"
        return "ended"

    sentence = in_child(child)
    assert f"process {os.getpid()} began it before it forked" in sentence
    assert sentence.endswith("/ True")
    assert monitor.end_window("epoch").total_energy > 0


def test_read_that_waits_holds_up_no_other_window(
    monitor: ZeusMonitor, meter: MeteredDevices
) -> None:
    slow, other = measured(monitor, "slow"), measured(monitor, "other")
    waits, answer = threading.Event(), threading.Event()

    def energy(key: str, mono: int) -> int:
        if mono == slow.period[1]:
            waits.set()
            answer.wait(60)
        return mono  # a window of less than a microsecond has some, too

    meter.energy = energy
    reader = threading.Thread(target=lambda: slow.total_energy)
    reader.start()
    waits.wait(60)
    assert other.total_energy > 0
    assert reader.is_alive()
    third = measured(monitor, "third")
    assert float(in_child(lambda: third.total_energy)) == third.total_energy
    answer.set()
    reader.join()


# ------------------------------------------------------------------------------ synchronising


class FakeTorch:
    """``torch`` with a CUDA that records the synchronised devices."""

    def __init__(self, *, available: bool = True, initialised: bool = True) -> None:
        self.waited: list[int] = []
        self.cuda = SimpleNamespace(
            is_available=lambda: available,
            is_initialized=lambda: initialised,
            synchronize=self.waited.append,
        )


class FakeCupy:
    def __init__(self) -> None:
        self.waited: list[int] = []
        self.cuda = SimpleNamespace(Device=self._device)

    def _device(self, number: int) -> SimpleNamespace:
        return SimpleNamespace(synchronize=lambda: self.waited.append(number))


class FakeJax:
    def __init__(self) -> None:
        self.waited: list[object] = []

    def live_arrays(self) -> list[str]:
        return ["array"]

    def block_until_ready(self, arrays: list[str]) -> None:
        self.waited += arrays

    def effects_barrier(self) -> None:
        self.waited.append("effects")


@pytest.mark.parametrize(
    ("framework", "module", "expected"),
    [
        ("torch", FakeTorch(), [0, 3]),
        ("torch", FakeTorch(initialised=False), []),
        ("cupy", FakeCupy(), [0, 3]),
        ("jax", FakeJax(), ["array", "effects"]),
    ],
)
def test_every_listed_device_is_waited_for(
    framework: str, module: Any, expected: list[object]
) -> None:
    DeviceSynchronizer(framework, {framework: module}).wait([0, 3])
    assert module.waited == expected


@pytest.mark.parametrize(
    ("modules", "cause"),
    [
        ({}, "the program has not imported it"),
        ({"torch": FakeTorch(available=False)}, "it has no CUDA device"),
    ],
)
def test_missing_cuda_warns_once(modules: Mapping[str, Any], cause: str) -> None:
    one = DeviceSynchronizer("torch", modules)
    with pytest.warns(RuntimeWarning, match=cause):
        one.wait([0])
    one.wait([0])  # a second warning would be an error


def test_unknown_framework_is_refused(meter: MeteredDevices) -> None:
    with pytest.raises(ValueError, match="sync_execution_with='tf' is not known: write one of"):
        monitor_of(meter)(sync_execution_with="tf")


def test_windows_synchronise_only_on_request_and_with_gpus(meter: MeteredDevices) -> None:
    class Counting(ZeusMonitor):
        read_devices = staticmethod(meter)

    one = Counting(cpu_indices=[])
    torch = FakeTorch()
    one._synchronizer = DeviceSynchronizer("torch", {"torch": torch})
    one.begin_window("a")
    one.end_window("a", sync_execution=False)
    assert torch.waited == [0, 1]
    one.begin_window("a", sync_execution=False)
    one.end_window("a", cancel=True)
    assert torch.waited == [0, 1, 0, 1]
    none = Counting(gpu_indices=[])
    none.begin_window("a")  # would warn: torch is not loaded
    none.end_window("a")


# ---------------------------------------------------------------------- values as objects


def test_measurement_is_pickled_and_copied_with_its_values(monitor: ZeusMonitor) -> None:
    window = measured(monitor)
    pickled = pickle.loads(pickle.dumps(window))
    for again in (pickled, copy.copy(window), copy.deepcopy(window), dataclasses.replace(window)):
        assert type(again) is Measurement
        assert dataclasses.asdict(again) == dataclasses.asdict(window)
        assert again.total_energy == window.total_energy
        assert again == window
        assert window == again
    for field, value in {"time": -1.0, "gpu_energy": {0: 1.0}, "dram_energy": None}.items():
        other = dataclasses.replace(window, **{field: value})
        assert getattr(other, field) == value
        assert other != window
        assert window != other
    assert window != "window"
    assert f"gpu_energy={window.gpu_energy}" in repr(window)


# ----------------------------------------------------------------------------------- log file


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[Path]:
    return tmp_path / "logs" / "zeus.csv"


def test_log_has_the_columns_of_zeus(meter: MeteredDevices, logs: Path) -> None:
    one = monitor_of(meter)(log_file=logs)
    assert logs.read_text() == "start_time,window_name,elapsed_time,gpu0_energy,gpu1_energy\n"
    windows = {key: measured(one, key) for key in ("first", "second", "third, last")}
    one.log_file.close()
    lines = logs.read_text().splitlines()[1:]
    for (key, window), line in zip(windows.items(), lines, strict=True):
        energies = f"{window.gpu_energy[0]},{window.gpu_energy[1]}"
        quoted = f'"{key}"' if "," in key else key
        assert line.endswith(f",{quoted},{window.time},{energies}")


def test_log_line_is_written_while_the_program_runs(
    meter: MeteredDevices, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(logs.parents[1])
    one = monitor_of(meter)(log_file="logs/zeus.csv")
    monkeypatch.chdir("/")  # as `%cd` in a notebook
    measured(one)
    eventually(lambda: len(logs.read_text().splitlines()) == 2, "the window is logged")
    one.log_file.close()


def test_log_without_known_gpus_gets_its_columns_from_the_first_window(
    meter: MeteredDevices, logs: Path
) -> None:
    meter.error = AgentUnavailableError("none")
    with pytest.warns(RuntimeWarning):
        one = monitor_of(meter)(log_file=logs)
    assert logs.read_text() == ""
    meter.error = None
    measured(one)
    one.log_file.close()
    assert logs.read_text().startswith("start_time,window_name,elapsed_time,gpu0_energy,gpu1_e")


def test_unknown_energy_is_an_empty_field_of_the_log(meter: MeteredDevices, logs: Path) -> None:
    one = monitor_of(meter)(log_file=logs)
    meter.error = NotMeasuredError("unknown")
    window = measured(one)
    one.log_file.close()
    assert logs.read_text().splitlines()[1].endswith(f",step,{window.time},,")


def test_log_of_a_forked_child_appends_its_own_windows(meter: MeteredDevices, logs: Path) -> None:
    one = monitor_of(meter)(log_file=logs)
    measured(one, "parent")

    def child() -> str:
        measured(one, "child")
        assert isinstance(one.log_file, WindowLog)
        one.log_file.close()
        return "closed"

    assert in_child(child) == "closed"
    one.log_file.close()
    names = [line.split(",")[1] for line in logs.read_text().splitlines()]
    assert sorted(names) == ["child", "parent", "window_name"]


def test_log_of_a_multiprocessing_child_has_its_last_window(
    meter: MeteredDevices, logs: Path
) -> None:
    one = monitor_of(meter)(log_file=logs)
    child = multiprocessing.get_context("fork").Process(target=measured, args=(one, "child"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork with threads
        child.start()
    child.join()
    assert ",child," in logs.read_text()


def test_windows_before_the_first_answer_are_logged_with_empty_fields(
    meter: MeteredDevices, logs: Path
) -> None:
    meter.error = AgentUnavailableError("none")
    with pytest.warns(RuntimeWarning):
        one = monitor_of(meter)(log_file=logs)
    measured(one, "early")
    asked = len(meter.calls)
    measured(one, "again")
    eventually(lambda: len(meter.calls) > asked, "the second window is looked up")
    meter.error = None
    measured(one, "late")
    one.log_file.close()
    header, *lines = logs.read_text().splitlines()
    assert header.endswith(",gpu0_energy,gpu1_energy")
    assert [line.split(",")[1] for line in lines] == ["early", "again", "late"]
    assert lines[0].endswith(",,")
    assert not lines[2].endswith(",")


def test_log_without_any_answer_has_times_only(meter: MeteredDevices, logs: Path) -> None:
    meter.error = AgentUnavailableError("none")
    with pytest.warns(RuntimeWarning):
        one = monitor_of(meter)(log_file=logs)
    window = measured(one)
    one.log_file.close()
    header, line = logs.read_text().splitlines()
    assert header == "start_time,window_name,elapsed_time"
    assert line.endswith(f",step,{window.time}")


def test_log_waits_for_an_agent_that_restarts(meter: MeteredDevices, logs: Path) -> None:
    one = monitor_of(meter)(log_file=logs)
    meter.error = AgentUnavailableError("restarting")
    asked = len(meter.calls)
    window = measured(one)
    eventually(lambda: len(meter.calls) > asked + 1, "the agent is asked again")
    meter.error = None
    one.log_file.close()
    energies = ",".join(map(str, window.gpu_energy.values()))
    assert logs.read_text().splitlines()[1].endswith(f",{energies}")


def test_line_that_cannot_be_written_costs_no_other_line(meter: MeteredDevices, logs: Path) -> None:
    one = monitor_of(meter)(log_file=logs)
    assert isinstance(one.log_file, WindowLog)
    measured(one, "epoch \udce9 日")  # a name of a file that is not UTF-8
    eventually(lambda: logs.read_text("utf-8").count("\n") == 2, "the window is logged")
    assert ",epoch \\udce9 日," in logs.read_text("utf-8")
    logs.rename(logs.with_suffix(".old"))
    logs.mkdir()  # as with a full disk, nothing can be written
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        measured(one, "lost")
        eventually(lambda: len(told) == 1, "the line is missed")
    assert "Window 'lost' is missing in " in str(told[0].message)
    logs.rmdir()
    measured(one, "next")
    one.log_file.close()
    assert ",next," in logs.read_text("utf-8")


def test_window_of_any_name_is_told_whole_or_not_at_all(
    meter: MeteredDevices, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process for missing lines could read nothing after a part of a line."""
    reading, writing = os.pipe()

    def start(log: WindowLog) -> None:
        log._told = OwnedDescriptor(writing)

    monkeypatch.setattr(WindowLog, "_start_rest", start)
    one: Any = monitor_of(meter)(log_file=logs)
    names: list[Any] = ["first", 2, None, ("a", Path("b")), "x" * 5000, "last"]
    for name in names:
        measured(one, name)
    one.log_file.close()
    with os.fdopen(reading) as told:
        windows = [json.loads(line) for line in told][:-1]
    assert [key for _, key, *_ in windows] == ["first", "2", "None", str(names[3]), "last"]
    with logs.open(newline="") as file:
        assert [line[1] for line in csv.reader(file)][1:] == list(map(str, names))


def test_line_is_not_delayed_by_the_process_for_missing_ones(
    meter: MeteredDevices, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = threading.Event()
    monkeypatch.setattr(WindowLog, "_start_rest", lambda _: started)
    one = monitor_of(meter)(log_file=logs)
    measured(one)
    eventually(lambda: logs.read_text().count("\n") == 2, "the window is logged")
    started.set()
    one.log_file.close()


def test_first_process_of_a_container_gets_no_child(
    meter: MeteredDevices, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be the parent of orphans, and wait for none."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    one = monitor_of(meter)(log_file=logs)
    monkeypatch.setattr(WindowLog, "_start_rest", lambda _: pytest.fail("it has one"))
    measured(one)
    one.log_file.close()
    assert logs.read_text().count("\n") == 2


def test_unused_log_closes_at_once(logs: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        WindowLog(logs, [0]).close()
    assert logs.read_text() == "start_time,window_name,elapsed_time,gpu0_energy\n"


@pytest.fixture
def past(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ConstantPast:
    """A package and a GPU, of an agent at ``tmp_path``."""
    monkeypatch.setenv("WATTSPAN_RUN_DIR", str(tmp_path))
    # A real board has a device file.
    emulated = dataclasses.replace(GPU, provenance=Provenance.EMULATED)
    past = ConstantPast(until=FAR, known_domains=(PACKAGE, emulated))
    past.devices[GPU.id] = 300_000
    past.gpus[GPU.id] = GpuStatus(GPU.id, Instant(5, 5), index=0)
    return past


def test_energy_of_a_silent_gpu_is_known_once_it_gives_readings_again(
    tmp_path: Path, past: ConstantPast
) -> None:
    with QueryServer(tmp_path, past):
        monitor = monitor_of(read_devices)(gpu_indices=[0])
        windows = [measured(monitor) for _ in range(4)]
        past.until = 0
        past.silenced.add(GPU.id)
        with pytest.raises(NotMeasuredError):
            _ = windows[0].gpu_energy
        past.until = FAR
        past.silenced.clear()
        for one in windows:
            assert one.total_energy == pytest.approx(300 * one.time, rel=0.01, abs=2e-6)


def test_energies_of_windows_are_read_with_the_first_of_them(
    tmp_path: Path, past: ConstantPast
) -> None:
    with QueryServer(tmp_path, past):
        monitor = monitor_of(read_devices)(gpu_indices=[0])
        monitor.begin_window("all", sync_execution=False)
        windows = [measured(monitor) for _ in range(20)]
        whole = monitor.end_window("all", sync_execution=False)
        assert windows[5].total_energy > 0
        assert windows[4].cpu_energy
    assert sum(one.total_energy for one in windows) < whole.total_energy
    for one in windows:
        assert one.total_energy == pytest.approx(300 * one.time, rel=0.01, abs=2e-6)
        assert one.cpu_energy == {0: pytest.approx(10 * one.time, rel=0.01, abs=2e-6)}
