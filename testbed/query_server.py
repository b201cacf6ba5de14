"""The query service on a real Unix socket, over a past in which everything draws constant power."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Self

from testbed.constant_history import ConstantPast
from testbed.snapshots import busy_host
from wattspan.api.estimates import EstimateRequest
from wattspan.api.service import DecisionHistoryView, QueryService, TuningView
from wattspan.cli.measure import process_identity
from wattspan.clock import SystemClock
from wattspan.emulation.control import Closeable
from wattspan.http.limits import ServerLimits
from wattspan.http.server import HttpServer
from wattspan.http.sockets import listen_unix
from wattspan.model import Consumer, PayerInfo, TuningAccounts
from wattspan.ports import ProcessDirectory, WattspanError
from wattspan.tuning.declared_jobs import DeclaredJobs

FAR = 2**62  # everything is settled
STARTED = 7


class Anybody(ProcessDirectory):
    """A directory in which every pid is alive."""

    def identify(self, pid: int) -> Consumer | None:
        return Consumer(pid, STARTED)

    def describe(self, consumer: Consumer) -> PayerInfo | None:
        return PayerInfo(consumer, "anybody")


class Living(ProcessDirectory):
    """The processes that are alive here."""

    def identify(self, pid: int) -> Consumer | None:
        try:
            return process_identity(pid)
        except WattspanError:
            return None

    def describe(self, consumer: Consumer) -> PayerInfo | None:
        return PayerInfo(consumer, "somebody")


class QueryServer(Closeable):
    """An agent's ``api.sock`` in ``folder``, as long as it is entered."""

    def __init__(
        self,
        folder: Path,
        past: ConstantPast | None = None,
        directory: ProcessDirectory | None = None,
        tuning: TuningView | None = None,
        history: DecisionHistoryView | None = None,
        jobs: DeclaredJobs | None = None,
        limits: ServerLimits | None = None,
        resolution: int = 0,
        inference: EstimateRequest | None = None,
    ) -> None:
        self.past = past if past is not None else ConstantPast(until=FAR)
        self.folder = folder
        self.log: list[str] = []
        clock = SystemClock()
        service = QueryService(
            self.past,
            directory or Anybody(),
            clock,
            devices=self.past,
            view=lambda: replace(
                busy_host(), host="testhost", tuning=tuning() if tuning else TuningAccounts()
            ),
            host="testhost",
            version="1.2.3",
            tuning=tuning,
            history=history,
            jobs=jobs,
            resolution=resolution,
            inference=inference,
        )
        self._server = HttpServer(clock, log=self.log.append, limits=limits)
        self._server.add_http(listen_unix(folder / "api.sock", what="Questions"), service)

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def close(self) -> None:
        self._server.stop()


def powered(pid: int, *, watts: float, children: dict[int, float] | None = None) -> ConstantPast:
    """A history with a process of ``watts`` and children of the given power."""
    past = ConstantPast(until=FAR)
    me = Consumer(pid, STARTED)
    family = {Consumer(child, STARTED): power for child, power in (children or {}).items()}
    past.powers = {one: round(w * 1000) for one, w in {me: watts, **family}.items()}
    past.members = {me: tuple(past.powers)}
    return past
