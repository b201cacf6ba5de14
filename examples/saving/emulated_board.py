"""A board of the emulated host that runs here: its steps take as long as its power limit allows."""

from __future__ import annotations

import time

from wattspan.emulation.control import Closeable, ControlClient

STEP = 0.1  # seconds at full speed, of which HOST are done without the board
HOST = 0.03


class EmulatedBoard(Closeable):
    """This process trains on board 0."""

    def __init__(self) -> None:
        self._host, self._done = ControlClient(), 0
        steps = {"step": STEP, "host": HOST, "noise": 0.01, "seed": 0}
        self._host.ask(do="attach", gpu=0, load=1.0, kernel="large-model", steps=steps)

    def step(self) -> None:
        """Return when the next step of the board is done."""
        while not self._host.ask(do="finished", gpu=0, since=self._done)["finished"]:
            time.sleep(STEP / 20)
        self._done += 1

    def close(self) -> None:
        self._host.close()
