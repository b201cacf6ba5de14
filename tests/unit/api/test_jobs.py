"""Requests of applications that declare, list and withdraw jobs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from testbed.constant_history import CHILD, OURS, OURSELVES, ROOTS, USER, Asked, local_peer
from testbed.tuned import ACCOUNTS, HELD

from wattspan.api.jobs import MAX_BODY_BYTES
from wattspan.config import AutotuneSettings
from wattspan.http.sockets import Peer
from wattspan.model import (
    Consumer,
    DeclarationOutcome,
    DeclaredTerms,
    Group,
    GroupKind,
    PayerInfo,
    Principal,
    RequestedTerms,
    TuningTerms,
)
from wattspan.tuning.declared_jobs import MAX_DECLARATIONS

BODY: dict[str, Any] = {"name": "train", "service": "trainer", "span": "train_step"}
SIBLING = local_peer(CHILD.pid, USER)
ROOT = local_peer(ROOTS.pid, 0)


def declare(asked: Asked, peer: Peer = OURSELVES, **changes: Any) -> dict[str, Any]:
    response = post(asked, json.dumps(BODY | changes).encode(), peer)
    assert response.status == 200, response.body
    found = json.loads(response.body)
    assert isinstance(found, dict)
    return found


def post(asked: Asked, body: bytes, peer: Peer = OURSELVES) -> Any:
    return asked.get("/v1/jobs", method="POST", peer=peer, body=body)


def refusal(asked: Asked, status: int, body: bytes, peer: Peer = OURSELVES) -> str:
    return asked.problem(status, "/v1/jobs", method="POST", peer=peer, body=body)


def listed(asked: Asked, peer: Peer = OURSELVES) -> dict[str, Any]:
    response = asked.get("/v1/jobs", peer=peer)
    assert response.status == 200
    found = json.loads(response.body)
    assert isinstance(found, dict)
    return found


def test_declaration_is_answered_with_asked_given_and_reason() -> None:
    asked = Asked(settings=AutotuneSettings(mode="advise", max_slowdown=0.05))
    answer = declare(
        asked,
        work="samples",
        max_slowdown=0.2,
        objective="cost",
        eta=0.9,
        knobs=["gpu_power"],
        first_watts=500,
        floor_watts=450,
    )
    assert answer == {
        "instance": "instance",
        "job": "train",
        "service": "trainer",
        "span": "train_step",
        "work": "samples",
        "asked": {
            "max_slowdown": 0.2,
            "objective": "cost",
            "eta": 0.9,
            "knobs": ["gpu_power"],
            "first_watts": 500.0,
            "floor_watts": 450.0,
        },
        "given": {
            "mode": "advise",
            "max_slowdown": 0.05,
            "objective": "cost",
            "eta": 0.9,
            "knobs": ["gpu_power"],
            "first_watts": 500.0,
            "floor_watts": 450.0,
        },
        "decision": "limited",
        "reason": answer["reason"],
        "provisional": False,
    }
    assert "The budget of 20 % is limited to 5 %" in answer["reason"]


def test_declaration_is_idempotent() -> None:
    asked = Asked()
    assert declare(asked) == declare(asked)
    assert len(listed(asked)["jobs"]) == 1


def test_every_declared_job_is_listed_for_every_user() -> None:
    terms = DeclaredTerms(
        "train",
        USER,
        RequestedTerms(),
        TuningTerms("advise", 0.05, "energy", 0.5, ()),
        DeclarationOutcome.ACCEPTED,
        "A reason.",
        owner=f"{USER}",
    )
    accounts = replace(ACCOUNTS, rows=(replace(HELD, declared=terms),))
    asked = Asked(tuning=lambda: accounts)
    declare(asked)
    declare(asked, SIBLING, max_slowdown=0.01)
    declare(asked, ROOT)
    for peer, own in ((OURSELVES, [True, False]), (ROOT, [False, True]), (Peer(), [False] * 2)):
        found = listed(asked, peer)
        assert [one["own"] for one in found["jobs"]] == own
    first, second = found["jobs"]
    assert (found["mode"], found["instance"], found["host_name"]) == (
        "apply",
        "instance",
        "testhost",
    )
    assert (first["uid"], first["processes"], second["uid"]) == (USER, 2, 0)
    assert first["given"]["max_slowdown"] == 0.01
    assert first["tuning"] == {
        "job": HELD.job,
        "state": "holding",
        "sentence": HELD.decision.sentence,
    }
    assert second["tuning"] is None


def test_host_without_tuning_ignores_declarations() -> None:
    asked = Asked(settings=AutotuneSettings())
    answer = declare(asked)
    assert (answer["decision"], answer["given"]["mode"]) == ("ignored", "off")
    assert "no effect while tuning is off" in answer["reason"]


def test_job_is_withdrawn_by_its_own_process() -> None:
    asked = Asked()
    name = "trainer/step 1"
    declare(asked, name=name)
    path = f"/v1/jobs/{name}"
    told = asked.problem(404, path, method="DELETE", peer=SIBLING)
    assert "process 101 has declared no job of that name" in told
    response = asked.get(path, method="DELETE")
    assert json.loads(response.body) == {"job": name, "withdrawn": True}
    asked.problem(404, path, method="DELETE")
    assert listed(asked)["jobs"] == []


def test_ended_process_has_no_declaration() -> None:
    asked = Asked()
    declare(asked)
    del asked.directory.infos[OURS]
    assert listed(asked)["jobs"] == []


@pytest.mark.parametrize(
    "peer",
    [
        Peer(address=("127.0.0.1", 5), local=("127.0.0.1", 6)),  # TCP
        Peer(uid=USER),  # another PID namespace
        Peer(pid=OURS.pid),
        local_peer(4711, USER),  # it has ended
    ],
)
def test_unidentified_sender_is_refused(peer: Peer) -> None:
    asked = Asked()
    told = refusal(asked, 403, json.dumps(BODY).encode(), peer)
    assert "the kernel does not identify its process" in told
    assert "Declare on the agent's Unix socket" in told
    assert asked.get("/v1/jobs/train", method="DELETE", peer=peer).status == 403


def test_process_of_another_user_than_the_connection_is_refused() -> None:
    asked = Asked()
    told = refusal(asked, 403, json.dumps(BODY).encode(), local_peer(OURS.pid, USER + 1))
    assert "not known to belong to the user who opened the connection" in told


def test_process_with_several_user_ids_may_declare() -> None:
    asked = Asked()
    asked.uids[OURS.pid] = -1
    assert declare(asked)["decision"] == "accepted"


def encoded(**changes: Any) -> bytes:
    return json.dumps(BODY | changes).encode()


@pytest.mark.parametrize(
    ("body", "part"),
    [
        (b"", "truncated"),
        (b"[]", "Expected `object`"),
        (b'{"name": "\xff"}', "can't decode byte"),
        (b"[" * 5000, "Expected `object`"),
        (encoded(max_slow=1), "unknown field `max_slow`"),
        (encoded(name=""), "$.name"),
        (encoded(name="x" * 101), "$.name"),
        (encoded(service=None), "$.service"),
        (encoded(span="x" * 201), "$.span"),
        (encoded(work="x" * 201), "$.work"),
        (encoded(span="train\x1b[31m"), "characters that do not print"),
        (encoded(max_slowdown=-0.1), "$.max_slowdown"),
        (encoded(max_slowdown="5 %"), "$.max_slowdown"),
        (encoded(max_slowdown=float("nan")), "malformed"),
        (encoded(eta=1.5), "$.eta"),
        (encoded(objective="speed"), "$.objective"),
        (encoded(knobs=["fan"]), "$.knobs"),
        (encoded(knobs=["gpu_power"] * 9), "$.knobs"),
        (json.dumps({"name": "train"}).encode(), "missing required field `service`"),
    ],
)
def test_invalid_declaration_names_the_cause_and_the_fields(body: bytes, part: str) -> None:
    asked = Asked()
    told = refusal(asked, 400, body)
    assert part in told
    assert asked.jobs.living() == ()


def test_large_declaration_is_refused() -> None:
    told = refusal(Asked(), 413, b" " * (MAX_BODY_BYTES + 1))
    assert f"more than {MAX_BODY_BYTES} bytes" in told


def test_declarations_of_one_user_are_bounded() -> None:
    asked = Asked()
    for number in range(MAX_DECLARATIONS // 2):
        one = Consumer(5000 + number, 1)
        asked.directory.infos[one] = PayerInfo(one, "job")
        asked.uids[one.pid] = USER
        declare(asked, local_peer(one.pid, USER))
    told = refusal(asked, 429, json.dumps(BODY).encode())
    assert f"user {USER} has no room" in told
    declare(asked, ROOT)


def test_unsupported_methods_and_parameters_are_refused() -> None:
    asked = Asked()
    assert asked.get("/v1/jobs", method="DELETE").status == 405
    assert asked.get("/v1/jobs/train").status == 405
    assert "'/v1/jobs'" in asked.problem(404, "/v1/job")
    assert "there is no such parameter" in asked.problem(400, "/v1/jobs", user="x")


def test_head_of_the_jobs_is_answered() -> None:
    assert Asked().get("/v1/jobs", method="HEAD").status == 200


def test_root_of_a_container_declares_for_its_container_only() -> None:
    asked = Asked(settings=AutotuneSettings(mode="advise"))
    container_root = ROOT._replace(principal=Principal(0, "0123456789ab"))
    told = refusal(asked, 403, json.dumps(BODY).encode(), container_root)
    assert "not known to belong" in told


def test_two_slurm_jobs_of_a_user_have_two_jobs_of_the_same_names() -> None:
    asked = Asked(settings=AutotuneSettings(mode="advise"))
    for process, number in ((OURS, "7"), (CHILD, "8")):
        groups = (Group(GroupKind.JOB, number),)
        asked.directory.infos[process] = PayerInfo(process, "python", groups)
    declare(asked)
    declare(asked, SIBLING)
    assert [one["processes"] for one in listed(asked)["jobs"]] == [1, 1]
