"""A program that trains on a board of an emulated host; its source also runs by ``python -c``."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from wattspan.emulation.control import Closeable, ControlClient


class EmulatedTraining(Closeable):
    """This process trains on board ``index``: steps as long as the board is slow.

    ::

        with EmulatedTraining(step=0.1) as training:
            while True:
                with tracer.start_as_current_span("train_step"):
                    training.step()
    """

    def __init__(
        self,
        index: int = 0,
        *,
        step: float = 0.1,
        host_part: float = 0.03,
        noise: float = 0.02,
        seed: int = 0,
        kernel: str = "large-model",
        host: Path | None = None,
    ) -> None:
        """``step`` is in seconds at full speed; ``host_part`` of it is done without the board."""
        self._index, self._done = index, 0
        self._host = ControlClient(host)
        steps = {"step": step, "host": host_part, "noise": noise, "seed": seed}
        try:
            self._host.ask(do="attach", gpu=index, load=1.0, kernel=kernel, steps=steps)
        except BaseException:
            self._host.close()
            raise
        self._pause = min(0.005, step / 50)

    def step(self) -> tuple[int, int]:
        """Return when the next step is done: when exactly it began and ended, monotonic."""
        waiting = threading.Event()
        while not (finished := self._ask_units(self._done)["finished"]):
            waiting.wait(self._pause)
        self._done += 1
        began, ended, *_ = finished[0]
        return began, ended

    def truth(self) -> dict[str, Any]:
        """The truth about the steps so far: ``units``, and nanoseconds ``took`` and ``ideal``."""
        return self._ask_units(1 << 62)

    def _ask_units(self, since: int) -> dict[str, Any]:
        return self._host.ask(do="finished", gpu=self._index, since=since)

    def close(self) -> None:
        self._host.close()
