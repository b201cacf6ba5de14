"""Spans with their energy, for the consumers after the join."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count

from wattspan.model import HwType, Instant, Microjoules
from wattspan.spans.values import IntervalEnergy, Outcome, Span, SpanEnergy

CPU, GPU = HwType.CPU, HwType.GPU
S = 10**9
BEGAN = Instant(10**12, 1_700_000_000 * S)

_identities = count(1)


def moment(seconds: int) -> Instant:
    """So long after the host began to send spans."""
    return Instant(BEGAN.mono + seconds * S, BEGAN.wall + seconds * S)


def joined(
    name: str,
    energy: Mapping[HwType, int],
    *,
    service: str = "shop",
    start: int = 0,
    end: int = 1,
    tokens: tuple[int, int] = (0, 0),
    outcome: Outcome = Outcome.JOINED,
) -> SpanEnergy:
    """A span of a trace of its own; ``start`` and ``end`` in seconds, exclusive energy in uJ."""
    identity = next(_identities)
    span = Span(
        identity.to_bytes(16), identity.to_bytes(8), b"", service, name,
        moment(start).mono, moment(end).mono, tokens_in=tokens[0], tokens_out=tokens[1],
    )  # fmt: skip
    exclusive = {kind: Microjoules(amount) for kind, amount in energy.items()}
    return SpanEnergy(
        span, exclusive, IntervalEnergy(exclusive, {}, max(0, end - start) * S), outcome
    )
