"""One knob of the devices of two drivers."""

from __future__ import annotations

from typing import Any

import pytest

from wattspan.capper.devices import IsolatedActuator
from wattspan.model import CapKey, Knob, KnobState, Trouble
from wattspan.ports import ActuatorError
from wattspan.testing import ManualClock

KNOB = Knob.GPU_POWER


class Pool:
    """The workers of a driver with given devices, of which ``hung`` more hang when listed.

    ``error`` is raised by all calls.
    """

    def __init__(self, *devices: str) -> None:
        self.clock = ManualClock()
        self.limits = dict.fromkeys(devices, 700)
        self.hung = 0
        self.error: ActuatorError | None = None
        self.prefetched: list[str] = []
        self.closed = False

    def worker(self, name: str) -> Pool:
        return self

    def begin(self, call: Any) -> None:
        self.prefetched.append(call.device)

    def ask(self, call: Any) -> Any:
        if self.error is not None:
            raise self.error
        match call.action:
            case "count":
                return len(self.limits) + self.hung
            case "identify":
                if call.slot >= len(self.limits):
                    raise ActuatorError("hangs", Trouble.STUCK)
                return list(self.limits)[call.slot]
        if call.device not in self.limits:
            raise ActuatorError(f"no {call.device}", Trouble.ABSENT)
        if call.action == "write":
            self.limits[call.device] = call.value or 0
        state = CapKey(KNOB, call.device)
        return KnobState(state, call.device, requested=self.limits[call.device])

    def replace(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def parts() -> tuple[Pool, Pool]:
    return Pool("gpu:a", "gpu:b"), Pool("gpu:0000:60:00.0")


@pytest.fixture
def joint(parts: tuple[Pool, Pool]) -> IsolatedActuator:
    return IsolatedActuator(KNOB, *parts)  # type: ignore[arg-type]


def test_devices_are_those_of_both(joint: IsolatedActuator) -> None:
    assert [state.key.device for state in joint.devices()] == [
        "gpu:a", "gpu:b", "gpu:0000:60:00.0",
    ]  # fmt: skip
    assert joint.knob is Knob.GPU_POWER


def test_driver_that_does_not_answer_hides_its_own_devices_only(
    joint: IsolatedActuator, parts: tuple[Pool, Pool]
) -> None:
    parts[0].error = ActuatorError("hangs", Trouble.STUCK)
    assert [state.key.device for state in joint.devices()] == ["gpu:0000:60:00.0"]
    assert joint.read("gpu:0000:60:00.0").requested == 700


def test_error_of_both_drivers_is_the_more_telling_one(
    joint: IsolatedActuator, parts: tuple[Pool, Pool]
) -> None:
    parts[0].error = ActuatorError("none", Trouble.ABSENT)
    parts[1].error = ActuatorError("hangs", Trouble.STUCK)
    for call in (joint.devices, lambda: joint.read("gpu:a")):
        with pytest.raises(ActuatorError, match="hangs"):
            call()


def test_device_is_written_by_its_own_driver(
    joint: IsolatedActuator, parts: tuple[Pool, Pool]
) -> None:
    assert joint.write("gpu:0000:60:00.0", 400).requested == 400
    assert joint.write("gpu:b", 300).requested == 300
    assert parts[0].limits == {"gpu:a": 700, "gpu:b": 300}


def test_unknown_device_is_not_written(joint: IsolatedActuator, parts: tuple[Pool, Pool]) -> None:
    with pytest.raises(ActuatorError, match="no gpu:c"):
        joint.write("gpu:c", 1)
    assert "gpu:c" not in parts[0].limits | parts[1].limits


def test_prefetch_goes_to_the_driver_of_each_device(
    joint: IsolatedActuator, parts: tuple[Pool, Pool]
) -> None:
    joint.devices()
    for part in parts:
        part.prefetched.clear()
    joint.prefetch(["gpu:0000:60:00.0", "gpu:b", "gpu:unknown"])
    assert (parts[0].prefetched, parts[1].prefetched) == (["gpu:b"], ["gpu:0000:60:00.0"])


def test_number_of_devices_counts_those_that_cannot_be_identified(
    joint: IsolatedActuator, parts: tuple[Pool, Pool]
) -> None:
    joint.devices()
    assert joint.unidentified is None
    parts[1].hung = 7
    joint.devices()
    assert joint.unidentified == 10


def test_both_are_closed(joint: IsolatedActuator, parts: tuple[Pool, Pool]) -> None:
    joint.close()
    assert parts[0].closed
    assert parts[1].closed
