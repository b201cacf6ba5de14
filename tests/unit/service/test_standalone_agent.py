"""`wattspan measure` without an agent samples finely for as long as its command runs."""

from pathlib import Path
from time import process_time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from wattspan.model import SECOND, Consumer
from wattspan.service import assembly
from wattspan.service.assembly import StandaloneAgent
from wattspan.service.sampling_demand import (
    FINE,
    START,
    WINDOW_EXPIRY,
    Intervals,
    SamplingDemand,
)
from wattspan.testing import ManualClock


def test_command_of_hours_keeps_the_fine_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, command = ManualClock(), Consumer(1, 1)
    demand = SamplingDemand(clock, Intervals())
    clock.advance(ns=START)
    past = SimpleNamespace(
        watch=lambda *_, **__: None, expect=lambda _: None, settled=lambda _: 2**62
    )
    view = SimpleNamespace(host="here")
    agent: Any = SimpleNamespace(history=past, demand=demand, devices=None, view=lambda: view)
    sampler: Any = SimpleNamespace(watch=lambda _: None, take=lambda _: ())
    monkeypatch.setattr(assembly, "energy_response", lambda *_, **__: {})
    monkeypatch.setattr("wattspan.sdk.client.Measurement.of", lambda facts: facts)
    alone = StandaloneAgent(agent, clock, sampler)  # type: ignore[arg-type]
    alone.watch(command)
    began = clock.monotonic()
    while clock.monotonic() - began < 4 * WINDOW_EXPIRY:
        for _ in range(10):
            assert demand.interval(clock.monotonic()) == FINE
            clock.advance(ns=SECOND)
        alone.read(command, began, clock.monotonic(), wait=0.0)


@pytest.mark.parametrize("readable", [True, False])
def test_own_usage_is_that_of_this_process(readable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not readable:
        monkeypatch.setattr(assembly, "STATM", Path("/nowhere"))
    measure, before = assembly.own_usage(), process_time()
    usage = measure()
    assert before - 0.01 <= usage.cpu_seconds <= process_time()
    resident = psutil.Process().memory_info().rss
    assert usage.rss_bytes == (pytest.approx(resident, rel=0.1) if readable else None)
