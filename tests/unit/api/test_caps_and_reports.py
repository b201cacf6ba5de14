"""``/v1/caps`` and ``/v1/report``, for users without the files and sockets behind them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from testbed.constant_history import USER, Asked, local_peer

from wattspan.api.authorization import NOBODY, shown_user
from wattspan.http.sockets import Peer
from wattspan.model import HOST_ROOT, Principal
from wattspan.ports import CapsError, StoreError

ADA = 1000


def stored(start: int, end: int, kinds: frozenset[str], user: int | None) -> Mapping[str, Any]:
    return {"asked": [start, end, sorted(kinds), user]}


def reported(peer: Peer, **query: str) -> Any:
    asked = {"start": "60", "end": "120", **query}
    return json.loads(Asked(stored=stored).get("/v1/report", peer=peer, **asked).body)


def test_caps_are_those_of_the_running_capper() -> None:
    state = {"socket": "/run/x/capper.sock", "state": {"rows": []}}
    response = Asked(caps=lambda: state).get("/v1/caps")
    assert json.loads(response.body) == {"host_name": "testhost", "capper": state}


def test_without_a_running_capper_there_is_none() -> None:
    assert json.loads(Asked(caps=dict).get("/v1/caps").body)["capper"] is None


def test_capper_that_does_not_answer_is_a_problem_with_its_cause() -> None:
    def refuse() -> Mapping[str, Any]:
        raise CapsError("No capper answers on /x: it takes too long. Start one.")

    assert "it takes too long" in Asked(caps=refuse).problem(503, "/v1/caps")


def test_report_is_for_the_asking_user() -> None:
    assert reported(local_peer(5, USER), kinds="user,process") == {
        "host_name": "testhost",
        "restricted": True,
        "asked": [60, 120, ["process", "user"], USER],
    }


def test_report_for_root_is_for_everything() -> None:
    found = reported(local_peer(5, 0))
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
    asked = {"start": "60", "end": "120", **query}
    assert cause in Asked(stored=stored).problem(400, "/v1/report", **asked)


def test_store_that_cannot_be_read_is_a_problem_with_its_cause() -> None:
    def broken(*_: object) -> Mapping[str, Any]:
        raise StoreError("There is no store at /x. Start it.")

    said = Asked(stored=broken).problem(503, "/v1/report", start="0", end="60")
    assert "There is no store at /x" in said
