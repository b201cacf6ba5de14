"""``/v1/recurring/``: the batch size of the next run, for the user at the socket."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from wattspan.api import recurring
from wattspan.api.recurring import RecurringHandler
from wattspan.api.requests import ProblemError
from wattspan.http.messages import HttpRequest
from wattspan.http.sockets import Peer
from wattspan.model import Consumer, PayerInfo, Principal
from wattspan.recurring.run_book import MAX_SHOWN, OPEN_DAYS, RunBookLimits
from wattspan.testing import FakeDirectory, ManualClock

ADA, EVE = Principal(1000), Principal(1001)
MINE, OTHER, THEIRS = Consumer(10, 1), Consumer(11, 1), Consumer(20, 1)
OWNERS = {MINE: ADA, OTHER: ADA, THEIRS: EVE}
TERMS = {
    "batch_sizes": [64, 16, 32],
    "default_batch_size": 32,
    "target_metric": 0.8,
    "higher_is_better_metric": True,
    "max_epochs": 10,
    "num_pruning_rounds": 1,
}
NEXT = {"job": "nightly", "gpus": "1 x H100", "terms": TERMS}
END = {"outcome": "converged", "energy_joules": 50.0, "seconds": 1.0, "power_watts": 700.0}


def peer_of(pid: int, owner: Principal) -> Peer:
    return Peer(pid=pid, uid=owner.user, principal=owner)


class Host:
    """A handler on a host with three processes."""

    def __init__(self, folder: Path, limits: RunBookLimits = RunBookLimits()) -> None:  # noqa: B008
        self.directory, self.clock = (
            FakeDirectory(PayerInfo(one, "python") for one in OWNERS),
            ManualClock(),
        )
        self.handler = RecurringHandler(
            folder / "runs.sqlite",
            self.directory,
            OWNERS.get,
            self.clock,
            host="node7",
            limits=limits,
        )

    def ask(
        self,
        name: str,
        body: object = None,
        *,
        peer: Peer = peer_of(MINE.pid, ADA),  # noqa: B008 - immutable
        **query: str,
    ) -> dict[str, Any]:
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        method = "GET" if name == "status" else "POST"
        request = HttpRequest(method, f"/v1/recurring/{name}", query, {}, sent, peer)
        answer: dict[str, Any] = json.loads(self.handler.respond(request).body)
        return answer

    def refused(self, status: int, name: str, body: object = None, **more: Any) -> str:
        with pytest.raises(ProblemError) as refused:
            self.ask(name, body, **more)
        assert refused.value.status == status
        return str(refused.value)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_runs_are_chosen_reported_and_shown(host: Host) -> None:
    for size, joules in ((32, 50.0), (16, 70.0), (64, 30.0)):
        begun = host.ask("next", NEXT)
        assert (begun["batch_size"], begun["phase"]) == (size, "pruning")
        ended = host.ask("report", {**END, "run": begun["run"], "energy_joules": joules})
        assert ended == {"host_name": "node7", "run": begun["run"], "recorded": True}
    (job,) = host.ask("status")["jobs"]
    assert (job["job"], job["gpus"], job["runs"], job["phase"]) == (
        *("nightly", "1 x H100", 3, "sampling"),
    )
    assert [(one["batch_size"], one["reached"]) for one in job["sizes"]] == [
        *((16, 1), (32, 1), (64, 1)),
    ]
    assert job["terms"]["batch_sizes"] == [16, 32, 64]
    assert job["best"] == 64


def test_later_runs_may_leave_the_terms_out(host: Host) -> None:
    host.ask("next", NEXT)
    assert host.ask("next", {"job": "nightly", "gpus": "1 x H100"})["phase"] == "concurrent"
    assert "it has no runs on these GPUs" in host.refused(404, "next", {"job": "nightly"})


def test_run_ends_with_its_process(host: Host) -> None:
    begun = host.ask("next", NEXT)
    del host.directory.infos[MINE]
    (job,) = host.ask("status", peer=peer_of(OTHER.pid, ADA))["jobs"]
    assert (job["running"], job["newest_run"]) == (0, None)
    other = peer_of(OTHER.pid, ADA)
    assert not host.ask("report", {**END, "run": begun["run"]}, peer=other)["recorded"]
    assert host.ask("next", NEXT, peer=other)["batch_size"] == begun["batch_size"]


def test_run_of_a_process_that_cannot_be_read_goes_on(host: Host) -> None:
    host.ask("next", NEXT)
    del host.directory.infos[MINE]
    host.directory.has_ended = lambda consumer: False  # type: ignore[method-assign]
    (job,) = host.ask("status", peer=peer_of(OTHER.pid, ADA))["jobs"]
    assert job["running"] == 1


def test_run_may_belong_to_another_process_of_the_user(host: Host) -> None:
    host.ask("next", {**NEXT, "pid": OTHER.pid})
    del host.directory.infos[MINE]
    assert host.ask("status", peer=peer_of(OTHER.pid, ADA))["jobs"][0]["running"] == 1
    assert "process 20" in host.refused(
        403, "next", {**NEXT, "pid": THEIRS.pid}, peer=peer_of(OTHER.pid, ADA)
    )
    assert "process 99" in host.refused(
        403, "next", {**NEXT, "pid": 99}, peer=peer_of(OTHER.pid, ADA)
    )


def test_jobs_of_other_users_are_invisible(host: Host) -> None:
    begun, eve = host.ask("next", NEXT), peer_of(THEIRS.pid, EVE)
    assert host.ask("status", peer=eve)["jobs"] == []
    assert "no such run" in host.refused(404, "report", {**END, "run": begun["run"]}, peer=eve)
    assert "no recurring job" in host.refused(404, "forget", {"job": "nightly"}, peer=eve)
    assert host.ask("next", NEXT, peer=eve)["batch_size"] == 32


def test_unidentified_sender_is_refused(host: Host) -> None:
    nobody = Peer(pid=MINE.pid)
    for name, body in (("next", NEXT), ("status", None), ("forget", {"job": "nightly"})):
        assert "does not identify its user" in host.refused(403, name, body, peer=nobody)
    assert "process 0" in host.refused(403, "next", NEXT, peer=peer_of(0, ADA))


def test_changed_terms_are_a_conflict(host: Host) -> None:
    host.ask("next", NEXT)
    changed = {**NEXT, "terms": {**TERMS, "eta_knob": 0.7}}
    assert "eta 0.5, not 0.7" in host.refused(409, "next", changed)
    assert host.ask("forget", {"job": "nightly"})["forgotten"]
    assert host.ask("next", changed)["batch_size"] == 32


def test_jobs_and_open_runs_beyond_the_limits_are_refused_with_the_remedy(tmp_path: Path) -> None:
    host = Host(tmp_path, RunBookLimits(jobs=1, open_runs=2))
    host.ask("next", NEXT)
    assert "you have 1 recurring jobs" in host.refused(429, "next", {**NEXT, "job": "other"})
    host.ask("next", NEXT)
    assert "2 runs that have not ended" in (refusal := host.refused(429, "next", NEXT))
    assert "wattspan recurring forget" in refusal
    host.ask("forget", {"job": "nightly"})
    host.ask("next", NEXT)


def test_run_that_is_open_for_too_long_is_lost(host: Host) -> None:
    host.ask("next", NEXT)
    host.clock.advance(OPEN_DAYS * 86_400)
    assert host.ask("status")["jobs"][0]["running"] == 1
    host.clock.advance(1)
    assert host.ask("status")["jobs"][0]["running"] == 0


def test_status_shows_the_newest_jobs_and_counts_the_others(host: Host) -> None:
    for number in range(MAX_SHOWN + 2):
        host.ask("next", {**NEXT, "job": f"job {number:02}"})
    host.ask("next", {**NEXT, "job": "job 00"})
    answer = host.ask("status")
    shown = [one["job"] for one in answer["jobs"]]
    assert (len(shown), shown[:2], answer["hidden_jobs"]) == (MAX_SHOWN, ["job 00", "job 03"], 2)
    answer = host.ask("status", job="job 01")
    assert ([one["job"] for one in answer["jobs"]], answer["hidden_jobs"]) == (["job 01"], 0)


def test_process_checks_are_those_of_the_sender_and_hold_no_lock(
    host: Host, tmp_path: Path
) -> None:
    host.ask("next", NEXT)
    host.ask("next", NEXT, peer=peer_of(THEIRS.pid, EVE))
    asked: list[int] = []

    def has_ended(consumer: Consumer) -> bool:
        asked.append(consumer.pid)
        with closing(sqlite3.connect(tmp_path / "runs.sqlite", timeout=0)) as other:
            other.execute("BEGIN EXCLUSIVE")  # fails if the handler holds a lock
        return False

    host.directory.has_ended = has_ended  # type: ignore[method-assign]
    host.ask("status")
    assert asked == [MINE.pid]


def test_principal_of_a_tcp_connection_is_refused(host: Host) -> None:
    peer = Peer(pid=MINE.pid, principal=ADA, address=("127.0.0.1", 5000))
    assert "does not identify its user" in host.refused(403, "status", peer=peer)


@pytest.mark.parametrize(
    ("terms", "cause"),
    [
        ({"default_batch_size": 5}, "default_batch_size 5"), ({"eta_knob": 2}, "eta_knob 2"),
        ({"beta_knob": 1}, "beta_knob 1"), ({"max_epochs": 0}, "max_epochs 0"),
        ({"batch_sizes": [0, 32]}, "each of 1 or more"),
    ],
)  # fmt: skip
def test_terms_that_make_no_sense_are_refused(host: Host, terms: Mapping, cause: str) -> None:
    assert cause in host.refused(400, "next", {**NEXT, "terms": {**TERMS, **terms}})


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("next", b"{"),
        ("next", b"\xff"),
        ("next", b"[" * 10_000),
        ("next", {"job": ""}),
        ("next", {"job": "x" * 201}),
        ("next", {"job": "a\nb", "terms": TERMS}),
        ("next", {**NEXT, "gpus": "\x1b[31m"}),
        ("next", {**NEXT, "odd": 1}),
        ("next", {**NEXT, "terms": {**TERMS, "batch_sizes": list(range(1, 300))}}),
        ("report", {"run": 0, **END}),
        ("report", {"run": 1, **END, "outcome": "odd"}),
        ("report", {"run": 1, **END, "energy_joules": -1}),
        (
            "report",
            b'{"run":1,"outcome":"missed","energy_joules":1e999,"seconds":1,"power_watts":1}',
        ),
        ("forget", {}),
    ],
    ids=lambda value: str(value)[:30],
)
def test_malformed_body_is_refused(host: Host, name: str, body: object) -> None:
    host.refused(400, name, body)


HUGE = ("1e999", "NaN", "-Infinity", "1" + "0" * 400, "-1", "true", "null", "[[1]]", '"1"')


@pytest.mark.parametrize("number", HUGE)
@pytest.mark.parametrize(
    "field", ["run", "energy_joules", "seconds", "power_watts", "epochs"], ids=str
)
def test_number_of_a_report_out_of_range_is_refused(host: Host, field: str, number: str) -> None:
    body = json.dumps({"run": 1, "epochs": 1, **END, field: "X"})
    host.refused(400, "report", body.replace('"X"', number).encode())


@pytest.mark.parametrize("number", [*HUGE, "1e16", "9223372036854775808"])
@pytest.mark.parametrize(
    "field",
    [
        *("batch_sizes", "default_batch_size", "max_epochs", "eta_knob", "beta_knob"),
        *("num_pruning_rounds", "window_size"),
    ],
)
def test_number_of_terms_out_of_range_is_refused(host: Host, field: str, number: str) -> None:
    value = f"[{number}]" if field == "batch_sizes" else number
    body = json.dumps({**NEXT, "terms": {**TERMS, field: "X"}})
    host.refused(400, "next", body.replace('"X"', value).encode())


@pytest.mark.parametrize("field", ["seed", "target_metric"])
@pytest.mark.parametrize("number", ["1e999", "NaN", "1" + "0" * 400, "-1e16", "true", "[]"])
def test_signed_number_of_terms_out_of_range_is_refused(
    host: Host, field: str, number: str
) -> None:
    body = json.dumps({**NEXT, "terms": {**TERMS, field: "X"}})
    host.refused(400, "next", body.replace('"X"', number).encode())


@pytest.mark.parametrize("key", [2**63, 2**64, 10**30])
def test_run_beyond_the_keys_of_the_file_is_refused(host: Host, key: int) -> None:
    host.refused(400, "report", {**END, "run": key})
    host.refused(404, "report", {**END, "run": 2**63 - 1})


@pytest.mark.parametrize("name", ["a\0b", "a\nb", "\ud800", "x" * 201, "x" * 10**6])
def test_status_of_a_name_that_no_job_has_is_refused(host: Host, name: str) -> None:
    host.refused(400, "status", job=name)


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
@pytest.mark.parametrize("field", ["job", "gpus"])
def test_name_with_unprintable_characters_is_refused(host: Host, field: str, name: str) -> None:
    host.refused(400, "next", {**NEXT, field: name})


def test_oversized_body_is_refused(host: Host) -> None:
    assert "16384 bytes" in host.refused(413, "next", b" " * (recurring.MAX_BODY_BYTES + 1))


def test_unknown_parameter_is_refused(host: Host) -> None:
    assert "jbo" in host.refused(400, "status", jbo="nightly")
    assert "no recurring job" in host.refused(404, "status", job="nightly")


def test_unusable_file_is_named(tmp_path: Path) -> None:
    host = Host(tmp_path / "not" / "there")
    assert "runs.sqlite" in host.refused(503, "next", NEXT)
