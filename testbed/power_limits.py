"""The power limits of an emulated host as another client of its drivers sees them, and hangs."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable

from testbed.capper_process import CapperProcess
from testbed.program import ENVIRONMENT, PROGRAM
from wattspan.capper.workers import open_actuators
from wattspan.clock import SystemClock
from wattspan.emulation.host import EmulatedHost
from wattspan.model import CapKey, Knob, Trouble
from wattspan.ports import ActuatorError

POWER = (Knob.GPU_POWER, Knob.CPU_POWER)


class PowerLimits:
    """Reads every limit; ``originals`` are those of when it was made."""

    def __init__(self, host: EmulatedHost) -> None:
        sysfs = host.sysfs
        assert sysfs is not None
        opened = open_actuators(
            POWER, nvml=host.nvml(), sysfs=sysfs, clock=SystemClock(), amdsmi=host.amdsmi()
        )
        self._actuators = {actuator.knob: actuator for actuator in opened}
        states = [state for one in opened for state in one.devices()]
        self.originals = {state.key: state.requested for state in states}

    def now(self, keys: Iterable[CapKey]) -> dict[CapKey, int | None]:
        return {key: self._read(key) for key in keys}

    def _read(self, key: CapKey) -> int | None:
        """A limit. The file of an emulated one is empty while the capper writes it."""
        for left in reversed(range(100)):
            try:
                return self._actuators[key.knob].read(key.device).requested
            except ActuatorError as error:
                if error.trouble is not Trouble.MALFORMED or not left:
                    raise
        return None

    def restored(self, keys: Iterable[CapKey]) -> bool:
        return all(self.now([key]) == {key: self.originals[key]} for key in keys)

    def total(self) -> int:
        """Milliwatts that all devices together may draw."""
        return sum(limit or 0 for limit in self.now(self.originals).values())

    def close(self) -> None:
        for actuator in self._actuators.values():
            actuator.close()


class Hang:
    """Makes one device of an emulated host hang, and ends that."""

    def __init__(self, host: EmulatedHost, key: CapKey) -> None:
        self._host, self.key = host, key

    def begin(self) -> None:
        if self.key.knob is Knob.GPU_POWER:
            self._host.ask(do="fault", gpu=0, fault="hang", on=True)
        else:
            self._host.ask(do="fault", zone="intel-rapl:0", fault="hang")

    def end(self) -> None:
        if self.key.knob is Knob.GPU_POWER:
            self._host.ask(do="fault", gpu=0, fault="hang", on=False)
        else:
            self._host.ask(do="fault", zone="intel-rapl:0", fault="release")


def restore(capper: CapperProcess, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `wattspan caps restore` where ``capper`` is, or was."""
    return subprocess.run(
        [*PROGRAM, "caps", "restore", *words, *capper.words],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
