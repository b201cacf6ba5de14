"""A capper whose devices block in writes, to be killed in the middle of one.

``python -m testbed.blocking_capper before|after CAPPER-OPTIONS``: the process blocks before or just
after the device write and reports it on standard error.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any

from wattspan.capper.devices import ConcurrentActuator
from wattspan.cli import capper
from wattspan.model import KnobState


class Blocking:
    """An actuator that writes, or does not, and then blocks."""

    def __init__(self, real: ConcurrentActuator, when: str) -> None:
        self._real, self._when = real, when

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def write(self, device: str, value: int | None) -> KnobState:
        state = self._real.write(device, value) if self._when == "after" else None
        print(f"standing still {self._when} the write", file=sys.stderr, flush=True)
        threading.Event().wait()
        assert state is not None
        return state


def main() -> None:
    when, real = sys.argv.pop(1), capper.open_isolated_actuators

    def blocking(*arguments: object) -> Sequence[ConcurrentActuator]:
        return [Blocking(one, when) for one in real(*arguments)]  # type: ignore[arg-type]

    capper.open_isolated_actuators = blocking
    capper.command()


if __name__ == "__main__":
    main()
