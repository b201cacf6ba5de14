"""Pages of an emulated engine with latency histograms, by the names and bounds of vLLM."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate

from testbed.engine_pages import VLLM, page
from wattspan.inference.latency_histograms import LATENCIES, read_tracked_page
from wattspan.model import Consumer
from wattspan.tuning.decisions.engine_load import EnginePageRead

FIRST = "vllm:time_to_first_token_seconds"
BETWEEN = "vllm:request_time_per_output_token_seconds"
TOKENS = "vllm:inter_token_latency_seconds"


@dataclass
class LatencyHistogram:
    """Counts observations in seconds."""

    name: str
    bounds: tuple[float, ...]

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, seconds: float, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += count

    def lines(self, model: str) -> Iterable[str]:
        for bound, count in zip([*self.bounds, "+Inf"], accumulate(self.counts), strict=True):
            labels = f'engine="0",le="{bound}",model_name="{model}"'
            yield f"{self.name}_bucket{{{labels}}} {count}.0"


def _of(name: str, *, first: bool) -> LatencyHistogram:
    names = LATENCIES["vllm"]
    return LatencyHistogram(name, names.first_bounds if first else names.between_bounds)


@dataclass
class LatencyPages:
    """The counters of an engine, and its pages."""

    model: str = "m"
    by_token: bool = False
    first: LatencyHistogram = field(default_factory=lambda: _of(FIRST, first=True))
    between: LatencyHistogram = field(default_factory=lambda: _of(BETWEEN, first=False))
    tokens: LatencyHistogram = field(default_factory=lambda: _of(TOKENS, first=False))

    def body(self, **counts: int) -> bytes:
        """A page with these counters."""
        each = (self.first, self.tokens if self.by_token else self.between)
        lines = [line for one in each for line in one.lines(self.model)]
        return page(VLLM, self.model, **counts) + "\n".join([*lines, ""]).encode()

    def read(
        self, at: int, interval: int, processes: tuple[Consumer, ...] = (), **counts: int
    ) -> EnginePageRead:
        """The page of a time in nanoseconds, as the agent reads it."""
        body = self.body(**counts)
        reading, latencies = read_tracked_page(body)
        return EnginePageRead("vllm", interval, at, reading, latencies, processes)
