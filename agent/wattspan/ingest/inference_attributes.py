"""The attributes by which engines for language models report requests, by preset.

- ``vllm``, ``tensorrt-llm`` and ``sglang`` share names: token counts as ``prompt_tokens`` and
  ``completion_tokens``, latencies in seconds as ``gen_ai.latency.*``; SGLang adds cached tokens.
- ``tgi`` (Text Generation Inference) has text such as ``1.5s`` and ``340µs`` in ``inference_time``,
  which begins after the queue, and ``time_per_token``, and no token counts.
- ``gen_ai`` are the semantic conventions of OpenTelemetry for generative AI.

A span is recognised by its attributes; its service and name do not matter.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from enum import IntEnum
from typing import NamedTuple

from wattspan.config.settings import SpanPreset
from wattspan.model import SECOND, Nanoseconds
from wattspan.spans.inference_requests import UNKNOWN_MODEL, InferenceDetails

Scalar = bytes | int | float | None
"""The value of an attribute; None for booleans, arrays and other values that are not needed."""


class InferenceFigure(IntEnum):
    """The figures of a report."""

    MODEL = 0
    CACHED = 1
    QUEUE = 2
    FIRST_TOKEN = 3
    PREFILL = 4
    DECODE = 5
    INFERENCE = 6
    PER_TOKEN = 7


class InferenceAttribute(NamedTuple):
    """An attribute with a figure; the first present one of a column counts."""

    column: InferenceFigure
    name: str
    presets: frozenset[SpanPreset]


_ENGINES: frozenset[SpanPreset] = frozenset(("vllm", "sglang", "tensorrt-llm"))
_LATENCY = "gen_ai.latency."
_ATTRIBUTES = (
    InferenceAttribute(InferenceFigure.MODEL, "gen_ai.response.model", _ENGINES | {"gen_ai"}),
    InferenceAttribute(InferenceFigure.MODEL, "gen_ai.request.model", _ENGINES | {"gen_ai"}),
    InferenceAttribute(
        InferenceFigure.CACHED, "gen_ai.usage.cache_read.input_tokens", _ENGINES | {"gen_ai"}
    ),
    InferenceAttribute(InferenceFigure.CACHED, "gen_ai.usage.cached_tokens", _ENGINES),
    InferenceAttribute(InferenceFigure.QUEUE, f"{_LATENCY}time_in_queue", _ENGINES),
    InferenceAttribute(InferenceFigure.FIRST_TOKEN, f"{_LATENCY}time_to_first_token", _ENGINES),
    InferenceAttribute(
        InferenceFigure.FIRST_TOKEN, "gen_ai.response.time_to_first_chunk", frozenset(("gen_ai",))
    ),
    InferenceAttribute(InferenceFigure.PREFILL, f"{_LATENCY}time_in_model_prefill", _ENGINES),
    InferenceAttribute(InferenceFigure.DECODE, f"{_LATENCY}time_in_model_decode", _ENGINES),
    InferenceAttribute(InferenceFigure.INFERENCE, "inference_time", frozenset(("tgi",))),
    InferenceAttribute(InferenceFigure.PER_TOKEN, "time_per_token", frozenset(("tgi",))),
)

INFERENCE_MARKS = b"gen_ai.", b"time_per_token"
"""Every request with reports contains one of them: other attributes alone are no report."""

_DURATION = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)(s|ms|µs|us|ns)")
_UNITS = {"s": SECOND, "ms": SECOND // 1000, "µs": 1000, "us": 1000, "ns": 1}
_LONGEST = 86_400 * SECOND
_MAX_TOKENS = 10**7


def inference_attributes(presets: Collection[str]) -> list[InferenceAttribute]:
    """The attributes that these presets look for."""
    return [each for each in _ATTRIBUTES if not each.presets.isdisjoint(presets)]


def inference_details(
    values: Sequence[Scalar], tokens: tuple[int | None, int | None], model: str
) -> tuple[InferenceDetails, int] | None:
    """The report in the values of all columns, and the generated tokens; None without a report.

    ``tokens`` are the counts of input and output, None where the span has none; ``model`` is the
    printable name of the model.
    """
    queue, first, prefill, decode, inference, per_token = map(
        as_nanoseconds, values[InferenceFigure.QUEUE :]
    )
    generated = tokens[1]
    if generated is None and inference and per_token:
        generated = min(_MAX_TOKENS, round(inference / per_token))
        decode = Nanoseconds(min(inference, per_token * max(0, generated - 1)))
        prefill = Nanoseconds(inference - decode)
    if generated is None and tokens[0] is None:
        return None
    cached = values[InferenceFigure.CACHED]
    whole = cached if isinstance(cached, int) and cached > 0 else 0
    return (
        InferenceDetails(model or UNKNOWN_MODEL, whole, queue, first, prefill, decode),
        generated or 0,
    )


def as_nanoseconds(value: Scalar) -> Nanoseconds | None:
    """A duration: a number of seconds, or text with a unit such as ``1.5s``; None for others.

    Negative durations and those of more than a day are None, too.
    """
    if isinstance(value, bytes):
        matched = _DURATION.fullmatch(value[:32].decode("utf-8", "replace"))
        if matched is None:
            return None
        time = float(matched[1]) * _UNITS[matched[2]]
    elif value is None:
        return None
    else:
        time = float(value) * SECOND
    return Nanoseconds(round(time)) if 0 <= time <= _LONGEST else None
