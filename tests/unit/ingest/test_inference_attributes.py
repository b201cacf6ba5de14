"""Reports of requests to language models: attributes of each engine, in protobuf and in JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from testbed.otlp import request, span

from wattspan.ingest.export_request import RequestedAttributes
from wattspan.ingest.inference_attributes import as_nanoseconds, is_hosted
from wattspan.ingest.trace_decoder import TraceDecoder
from wattspan.spans.values import InferenceDetails, Span

MS = 1_000_000
VLLM = {
    "gen_ai.usage.prompt_tokens": 120,
    "gen_ai.usage.completion_tokens": 33,
    "gen_ai.request.id": "chatcmpl-1",
    "gen_ai.response.model": "meta-llama/Llama-3.1-8B",
    "gen_ai.latency.time_in_queue": 0.25,
    "gen_ai.latency.time_to_first_token": 0.5,
    "gen_ai.latency.e2e": 2.5,
    "gen_ai.latency.time_in_model_prefill": 0.25,
    "gen_ai.latency.time_in_model_decode": 2.0,
}
VLLM_DETAILS = InferenceDetails(
    "meta-llama/Llama-3.1-8B", 0, 250 * MS, 500 * MS, 250 * MS, 2000 * MS
)


def _json(attributes: dict[str, Any]) -> bytes:
    kinds = {str: "stringValue", int: "intValue", float: "doubleValue"}
    pairs = [{"key": k, "value": {kinds[type(v)]: v}} for k, v in attributes.items()]
    times = {"startTimeUnixNano": "1", "endTimeUnixNano": "2"}
    one = {"traceId": "0a" * 16, "spanId": "0b" * 8, "name": "x", **times, "attributes": pairs}
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [one]}]}]}).encode()


def _records(attributes: dict[str, Any], **settings: Any) -> tuple[Span, Span]:
    """The span with these attributes, received in protobuf and in JSON."""
    asked = RequestedAttributes(**settings)
    decoder = TraceDecoder(asked, max_spans=10, max_fields=1000)
    body = request(span(1, **attributes)).SerializeToString()
    (binary,) = decoder.decode(body).parts[0].spans
    (text,) = decoder.decode(_json(attributes), json=True).parts[0].spans
    return binary, text


@pytest.mark.parametrize(
    ("attributes", "tokens", "details"),
    [
        (VLLM, (120, 33), VLLM_DETAILS),
        (
            VLLM | {"gen_ai.usage.cached_tokens": 64},
            (120, 33),
            VLLM_DETAILS._replace(cached=64),
        ),
        (
            {
                "gen_ai.usage.input_tokens": 10,
                "gen_ai.usage.output_tokens": 20,
                "gen_ai.usage.cache_read.input_tokens": 4,
                "gen_ai.request.model": "asked",
                "gen_ai.response.model": "used",
                "gen_ai.response.time_to_first_chunk": 0.125,
            },
            (10, 20),
            InferenceDetails("used", 4, first_token=125 * MS),
        ),
        (
            {"gen_ai.usage.input_tokens": 10, "gen_ai.request.model": "asked"},
            (10, 0),
            InferenceDetails("asked"),
        ),
        (
            {
                "queue_time": "1.5ms",
                "inference_time": "2.0000001s",
                "time_per_token": "20ms",
                "total_time": "2.1s",
            },
            (0, 100),
            InferenceDetails(prefill=20 * MS + 100, decode=99 * 20 * MS),
        ),
    ],
    ids=["vllm", "sglang", "gen_ai", "model only", "tgi"],
)
def test_report_of_an_engine_is_read(
    attributes: dict[str, Any], tokens: tuple[int, int], details: InferenceDetails
) -> None:
    for record in _records(attributes):
        assert (record.tokens_in, record.tokens_out) == tokens
        assert record.inference == details


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"http.route": "/v1/models"},
        {"queue_time": "1ms"},
        {"gen_ai.response.model": "m"},
        {"inference_time": "1s", "time_per_token": "0s"},
    ],
)
def test_span_without_tokens_has_no_report(attributes: dict[str, Any]) -> None:
    for record in _records(attributes):
        assert record.inference is None


def test_presets_limit_the_recognised_attributes() -> None:
    for record in _records(VLLM, presets=()):
        assert record.inference is None
        assert (record.tokens_in, record.tokens_out) == (120, 33)
    for record in _records(VLLM, presets=("gen_ai",)):
        assert record.inference == InferenceDetails("meta-llama/Llama-3.1-8B")


def test_invalid_figures_are_ignored() -> None:
    wrong = {
        "gen_ai.latency.time_in_queue": -1.0,
        "gen_ai.latency.time_to_first_token": "soon",
        "gen_ai.latency.time_in_model_decode": 1e30,
        "gen_ai.usage.cached_tokens": -5,
        "gen_ai.response.model": 7,
    }
    for record in _records(VLLM | wrong):
        assert record.inference == InferenceDetails(prefill=250 * MS)


def test_long_model_names_are_cut() -> None:
    for record in _records(VLLM | {"gen_ai.response.model": "m" * 5000}):
        assert record.inference.model == "m" * 200


@pytest.mark.parametrize(
    ("value", "time"),
    [
        (b"1.5s", 1_500_000_000),
        (b"250ms", 250 * MS),
        ("12µs".encode(), 12_000),
        (b"12us", 12_000),
        (b"7ns", 7),
        (b"5", None),
        (b"\xff\xffs", None),
        (b"-1s", None),
        (2, 2_000_000_000),
        (float("nan"), None),
        (86_401, None),
        (None, None),
    ],
)
def test_durations_are_seconds_or_have_a_unit(value: object, time: int | None) -> None:
    assert as_nanoseconds(value) == time


@pytest.mark.parametrize(("own", "model"), [({"gen_ai.request.model": "m"}, "m"), ({}, "served")])
def test_model_of_the_resource_names_requests_without_a_model(
    own: dict[str, str], model: str
) -> None:
    tokens = {"gen_ai.usage.output_tokens": 3, "gen_ai.latency.time_in_queue": 0.5}
    sent = request(span(1, **tokens, **own), resource={"gen_ai.request.model": "served"})
    decoder = TraceDecoder(max_spans=10, max_fields=1000)
    (part,) = decoder.decode(sent.SerializeToString()).parts
    assert [each.model for each in part.spans.inference if each] == [model]


@pytest.mark.parametrize(
    ("provider", "hosted"),
    [
        *((name, True) for name in (
            "amazon-bedrock", "anthropic", "anthropic.messages", "aws.bedrock", "az.ai.inference",
            "az.ai.openai", "azure.ai.inference", "AzureOpenAI", "azure_openai", "bedrock_converse",
            "cerebras", "ChatAnthropic", "ChatMistralAI", "cohere", "cohere.chat", "deepinfra",
            "deepseek", "deepseek.chat", "fireworks_ai", "gcp.gemini", "gcp.vertex_ai", "gemini",
            "google.generative-ai", "google_genai", "groq", "groq.chat", "ibm.watsonx.ai",
            "mistral", "mistral.chat", "mistral_ai", "mistral_ai.chat", "mistralai", "moonshot",
            "moonshotai", "openrouter", "perplexity", "sambanova", "together_ai", "togetherai",
            "vertex_ai", "x_ai", "x.ai", "xai", "xai.chat",
        )),
        *((name, False) for name in (
            "", "deepseek-r1", "deepseek_v3", "foxai", "llama.cpp", "mistral.rs", "mistral-7b",
            "mistral-small", "mistralrs", "mistralai/Mistral-7B-Instruct", "ollama",
            "ollama/mistral", "openai", "vllm", "vllm-deepseek",
        )),
    ],
)  # fmt: skip
def test_providers_that_run_their_models_are_known_by_whole_names(
    provider: str, *, hosted: bool
) -> None:
    assert is_hosted(provider) is hosted
