"""The tokens, roles and reports in attributes: edges that the recorded cases do not reach."""

from __future__ import annotations

from typing import get_args

import pytest
from testbed.otlp import Receiver, request, span
from testbed.otlp_reference import json_of

from wattspan.config.settings import SpanFigure, SpansSettings
from wattspan.http.sockets import Peer
from wattspan.ingest.inference_attributes import (
    ATTRIBUTES,
    MAX_TOKENS,
    NO_REPORT,
    SETTINGS,
    InferenceFigure,
    TokenReport,
    inference_attributes,
    is_aggregate,
    is_loopback,
    token_report,
)
from wattspan.ingest.span_attributes import Scalar
from wattspan.ingest.trace_receiver import EXPECTED_WITHIN
from wattspan.spans.values import InferenceDetails, TokenRole

F = InferenceFigure
MS = 1_000_000


def _report(values: dict[InferenceFigure, Scalar], kind: int = 0) -> TokenReport:
    return token_report(tuple(values.get(figure) for figure in F), kind)


def test_every_name_belongs_to_one_figure() -> None:
    names = [each.name for each in ATTRIBUTES]
    assert len(names) == len(set(names))


def test_added_names_come_first_and_need_no_preset() -> None:
    first, *_ = inference_attributes((), {"input_tokens": ["app.prompt"]})
    assert (first.column, first.name) == (F.INPUT, "app.prompt")


@pytest.mark.parametrize(
    ("values", "kind", "role"),
    [
        ({}, 0, TokenRole.PLAIN),
        ({}, 1, TokenRole.PLAIN),
        ({}, 2, TokenRole.SERVER),
        ({}, 3, TokenRole.CLIENT),
        ({F.OPERATION: b"chat"}, 1, TokenRole.CALL),
        ({F.PROVIDER: b"openai"}, 0, TokenRole.CALL),
        ({F.SERVER: b"api.openai.com"}, 3, TokenRole.REMOTE),
        ({F.SERVER: b"https://user@10.0.0.7:8000/v1"}, 3, TokenRole.REMOTE),
        ({F.SERVER: b"http://localhost:8000/v1"}, 3, TokenRole.CLIENT),
        ({F.SERVER: b"api.openai.com"}, 1, TokenRole.PLAIN),
        ({F.PROVIDER: b"anthropic"}, 1, TokenRole.REMOTE),
        ({F.PROVIDER: b"gcp.gemini"}, 3, TokenRole.REMOTE),
        ({F.PROVIDER: b"anthropic", F.SERVER: b"127.0.0.1"}, 3, TokenRole.CLIENT),
        ({F.PROVIDER: b"anthropic"}, 2, TokenRole.SERVER),
        ({F.PROVIDER: b"openai", F.SERVER: b"https://api.openai.com/v1"}, 1, TokenRole.REMOTE),
        ({F.PROVIDER: b"anthropic", F.SERVER: b"http://0.0.0.0:80"}, 1, TokenRole.CALL),
        ({F.PROVIDER: b"AWS"}, 3, TokenRole.REMOTE),
        ({F.PROVIDER: b"az.ai.inference"}, 1, TokenRole.REMOTE),
        ({F.QUEUE: 0.5}, 3, TokenRole.ENGINE),
        ({F.QUEUE: 0.5, F.OPERATION: b"invoke_agent"}, 2, TokenRole.AGGREGATE),
        ({F.OPERATION: b"AGENT"}, 3, TokenRole.AGGREGATE),
    ],
)
def test_evidence_gives_the_role(
    values: dict[InferenceFigure, Scalar], kind: int, role: TokenRole
) -> None:
    assert _report({F.INPUT: 1, **values}, kind).role is role


