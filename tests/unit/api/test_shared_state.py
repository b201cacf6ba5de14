"""``/v1/caps`` and ``/v1/report``, for users without the files and sockets behind them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import pytest

from wattspan.api.requests import ProblemError
from wattspan.api.shared_state import NOBODY, caps_response, report_response, shown_user
from wattspan.http.messages import HttpRequest, HttpResponse
from wattspan.http.sockets import Peer
from wattspan.model import HOST_ROOT, Principal
from wattspan.ports import CapsError, StoreError

ADA = 1000


def request(path: str, **query: str) -> HttpRequest:
    return HttpRequest("GET", path, query, {}, b"", Peer(uid=ADA))


def facts(response: HttpResponse) -> Any:
    return json.loads(response.body)


def stored(start: int, end: int, kinds: frozenset[str], user: int | None) -> Mapping[str, Any]:
    return {"asked": [start, end, sorted(kinds), user]}


def reported(user: int | None = ADA, **query: str) -> Any:
    asked = {"start": "60", "end": "120", **query}
    return facts(report_response(stored, request("/v1/report", **asked), "node7", user))


def test_caps_are_those_of_the_running_capper() -> None:
    state = {"socket": "/run/x/capper.sock", "state": {"rows": []}}
    response = caps_response(lambda: state, request("/v1/caps"), "node7")
    assert facts(response) == {"host_name": "node7", "capper": state}


def test_without_a_running_capper_there_is_none() -> None:
    assert facts(caps_response(dict, request("/v1/caps"), "node7"))["capper"] is None


def test_capper_that_does_not_answer_is_a_problem_with_its_cause() -> None:
    def refuse() -> Mapping[str, Any]:
        raise CapsError("No capper answers on /x: it takes too long. Start one.")

    with pytest.raises(ProblemError, match="it takes too long") as problem:
        caps_response(refuse, request("/v1/caps"), "node7")
    assert problem.value.status == HTTPStatus.SERVICE_UNAVAILABLE


def test_report_is_for_the_named_user() -> None:
    found = reported(kinds="user,process")
    assert found == {
        "host_name": "node7",
        "restricted": True,
        "asked": [60, 120, ["process", "user"], ADA],
    }


def test_report_without_a_user_is_for_everything() -> None:
    found = reported(None)
    assert (found["restricted"], found["asked"]) == (False, [60, 120, [], None])


@pytest.mark.parametrize(
    ("principal", "shown"),
    [
        (Principal(ADA), ADA),
        (HOST_ROOT, None),
        (Principal(ADA, "c0ffee"), NOBODY),
        (Principal(0, "c0ffee"), NOBODY),
        (Principal(None, pod="a"), NOBODY),
        (Principal(ADA, pod="a"), NOBODY),
        (None, NOBODY),
    ],
)
def test_user_of_the_host_sees_the_own_row(principal: Principal | None, shown: int | None) -> None:
    privileged = principal is not None and principal.user == 0
    assert shown_user(Peer(principal=principal), privileged=privileged) == shown


@pytest.mark.parametrize(
    ("query", "cause"),
    [
        ({"start": "yesterday"}, "no whole number of Unix seconds"),
        ({"end": "-1"}, "no whole number of Unix seconds"),
        ({"start": "9" * 13}, "no whole number of Unix seconds"),
        ({"kinds": ",".join(map(str, range(17)))}, "more than 16"),
        ({"owner": "0"}, "no such parameter"),
    ],
)
def test_invalid_report_query_is_refused(query: dict[str, str], cause: str) -> None:
    with pytest.raises(ProblemError, match=cause) as problem:
        reported(**query)
    assert problem.value.status == HTTPStatus.BAD_REQUEST


def test_store_that_cannot_be_read_is_a_problem_with_its_cause() -> None:
    def broken(*_: object) -> Mapping[str, Any]:
        raise StoreError("There is no store at /x. Start it.")

    asked = request("/v1/report", start="0", end="60")
    with pytest.raises(ProblemError, match="There is no store at /x"):
        report_response(broken, asked, "node7", ADA)
