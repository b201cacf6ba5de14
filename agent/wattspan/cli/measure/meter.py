"""Who measures for ``wattspan measure``: a running agent, or one of our own for the time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from wattspan.api import energy
from wattspan.cli.measure.child import process_identity
from wattspan.model import MILLISECOND, SECOND, Consumer
from wattspan.ports import Clock, SourceError, WattspanError
from wattspan.sdk.agent import MeasurementError
from wattspan.sdk.client import read_measurement, request_json
from wattspan.sdk.measurement import Measurement

if TYPE_CHECKING:
    from collections.abc import Callable

    from wattspan.clock import SystemClock
    from wattspan.processes.cpu_sampler import CpuSampler
    from wattspan.service.agent import Agent
    from wattspan.service.configuration import LoadedConfiguration

STARTUP_TIMEOUT = 4 * SECOND
"""How long an agent of our own is given to begin: GPU counters settle 1 to 3 s late."""

_STEP = 20 * MILLISECOND


class MeasurementClient(Protocol):
    """Says what was spent. ``about`` is who that is, for the reader of the figures."""

    about: str
    note: str

    def watch(self, consumer: Consumer) -> None:
        """Be prepared for questions about ``consumer`` and its descendants."""
        ...

    def read(self, consumer: Consumer, start: int, end: int, wait: float) -> Measurement:
        """What was spent from ``start`` to ``end``, after at most ``wait`` seconds."""
        ...


class RunningAgentClient:
    """The agent of this host, asked over its socket."""

    def __init__(self, directories: tuple[str, ...]) -> None:
        """AgentUnavailableError if none answers in any of the run ``directories``."""
        self._directories = directories
        told = self._ask("/v1/watch", {"pid": "self", "family": "1"})
        ourselves = process_identity(os.getpid())
        # In a container the agent may see other process ids than we do; then it is asked about
        # us, as the kernel tells it, and so about all that we started.
        self._by_name = (told["pid"], told["started"]) == ourselves
        self.about = f"the agent on {self._ask('/v1/status', {})['host_name']}"
        self.note = (
            ""
            if self._by_name
            else "The agent sees other process ids than this container, so the command's "
            "processes include `wattspan measure` itself."
        )

    def watch(self, consumer: Consumer) -> None:
        if self._by_name:
            with contextlib.suppress(MeasurementError):  # reading says what is wrong
                self._ask("/v1/watch", self._whom(consumer))

    def read(self, consumer: Consumer, start: int, end: int, wait: float) -> Measurement:
        window = {"start": f"mono:{start}", "end": f"mono:{end}"}
        return read_measurement(self._whom(consumer) | window, wait, self._directories)

    def _whom(self, consumer: Consumer) -> dict[str, str]:
        if not self._by_name:
            return {"pid": "self", "family": "1"}
        return {"pid": str(consumer.pid), "started": str(consumer.started), "family": "1"}

    def _ask(self, path: str, parameters: Mapping[str, str]) -> dict[str, object]:
        return request_json(path, parameters, directories=self._directories)


class InProcessAgentClient:
    """An agent of our own, in this process."""

    note = ""

    def __init__(self, agent: Agent, clock: Clock, fine: CpuSampler) -> None:
        self._agent, self._clock, self._fine = agent, clock, fine
        self.about = "wattspan measure itself, no agent"

    def ready(self) -> None:
        """Until every counter has been read twice, or it is clear that one is not going to."""
        begun = self._clock.monotonic()
        past = self._agent.history

        def all_known() -> bool:
            now = self._clock.monotonic()
            known = (past.device(one, begun - SECOND, now).covered for one in past.domains())
            return past.settled() > begun and all(covered > 0 for covered in known)

        self._until(all_known, STARTUP_TIMEOUT)

    def watch(self, consumer: Consumer) -> None:
        self._fine.watch(consumer)
        samples = partial(self._fine.take, consumer)
        self._agent.history.watch(consumer, family=True, samples=samples, holder="measure")

    def read(self, consumer: Consumer, start: int, end: int, wait: float) -> Measurement:
        self._until(lambda: self._agent.history.settled(consumer) >= end, round(wait * SECOND))
        told = energy.energy_response(self._agent.history, start, end, consumer, family=True)
        return Measurement.of({"host_name": self._agent.view().host, **told})

    def _until(self, reached: Callable[[], bool], patience: int) -> None:
        deadline = self._clock.monotonic() + patience
        while not reached() and self._clock.monotonic() < deadline:
            self._clock.sleep_until(self._clock.monotonic() + _STEP)


@contextlib.contextmanager
def in_process_agent(
    loaded: LoadedConfiguration, clock: SystemClock, tell: Callable[[str], None], why: str
) -> Iterator[InProcessAgentClient]:
    """An agent that serves nobody and keeps nothing; ``why`` there is need of one."""
    from wattspan.processes.cpu_sampler import CpuSampler
    from wattspan.service.assembly import build_agent
    from wattspan.service.configuration import selected_emulated_host
    from wattspan.service.daemon import require_readable_counters

    with contextlib.ExitStack() as stack:
        host = stack.enter_context(selected_emulated_host(loaded.config.emulation))
        try:
            agent = build_agent(
                loaded.config, replace(loaded.plugins, exporters={}), log=tell, emulated=host
            )
            stack.callback(agent.stop)
            agent.start()
            require_readable_counters(agent.view().health)
        except SourceError as error:
            raise SourceError(f"{why}{error}") from None
        fine = CpuSampler(clock)
        fine.start()
        stack.callback(fine.stop)
        meter = InProcessAgentClient(agent, clock, fine)
        meter.ready()
        yield meter
    if agent.failure is not None:
        raise WattspanError("The measuring failed, as said above; the command itself did run.")