def test_operations_of_agents_tools_and_workflows_are_no_calls() -> None:
    for name in (
        "invoke_agent", "execute_tool", "invoke_workflow", "create_agent", "CHAIN", "tool",
        "ai.generateText", "ai.toolCall", "workflow", "execute_event_loop_cycle",
    ):  # fmt: skip
        assert is_aggregate(name), name
    for name in (
        "chat", "text_completion", "generate_content", "embeddings", "LLM", "EMBEDDING",
        "completion", "ai.generateText.doGenerate", "generation", "acompletion", "",
    ):  # fmt: skip
        assert not is_aggregate(name), name


def test_addresses_of_this_host_are_loopback() -> None:
    for server in ("localhost", "http://127.0.0.1:1/v1", "[::1]:80", "::1", "[::]:80", "/run/x"):
        assert is_loopback(server), server
    for server in ("api.openai.com", "http://10.0.0.1", "http://a@b/localhost", ""):
        assert not is_loopback(server), server


def test_sums_of_an_agent_count_only_without_own_counts() -> None:
    both = {F.ALL_INPUT: 9, F.ALL_OUTPUT: 8, F.OPERATION: b"chat"}
    assert _report(both)[:3] == (9, 8, TokenRole.AGGREGATE)
    assert _report({**both, F.INPUT: 1})[:3] == (1, 0, TokenRole.CALL)


def test_agent_is_a_request_only_by_a_known_part_of_its_tokens() -> None:
    agent = {F.OPERATION: b"invoke_agent", F.MODEL: b"m"}
    assert _report({**agent, F.INPUT: 9}).details == InferenceDetails("m")
    assert _report({**agent, F.TOTAL: 9}) == TokenReport(role=TokenRole.AGGREGATE)


def test_span_with_tokens_alone_is_no_request() -> None:
    assert _report({F.INPUT: 3, F.OUTPUT: 4}) == TokenReport(3, 4)
    assert _report({F.MODEL: b"m"}) == NO_REPORT
    assert _report({}) == NO_REPORT


@pytest.mark.parametrize(
    ("values", "tokens"),
    [
        ({F.OUTPUT: 80, F.TOTAL: 1280}, (1200, 80)),
        ({F.INPUT: 1200, F.TOTAL: 1280}, (1200, 80)),
        ({F.INPUT: 0, F.OUTPUT: 80, F.TOTAL: 1280}, (1200, 80)),
        ({F.INPUT: 1200, F.TOTAL: 80}, (1200, 0)),
        ({F.OUTPUT: 80, F.TOTAL: 1280, F.CACHED_APART: 1000, F.PROVIDER: b"anthropic"}, (1200, 80)),
        ({F.USAGE: b'{"input": 10, "total": 30}'}, (10, 20)),
        ({F.USAGE: b'{"output": 10}', F.TOTAL: 30}, (20, 10)),
        ({F.INPUT: 0, F.OUTPUT: 0, F.USAGE: b'{"input": 10, "output": 20}'}, (10, 20)),
        ({F.TOTAL: 7, F.OPERATION: b"embeddings"}, (7, 0)),
        ({F.USAGE: b'{"total": 7}', F.OPERATION: b"EMBEDDING"}, (7, 0)),
        ({F.INPUT: 7, F.TOTAL: 7, F.OPERATION: b"ai.embed.doEmbed"}, (7, 0)),
        ({F.TOTAL: 30, F.OPERATION: b"chat"}, (0, 0)),  # of unknown parts
        ({F.INPUT: 0, F.OUTPUT: 0, F.TOTAL: 30}, (0, 0)),
        ({F.USAGE: b'{"total": 30}'}, (0, 0)),
    ],
)
def test_missing_count_is_the_rest_of_the_total(
    values: dict[InferenceFigure, Scalar], tokens: tuple[int, int]
) -> None:
    report = _report({F.MODEL: b"m", **values})
    assert report[:2] == tokens
    assert report.details is not None


