"""`wattspan measure` without an agent samples finely for as long as its command runs."""

from types import SimpleNamespace
from typing import Any

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
