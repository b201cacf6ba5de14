"""The begin of prefill by the stage spans of an engine.

SGLang reports a request by one span with token counts and latencies, whose prefill includes the
wait in the scheduler's queue. The processes of its scheduler report the stages of the request by
further spans of the same trace, one set for each rank; those of prefill begin when it is scheduled.
"""

from __future__ import annotations

from collections.abc import Hashable

from wattspan.spans.values import SpanColumns
from wattspan.spans.weights import GenerationalCache

PREFILL_STAGES = frozenset(("prefill_forward", "chunked_prefill"))
"""The names of SGLang's spans in which a prompt is computed."""

MAX_TRACES = 32_768
_MAX_STAGES = 64  # of one trace; further ones are ignored


class PrefillStages:
    """The stages of recent traces. A known trace id in spans of another principal adds none."""

    def __init__(self) -> None:
        self._starts: GenerationalCache[tuple[int, ...]] = GenerationalCache(MAX_TRACES)

    def add(self, owner: Hashable, spans: SpanColumns) -> None:
        """Add the stages of prefill among received spans of a principal."""
        if PREFILL_STAGES.isdisjoint(spans.name):
            return
        for trace, name, start in zip(spans.trace, spans.name, spans.start, strict=True):
            if name in PREFILL_STAGES:
                known = self._starts.get((owner, trace)) or ()
                if len(known) < _MAX_STAGES:
                    self._starts[owner, trace] = (*known, start)

    def begin(self, owner: Hashable, trace: bytes, start: int, until: int) -> int | None:
        """The begin of the first stage of a trace from ``start`` to ``until``; None for none."""
        return min(
            (each for each in self._starts.get((owner, trace)) or () if start <= each <= until),
            default=None,
        )
