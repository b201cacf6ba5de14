"""Responses of the agent about tuning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from testbed.constant_history import DRAM, Asked, local_peer
from testbed.tuned import ACCOUNTS, HELD, HOLD, PROBED, RELEASE, ago, decided

from wattspan.api.service import DEFAULT_DECISIONS, MAX_DECISIONS
from wattspan.model import Domain, HwType, Provenance, RecordedDecision, TuningAccounts
from wattspan.storage.tuning import DecisionLog
from wattspan.testing import ManualClock
from wattspan.tuning.serialization import (
    TuningDocument,
    recorded_decision_from_json,
    tuning_accounts,
)

STRANGER = local_peer(55, 2000)


class Recalling:
    """A history that records its queries."""

    def __init__(self, *decisions: RecordedDecision) -> None:
        self.decisions = decisions
        self.asked: list[tuple[str, int, int | None]] = []

    def __call__(
        self, job: str = "", limit: int = DEFAULT_DECISIONS, since: int | None = None
    ) -> tuple[RecordedDecision, ...]:
        self.asked.append((job, limit, since))
        return self.decisions


def told(asked: Asked, path: str = "/v1/tuning", **query: object) -> dict[str, Any]:
    response = asked.get(path, **query)
    assert response.status == 200, response.body
    found = json.loads(response.body)
    assert isinstance(found, dict)
    return found


def test_jobs_are_listed_with_cap_holders() -> None:
    asked = Asked(tuning=lambda: ACCOUNTS)
    answer = told(asked)
    assert tuning_accounts(msgspec.convert(answer, TuningDocument)) == ACCOUNTS
    assert (answer["host_name"], answer["emulated"]) == ("testhost", False)
    assert answer["now_mono_ns"] == asked.clock.monotonic()


def test_mode_without_a_tuner_is_off() -> None:
    answer = told(Asked())
    assert tuning_accounts(msgspec.convert(answer, TuningDocument)) == TuningAccounts("off")
    assert told(Asked(), "/v1/tuning/history")["decisions"] == []


def test_emulated_hosts_tuning_is_labelled() -> None:
    asked = Asked(tuning=lambda: ACCOUNTS, history=Recalling())
    unreal = Domain("GPU-9", HwType.GPU, "GPU 9", "nvml", Provenance.EMULATED)
    asked.past.known_domains = (DRAM, unreal)
    assert told(asked)["emulated"] is True
    assert told(asked, "/v1/tuning/history")["emulated"] is True


def test_every_user_of_the_socket_may_query_the_host() -> None:
    asked = Asked(tuning=lambda: ACCOUNTS, history=Recalling(decided(1, HOLD)))
    for path in ("/v1/tuning", "/v1/tuning/history"):
        assert asked.get(path, peer=STRANGER).status == 200


def test_decisions_are_served_unchanged() -> None:
    one = decided(3, RELEASE)
    (answer,) = told(Asked(history=Recalling(one)), "/v1/tuning/history")["decisions"]
    assert recorded_decision_from_json(answer) == one


def test_query_parameters_reach_the_history() -> None:
    recalling = Recalling()
    asked = Asked(history=recalling)
    told(asked, "/v1/tuning/history")
    told(asked, "/v1/tuning/history", job="a/b", limit=7, since="-90s")
    told(asked, "/v1/tuning/history", since="2023-11-14T22:00:00Z")
    now = asked.clock.now().wall
    assert recalling.asked == [
        ("", DEFAULT_DECISIONS, None),
        ("a/b", 7, now - 90 * 10**9),
        ("", DEFAULT_DECISIONS, 1_699_999_200 * 10**9),
    ]


def test_query_accepts_times_before_boot() -> None:
    recalling = Recalling()
    told(Asked(history=recalling), "/v1/tuning/history", since="-3650d")
    ((_, _, since),) = recalling.asked
    assert since < 1_400_000_000 * 10**9


@pytest.mark.parametrize("limit", ["0", "-1", "many", "", str(MAX_DECISIONS + 1), "9" * 30, "١"])
def test_invalid_limit_error_names_valid_values(limit: str) -> None:
    sentence = Asked(history=Recalling()).problem(400, "/v1/tuning/history", limit=limit)
    assert f"from 1 to {MAX_DECISIONS}" in sentence


def test_parameters_that_are_unknown_name_the_nearest() -> None:
    asked = Asked(tuning=lambda: ACCOUNTS, history=Recalling())
    assert "'limit'" in asked.problem(400, "/v1/tuning/history", limits=3)
    assert "there is no such parameter" in asked.problem(400, "/v1/tuning", job="a")
    assert "'since'" in asked.problem(400, "/v1/tuning/history", sinc="-1s")
    assert "since=yesterday" in asked.problem(400, "/v1/tuning/history", since="yesterday")
    assert "/v1/tuning" in asked.problem(404, "/v1/tunin")


def test_tuning_routes_are_read_only() -> None:
    for path in ("/v1/tuning", "/v1/tuning/history"):
        assert Asked(tuning=lambda: ACCOUNTS).get(path, method="POST").status == 405


def test_decision_log_implements_the_history_port(tmp_path: Path) -> None:
    book = DecisionLog(tmp_path / "d.jsonl", ManualClock())
    for one in (decided(30, HOLD), decided(20, HOLD, PROBED.job), decided(10, RELEASE)):
        book.add(one)
    asked = Asked(history=book.recent)
    answer = told(asked, "/v1/tuning/history", job=HELD.job, since=ago(15).wall)
    assert [one["reason"] for one in answer["decisions"]] == ["over_budget"]
