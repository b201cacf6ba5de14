"""``GET /v1/advice``, ``GET /v1/inference`` and ``wattspan advise``: what each may show."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from testbed.constant_history import OURS, OURSELVES, ROOTS, Asked, local_peer
from testbed.query_server import QueryServer

from wattspan.advice.rules import BoardFacts, BoardUse, UseFacts
from wattspan.advice.static_power import StaticPowerFit, StaticPowerRefusal
from wattspan.api.service import QueryService
from wattspan.cli.advise import advice_lines
from wattspan.http.messages import HttpRequest
from wattspan.http.sockets import Peer
from wattspan.inference.estimate import RequestEstimate
from wattspan.inference.requests import InferenceRequest
from wattspan.model import (
    SECOND,
    Consumer,
    Microjoules,
    Milliwatts,
    Provenance,
    StaticBasis,
    StaticPower,
)
from wattspan.sdk import RefusedError
from wattspan.sdk.client import request_json

FIT = StaticPowerFit(Milliwatts(100_000), Milliwatts(1_000), Milliwatts(400_000), 60, (60, 64))
USES = {OURS: "ours", ROOTS: "theirs"}


def facts(may_see: Callable[[Consumer], bool]) -> tuple[BoardFacts, ...]:
    use = BoardUse(180 * 10**9, 600 * SECOND, 0, 0, 60 * SECOND, 600 * SECOND)
    visible = tuple(UseFacts(name, use) for one, name in USES.items() if may_see(one))
    known = StaticPower(Milliwatts(100_000), StaticBasis.FITTED)
    idle = Milliwatts(60_000)
    boards = (("gpu:0", known, FIT, visible), ("gpu:1", None, StaticPowerRefusal.FEW_WINDOWS, ()))
    return tuple(
        BoardFacts(
            key, f"A100 {key[-1]}", Provenance.EMULATED, 600 * SECOND, 0, Microjoules(0), True,
            static, fit, idle if static else None, (), uses,
        )
        for key, static, fit, uses in boards
    )  # fmt: skip


def ask(peer: Peer = OURSELVES, **query: str) -> tuple[int, dict[str, Any]]:
    asked = Asked()
    service = QueryService(
        asked.past, asked.directory, asked.clock, devices=asked.past, view=asked.view,
        host="h", version="1", advice=facts,
    )  # fmt: skip
    response = asyncio.run(service(HttpRequest("GET", "/v1/advice", query, {}, b"", peer)))
    return response.status, json.loads(response.body)


def test_advice_has_joules_range_and_confidence() -> None:
    status, found = ask(local_peer(None, 0))
    assert status == 200
    first, second = found["advice"]
    assert (first["service"], second["service"]) == ("ours", "theirs")
    assert (first["kind"], first["joules"]) == ("overlap_communication", 6000.0)
    assert (first["low_joules"], first["high_joules"]) == (5940.0, 6060.0)
    assert (first["confidence"], first["static_basis"]) == ("high", "fitted")
    assert found["services"] == ["ours", "theirs"]
    assert found["emulated"]


def test_boards_have_their_static_power_or_the_reason() -> None:
    _, found = ask()
    one, other = found["boards"]
    assert (one["static_watts"], one["fitted_half_width_watts"]) == (100.0, 1.0)
    assert (one["fitted_celsius"], one["fit_refused"], one["idle_watts"]) == ([60, 64], None, 60.0)
    assert (other["static_watts"], other["static_basis"], other["idle_watts"]) == (None,) * 3
    assert (other["fit_refused"], other["fitted_watts"]) == ("few_windows", None)


def test_other_users_see_advice_about_their_own_processes() -> None:
    _, found = ask(local_peer(None, 12345))
    assert (found["advice"], found["services"]) == ([], [])


def test_advice_is_restricted_to_a_service() -> None:
    _, found = ask(local_peer(None, 0), service="theirs")
    assert [one["service"] for one in found["advice"]] == ["theirs"]


def test_unknown_parameter_is_refused() -> None:
    status, _ = ask(servcie="x")
    assert status == 400


def test_agent_without_facts_has_no_such_path() -> None:
    assert Asked().get("/v1/advice").status == 404


def test_lines_have_joules_confidence_and_provenance() -> None:
    _, found = ask(local_peer(None, 0))
    lines = list(advice_lines(found))
    assert lines[0].startswith("EMULATED")
    assert "6.00 kJ (5.94 kJ to 6.06 kJ) in 10m 00s, confidence high, emulated" in lines
    assert any(line.split()[:2] == ["A100", "0"] and "60 to 64 °C" in line for line in lines)
    assert any("less than a minute with waiting spans" in line for line in lines)


def test_missing_advice_has_its_reasons_for_people_and_programs() -> None:
    _, found = ask(local_peer(None, 12345))  # sees no process
    assert [(one["reason"], one["hw_id"], one["service"]) for one in found["no_advice"]] == [
        ("no_use", "gpu:0", None), ("idle_unknown", "gpu:1", None), ("no_use", "gpu:1", None),
    ]  # fmt: skip
    lines = list(advice_lines(found | {"emulated": False}))
    assert lines[0].startswith("No advice")
    assert lines[1:4] == [f"  {one['sentence']}" for one in found["no_advice"]]
    assert lines[4] == ""


def test_advice_needs_no_reasons() -> None:
    _, found = ask(local_peer(None, 0))
    assert found["no_advice"] == []


# ------------------------------------------------------------------------------- requests to models


ESTIMATE = RequestEstimate(
    Microjoules(2_500_000), Microjoules(500_000), Microjoules(2_000_000), Microjoules(250_000)
)


class Estimates:
    """Answers with one estimate, and keeps the questions."""

    def __init__(self, estimate: RequestEstimate | None) -> None:
        self.estimate = estimate
        self.asked: list[tuple[Consumer, InferenceRequest]] = []

    def __call__(self, process: Consumer, request: InferenceRequest) -> RequestEstimate | None:
        self.asked.append((process, request))
        return self.estimate


def _ask(folder: Path, estimates: Estimates, **parameters: str) -> dict[str, object]:
    with QueryServer(folder, inference=estimates):
        return request_json("/v1/inference", parameters, directories=(str(folder),))


def test_estimate_of_the_asking_process_is_answered(tmp_path: Path) -> None:
    estimates = Estimates(ESTIMATE)

    found = _ask(
        tmp_path, estimates, model="m", prompt="100", cached="40", completion="11", time="2500ms"
    )

    assert found == {
        "host_name": "testhost",
        "joules": 2.5,
        "input_joules": 0.5,
        "output_joules": 2.0,
        "uncertainty_joules": 0.25,
        "status": "provisional",
        "emulated": False,
    }
    ((process, request),) = estimates.asked
    assert process.pid == os.getpid()
    assert (request.model, request.prefill, request.context) == ("m", 60, 100)
    assert (request.decode, request.end) == (10, 5 * SECOND // 2)


def test_unknown_uncertainty_is_null(tmp_path: Path) -> None:
    found = _ask(tmp_path, Estimates(ESTIMATE._replace(uncertainty=None)))

    assert found["uncertainty_joules"] is None


def test_unknown_energy_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"not known yet.*Send the spans of the engine"):
        _ask(tmp_path, Estimates(None), model="m")


@pytest.mark.parametrize(
    ("name", "value", "cause"),
    [
        ("prompt", "-1", "no whole number"),
        ("completion", "99999999999", "no whole number"),
        ("time", "soon", "Write the duration"),
        ("tokens", "1", "there is no such parameter"),
    ],
)
def test_invalid_parameters_are_refused(tmp_path: Path, name: str, value: str, cause: str) -> None:
    with pytest.raises(RefusedError, match=cause):
        _ask(tmp_path, Estimates(ESTIMATE), **{name: value})


def test_agent_without_spans_knows_no_energy(tmp_path: Path) -> None:
    with QueryServer(tmp_path), pytest.raises(RefusedError, match="not known yet"):
        request_json("/v1/inference", {}, directories=(str(tmp_path),))
