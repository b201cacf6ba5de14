"""The source over the real binding and a real C library, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nvml_library import build, environment
from wattspan.clock import SystemClock
from wattspan.emulation.boards import H100
from wattspan.emulation.gpus import EmulatedGpus
from wattspan.emulation.workloads import SteadyLoad

CLIENT = """
import json, os, sys
from wattspan.clock import SystemClock
from wattspan.model import Consumer, PayerInfo
from wattspan.ports import SourceContext
from wattspan.sources.nvml.source import open_nvml
from wattspan.sources.nvml.device import NvmlSettings
from wattspan.testing import FakeDirectory

clock = SystemClock()
worker = Consumer(int(sys.argv[1]), 0)
directory = FakeDirectory([PayerInfo(worker, "worker")])
source = open_nvml(NvmlSettings(), SourceContext(clock, directory))
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
    "provenance": sorted({str(domain.provenance) for domain in batch.domains}),
    "rising": all(a.counter <= b.counter for a, b in zip(readings, readings[1:])),
    "energy": readings[-1].counter - readings[0].counter,
    "limit": gpus[0].limits.maximum,
    "failures": [str(failure) for failure in batch.failures],
}))
"""


@pytest.mark.needs_cc
@pytest.mark.parametrize(
    ("slices", "methods"), [((), ["gpu-sm-utilisation"]), ((3, 1), ["mig-gpm"] * 3)]
)
def test_binding_and_a_c_library_feed_the_source(
    tmp_path: Path, slices: tuple[int, ...], methods: list[str]
) -> None:
    library = build(tmp_path)
    with EmulatedGpus(tmp_path / "gpus", [H100], SystemClock()) as gpus:
        gpus.divide(0, slices)
        gpus.attach(0, os.getpid(), SteadyLoad(0.5))
        gpus.start()
        answer = subprocess.run(
            [sys.executable, "-c", CLIENT, str(os.getpid())],
            env={**os.environ, **environment(library, gpus.path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        truth = gpus.truth(0).energy
    assert answer.returncode == 0, answer.stderr
    told = json.loads(answer.stdout)
    assert told["provenance"] == ["emulated"]  # without any declaration to the source
    assert told["methods"] == methods
    assert told["rising"]
    assert 0 < told["energy"] <= truth
    assert told["limit"] == 700_000
    assert [f for f in told["failures"] if "pid namespace" not in f] == []
