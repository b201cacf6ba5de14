"""The agent's program under tracemalloc: each SIGUSR2 writes where its memory was asked for."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tracemalloc
from pathlib import Path

WHERE = "SOAK_TRACES"  # a directory
FRAMES = 1  # more makes the agent too slow to be itself


def dump(number: int, frame: object) -> None:
    folder = Path(os.environ[WHERE])
    gc.collect()
    ready = folder / f"{len(list(folder.iterdir()))}.trace"
    writing = ready.with_suffix(".part")
    tracemalloc.take_snapshot().dump(str(writing))
    writing.rename(ready)


def main() -> None:
    tracemalloc.start(FRAMES)
    signal.signal(signal.SIGUSR2, dump)
    from wattspan.cli import main as program

    sys.argv[0] = "wattspan"
    program()


if __name__ == "__main__":
    main()
