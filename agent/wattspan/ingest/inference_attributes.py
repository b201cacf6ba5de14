"""The tokens of a span, its role, and its report of a request to a language model.

A span is recognised by its attributes, whose names one table has; its service and name do not
matter. Counts may be integers, doubles or text. A count that is negative, no number or
larger than any context is ignored alone: the next name of the same figure counts. A missing count
is the rest of the total, and counts that are all 0, as of streams, are unknown.

The conventions of OpenTelemetry for generative AI have old and present names. Instrumentations
have names of their own: OpenInference (``llm.token_count.*``), OpenLLMetry (``llm.usage.*``),
Vercel's AI SDK (``ai.*``), Langfuse, MLflow, Semantic Kernel. Engines add latencies: ``vllm``,
``tensorrt-llm`` and ``sglang`` share names, in seconds; ``tgi`` (Text Generation Inference) has
text such as ``1.5s`` and ``340µs`` in ``inference_time``, which begins after the queue, and
``time_per_token``, and no token counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple, cast

from wattspan.config.settings import SPAN_PRESETS, SpanFigure, SpanPreset
from wattspan.ingest.export_request import MAX_NAME
from wattspan.ingest.span_attributes import Scalar, printable
from wattspan.model import MILLISECOND, SECOND, Nanoseconds
from wattspan.spans.values import UNKNOWN_MODEL, InferenceDetails, TokenRole


class InferenceFigure(IntEnum):
    """The figures of a report: numbers of tokens, then texts, then durations."""

    INPUT = 0
    OUTPUT = 1
    ALL_INPUT = 2  # of an agent and the calls in it
    ALL_OUTPUT = 3
    TOTAL = 4
    CACHED = 5  # a part of the input
    CACHED_APART = 6  # in the way of the provider, which may not count it as input
    WRITTEN_APART = 7  # input that was written to the cache, likewise
    WRITTEN = 8  # input that was written to the cache, a part of the input
    REASONING = 9  # a part of the output
    REASONING_APART = 10  # which the output leaves out
    USAGE = 11  # JSON with several counts
    MODEL = 12
    PROVIDER = 13
    OPERATION = 14
    SERVER = 15  # the host or the URL that is called
    QUEUE = 16
    FIRST_TOKEN = 17
    FIRST_CHUNK = 18  # the first token as the caller sees it
    FIRST_CHUNK_MS = 19
    PREFILL = 20
    DECODE = 21
    INFERENCE = 22
    PER_TOKEN = 23


class InferenceAttribute(NamedTuple):
    """An attribute with a figure; the first present and valid one of a column counts."""

    column: InferenceFigure
    name: str
    presets: frozenset[str] | None  # None: whatever the presets, as the tokens of any span


_ENGINES: frozenset[SpanPreset] = frozenset(("vllm", "sglang", "tensorrt-llm"))
_CALLS: frozenset[SpanPreset] = frozenset(("gen_ai",))
_ANY = _ENGINES | _CALLS
_USAGE, _LATENCY, _LLM = "gen_ai.usage.", "gen_ai.latency.", "llm.token_count."

_NAMES: Mapping[InferenceFigure, Mapping[frozenset[SpanPreset] | None, tuple[str, ...]]] = {
    InferenceFigure.INPUT: {
        None: (
            f"{_USAGE}input_tokens",
            f"{_USAGE}prompt_tokens",  # the name until 2024
            f"{_LLM}prompt",
            "llm.usage.prompt_tokens",
            "ai.usage.inputTokens",
            "ai.usage.promptTokens",
            "ai.usage.tokens",  # of embeddings
            "gen_ai.response.prompt_tokens",  # Semantic Kernel until 2024
        )
    },
    InferenceFigure.OUTPUT: {
        None: (
            f"{_USAGE}output_tokens",
            f"{_USAGE}completion_tokens",
            f"{_LLM}completion",
            "llm.usage.completion_tokens",
            "ai.usage.outputTokens",
            "ai.usage.completionTokens",
            "gen_ai.response.completion_tokens",
        )
    },
    InferenceFigure.ALL_INPUT: {None: ("gen_ai.aggregated_usage.input_tokens",)},
    InferenceFigure.ALL_OUTPUT: {None: ("gen_ai.aggregated_usage.output_tokens",)},
    InferenceFigure.TOTAL: {
        None: (
            f"{_USAGE}total_tokens",
            f"{_LLM}total",
            "llm.usage.total_tokens",
            "ai.usage.totalTokens",
        )
    },
    InferenceFigure.CACHED: {
        _ANY: (f"{_USAGE}cache_read.input_tokens",),
        _ENGINES: (f"{_USAGE}cached_tokens",),
        _CALLS: (
            f"{_LLM}prompt_details.cache_read",
            f"{_USAGE}details.cache_read_tokens",
            f"{_USAGE}details.cache_read_input_tokens",  # Pydantic AI: its input includes them
            f"{_USAGE}cached_input_tokens",
            f"{_USAGE}prompt_tokens_details.cached_tokens",
        ),
    },
    InferenceFigure.CACHED_APART: {
        _CALLS: (
            f"{_USAGE}cache_read_input_tokens",
            "llm.usage.cache_read_input_tokens",
            "ai.usage.cachedInputTokens",
            "ai.usage.inputTokenDetails.cacheReadTokens",
        )
    },
    InferenceFigure.WRITTEN_APART: {
        _CALLS: (
            f"{_USAGE}cache_creation_input_tokens",
            f"{_USAGE}cache_write_input_tokens",
            "llm.usage.cache_creation_input_tokens",
            "ai.usage.inputTokenDetails.cacheWriteTokens",
        )
    },
    InferenceFigure.WRITTEN: {
        _ANY: (f"{_USAGE}cache_creation.input_tokens",),
        _CALLS: (
            f"{_LLM}prompt_details.cache_write",
            f"{_USAGE}details.cache_creation_input_tokens",
        ),
    },
    InferenceFigure.REASONING: {
        _ANY: (f"{_USAGE}reasoning.output_tokens",),
        _CALLS: (
            f"{_USAGE}reasoning_tokens",
            f"{_USAGE}details.reasoning_tokens",
            f"{_USAGE}details.thoughts_tokens",
            f"{_LLM}completion_details.reasoning",
            "llm.usage.reasoning_tokens",
            "ai.usage.reasoningTokens",
            "ai.usage.outputTokenDetails.reasoningTokens",
        ),
    },
    # Google ADK until 2.2; since then its output has them, under the name of the convention.
    InferenceFigure.REASONING_APART: {_CALLS: (f"{_USAGE}experimental.reasoning_tokens",)},
    InferenceFigure.USAGE: {
        None: ("langfuse.observation.usage_details", "mlflow.chat.tokenUsage"),
    },
    InferenceFigure.MODEL: {
        _ANY: ("gen_ai.response.model", "gen_ai.request.model"),
        _CALLS: (
            "llm.model_name",
            "embedding.model_name",
            "llm.response.model",
            "llm.request.model",
            "ai.response.model",
            "ai.model.id",
            "langfuse.observation.model.name",
        ),
    },
    InferenceFigure.PROVIDER: {
        _CALLS: (
            "gen_ai.provider.name",
            "gen_ai.system",
            "llm.provider",
            "llm.system",
            "ai.model.provider",
        )
    },
    InferenceFigure.OPERATION: {
        None: (
            "gen_ai.operation.name",
            "openinference.span.kind",
            "traceloop.span.kind",
            "gen_ai.span.kind",  # LoongSuite, Dify
            "langsmith.span.kind",
            "llm.request.type",
            "ai.operationId",
            "langfuse.observation.type",
            "mlflow.spanType",
        )
    },
    InferenceFigure.SERVER: {None: ("server.address", "gen_ai.openai.api_base")},
    InferenceFigure.QUEUE: {_ENGINES: (f"{_LATENCY}time_in_queue",)},
    InferenceFigure.FIRST_TOKEN: {_ENGINES: (f"{_LATENCY}time_to_first_token",)},
    InferenceFigure.FIRST_CHUNK: {_CALLS: ("gen_ai.response.time_to_first_chunk",)},
    InferenceFigure.FIRST_CHUNK_MS: {_CALLS: ("ai.response.msToFirstChunk",)},
    InferenceFigure.PREFILL: {_ENGINES: (f"{_LATENCY}time_in_model_prefill",)},
    InferenceFigure.DECODE: {_ENGINES: (f"{_LATENCY}time_in_model_decode",)},
    InferenceFigure.INFERENCE: {frozenset(("tgi",)): ("inference_time",)},
    InferenceFigure.PER_TOKEN: {frozenset(("tgi",)): ("time_per_token",)},
}

ATTRIBUTES = tuple(
    InferenceAttribute(figure, name, presets)
    for figure, sets in _NAMES.items()
    for presets, names in sets.items()
    for name in names
)
"""All known attributes."""

MARKS = b"oken", b"usage_details", b"gen_ai.operation.name", b"span.kind"
"""Every request with tokens or with a tool contains one of them, unless a setting adds names."""

SETTINGS: Mapping[SpanFigure, InferenceFigure] = {
    "input_tokens": InferenceFigure.INPUT,
    "output_tokens": InferenceFigure.OUTPUT,
    "cached_tokens": InferenceFigure.CACHED,
    "model": InferenceFigure.MODEL,
    "operation": InferenceFigure.OPERATION,
    "queue_time": InferenceFigure.QUEUE,
    "first_token_time": InferenceFigure.FIRST_TOKEN,
    "prefill_time": InferenceFigure.PREFILL,
    "decode_time": InferenceFigure.DECODE,
}
"""The keys of ``[spans.attributes]`` and their figures."""

_AGGREGATES = frozenset(
    (
        "agent", "chain", "tool", "workflow", "task", "retriever", "guardrail", "evaluator",
        "span", "plan", "parser", "prompt",
        "ai.generatetext", "ai.streamtext", "ai.generateobject", "ai.streamobject", "ai.embed",
        "ai.embedmany", "ai.toolcall",
    )
)  # fmt: skip
_HOST = re.compile(r"^[a-z+]+://(?:[^/@]*@)?")
_AGGREGATE_PREFIXES = "invoke_", "execute_", "create_"
_STEPS = re.compile(r"(?:agent|tool|ai\.toolcall)$|invoke_agent|execute_tool")


def inference_attributes(
    presets: Collection[str] = SPAN_PRESETS,
    added: Mapping[SpanFigure, Iterable[str]] | None = None,
) -> list[InferenceAttribute]:
    """The attributes that these presets look for, those that settings add before all others.

    ``added`` are names by the keys of :data:`SETTINGS`.
    """
    own = [
        InferenceAttribute(figure, name, None)
        for key, figure in SETTINGS.items()
        for name in (added or {}).get(key, ())
    ]
    known = [
        each for each in ATTRIBUTES if each.presets is None or not each.presets.isdisjoint(presets)
    ]
    return own + known


def is_aggregate(operation: str) -> bool:
    """True for the operation of an agent, a tool or a workflow; False for that of a model."""
    name = _plain(operation)
    return name in _AGGREGATES or name.startswith(_AGGREGATE_PREFIXES)


def _plain(operation: str) -> str:
    return operation.strip(' "').lower()


_HOSTED = re.compile(
    # Only a provider has these names, with any ending: "azureopenai", "gcp.vertex_ai".
    r"(?:^|[^a-z0-9])(?:chat)?(?:amazon|anthropic|aws|azure|bedrock|cerebras|cohere|deepinfra"
    r"|fireworks|gcp|gemini|google|groq|openrouter|perplexity|sambanova|together|vertex|watsonx"
    r"|(?:az[._-]ai|x[._-]?ai)(?![a-z0-9]))"
    # Models and an engine (mistral.rs) have the names of these as well: "mistral_ai.chat".
    r"|^(?:chat)?(?:deepseek|mistral|moonshot)(?:ai)?(?:[._-](?:ai|api|chat|completions?"
    r"|embeddings?|responses))*$"
)


def is_hosted(provider: str) -> bool:
    """True for a provider whose models run at the provider only.

    OpenAI is none of them: many engines have its interface, and their callers name it.
    """
    return _HOSTED.search(provider.strip().lower()) is not None


def is_loopback(server: str) -> bool:
    """True for the address or URL of a server that may be on this host: its names of itself."""
    host = _HOST.sub("", server.strip().lower())
    return host.startswith(("localhost", "127.", "0.0.0.", "[::1]", "[::]", "::1", "/", "unix"))


# ------------------------------------------------------------------------------- the report

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

_MAX_TEXT = 300  # bytes of a provider or a server that are read
_NO_TIMES = (None,) * 8
_LAST_COUNT, _LAST_TEXT = int(InferenceFigure.REASONING_APART), int(InferenceFigure.SERVER)


class TokenReport(NamedTuple):
    """The tokens of a span, and the report of a request; ``details`` are None for other spans.

    A request without tokens has a total, whose parts are unknown. A tool or an agent without tokens
    has the role of an aggregate.
    """

    tokens_in: int = 0
    tokens_out: int = 0
    role: TokenRole = TokenRole.PLAIN
    details: InferenceDetails | None = None


NO_REPORT, _STEP_REPORT = TokenReport(), TokenReport(role=TokenRole.AGGREGATE)


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
    counts, times = values[:11], values[16:]
    usage, model, provider, operation, server = values[11:16]
    cached, prompt, generated, total = _tokens(counts, usage, provider)
    if not prompt and not generated and "embed" in _text(_clipped(operation)).lower():
        prompt = total
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
    if not (prompt or generated or total):
        return _STEP_REPORT if _is_step(_clipped(operation)) else NO_REPORT
    role = _role(kind, _clipped(operation), _clipped(provider), _clipped(server))
    if role is not TokenRole.AGGREGATE:
        if has_times and any(one is not None for one in (*times[:2], *times[4:])):
            role = TokenRole.ENGINE
        elif counts[:2] == (None, None) and counts[2:4] != (None, None):
            role = TokenRole.AGGREGATE  # its only counts are those of an agent with its calls
    known = has_times or any(one is not None for one in (*counts[5:], *values[11:15]))
    if not known or (role is TokenRole.AGGREGATE and not (prompt or generated)):
        return TokenReport(prompt or 0, generated or 0, role)
    name = printable(model, MAX_NAME) if isinstance(model, bytes) else UNKNOWN_MODEL
    first = chunk if first is None else first
    details = InferenceDetails(name, cached, queue, first, prefill, decode)
    return TokenReport(prompt or 0, generated or 0, role, details)


def _clipped(value: Scalar) -> bytes | None:
    return value[:_MAX_TEXT] if isinstance(value, bytes) else None


@lru_cache(maxsize=1024)
def _role(
    kind: int, operation: bytes | None, provider: bytes | None, server: bytes | None
) -> TokenRole:
    """The role by these texts and the kind of a span, which few spans of a sender vary."""
    if is_aggregate(_text(operation)):
        return TokenRole.AGGREGATE
    if kind == SERVER_KIND:
        return TokenRole.SERVER
    if operation is None and not provider and kind != CLIENT_KIND:
        return TokenRole.PLAIN
    if not is_loopback(_text(server)) if server else is_hosted(_text(provider)):
        return TokenRole.REMOTE
    return TokenRole.CLIENT if kind == CLIENT_KIND else TokenRole.CALL


@lru_cache(maxsize=1024)
def _is_step(operation: bytes | None) -> bool:
    """True for the operation of a tool or an agent, in which calls of their own are made."""
    return _STEPS.match(_plain(_text(operation))) is not None


def _text(value: bytes | None) -> str:
    return (value or b"").decode("utf-8", "replace")


_Tokens = tuple[int, int | None, int | None, int | None]
"""The cached input, the whole input, the output and their total; None for absent counts."""


def _tokens(values: Sequence[Scalar], usage: Scalar, provider: Scalar) -> _Tokens:
    counts = cast("Sequence[int | None]", values)  # as `read_figure` reads them
    prompt, generated, all_input, all_output, total, cached, apart, *rest = counts
    written_apart, written, reasoning, thoughts = rest
    if prompt is None and generated is None:
        prompt, generated = all_input, all_output
    if not prompt and not generated and isinstance(usage, bytes):
        found = _usage(usage)
        return _completed(*found[:3], total if found[3] is None else found[3])
    # What a span names in both ways is a part of the input, as the conventions have it.
    beside = (apart or 0) * (cached is None) + (written_apart or 0) * (written is None)
    parts = (cached or 0) + (written or 0)
    if prompt is not None and beside and _excludes(provider, prompt, generated, total, beside):
        prompt = min(MAX_TOKENS, prompt + beside)
    elif prompt is not None and parts and _leaves_out(prompt, generated, total, parts):
        prompt = min(MAX_TOKENS, prompt + parts)
    if generated is not None and reasoning and _leaves_out(generated, prompt, total, reasoning):
        generated = min(MAX_TOKENS, generated + reasoning)
    elif thoughts and reasoning is None:
        generated = min(MAX_TOKENS, (generated or 0) + thoughts)
    return _completed((apart if cached is None else cached) or 0, prompt, generated, total)


def _completed(
    cached: int, prompt: int | None, generated: int | None, total: int | None
) -> _Tokens:
    """The same counts, with the rest of the total for a missing one."""
    if total is not None and not (prompt == generated == 0):
        if not prompt and generated is not None:
            prompt = max(0, total - generated)
        elif not generated and prompt is not None:
            generated = max(0, total - prompt)
    return cached, prompt, generated, total


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
    name = _text(_clipped(provider)).lower()
    return any(part in name for part in _EXCLUDING)


def _leaves_out(count: int, other: int | None, total: int | None, beside: int) -> bool | None:
    """True if a count of input or output leaves ``beside`` tokens out; None if unknown.

    ``other`` is the count of the other way, ``total`` the sum of the span.
    """
    if beside > count:
        return True
    rest = None if total is None else total - count - (other or 0)
    return rest == beside if rest in (0, beside) else None


def _usage(raw: bytes) -> _Tokens:
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
        return 0, None, None, None
    return cached, prompt, generated, total


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
