"""Tuning as plain facts: the served and stored decision equals the original."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from testbed.tuned import ACCOUNTS, HELD, HOLD, NOW, PIPELINED, RELEASE, TRACKED, decided

from wattspan.model import (
    Decision,
    DecisionReason,
    Knob,
    Microjoules,
    Move,
    RecordedDecision,
    TuningAccounts,
)
from wattspan.tuning.serialization import (
    TuningDocument,
    recorded_decision_from_json,
    recorded_decision_to_json,
    row_to_json,
    tuning_accounts,
    tuning_document,
)


def over_the_wire(facts: object) -> dict[str, object]:
    encoded = msgspec.json.decode(msgspec.json.encode(facts))
    assert isinstance(encoded, dict)
    return encoded


def read_back(document: TuningDocument) -> TuningAccounts:
    return tuning_accounts(msgspec.json.decode(msgspec.json.encode(document), type=TuningDocument))


@pytest.mark.parametrize("accounts", [ACCOUNTS, TuningAccounts()], ids=["busy", "off"])
def test_accounts_round_trip(accounts: TuningAccounts) -> None:
    assert read_back(tuning_document(accounts)) == accounts


def test_decision_round_trips() -> None:
    one = decided(3.5, HOLD)
    assert recorded_decision_from_json(over_the_wire(recorded_decision_to_json(one))) == one


def test_serialised_power_is_in_watts_and_clocks_in_megahertz() -> None:
    watts = recorded_decision_to_json(decided(0, HOLD))
    assert (watts["unit"], watts["caps"]) == ("W", {"GPU-0": 560.0, "GPU-1": 560.0})
    clock = RecordedDecision(NOW, "job", Knob.GPU_CLOCK, replace(HOLD, caps={"GPU-0": 1410}), True)
    encoded = recorded_decision_to_json(clock)
    assert (encoded["unit"], encoded["caps"]) == ("MHz", {"GPU-0": 1410.0})
    assert recorded_decision_from_json(over_the_wire(encoded)) == clock


def test_unknown_value_serialises_as_null() -> None:
    row = replace(HELD, slowdown=None, saved=None, lost=None, saving=float("nan"))
    encoded = row_to_json(row)
    assert [encoded[name] for name in ("slowdown", "saved_joules", "lost_seconds", "saving")] == (
        [None] * 4
    )
    assert row_to_json(replace(HELD, saved=Microjoules(0)))["saved_joules"] == 0.0


def test_unknown_fields_of_a_newer_agent_are_ignored() -> None:
    facts = over_the_wire(tuning_document(ACCOUNTS))
    facts["novelty"] = facts["jobs"][0]["novelty"] = facts["caps"][0]["novelty"] = 1  # type: ignore[index]
    facts["jobs"][0]["tried"][0]["novelty"] = 1  # type: ignore[index]
    assert tuning_accounts(msgspec.convert(facts, TuningDocument)) == ACCOUNTS


def test_unknown_enum_value_of_a_newer_agent_is_rejected() -> None:
    facts = recorded_decision_to_json(decided(0, RELEASE)) | {"reason": "bad_weather"}
    with pytest.raises(ValueError, match="bad_weather"):
        recorded_decision_from_json(facts)


def test_names_with_lone_surrogates_are_encoded() -> None:
    decision = Decision(Move.DECLINE, DecisionReason.NO_SIGNAL, "odd \ud800 words")
    encoded = over_the_wire(
        recorded_decision_to_json(
            RecordedDecision(NOW, "odd\udc80", Knob.GPU_POWER, decision, False)
        )
    )
    assert encoded["job"] == "odd?"
    assert over_the_wire(row_to_json(replace(HELD, service="\ud800")))["service"] == "?"


def test_accounts_are_plain_json(tmp_path: Path) -> None:
    text = msgspec.json.encode(tuning_document(ACCOUNTS)).decode()
    assert json.loads(text)["jobs"][0]["original"] == {"GPU-0": 700.0, "GPU-1": 700.0}


def test_pipelines_round_trip() -> None:
    accounts = TuningAccounts("apply", (PIPELINED,))
    assert read_back(tuning_document(accounts)) == accounts
    first, second = row_to_json(PIPELINED)["pipelines"]
    assert (first["name"], first["reason"]) == ("dp-0", "straggler")
    assert first["unit_time_seconds"] == 1.16
    assert first["ranks"][0] == {
        "device": "GPU-0",
        "clock": 1635,
        "planned": 1635,
        "waiting": 0.121,
        "saved_joules": 5310.0,
    }
    assert second["straggler_time_seconds"] is None
    contact, host = row_to_json(PIPELINED)["partners"]
    assert contact["age_seconds"] is None
    assert (host["host"], host["age_seconds"], host["straggler"]) == ("host-2", 1.2, "dp-2")


def test_partners_of_an_earlier_agent_are_read() -> None:
    encoded = tuning_document(TuningAccounts("apply", (PIPELINED,)))
    for one in encoded.jobs[0]["partners"]:
        del one["age_seconds"], one["straggler"]
    (row,) = read_back(encoded).rows
    assert [(one.age, one.straggler) for one in row.partners] == [(None, ""), (None, "")]


def test_load_of_a_tracked_job_round_trips() -> None:
    accounts = TuningAccounts("apply", (TRACKED,))
    assert read_back(tuning_document(accounts)) == accounts
    encoded = row_to_json(TRACKED)
    assert encoded["load"]["objectives"][0] == {
        "name": "ttft_p99",
        "limit_seconds": 0.4,
        "allowed": 0.01,
        "requests": 1200,
        "misses": 6,
    }