@pytest.mark.parametrize(
    "values",
    [
        {F.INPUT: 0, F.OUTPUT: 0},
        {F.INPUT: 0},
        {F.OUTPUT: 0, F.QUEUE: 0.5},
        {F.INPUT: 0, F.OUTPUT: 0, F.TOTAL: 0, F.OPERATION: b"embeddings"},
        {F.ALL_INPUT: 0, F.ALL_OUTPUT: 0},
        {F.USAGE: b'{"input": 0, "output": 0, "total": 0}'},
    ],
)
def test_counts_that_are_all_zero_are_unknown(values: dict[InferenceFigure, Scalar]) -> None:
    assert _report({F.MODEL: b"m", **values}, kind=3) == NO_REPORT


def test_first_token_of_the_caller_is_in_seconds_or_milliseconds() -> None:
    for values in ({F.FIRST_CHUNK: 0.125}, {F.FIRST_CHUNK_MS: 125}):
        report = _report({F.OUTPUT: 3, **values})
        assert report.details == InferenceDetails(first_token=125 * MS)
        assert report.role is TokenRole.PLAIN
    for value in (-1, b"125", 1e30):
        report = _report({F.OUTPUT: 3, F.MODEL: b"m", F.FIRST_CHUNK_MS: value})
        assert report.details == InferenceDetails("m")


@pytest.mark.parametrize(
    ("values", "prompt", "cached"),
    [
        ({F.CACHED: 40}, 50, 40),
        ({F.CACHED: 60}, 110, 60),  # more than the input: it was left out
        ({F.CACHED_APART: 40}, 50, 40),
        ({F.CACHED_APART: 60}, 110, 60),
        ({F.CACHED_APART: 40, F.PROVIDER: b"anthropic"}, 90, 40),
        ({F.CACHED_APART: 40, F.PROVIDER: b"AWS Bedrock"}, 90, 40),
        ({F.CACHED_APART: 40, F.PROVIDER: b"anthropic", F.TOTAL: 53}, 50, 40),
        ({F.CACHED_APART: 40, F.TOTAL: 93}, 90, 40),
        ({F.CACHED_APART: 40, F.TOTAL: 77}, 50, 40),  # a total of something else
        ({F.WRITTEN_APART: 40, F.PROVIDER: b"anthropic"}, 90, 0),
        ({F.CACHED: 40, F.WRITTEN_APART: 5, F.PROVIDER: b"anthropic"}, 55, 40),
        ({F.CACHED: 40, F.CACHED_APART: 40, F.PROVIDER: b"anthropic"}, 50, 40),  # in both ways
    ],
)
def test_input_includes_cached_tokens(
    values: dict[InferenceFigure, Scalar], prompt: int, cached: int
) -> None:
    report = _report({F.INPUT: 50, F.OUTPUT: 3, F.MODEL: b"m", **values})
    assert (report.tokens_in, report.details.cached) == (prompt, cached)


def test_input_with_cached_tokens_is_bounded() -> None:
    values = {F.INPUT: MAX_TOKENS, F.PROVIDER: b"anthropic", F.CACHED_APART: 9}
    assert _report(values).tokens_in == MAX_TOKENS


@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        (b'{"input": 5, "output": 3}', (5, 3, 0)),
        (b'{"input": 5, "input_cached_tokens": 4, "output": 3}', (9, 3, 4)),
        (b'{"input": 9, "input_cache_read": 4, "output": 3, "total": 12}', (9, 3, 4)),
        (b'{"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}', (9, 3, 0)),
        (b'{"output": 3}', (0, 3, 0)),
        (b'{"input": 3}', (3, 0, 0)),
        (b'{"input": true, "output": 3, "text": "9"}', (0, 3, 0)),
        (b'{"input": -3, "output": 3}', (0, 3, 0)),
        (b'{"input": 9000000, "input_cached_tokens": 9000000}', (0, 0, 0)),
        (b"[1]", (0, 0, 0)),
        (b"{", (0, 0, 0)),
        (b"\xff", (0, 0, 0)),
        (b"[" * 4000, (0, 0, 0)),
        (b'{"input": 5, "a": "' + b"x" * 5000 + b'"}', (0, 0, 0)),
    ],
)
def test_counts_in_json_are_read(usage: bytes, counts: tuple[int, int, int]) -> None:
    report = _report({F.USAGE: usage})
    cached = report.details.cached if report.details else 0
    assert (report.tokens_in, report.tokens_out, cached) == counts


