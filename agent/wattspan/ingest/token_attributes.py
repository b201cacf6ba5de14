"""The names of attributes for tokens, models, operations and latencies, in one table.

The conventions of OpenTelemetry for generative AI have old and present names. Instrumentations
have names of their own: OpenInference (``llm.token_count.*``), OpenLLMetry (``llm.usage.*``),
Vercel's AI SDK (``ai.*``), Langfuse, MLflow, Semantic Kernel. Engines add latencies: ``vllm``,
``tensorrt-llm`` and ``sglang`` share names, in seconds; ``tgi`` (Text Generation Inference) has
text such as ``1.5s`` and ``340µs`` in ``inference_time``, which begins after the queue, and
``time_per_token``, and no token counts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from enum import IntEnum
from typing import NamedTuple

from wattspan.config.settings import SPAN_PRESETS, SpanFigure, SpanPreset


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
    USAGE = 10  # JSON with several counts
    MODEL = 11
    PROVIDER = 12
    OPERATION = 13
    SERVER = 14  # the host or the URL that is called
    QUEUE = 15
    FIRST_TOKEN = 16
    FIRST_CHUNK = 17  # the first token as the caller sees it
    FIRST_CHUNK_MS = 18
    PREFILL = 19
    DECODE = 20
    INFERENCE = 21
    PER_TOKEN = 22


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
            f"{_USAGE}cached_input_tokens",
            f"{_USAGE}prompt_tokens_details.cached_tokens",
        ),
    },
    InferenceFigure.CACHED_APART: {
        _CALLS: (
            f"{_USAGE}cache_read_input_tokens",
            f"{_USAGE}details.cache_read_input_tokens",
            "llm.usage.cache_read_input_tokens",
            "ai.usage.cachedInputTokens",
            "ai.usage.inputTokenDetails.cacheReadTokens",
        )
    },
    InferenceFigure.WRITTEN_APART: {
        _CALLS: (
            f"{_USAGE}cache_creation_input_tokens",
            f"{_USAGE}cache_write_input_tokens",
            f"{_USAGE}details.cache_creation_input_tokens",
            "llm.usage.cache_creation_input_tokens",
            "ai.usage.inputTokenDetails.cacheWriteTokens",
        )
    },
    InferenceFigure.WRITTEN: {
        _ANY: (f"{_USAGE}cache_creation.input_tokens",),
        _CALLS: (f"{_LLM}prompt_details.cache_write",),
    },
    InferenceFigure.REASONING: {
        _ANY: (f"{_USAGE}reasoning.output_tokens",),
        _CALLS: (
            f"{_USAGE}reasoning_tokens",
            f"{_USAGE}details.reasoning_tokens",
            f"{_LLM}completion_details.reasoning",
            "llm.usage.reasoning_tokens",
            "ai.usage.reasoningTokens",
            "ai.usage.outputTokenDetails.reasoningTokens",
        ),
    },
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

MARKS = b"oken", b"usage_details"
"""Every request with tokens contains one of them, unless a setting adds names."""

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
    name = operation.strip(' "').lower()
    return name in _AGGREGATES or name.startswith(_AGGREGATE_PREFIXES)


_HOSTED = (
    "anthropic", "azure", "bedrock", "cohere", "gcp", "gemini", "google", "groq", "perplexity",
    "vertex", "watsonx", "x_ai", "xai",
)  # fmt: skip


def is_hosted(provider: str) -> bool:
    """True for a provider whose models run at the provider only.

    OpenAI is none of them: many engines have its interface, and their callers name it.
    """
    name = provider.lower()
    return any(part in name for part in _HOSTED)


def is_loopback(server: str) -> bool:
    """True for the address or URL of a server that may be on this host: its names of itself."""
    host = _HOST.sub("", server.strip().lower())
    return host.startswith(("localhost", "127.", "[::1]", "::1", "/", "unix"))
