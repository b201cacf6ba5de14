"""A source of GPUs over a driver's real binding and an emulated C library, in its own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wattspan.clock import SystemClock
from wattspan.emulation.boards import EmulatedBoard
from wattspan.emulation.gpus import EmulatedGpus
from wattspan.emulation.workloads import SteadyLoad

_CLIENT = """
import importlib, json, sys
from wattspan.clock import SystemClock
from wattspan.model import Consumer, PayerInfo
from wattspan.ports import SourceContext
from wattspan.testing import FakeDirectory

clock = SystemClock()
worker = Consumer(int(sys.argv[2]), 0)
directory = FakeDirectory([PayerInfo(worker, "worker")])
plugin = importlib.import_module(f"wattspan.sources.{sys.argv[1]}.source").plugin
source = plugin.open(plugin.settings(), SourceContext(clock, directory))
readings, spent, gpus = [], 0, ()
while spent < 200_000_000 or len(readings) < 10:
    batch = source.read()
    readings += batch.readings
    spent += sum(usage.spent.get(worker, 0) for usage in batch.usages)
    gpus = batch.gpus or gpus
    clock.sleep_until(clock.monotonic() + 20_000_000)
source.close()
print(json.dumps({
    "methods": [domain.method for domain in batch.domains],
    "why": [domain.why for domain in batch.domains],
    "provenance": sorted({str(domain.provenance) for domain in batch.domains}),
    "rising": all(a.counter <= b.counter for a, b in zip(readings, readings[1:])),
    "energy": readings[-1].counter - readings[0].counter,
    "limit": gpus[0].limits.maximum,
    "failures": [str(failure) for failure in batch.failures],
}))
"""


def read_source(
    name: str,
    board: EmulatedBoard,
    file: Path,
    environment: Mapping[str, str],
    slices: tuple[int, ...] = (),
) -> dict[str, Any]:
    """The results of the source ``name`` on one board in ``file``, half of it used by this process.

    ``truth`` is the energy of the board since its start, ``slices`` the sizes of MIG instances.
    """
    with EmulatedGpus(file, [board], SystemClock()) as gpus:
        gpus.divide(0, slices)
        gpus.attach(0, os.getpid(), SteadyLoad(0.5))
        gpus.start()
        answer = subprocess.run(
            [sys.executable, "-c", _CLIENT, name, str(os.getpid())],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        truth = gpus.truth(0).energy
    assert answer.returncode == 0, answer.stderr
    return {**json.loads(answer.stdout), "truth": truth}