def test_counts_of_attributes_come_before_json() -> None:
    assert _report({F.USAGE: b'{"input": 5}', F.INPUT: 7}).tokens_in == 7


@pytest.mark.slow
@pytest.mark.parametrize("json", [False, True])
def test_added_names_that_no_span_has_are_logged_once(*, json: bool) -> None:
    log: list[str] = []
    receiver = Receiver(names={"input_tokens": ["app.prompt", "app.prompts"]}, log=log.append)
    whole = request(*(span(n, app__prompt=n) for n in range(1, 1001)))
    body = json_of(whole) if json else whole.SerializeToString()
    for _ in range(EXPECTED_WITHIN // 1000 + 3):
        receiver.take(body, Peer(), json=json)
    (line,) = log
    assert "spans has app.prompts." in line
    assert receiver.sink.deliveries[0].parts[0].spans[6].tokens_in == 7


@pytest.mark.parametrize(
    ("weight", "lines"), [("", 0), ("app.size", 0), ("app.sizes", 1), ("app.other", 2)]
)
def test_weight_that_no_span_has_is_logged_once(weight: str, lines: int) -> None:
    log: list[str] = []
    names = {"model": ["app.modell"]} if lines == 2 else {}
    receiver = Receiver(weight=weight, names=names, log=log.append)
    body = request(*(span(n, app__size=n) for n in range(1, 1001))).SerializeToString()
    for _ in range(EXPECTED_WITHIN // 1000 + 1):
        receiver.take(body, Peer())
    assert len(log) == lines
    if lines:
        assert log[0].startswith("[spans] weight: none of 10000 received spans has app.")
        assert weight in log[0]
    if lines == 2:
        assert "[spans.attributes]: none of 10000 received spans has app.modell." in log[1]


@pytest.mark.parametrize(
    ("attributes", "fault"),
    [
        ({"input_tokens": ["a"], "output_tokens": ["a"]}, "'a' is named twice"),
        ({"model": [""]}, "1 to 200 characters"),
        ({"model": ["m" * 201]}, "1 to 200 characters"),
        ({"model": [str(n) for n in range(33)]}, "33 names; at most 32"),
    ],
)
def test_impossible_names_of_settings_are_refused(
    attributes: dict[str, list[str]], fault: str
) -> None:
    with pytest.raises(ValueError, match=fault):
        SpansSettings(attributes=attributes)


def test_every_key_of_the_setting_has_a_figure() -> None:
    assert set(get_args(SpanFigure)) == SETTINGS.keys()


def test_request_with_names_of_many_conventions_is_read_alike_in_both_encodings() -> None:
    """Beyond some names the decoder reads every attribute instead of searching for each name."""
    names = [each.name for each in ATTRIBUTES if each.column is not F.USAGE]
    spans = [
        span(1, **dict.fromkeys(names, 7)),
        span(2, gen_ai__usage__prompt_tokens=5, gen_ai__usage__input_tokens=-1),
        span(3, note="tokens"),
        span(4, llm__token_count__completion="9", ai__usage__outputTokens=8),
    ]
    receiver = Receiver()
    whole = request(*spans)
    receiver.take(whole.SerializeToString(), Peer())
    receiver.take(json_of(whole), Peer(), json=True)
    first, second = (list(one.parts[0].spans) for one in receiver.sink.deliveries)
    assert first == second
    assert [(one.tokens_in, one.tokens_out) for one in first] == [(21, 7), (5, 0), (0, 0), (0, 9)]
