"""The bounded pools of the agent that users fill: their limits and rules, in one table."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from wattspan.model import SECOND
from wattspan.sharing.fair_pool import FairPool, Overflow


class PoolName(StrEnum):
    """A pool: a label of a metric."""

    BODIES = "bodies"  # bytes of the requests in flight of one server
    CONNECTIONS = "connections"  # of one server
    CPU_CLOCKS = "cpu_clocks"  # of processes with open spans, read between polls
    DECLARED_JOBS = "declared_jobs"
    ENGINES = "engines"  # whose requests to language models get energy
    FAMILIES = "families"  # processes with known parents: running ones, and ended ones apart
    HANDSHAKES = "handshakes"  # of TLS, unfinished, of one listener
    INFERENCE_ACCOUNTS = "inference_accounts"  # pairs of service and model
    JOB_SEARCHES = "job_searches"  # owners whose spans are searched for units of work
    LARGE_REQUESTS = "large_requests"  # held while they wait for a decoder
    MODEL_CALLS = "model_calls"  # calls of language models elsewhere, until spans in them arrive
    OPEN_SPANS = "open_spans"  # announced, not received
    SAMPLING = "sampling"  # processes for which the agent samples at the fine interval
    SERVICES = "services"  # with accounts of energy outside of spans
    SIDE_CHANNEL = "side_channel"  # processes that announce spans
    SPAN_BUFFER = "span_buffer"  # bytes of received spans that are not joined
    SPAN_NAMES = "span_names"  # services and names of spans with accounts of their own
    TUNED_JOBS = "tuned_jobs"
    UNMETERED_ACCOUNTS = "unmetered_accounts"  # services and models of requests without energy
    WAITING_QUERIES = "waiting_queries"  # for energy that has not settled


class PoolRule(NamedTuple):
    """The limit of a pool unless it is configured, and its behaviour beyond it."""

    limit: int
    overflow: Overflow
    lifetime: int = 0


POOL_RULES: Mapping[PoolName, PoolRule] = {
    PoolName.BODIES: PoolRule(64 << 20, Overflow.RESERVE),
    PoolName.CONNECTIONS: PoolRule(256, Overflow.RESERVE),
    PoolName.CPU_CLOCKS: PoolRule(256, Overflow.REFUSE),
    PoolName.DECLARED_JOBS: PoolRule(128, Overflow.RESERVE),
    PoolName.ENGINES: PoolRule(64, Overflow.REPLACE, 600 * SECOND),
    PoolName.FAMILIES: PoolRule(20_000, Overflow.REPLACE),
    PoolName.HANDSHAKES: PoolRule(256, Overflow.RESERVE),
    PoolName.INFERENCE_ACCOUNTS: PoolRule(64, Overflow.REFUSE, 24 * 3600 * SECOND),
    PoolName.JOB_SEARCHES: PoolRule(64, Overflow.REPLACE),
    PoolName.LARGE_REQUESTS: PoolRule(8, Overflow.RESERVE),
    PoolName.MODEL_CALLS: PoolRule(16_384, Overflow.REPLACE),
    PoolName.OPEN_SPANS: PoolRule(100_000, Overflow.REFUSE),
    PoolName.SAMPLING: PoolRule(1_024, Overflow.REPLACE),
    PoolName.SERVICES: PoolRule(1_000, Overflow.RESERVE),
    PoolName.SIDE_CHANNEL: PoolRule(256, Overflow.RESERVE),
    PoolName.SPAN_BUFFER: PoolRule(128 << 20, Overflow.RESERVE),
    PoolName.SPAN_NAMES: PoolRule(500, Overflow.REFUSE, 600 * SECOND),
    PoolName.TUNED_JOBS: PoolRule(64, Overflow.RESERVE),
    PoolName.UNMETERED_ACCOUNTS: PoolRule(64, Overflow.REFUSE, 24 * 3600 * SECOND),
    PoolName.WAITING_QUERIES: PoolRule(64, Overflow.RESERVE),
}


class Pools:
    """Makes the pools of one agent, and reads their counters. Reading is safe from any thread."""

    def __init__(self) -> None:
        self._made: list[tuple[PoolName, FairPool[Any]]] = []

    def make(self, name: PoolName, limit: int | None = None) -> FairPool[Any]:
        """A new pool; servers have pools of one name, whose counters are summed."""
        rule = POOL_RULES[name]
        pool: FairPool[Any] = FairPool(
            rule.limit if limit is None else limit, rule.overflow, rule.lifetime
        )
        self._made.append((name, pool))
        return pool

    def refusals(self) -> dict[tuple[str, str], int]:
        """Refused and displaced items by pool and reason, of the pools that were made."""
        counts: dict[tuple[str, str], int] = {}
        for name, pool in tuple(self._made):
            for reason, count in (("full", pool.refused), ("displaced", pool.displaced)):
                counts[name.value, reason] = counts.get((name.value, reason), 0) + count
        return counts

    def used(self) -> dict[str, float]:
        """The used part of the limit of each pool; of pools of one name, that of the fullest."""
        found: dict[str, float] = {}
        for name, pool in tuple(self._made):
            part = len(pool) / pool.limit if pool.limit else 0.0
            found[name.value] = max(found.get(name.value, 0.0), part)
        return found
