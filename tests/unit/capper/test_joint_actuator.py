"""One knob of the devices of two drivers."""

from __future__ import annotations

import pytest

from wattspan.capper.workers import JointActuator
from wattspan.model import CapKey, Knob, KnobState, Trouble
from wattspan.ports import ActuatorError


class Part:
    """A driver with given devices; ``error`` is raised by all of its calls."""

    knob = Knob.GPU_POWER

    def __init__(self, *devices: str) -> None:
        self.limits = dict.fromkeys(devices, 700)
        self.error: ActuatorError | None = None
        self.unidentified: int | None = None
        self.prefetched: list[str] = []
        self.closed = False

    def devices(self) -> tuple[KnobState, ...]:
        self._check()
        return tuple(self.read(device) for device in self.limits)

    def read(self, device: str) -> KnobState:
        self._check()
        if device not in self.limits:
            raise ActuatorError(f"no {device}", Trouble.ABSENT)
        return KnobState(CapKey(self.knob, device), device, requested=self.limits[device])

    def write(self, device: str, value: int | None) -> KnobState:
        self._check()
        self.limits[device] = value or 0
        return self.read(device)

    def prefetch(self, devices: list[str]) -> None:
        self.prefetched += devices

    def close(self) -> None:
        self.closed = True

    def _check(self) -> None:
        if self.error is not None:
            raise self.error


@pytest.fixture
def parts() -> tuple[Part, Part]:
    return Part("gpu:a", "gpu:b"), Part("gpu:0000:60:00.0")


@pytest.fixture
def joint(parts: tuple[Part, Part]) -> JointActuator:
    return JointActuator(parts)


def test_devices_are_those_of_both(joint: JointActuator) -> None:
    assert [state.key.device for state in joint.devices()] == [
        "gpu:a", "gpu:b", "gpu:0000:60:00.0",
    ]  # fmt: skip
    assert joint.knob is Knob.GPU_POWER


def test_driver_that_does_not_answer_hides_its_own_devices_only(
    joint: JointActuator, parts: tuple[Part, Part]
) -> None:
    parts[0].error = ActuatorError("hangs", Trouble.STUCK)
    assert [state.key.device for state in joint.devices()] == ["gpu:0000:60:00.0"]
    assert joint.read("gpu:0000:60:00.0").requested == 700


def test_error_of_both_drivers_is_the_more_telling_one(
    joint: JointActuator, parts: tuple[Part, Part]
) -> None:
    parts[0].error = ActuatorError("none", Trouble.ABSENT)
    parts[1].error = ActuatorError("hangs", Trouble.STUCK)
    for call in (joint.devices, lambda: joint.read("gpu:a")):
        with pytest.raises(ActuatorError, match="hangs"):
            call()


def test_device_is_written_by_its_own_driver(
    joint: JointActuator, parts: tuple[Part, Part]
) -> None:
    assert joint.write("gpu:0000:60:00.0", 400).requested == 400
    assert joint.write("gpu:b", 300).requested == 300
    assert parts[0].limits == {"gpu:a": 700, "gpu:b": 300}


def test_unknown_device_is_not_written(joint: JointActuator, parts: tuple[Part, Part]) -> None:
    with pytest.raises(ActuatorError, match="no gpu:c"):
        joint.write("gpu:c", 1)
    assert "gpu:c" not in parts[0].limits | parts[1].limits


def test_prefetch_goes_to_the_driver_of_each_device(
    joint: JointActuator, parts: tuple[Part, Part]
) -> None:
    joint.devices()
    joint.prefetch(["gpu:0000:60:00.0", "gpu:b", "gpu:unknown"])
    assert (parts[0].prefetched, parts[1].prefetched) == (["gpu:b"], ["gpu:0000:60:00.0"])


def test_number_of_devices_counts_those_that_cannot_be_identified(
    joint: JointActuator, parts: tuple[Part, Part]
) -> None:
    joint.devices()
    assert joint.unidentified is None
    parts[1].unidentified = 8
    assert joint.unidentified == 10


def test_both_are_closed(joint: JointActuator, parts: tuple[Part, Part]) -> None:
    joint.close()
    assert parts[0].closed
    assert parts[1].closed
