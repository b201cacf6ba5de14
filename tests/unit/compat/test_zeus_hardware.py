"""Readings of GPUs, recurring trainings and helpers of scripts, by Zeus's names."""

from __future__ import annotations

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from time import monotonic_ns
from types import SimpleNamespace
from typing import Any

import pytest
from testbed.metered_devices import MeteredDevices, gpu

from wattspan.compat.zeus.hardware import (
    GPU,
    GPUs,
    ZeusGPUHeterogeneousError,
    ZeusGPUInitError,
    get_gpus,
)
from wattspan.compat.zeus.limits import ZeusGPUNotSupportedError
from wattspan.compat.zeus.monitor import ZeusMonitor
from wattspan.compat.zeus.optimizer import (
    BatchSizeOptimizer,
    JobSpec,
    ZeusBSOBadOperationError,
    ZeusBSOTrainFailError,
)
from wattspan.compat.zeus.utilities import (
    LinearScaler,
    SquareRootScaler,
    get_env,
    get_ip_lat_long,
)
from wattspan.sdk import NotMeasuredError

BOARDS = (gpu(0), gpu(1))
MONITOR: Any = SimpleNamespace(gpu_indices=[0])
TICK = 10**8


@pytest.fixture(autouse=True)
def no_agent(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("WATTSPAN_RUN_DIR", str(tmp_path / "none"))


@pytest.fixture
def meter() -> MeteredDevices:
    now = monotonic_ns()
    return MeteredDevices(
        BOARDS,
        steps={
            BOARDS[1].id: ((now - 2 * TICK, now - TICK, 9.0), (now - TICK, now, 12.0)),
        },
        temperatures={BOARDS[1].id: ((now - TICK, 41), (now, 43))},
    )


def test_readings_are_the_newest_of_the_indexed_gpu(meter: MeteredDevices) -> None:
    gpus = GPUs(read=meter)
    assert len(gpus) == 2
    assert gpus.get_name(1) == BOARDS[1].model
    assert gpus.get_average_power_usage(1) == 120_000
    assert gpus.get_instant_power_usage(gpu_index=1) == 120_000
    assert gpus.get_gpu_temperature(1) == 43
    for read in (gpus.get_instant_power_usage, gpus.get_gpu_temperature):
        with pytest.raises(NotMeasuredError, match="of GPU 0 is unknown"):
            read(0)
    with pytest.raises(AttributeError):
        gpus.get_nothing(0)
    with pytest.raises(IndexError):
        gpus.get_name(2)


def test_energy_counts_on_from_call_to_call_and_after_unknown_time(meter: MeteredDevices) -> None:
    meter.energy = lambda key, mono: mono * 1000  # a megawatt, so that each moment counts
    one, key = GPU(1, meter), BOARDS[1].id

    def counted() -> tuple[int, int, int]:
        """The figure, and the period that was read for it."""
        figure = one.get_total_energy_consumption()
        since, until, _ = meter.calls[-1]
        return figure, since, until

    began = counted()[1]
    figure, _, until = counted()
    assert figure == pytest.approx(1000 * meter.joules(key, began, until), abs=1)
    meter.lost[key] = 0
    with pytest.raises(NotMeasuredError):
        one.get_total_energy_consumption()
    del meter.lost[key]
    figure, since, later = counted()
    assert since == until  # the unknown period is asked for again
    assert figure == pytest.approx(1000 * meter.joules(key, began, later), abs=1)


def test_gpus_of_a_monitor_count_on_between_reads(meter: MeteredDevices) -> None:
    class Monitor(ZeusMonitor):
        read_devices = staticmethod(meter)

    monitor = Monitor()
    assert len(monitor.gpus) == 2
    assert monitor.gpus.gpus[1] is monitor.gpus.gpus[1]


def test_figures_that_the_agent_lacks_are_named_errors(meter: MeteredDevices) -> None:
    one = GPU(0, meter)
    calls: list[Callable[[], object]] = [
        lambda: one.set_persistence_mode(True),
        one.get_persistence_mode,
        one.get_supported_memory_clocks,
        lambda: one.set_memory_locked_clocks(1, 2),
        one.reset_memory_locked_clocks,
        one.get_supported_graphics_clocks,
        one.get_average_memory_power_usage,
    ]
    for call in calls:
        with pytest.raises(ZeusGPUNotSupportedError, match=r"\. (Use|The counter)"):
            call()


def test_gpus_of_several_models_are_refused_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    mixed = MeteredDevices((gpu(0, model="B"), gpu(1, model="A")))
    with pytest.raises(ZeusGPUHeterogeneousError, match="A, B"):
        GPUs(ensure_homogeneous=True, read=mixed)
    assert len(GPUs(read=mixed)) == 2


def test_missing_agent_is_named() -> None:
    with pytest.raises(ZeusGPUInitError, match="No wattspan agent answers"):
        get_gpus()


# ------------------------------------------------------------------------- recurring trainings


def spec(**terms: Any) -> JobSpec:
    return JobSpec(
        job_id=None,
        job_id_prefix="nightly",
        batch_sizes=[16, 32, 64],
        default_batch_size=32,
        mab_seed=3,
        **terms,
    )


@pytest.mark.parametrize(
    ("terms", "metrics", "fails"),
    [
        ({"target_metric": 0.8, "max_epochs": 2}, [0.5, 0.9], False),
        ({"target_metric": 0.8, "max_epochs": 2}, [0.5, 0.7], True),
        ({"higher_is_better_metric": False, "max_epochs": 2}, [0.9, 0.4], False),
        ({"higher_is_better_metric": False, "beta_knob": None, "max_epochs": 1}, [0.6], True),
    ],
)
def test_training_ends_at_its_target_or_fails(
    terms: dict[str, Any], metrics: list[float], fails: bool
) -> None:
    optimizer = BatchSizeOptimizer(MONITOR, "http://unused", spec(**terms))
    with pytest.warns(RuntimeWarning, match="Job nightly: This run uses the default batch size"):
        assert optimizer.get_batch_size() == optimizer.current_batch_size == 32
    with pytest.warns(RuntimeWarning, match="Job nightly"):
        optimizer.on_train_begin()
    for metric in metrics[:-1]:
        optimizer.on_evaluate(metric)
        assert not optimizer.training_finished
    if fails:
        with pytest.raises(ZeusBSOTrainFailError, match="Batch size 32 costs"):
            optimizer.on_evaluate(metrics[-1])
    else:
        optimizer.on_evaluate(metrics[-1])
    assert optimizer.training_finished
    optimizer.on_evaluate(0.0)


def test_other_ranks_measure_nothing_and_terms_are_checked() -> None:
    optimizer = BatchSizeOptimizer(MONITOR, "", spec(), rank=1)
    optimizer.on_train_begin()
    optimizer.on_evaluate(1.0)
    assert not optimizer.training_finished
    with pytest.raises(ZeusBSOBadOperationError, match="Only rank 0"):
        optimizer.get_batch_size()
    with pytest.raises(TypeError, match="max_epoch"):
        BatchSizeOptimizer(MONITOR, "", spec(max_epoch=3))


# ------------------------------------------------------------------------------------- helpers


def test_environment_variable_has_the_asked_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATTS", "1.5")
    assert get_env("WATTS", float) == 1.5
    assert get_env("WATTS", str, "2") == "1.5"
    for text, value in {"True": True, "false": False}.items():
        monkeypatch.setenv("TUNES", text)
        assert get_env("TUNES", bool) is value
    monkeypatch.setenv("TUNES", "maybe")
    with pytest.raises(ValueError, match="'maybe' is no truth value"):
        get_env("TUNES", bool)
    monkeypatch.delenv("WATTS")
    assert get_env("WATTS", float, 0.0) == 0.0
    with pytest.raises(ValueError, match="WATTS is missing"):
        get_env("WATTS", float)


def test_learning_rate_is_scaled_with_the_batch_size() -> None:
    assert LinearScaler(bs=64, lr=0.01).compute_lr(new_bs=256) == pytest.approx(0.04)
    assert SquareRootScaler(bs=64, lr=0.01).compute_lr(new_bs=256) == pytest.approx(0.02)


def place_by(answer: bytes) -> tuple[float, float]:
    """The place of this network by a service with this answer."""

    class Place(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with HTTPServer(("127.0.0.1", 0), Place) as server:
        thread = Thread(target=server.handle_request)
        thread.start()
        try:
            return get_ip_lat_long(f"http://127.0.0.1:{server.server_port}/json")
        finally:
            thread.join()


def test_place_is_that_of_the_answer() -> None:
    assert place_by(b'{"ip": "192.0.2.7", "loc": "42.28,-83.74"}') == (42.28, -83.74)


@pytest.mark.parametrize(
    "answer",
    [b'{"ip": "10.0.0.7", "bogon": true}', b'{"loc": ""}', b'{"loc": null}', b"[]", b"slow down"],
)
def test_answer_without_a_place_is_an_error_with_the_answer(answer: bytes) -> None:
    with pytest.raises(OSError, match="does not know the place of this network") as error:
        place_by(answer)
    assert answer.decode() in str(error.value)
