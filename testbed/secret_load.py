"""A package whose power depends on a secret, read at the agent's interval."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from testbed.constant_history import PACKAGE, ConstantPast, local_peer
from wattspan.api.authorization import Authorization
from wattspan.api.service import QueryService
from wattspan.http.messages import HttpRequest
from wattspan.http.sockets import Peer
from wattspan.model import MILLISECOND, HwType, Microjoules, Principal, Snapshot
from wattspan.ports import EnergyStep
from wattspan.spans.values import IntervalEnergy
from wattspan.testing import FakeDirectory, ManualClock

INTERVAL = 100 * MILLISECOND
STRANGER = local_peer(55, 2000)
ROOT = local_peer(9, 0)
AGENT = Principal(999)


@dataclass
class VictimPast(ConstantPast):
    """Implements ports.Past: ``energies`` of consecutive intervals from time 0, in microjoules.

    Data before ``horizon`` is dropped, as in a timeline: by whole intervals.
    """

    energies: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.known_domains = (PACKAGE,)
        self.idles = {}

    def device(
        self, domain_id: str, start: int, end: int, own: Sequence[int] | None = None
    ) -> IntervalEnergy:
        start, end = max(start, self.horizon, 0), min(end, self.until)
        energy = covered = 0
        for number in range(start // INTERVAL, -(-end // INTERVAL)):
            begin = number * INTERVAL
            inside = min(end, begin + INTERVAL) - max(start, begin)
            if inside > 0 and number < len(self.energies):
                energy += self.energies[number] * inside // INTERVAL
                covered += inside
        return IntervalEnergy(
            {HwType.CPU: Microjoules(energy)}, {HwType.CPU: Microjoules(0)}, covered
        )

    def timeline(
        self, domain_id: str, start: int, end: int, *, common: bool = False
    ) -> list[EnergyStep]:
        return [
            EnergyStep(number * INTERVAL, (number + 1) * INTERVAL, Microjoules(energy))
            for number, energy in enumerate(self.energies)
        ]


def told(
    past: VictimPast,
    start: int,
    end: int,
    *,
    resolution: int,
    peer: Peer = STRANGER,
    at_once: bool = False,
) -> dict[str, Any]:
    """Response for a window: of settled energy, or ``at_once`` of readings."""
    clock = ManualClock()
    clock.advance(past.until / 1e9)
    service = QueryService(
        past,
        FakeDirectory(),
        clock,
        devices=past,
        view=lambda: Snapshot(clock.now(), 1, "h"),
        host="h",
        version="1",
        resolution=resolution,
        authorization=Authorization(lambda _: None, AGENT),
    )
    query = {"start": f"mono:{start}", "end": f"mono:{end}"}
    if at_once:
        query |= {"of": "devices", "timeline": "1", "wait": "0s"}

    async def ask() -> bytes:
        return (await service(HttpRequest("GET", "/v1/energy", query, {}, b"", peer))).body

    answer: dict[str, Any] = json.loads(asyncio.run(ask()))
    assert "devices" in answer, answer
    return answer


def joules(answer: dict[str, Any]) -> float | None:
    found: float | None = answer["devices"][0]["joules"]
    return found
