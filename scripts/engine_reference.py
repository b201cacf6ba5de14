"""The reference page of serving engines' counters, made from the table that the agent reads."""

from __future__ import annotations

from wattspan.inference.engine_metrics import PAGES, EnginePage, Figure, Moves
from wattspan.inference.latency_histograms import LATENCIES, LatencyNames

_MOVES = {
    Moves.ITERATION: "each iteration",
    Moves.LOG_INTERVAL: "each log interval",
    Moves.FINISH: "with a request's end",
}
_GUIDE = "../how-to/measure-llm-requests.md#joules-per-token-of-vllm-in-five-minutes"
_HEAD = (
    "`kind`",
    "version",
    "switched on by",
    "counters move",
    "prompt tokens",
    "split",
    "latencies",
    "note",
)


def page() -> str:
    """The whole page."""
    return "\n".join(
        [
            "# Counters of serving engines\n",
            f"What [`[[serving.engine]]`]({_GUIDE}) reads: names from each engine's source,"
            " tried on their pages ([engine pages](../field.md)). Ollama has no"
            " such page.\n",
            f"| {' | '.join(_HEAD)} |",
            "|---" * len(_HEAD) + "|",
            *(f"| {' | '.join(_cells(one))} |" for one in PAGES),
            "",
        ]
    )


def _cells(one: EnginePage) -> tuple[str, ...]:
    split = {Figure.ITERATIONS, Figure.COMPUTED} <= one.series.keys()
    prompt = f"{'with' if one.cached else 'without'} cached"
    prompt += "" if Figure.CACHED in one.series else ", uncounted"
    return (
        f"`{one.kind}`",
        one.version,
        one.switch,
        _MOVES[one.moves],
        prompt if Figure.OUTPUT in one.series else "–",
        "yes" if split else "–",
        _latencies(LATENCIES.get(one.kind, LatencyNames())),
        one.note,
    )


def _latencies(names: LatencyNames) -> str:
    """The latencies by which load can be tracked."""
    found = ["first token"] if names.first else []
    if names.between:
        found.append("between tokens")
    elif names.tokens:
        found.append("each token")
    return ", ".join(found) or "–"
