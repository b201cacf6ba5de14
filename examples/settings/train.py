"""A training on an emulated board: its steps take as long as the board is slow.

    python train.py BATCH_SIZE

It prints the samples of each step. A larger batch takes longer, and less time per sample.
"""

from __future__ import annotations

import sys
import time

from wattspan.emulation.control import ControlClient


def main() -> None:
    batch = int(sys.argv[1])
    step = 0.03 + 0.001 * batch  # seconds at full speed
    with ControlClient() as host:
        steps = {"step": step, "host": 0.03, "noise": 0.01, "seed": batch}
        host.ask(do="attach", gpu=0, load=1.0, kernel="large-model", steps=steps)
        done = 0
        while True:
            while not host.ask(do="finished", gpu=0, since=done)["finished"]:
                time.sleep(step / 20)
            done += 1
            print(f"samples={batch}", flush=True)


if __name__ == "__main__":
    main()
