"""An agent inside the process of ``wattspan measure``: no exporters, no store, no listeners."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from wattspan.api.energy import energy_response
from wattspan.clock import SystemClock
from wattspan.model import MILLISECOND, SECOND, Consumer
from wattspan.ports import WattspanError
from wattspan.processes.cpu_sampler import CpuSampler
from wattspan.sdk.measurement import Measurement
from wattspan.service.agent import Agent
from wattspan.service.assembly import build_agent
from wattspan.service.configuration import LoadedConfiguration, selected_emulated_host
from wattspan.service.daemon import require_readable_counters

STARTUP_TIMEOUT = 4 * SECOND  # GPU counters settle 1 to 3 s late
_POLL_INTERVAL = 20 * MILLISECOND


class StandaloneAgent:
    """Measures consumers with an agent in this process."""

    about = "wattspan measure itself, no agent"
    note = ""

    def __init__(self, agent: Agent, clock: SystemClock, sampler: CpuSampler) -> None:
        self._agent, self._clock, self._sampler = agent, clock, sampler

    def wait_until_ready(self) -> None:
        """Return when every counter has been read twice, or after STARTUP_TIMEOUT."""
        begun = self._clock.monotonic()
        history = self._agent.history

        def all_known() -> bool:
            now = self._clock.monotonic()
            known = (history.device(one, begun - SECOND, now).covered for one in history.domains())
            return history.settled() > begun and all(covered > 0 for covered in known)

        self._wait_for(all_known, STARTUP_TIMEOUT)

    def watch(self, consumer: Consumer) -> None:
        self._sampler.watch(consumer)
        samples = partial(self._sampler.take, consumer)
        self._agent.history.watch(consumer, family=True, samples=samples, holder="measure")

    def read(self, consumer: Consumer, start: int, end: int, wait: float) -> Measurement:
        history = self._agent.history
        self._wait_for(lambda: history.settled(consumer) >= end, round(wait * SECOND))
        response = energy_response(history, start, end, consumer, family=True)
        return Measurement.of({"host_name": self._agent.view().host, **response})

    def _wait_for(self, reached: Callable[[], bool], timeout: int) -> None:
        deadline = self._clock.monotonic() + timeout
        while not reached() and self._clock.monotonic() < deadline:
            self._clock.sleep_until(self._clock.monotonic() + _POLL_INTERVAL)


@contextlib.contextmanager
def standalone_agent(
    loaded: LoadedConfiguration, clock: SystemClock, log: Callable[[str], None]
) -> Iterator[StandaloneAgent]:
    """A running StandaloneAgent. SourceError if no counter can be read."""
    with contextlib.ExitStack() as stack:
        host = stack.enter_context(selected_emulated_host(loaded.config.emulation))
        plugins = replace(loaded.plugins, exporters={})
        agent = build_agent(loaded.config, plugins, log=log, emulated=host)
        stack.callback(agent.stop)
        agent.start()
        require_readable_counters(agent.view().health)
        sampler = CpuSampler(clock)
        sampler.start()
        stack.callback(sampler.stop)
        standalone = StandaloneAgent(agent, clock, sampler)
        standalone.wait_until_ready()
        yield standalone
    if agent.failure is not None:
        raise WattspanError("The measurement failed, as logged above; the command itself did run.")
