"""The energy of a training run by the agent: its GPUs, or its processes."""

from __future__ import annotations

from typing import Any

import pytest

from wattspan.recurring import optimizer as optimizer_module
from wattspan.recurring.optimizer import AgentMeter
from wattspan.sdk import MeasurementError
from wattspan.sdk.client import Device


def board(number: int, joules: float | None = 0.0, model: str = "NVIDIA H100") -> Device:
    return Device(
        *(f"gpu:GPU-{number}", "gpu", f"GPU {number}", joules, 0.0, 1.0, "emulated"),
        number=number,
        uuid=f"GPU-{number}",
        model=model,
    )


class Agent:
    """Answers with given devices and requests, and keeps the requests."""

    def __init__(self, *devices: Device, gpus: dict[str, Any] | None = None) -> None:
        self.devices = devices
        self.gpus = gpus or {}
        self.asked: list[str] = []

    def read(self, start: int, end: int, ids: object = None, **_: object) -> list[Device]:
        wanted = None if ids is None else set(ids)  # type: ignore[call-overload]
        return [one for one in self.devices if wanted is None or one.id in wanted]

    def request(self, path: str, parameters: dict, **_: object) -> dict[str, Any]:
        self.asked.append(path)
        return {"domains": [{"hw_id": key, "gpu": gpu} for key, gpu in self.gpus.items()]}


def metered(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, max_power: float | None = None
) -> AgentMeter:
    for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "SLURM_JOB_GPUS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(optimizer_module, "request_json", agent.request)
    return AgentMeter(max_power, read=agent.read)


def test_run_has_the_energy_of_all_its_boards(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = metered(Agent(board(0, 70.0), board(1, 30.0)), monkeypatch)
    meter.begin()
    joules, seconds = meter.read()
    assert joules == 100.0
    assert seconds > 0
    assert meter.gpus() == "2 x NVIDIA H100"


def test_gpus_are_named_by_number_and_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    mixed = Agent(board(0, model="B"), board(1, model="A"), board(2, model="B"))
    assert metered(mixed, monkeypatch).gpus() == "1 x A, 2 x B"


def test_only_visible_boards_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent(board(0, 70.0), board(1, 30.0))
    meter = metered(agent, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1")
    meter = AgentMeter(read=agent.read)
    meter.begin()
    assert meter.read()[0] == 30.0
    assert meter.gpus() == "1 x NVIDIA H100"


def test_only_asked_boards_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent(board(0, 70.0), board(1, 30.0))
    metered(agent, monkeypatch)
    meter = AgentMeter(read=agent.read, gpu_indices=[1])
    meter.begin()
    assert meter.read()[0] == 30.0


def test_highest_power_is_the_sum_of_the_default_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {
        "gpu:GPU-0": {"default_limit_watts": 700.0, "limit_watts": 500.0},
        "gpu:GPU-1": {"default_limit_watts": None, "limit_watts": 600.0},
    }
    assert metered(Agent(board(0), board(1), gpus=limits), monkeypatch).power() == 1300.0
    assert metered(Agent(board(0)), monkeypatch, max_power=99.0).power() == 99.0


def test_unknown_limit_asks_for_max_power(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MeasurementError, match=r"gpu:GPU-0 is not known\. Give max_power"):
        metered(Agent(board(0)), monkeypatch).power()


def test_unmeasured_energy_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = metered(Agent(board(0, None)), monkeypatch)
    with pytest.raises(MeasurementError, match="has not begun"):
        meter.read()
    meter.begin()
    with pytest.raises(MeasurementError, match="GPU 0 is not known for this run"):
        meter.read()


def test_program_without_gpus_is_watched_and_needs_a_power(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent()
    meter = metered(agent, monkeypatch)
    with pytest.raises(MeasurementError, match=r"without GPUs is not known\. Give max_power"):
        meter.power()
    assert meter.gpus() == ""
    meter.begin()
    assert agent.asked == ["/v1/watch"]

    class Found:
        class joules:  # noqa: N801 - as the attribute of a measurement
            total = 12.5

    monkeypatch.setattr(optimizer_module, "read_measurement", lambda *_: Found)
    assert meter.read()[0] == 12.5
