"""The provisional energy of a request by ``GET /v1/inference``, on the agent's socket."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from testbed.query_server import QueryServer

from wattspan.inference.estimate import RequestEstimate
from wattspan.inference.requests import InferenceRequest
from wattspan.model import SECOND, Consumer, Microjoules
from wattspan.sdk import RefusedError
from wattspan.sdk.client import request_json

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
