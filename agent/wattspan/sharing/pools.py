"""The bounded pools of the agent that users fill: their limits and rules, in one table."""

from __future__ import annotations

from collections.abc import Hashable
from enum import StrEnum
from typing import Any, Self

from wattspan.model import SECOND
from wattspan.sharing.fair_pool import FairPool, Overflow


class PoolName(StrEnum):
    """A pool: a label of a metric; its limit unless it is configured, and its rule beyond it."""

    limit: int
    overflow: Overflow
    lifetime: int

    def __new__(cls, label: str, limit: int, overflow: Overflow, lifetime: int = 0) -> Self:
        pool = str.__new__(cls, label)
        pool._value_ = label
        pool.limit, pool.overflow, pool.lifetime = limit, overflow, lifetime
        return pool

    BODIES = ("bodies", 64 << 20, Overflow.RESERVE)  # bytes of the requests in flight of one server
    CONNECTIONS = ("connections", 256, Overflow.RESERVE)  # of one server
    # of processes with open spans, read between polls
    CPU_CLOCKS = ("cpu_clocks", 256, Overflow.REFUSE)
    DECLARED_JOBS = ("declared_jobs", 128, Overflow.RESERVE)
    # whose requests to language models get energy
    ENGINES = ("engines", 64, Overflow.REPLACE, 600 * SECOND)
    # processes with known parents: running ones, and ended ones apart
    FAMILIES = ("families", 20_000, Overflow.REPLACE)
    # processes that send spans of others
    FORWARDERS = ("forwarders", 256, Overflow.REPLACE)
    HANDSHAKES = ("handshakes", 256, Overflow.RESERVE)  # of TLS, unfinished, of one listener
    # checked claims of connections, with their processes
    IDENTITIES = ("identities", 4_096, Overflow.REPLACE, 600 * SECOND)
    # pairs of service and model
    INFERENCE_ACCOUNTS = ("inference_accounts", 64, Overflow.REFUSE, 24 * 3600 * SECOND)
    # owners whose spans are searched for units of work
    JOB_SEARCHES = ("job_searches", 64, Overflow.REPLACE)
    LARGE_REQUESTS = ("large_requests", 8, Overflow.RESERVE)  # held while they wait for a decoder
    # calls of language models elsewhere, until spans in them arrive
    MODEL_CALLS = ("model_calls", 16_384, Overflow.REPLACE)
    OPEN_SPANS = ("open_spans", 100_000, Overflow.REFUSE)  # announced, not received
    # processes for which the agent samples at the fine interval
    SAMPLING = ("sampling", 1_024, Overflow.REPLACE)
    # TCP connections with known senders
    SENDERS = ("senders", 1_024, Overflow.REPLACE, 600 * SECOND)
    SERVICES = ("services", 1_000, Overflow.RESERVE)  # with accounts of energy outside of spans
    SIDE_CHANNEL = ("side_channel", 256, Overflow.RESERVE)  # processes that announce spans
    # bytes of received spans that are not joined
    SPAN_BUFFER = ("span_buffer", 128 << 20, Overflow.RESERVE)
    # services and names of spans with accounts of their own
    SPAN_NAMES = ("span_names", 500, Overflow.REFUSE, 600 * SECOND)
    TUNED_JOBS = ("tuned_jobs", 64, Overflow.RESERVE)
    # services and models of requests without energy
    UNMETERED_ACCOUNTS = ("unmetered_accounts", 64, Overflow.REFUSE, 24 * 3600 * SECOND)
    WAITING_QUERIES = ("waiting_queries", 64, Overflow.RESERVE)  # for energy that has not settled
    # of processes that may still read them: 8,192 windows
    WINDOW_EDGES = ("window_edges", 16_384, Overflow.REPLACE)
    # connected processes that open windows and announce no span
    WINDOW_RINGS = ("window_rings", 128, Overflow.REFUSE)


class Pools:
    """Makes the pools of one agent, and reads their counters. Reading is safe from any thread."""

    def __init__(self) -> None:
        self._made: list[tuple[PoolName, FairPool[Any]]] = []

    def make(self, name: PoolName, limit: int | None = None) -> FairPool[Any]:
        """A new pool; servers have pools of one name, whose counters are summed."""
        most = name.limit if limit is None else limit
        pool: FairPool[Any] = FairPool(most, name.overflow, name.lifetime)
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


# ---------------------------------------------- token buckets of peers: rates, in exact integers


BURST_SECONDS = 4
"""Burst size in seconds of the permitted rate."""

MAX_PEERS = 1024
"""Number of buckets; a peer without one has a full bucket."""

_EVICTION_DIVISOR = 4  # a fraction is evicted at once, so that not each new peer costs a sort


class RateLimiter:
    """Admits ``rate`` requests a second of each peer, and ``burst`` at once.

    At most ``burst + rate * t`` requests of a peer are admitted in any time ``t``; a peer whose
    requests are at least ``1 / rate`` apart is never refused. For one thread, or under a lock;
    times are monotonic nanoseconds.
    """

    def __init__(self, rate: int, burst: int, remembered: int = MAX_PEERS) -> None:
        self.rate, self._burst, self._remembered = rate, burst * SECOND, remembered
        # The time at which a peer's bucket is full again, in units of 1/rate nanoseconds, so that
        # a request is SECOND units and nothing is rounded.
        self._full: dict[Hashable, int] = {}

    def __len__(self) -> int:
        """Number of buckets."""
        return len(self._full)

    def admits(self, peer: Hashable, now: int) -> bool:
        """True if a request of ``peer`` is admitted now; only admitted requests count."""
        at = now * self.rate
        full = max(self._full.get(peer, at), at) + SECOND
        if full - at > self._burst:
            return False
        if peer not in self._full and len(self._full) >= self._remembered:
            self._forget(at)
        self._full[peer] = full
        return True

    def _forget(self, at: int) -> None:
        """Evict full buckets, or else the fullest: an evicted peer gains a full bucket."""
        owing = sorted(self._full.items(), key=lambda one: one[1], reverse=True)
        kept = self._remembered - max(1, self._remembered // _EVICTION_DIVISOR)
        self._full = {peer: full for peer, full in owing[:kept] if full > at}
