"""The tokens of a span, its role, and its report of a request to a language model.

A span is recognised by its attributes (:mod:`wattspan.ingest.token_attributes`); its service and
name do not matter. Counts may be integers, doubles or text. A count that is negative, no number or
larger than any context is ignored alone: the next name of the same figure counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from wattspan.ingest.export_request import MAX_NAME
from wattspan.ingest.span_attributes import Scalar, printable
from wattspan.ingest.token_attributes import (
    InferenceFigure,
    is_aggregate,
    is_hosted,
    is_loopback,
)
from wattspan.model import MILLISECOND, SECOND, Nanoseconds
from wattspan.spans.values import UNKNOWN_MODEL, InferenceDetails, TokenRole

CLIENT_KIND, SERVER_KIND = 3, 2
"""The kinds of spans in OTLP that are evidence of a role."""

MAX_TOKENS = 10**7
"""Tokens of one span and direction, at most: more than any context length."""

_DURATION = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)(s|ms|µs|us|ns)")
_UNITS = {"s": SECOND, "ms": SECOND // 1000, "µs": 1000, "us": 1000, "ns": 1}
_LONGEST = 86_400 * SECOND
_DECIMAL = re.compile(rb"[0-9]{1,18}(?:\.[0-9]{1,18})?")
_MAX_USAGE = 4096  # bytes of JSON with counts

_EXCLUDING = "anthropic", "bedrock"
"""Providers, by a part of their names, whose count of input leaves cached tokens out."""

_NO_TIMES = (None,) * 8
_LAST_COUNT, _LAST_TEXT = int(InferenceFigure.REASONING), int(InferenceFigure.SERVER)


class TokenReport(NamedTuple):
    """The tokens of a span, and the report of a request; ``details`` are None for other spans."""

    tokens_in: int = 0
    tokens_out: int = 0
    role: TokenRole = TokenRole.PLAIN
    details: InferenceDetails | None = None


NO_REPORT = TokenReport()


def read_figure(column: int, value: Scalar) -> Scalar:
    """A valid value of a column; None for one that is ignored."""
    if column <= _LAST_COUNT:
        return token_count(value)
    if column <= _LAST_TEXT:
        return value if isinstance(value, bytes) else None
    return value


def token_count(value: Scalar) -> int | None:
    """A number of tokens in an integer, a double or text; None for negative and absurd ones."""
    if isinstance(value, bytes):
        if not _DECIMAL.fullmatch(value):
            return None
        value = float(value) if b"." in value else int(value)
    if value is None:
        return None
    return round(value) if 0 <= value <= MAX_TOKENS else None  # None for NaN


def token_report(values: Sequence[Scalar], kind: int) -> TokenReport:
    """The report of a span of this OTLP ``kind`` with the values of all figures in order."""
    if values.count(None) == len(values):
        return NO_REPORT
    # Unpacked: reading each by an InferenceFigure takes longer than all else.
    counts, times = values[:10], values[15:]
    usage, model, provider, operation, server = values[10:15]
    cached, prompt, generated = _tokens(counts, usage, provider)
    has_times = times.count(None) < len(times)
    queue, first, chunk, _, prefill, decode, inference, per_token = (
        map(as_nanoseconds, times) if has_times else _NO_TIMES
    )
    if chunk is None:
        chunk = _milliseconds(times[3])
    if generated is None and inference and per_token:
        generated = min(MAX_TOKENS, round(inference / per_token))
        decode = Nanoseconds(min(inference, per_token * max(0, generated - 1)))
        prefill = Nanoseconds(inference - decode)
    if prompt is None and generated is None:
        return NO_REPORT
    if is_aggregate(_text(operation)):
        role = TokenRole.AGGREGATE
    elif has_times and any(one is not None for one in (*times[:2], *times[4:])):
        role = TokenRole.ENGINE
    elif counts[:2] == (None, None) and counts[2:4] != (None, None):
        role = TokenRole.AGGREGATE  # the only counts are those of an agent with the calls in it
    else:
        role = _caller(kind, operation is not None, _text(provider), _text(server))
    known = has_times or any(one is not None for one in (*counts[5:], *values[10:14]))
    if role is TokenRole.AGGREGATE or not known:
        return TokenReport(prompt or 0, generated or 0, role)
    name = printable(model, MAX_NAME) if isinstance(model, bytes) else UNKNOWN_MODEL
    first = chunk if first is None else first
    details = InferenceDetails(name, cached, queue, first, prefill, decode)
    return TokenReport(prompt or 0, generated or 0, role, details)


def _caller(kind: int, operation: bool, provider: str, server: str) -> TokenRole:
    """The role of a span without the times of an engine."""
    if kind == SERVER_KIND:
        return TokenRole.SERVER
    if not (operation or provider) and kind != CLIENT_KIND:
        return TokenRole.PLAIN
    if is_hosted(provider) if not server else kind == CLIENT_KIND and not is_loopback(server):
        return TokenRole.REMOTE
    return TokenRole.CLIENT if kind == CLIENT_KIND else TokenRole.CALL


def _text(value: Scalar) -> str:
    return value[:300].decode("utf-8", "replace") if isinstance(value, bytes) else ""


def _tokens(
    values: Sequence[Scalar], usage: Scalar, provider: Scalar
) -> tuple[int, int | None, int | None]:
    """The cached input, the whole input and the output; None for absent counts."""
    counts = [value if isinstance(value, int) else None for value in values]
    prompt, generated, all_input, all_output, total, cached, apart, *rest = counts
    written_apart, written, reasoning = rest
    if prompt is None and generated is None:
        prompt, generated = all_input, all_output
    if prompt is None and generated is None and isinstance(usage, bytes):
        return _usage(usage)
    beside, parts = (apart or 0) + (written_apart or 0), (cached or 0) + (written or 0)
    if prompt is not None and beside and _excludes(provider, prompt, generated, total, beside):
        prompt = min(MAX_TOKENS, prompt + beside)
    elif prompt is not None and parts and _leaves_out(prompt, generated, total, parts):
        prompt = min(MAX_TOKENS, prompt + parts)
    if generated is not None and reasoning and _leaves_out(generated, prompt, total, reasoning):
        generated = min(MAX_TOKENS, generated + reasoning)
    return (apart if cached is None else cached) or 0, prompt, generated


def _excludes(
    provider: Scalar, prompt: int, generated: int | None, total: int | None, beside: int
) -> bool:
    """True if the count of input leaves ``beside`` tokens out, which the cache has or gets.

    The sum of a span decides, else the provider: input counts of Anthropic exclude tokens of the
    cache, those of OpenAI and of the conventions include them.
    """
    by_counts = _leaves_out(prompt, generated, total, beside)
    if by_counts is not None:
        return by_counts
    name = _text(provider).lower()
    return any(part in name for part in _EXCLUDING)


def _leaves_out(count: int, other: int | None, total: int | None, beside: int) -> bool | None:
    """True if a count of input or output leaves ``beside`` tokens out; None if unknown.

    ``other`` is the count of the other way, ``total`` the sum of the span.
    """
    if beside > count:
        return True
    rest = None if total is None else total - count - (other or 0)
    return rest == beside if rest in (0, beside) else None


def _usage(raw: bytes) -> tuple[int, int | None, int | None]:
    """The counts in a JSON object, of which each key is a part of the input or the output.

    A key beside ``input`` is a part of it if the total says so.
    """
    counts = _whole_numbers(raw)
    parts_in = {key: count for key, count in counts.items() if "input" in key or "prompt" in key}
    parts_out = {
        key: count for key, count in counts.items() if key.startswith(("output", "completion"))
    }
    main_in = _first(counts, "input", "input_tokens", "prompt_tokens", "promptTokens")
    main_out = _first(counts, "output", "output_tokens", "completion_tokens", "completionTokens")
    cached = sum(count for key, count in parts_in.items() if "cache" in key and "creat" not in key)
    prompt = sum(parts_in.values()) if parts_in else None
    generated = sum(parts_out.values()) if parts_out else None
    total = _first(counts, "total", "total_tokens", "totalTokens")
    if total is not None and total == (main_in or 0) + (main_out or 0):
        prompt, generated = main_in, main_out
    if (prompt or 0) > MAX_TOKENS or (generated or 0) > MAX_TOKENS:
        return 0, None, None
    return cached, prompt, generated


def _whole_numbers(raw: bytes) -> dict[str, int]:
    """The numbers of tokens in a JSON object; {} for other texts."""
    try:
        found: Any = json.loads(raw) if len(raw) <= _MAX_USAGE else None
    except (ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    counts = {
        key: token_count(value)
        for key, value in found.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    return {key: count for key, count in counts.items() if count is not None}


def _first(counts: Mapping[str, int], *names: str) -> int | None:
    return next((counts[name] for name in names if name in counts), None)


def _milliseconds(value: Scalar) -> Nanoseconds | None:
    if isinstance(value, bytes) or value is None or not 0 <= value <= _LONGEST / MILLISECOND:
        return None
    return Nanoseconds(round(value * MILLISECOND))


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
