"""Runs of a command, and the energy of each as a running agent or an own one measures it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Protocol

from wattspan.cli.measure import child
from wattspan.cli.measure.results import CommandRun, MeasurementResult
from wattspan.model import SECOND, Consumer
from wattspan.ports import Clock
from wattspan.sdk.agent import MeasurementError
from wattspan.sdk.client import read_measurement, request_json
from wattspan.sdk.measurement import Measurement

READ_INTERVAL = 10 * SECOND
"""A long run is read in periods, while the agent still remembers which processes belong to it."""

SETTLEMENT_LAG = 4 * SECOND
"""The delay after which a period has settled."""

READ_TIMEOUT = 10.0  # seconds to wait for the last period


class MeasurementClient(Protocol):
    """Measures consumers. ``about`` names the agent; ``note`` is for the reader of the figures."""

    about: str
    note: str

    def watch(self, consumer: Consumer) -> None:
        """Sample ``consumer`` and its descendants from now on."""
        ...

    def read(self, consumer: Consumer, start: int, end: int, wait: float) -> Measurement:
        """The energy from ``start`` to ``end``, after at most ``wait`` seconds."""
        ...


class RunningAgentClient:
    """The agent of this host, on its Unix socket."""

    def __init__(self, directories: tuple[str, ...]) -> None:
        """AgentUnavailableError if no agent answers in the run ``directories``."""
        self._directories = directories
        watched = self._request("/v1/watch", {"pid": "self", "family": "1"})
        # In a container the agent may see other process ids. It is then asked about this process,
        # which the kernel names to it, and so about all of its children.
        self._same_pids = (watched["pid"], watched["started"]) == child.process_identity(
            os.getpid()
        )
        self.about = f"the agent on {self._request('/v1/status', {})['host_name']}"
        self.note = (
            ""
            if self._same_pids
            else "The agent sees other process ids than this container, so the command's "
            "processes include `wattspan measure` itself."
        )

    def watch(self, consumer: Consumer) -> None:
        if self._same_pids:
            with contextlib.suppress(MeasurementError):  # `read` reports the error
                self._request("/v1/watch", self._process(consumer))

    def read(self, consumer: Consumer, start: int, end: int, wait: float) -> Measurement:
        period = {"start": f"mono:{start}", "end": f"mono:{end}"}
        return read_measurement(self._process(consumer) | period, wait, self._directories)

    def _process(self, consumer: Consumer) -> dict[str, str]:
        if not self._same_pids:
            return {"pid": "self", "family": "1"}
        return {"pid": str(consumer.pid), "started": str(consumer.started), "family": "1"}

    def _request(self, path: str, parameters: Mapping[str, str]) -> dict[str, object]:
        return request_json(path, parameters, directories=self._directories)


def measure(
    words: Sequence[str], repeat: int, client: MeasurementClient, clock: Clock
) -> MeasurementResult:
    """Run ``words`` ``repeat`` times, or until it is interrupted."""
    runs: list[CommandRun] = []
    while len(runs) < repeat and not (runs and runs[-1].interrupted):
        runs.append(_measure_run(words, client, clock))
    notes = (client.note, *(run.trouble for run in runs))
    return MeasurementResult(words, runs, client.about, [*dict.fromkeys(filter(None, notes))])


def _measure_run(words: Sequence[str], client: MeasurementClient, clock: Clock) -> CommandRun:
    run, since = CommandRun(), 0

    def read_period(consumer: Consumer, start: int) -> None:
        nonlocal since
        begin, end = max(since, start), clock.monotonic() - SETTLEMENT_LAG
        if end > begin:
            with contextlib.suppress(MeasurementError):
                period = client.read(consumer, begin, end, 0.0)
                if period.complete:  # an incomplete one is read again with the next
                    run.add(period)
                    since = end

    ended = child.run_child(
        words, clock, begun=client.watch, meanwhile=read_period, every=READ_INTERVAL
    )
    run.seconds = (ended.end - ended.start) / 1e9
    run.cpu_seconds, run.code = ended.cpu_seconds, ended.code
    run.interrupted = ended.interrupted
    last = max(since, ended.start), ended.end
    try:
        try:
            run.add(client.read(ended.whom, *last, READ_TIMEOUT))
        except KeyboardInterrupt:  # the user does not wait for the last period to settle
            run.interrupted = True
            run.add(client.read(ended.whom, *last, 0.0))
    except MeasurementError as error:
        run.miss(last[1] - last[0], str(error))
    return run
