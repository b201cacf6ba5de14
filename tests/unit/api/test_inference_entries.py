"""Language models and serving engines in the snapshot document."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from testbed.snapshots import busy_host, engine_host

from wattspan.api.inference_entries import EngineEntry
from wattspan.api.snapshot_document import decode_snapshot, restrict, snapshot_document
from wattspan.model import (
    EngineRow,
    HostRequests,
    InferenceRow,
    Microjoules,
    Snapshot,
    SourceHealth,
    SpanAccounts,
    UnmeteredRow,
)


def engines_of(snapshot: Snapshot) -> list[EngineEntry]:
    encoded = msgspec.json.encode(snapshot_document(snapshot, "1.2.3"))
    return decode_snapshot(encoded).engines


def test_host_without_a_configured_engine_has_none() -> None:
    assert engines_of(busy_host()) == []
    former = replace(engine_host(), health=busy_host().health)
    assert engines_of(former) == [], "its totals remain"


def test_engine_has_its_figures_with_their_uncertainty() -> None:
    chat, *_ = engines_of(engine_host())
    assert (chat.engine, chat.model, chat.owner) == ("chat", "llama", "vllm")
    assert (chat.up, chat.failure) == (True, "")
    assert (chat.gpu_joules, chat.requests) == (8_000.0, 70)
    assert chat.tokens == {"input": 90_000, "output": 7_000}
    assert chat.token_joules == {"all": 0.082474, "input": 0.03, "output": 0.7}
    assert chat.token_uncertainty_joules == {"all": 0.0009, "input": 0.009, "output": 0.06}
    assert (chat.request_joules, chat.request_uncertainty_joules) == (114.285714, 5.0)
    assert chat.idle_ratio == 0.25


def test_engine_without_figures_has_an_entry_with_the_state_of_its_page() -> None:
    _, code, embed = engines_of(engine_host())
    assert (code.engine, code.up) == ("code", False)
    remedy = "Start the engine with its metrics, or correct `url`."
    assert code.failure == f"connection refused. {remedy}"
    assert (embed.engine, embed.up, embed.failure) == ("embed", True, "")
    for one in (code, embed):
        assert (one.model, one.tokens, one.token_joules) == ("", {}, {})
        assert one.gpu_joules is one.requests is one.request_joules is one.idle_ratio is None


def test_models_of_an_engine_are_entries_with_the_same_state() -> None:
    host = engine_host()
    second = EngineRow("code", "b", "eve", Microjoules(1), {"output": 1})
    models = second, EngineRow("code", "a", "")
    document = engines_of(replace(host, spans=replace(host.spans, engines=models)))
    assert [(one.engine, one.model, one.up) for one in document] == [
        ("chat", "", True), ("code", "a", False), ("code", "b", False), ("embed", "", True),
    ]  # fmt: skip
    assert len({one.failure for one in document if one.engine == "code"}) == 1


def test_engine_that_names_no_model_has_its_energy() -> None:
    host = engine_host()
    unnamed = EngineRow("chat", "", "vllm", Microjoules(5_000_000), {"output": 3})
    chat, *_ = engines_of(replace(host, spans=replace(host.spans, engines=(unnamed,))))
    assert (chat.model, chat.gpu_joules) == ("", 5.0)


def test_names_of_engines_are_printable() -> None:
    host = engine_host()
    evil = EngineRow("evil\x1b[31m", "mo\ndel", "")
    health = (SourceHealth("engine:evil\x1b[31m", True, 1, 0),)
    spans = replace(host.spans, engines=(evil,))
    names = [
        (one.engine, one.model) for one in engines_of(replace(host, health=health, spans=spans))
    ]
    assert names == [("evil?[31m", "mo?del")]


def test_other_users_see_no_engine_and_no_reason_of_one() -> None:
    whole = snapshot_document(engine_host(), "1.2.3")
    seen = restrict(whole, lambda _: True, None)
    assert seen.engines == []
    assert [one.source for one in seen.sources] == ["rapl"]


# -------------------------------------------------------------------------- the whole host

PARTS = {"gpu": 6_000, "cpu": 300, "memory": 60, "idle": 0}
HOST = HostRequests(
    {part: Microjoules(joules * 10**6) for part, joules in PARTS.items()},
    {"input": 54_000, "output": 6_000},
    60,
    counts=dict.fromkeys(PARTS, (60, 6_000)),
)


def engine_with(host: HostRequests, requests: int | None = 70) -> EngineEntry:
    snapshot = engine_host()
    (row,) = snapshot.spans.engines
    spans = replace(snapshot.spans, engines=(replace(row, host=host, requests=requests),))
    return engines_of(replace(snapshot, spans=spans))[0]


def test_energy_of_the_whole_host_is_by_part_with_its_method() -> None:
    found = engine_with(HOST).host
    assert found is not None
    assert (found.method, found.uncertainty_joules) == ("engine_metrics", None)
    assert found.joules == {"gpu": 6_000.0, "cpu": 300.0, "memory": 60.0, "idle": 0.0}
    assert found.request_joules == {"gpu": 100.0, "cpu": 5.0, "memory": 1.0, "idle": 0.0}
    assert found.output_token_joules == {"gpu": 1.0, "cpu": 0.05, "memory": 0.01, "idle": 0.0}
    assert found.alike
    assert not found.bounded
    assert (found.requests, found.tokens) == (60, {"input": 54_000, "output": 6_000})


def test_unknown_energy_of_the_whole_host_is_null() -> None:
    assert [one.host for one in engines_of(engine_host())] == [None] * 3
    assert engine_with(HostRequests({}, {"output": 5}, 1)).host is None


def test_engine_that_counts_no_requests_has_energy_of_tokens_only() -> None:
    found = engine_with(HOST, None).host
    assert found is not None
    assert (found.requests, found.request_joules) == (None, {})
    assert found.output_token_joules["gpu"] == 1.0
    assert found.alike


def test_row_with_the_energy_of_several_models_has_none_of_a_token() -> None:
    found = engine_with(HostRequests(HOST.energy), None).host
    assert found is not None
    assert found.joules["cpu"] == 300.0
    assert (found.output_token_joules, found.request_joules) == ({}, {})


def test_parts_of_different_requests_have_no_sum() -> None:
    counts = {**HOST.counts, "memory": (20, 1_000)}
    found = engine_with(replace(HOST, counts=counts)).host
    assert found is not None
    assert not found.alike
    assert found.request_joules == {"gpu": 100.0, "cpu": 5.0, "memory": 3.0, "idle": 0.0}
    assert found.output_token_joules["memory"] == 0.06
    assert (found.part_requests["memory"], found.part_output_tokens["memory"]) == (20, 1_000)


def test_requests_to_a_model_have_their_energy_of_the_whole_host() -> None:
    row = InferenceRow(
        "llm", "m", {"input": Microjoules(1)}, {"input": 1}, {"model": 70}, (), host=HOST
    )
    unknown = replace(row, model="n", host=HostRequests())
    unmetered = UnmeteredRow("llm", "far", "client", 3, {"output": 4})
    spans = SpanAccounts(inference=(row, unknown), unmetered=(unmetered,))
    document = snapshot_document(replace(busy_host(), spans=spans), "1.2.3")
    found = decode_snapshot(msgspec.json.encode(document)).spans
    known, other = found.inference
    assert known.host is not None
    assert (known.host.method, known.host.requests) == ("equal_parts", 60)
    assert known.host.request_joules["cpu"] == 5.0
    assert other.host is None
    assert [(one.model, one.role, one.requests) for one in found.unmetered] == [
        ("far", "client", 3),
    ]
