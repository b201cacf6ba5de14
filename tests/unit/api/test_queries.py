"""Responses to queries of the energy between two times."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testbed.constant_history import (
    DRAM,
    GPU,
    OURS,
    OURSELVES,
    PACKAGE,
    ROOTS,
    USER,
    Asked,
    local_peer,
)

from wattspan.api import authorization
from wattspan.api.requests import parse_time
from wattspan.api.service import MAX_WAITING
from wattspan.api.watches import MAX_SAMPLED, MAX_WATCHED, WatchList
from wattspan.config.settings import AgentSettings
from wattspan.http.messages import HttpRequest
from wattspan.http.sockets import Peer
from wattspan.model import SECOND, Consumer, HwType, Instant, PayerInfo, Principal
from wattspan.model.settings import Duration, keys

ROOT = local_peer(9, 0)
STRANGER = local_peer(55, 2000)
UNPROVEN = Peer()


@pytest.fixture
def asked() -> Asked:
    return Asked()


def test_devices_add_up_to_the_host(asked: Asked) -> None:
    told = asked.energy(2.0)
    assert {one["hw_id"]: one["joules"] for one in told["devices"]} == {
        "package-0": 20.0,
        "package-1": 40.0,
        "dram-0": 6.0,
    }
    assert told["host"]["joules"] == {"cpu": 60.0, "memory": 6.0}
    assert told["host"]["uncertainty_joules"] == {"cpu": 0.6, "memory": 0.06}
    assert (told["seconds"], told["host_name"]) == (2.0, "testhost")
    assert told["process"] is told["family"] is None


def test_process_energy_is_reported_with_and_without_descendants(asked: Asked) -> None:
    told = asked.energy(2.0, pid=OURS.pid, family=1)
    assert told["process"]["joules"] == {"cpu": 8.0, "memory": 0.8}
    assert told["family"]["joules"] == {"cpu": 10.0, "memory": 1.0}
    assert told["process"]["pid"] == OURS.pid
    assert told["process"]["started"] == OURS.started


def test_family_is_reported_only_on_request(asked: Asked) -> None:
    assert asked.energy(pid=OURS.pid)["family"] is None


def test_pid_self_is_the_sender(asked: Asked) -> None:
    assert asked.energy(pid="self")["process"]["pid"] == OURS.pid


def test_kind_of_a_sum_is_as_trustworthy_as_its_worst_part(asked: Asked) -> None:
    told = asked.energy()
    assert told["provenance"] == {"cpu": "derived", "memory": "measured"}
    assert told["emulated"] is False


def test_unmeasured_energy_is_null(asked: Asked) -> None:
    asked.past.known_domains = (DRAM, GPU, PACKAGE)
    told = asked.energy(2.0)
    assert told["host"]["joules"] == {"cpu": 20.0, "gpu": None, "memory": 6.0}
    (gpu,) = [one for one in told["devices"] if one["hw_type"] == "gpu"]
    assert gpu["joules"] is None
    assert gpu["uncertainty_joules"] is None
    assert told["host"]["coverage"] == 0.0


def test_figures_have_their_certainty(asked: Asked) -> None:
    asked.past.bounds = {HwType.CPU: asked.now - SECOND}
    told = asked.energy(2.0, pid=OURS.pid)
    assert told["process"]["certainty"] == {"cpu": "lower_bound", "memory": "known"}
    assert told["host"]["certainty"] == {"cpu": "known", "memory": "known"}
    later = asked.energy(0.5, pid=OURS.pid)
    assert later["process"]["certainty"] == {"cpu": "known", "memory": "known"}
    partial = asked.energy(1.0, end=f"mono:{asked.now + SECOND}", pid=OURS.pid)
    assert set(partial["process"]["certainty"].values()) == {"lower_bound"}
    assert set(partial["host"]["certainty"].values()) == {"lower_bound"}
    asked.past.known_domains = (DRAM, GPU)
    told = asked.energy(2.0)
    assert told["host"]["certainty"] == {"gpu": "unknown", "memory": "known"}
    assert {one["hw_type"]: one["certainty"] for one in told["devices"]} == {
        "gpu": "unknown", "memory": "known",
    }  # fmt: skip


def test_window_before_the_history_has_no_energy(asked: Asked) -> None:
    asked.past.horizon = asked.now
    told = asked.energy(2.0, pid=OURS.pid)
    assert told["process"]["joules"] == {}
    assert told["process"]["coverage"] == 0.0
    assert set(told["host"]["joules"].values()) == {None}


@pytest.mark.parametrize(("method", "body"), [("GET", b""), ("POST", b"[[1,2]]")])
def test_settled_query_is_acknowledged_again_and_again_while_others_have_the_turn(
    asked: Asked, method: str, body: bytes
) -> None:
    heard = asyncio.Semaphore(0)
    words = {} if body else {"start": "mono:1", "end": "mono:2"}
    words |= {"pid": str(OURS.pid), "started": str(OURS.started)}

    async def ask() -> None:
        request = HttpRequest(method, "/v1/energy", words, {}, body, OURSELVES, heard.release)
        async with asked.service._slow_lock.of(None):
            answer = asyncio.ensure_future(asked.service(request))
            for _ in range(2):
                await asyncio.wait_for(heard.acquire(), 60)
            assert not answer.done()
        assert (await answer).status == 200

    asyncio.run(ask())


def test_empty_window_is_complete(asked: Asked) -> None:
    told = asked.energy(0.0)
    assert told["host"]["joules"] == {"cpu": 0.0, "memory": 0.0}
    assert told["host"]["coverage"] == 1.0


def test_unsettled_time_reduces_the_coverage(asked: Asked) -> None:
    told = asked.energy(1.0, end=f"mono:{asked.now + SECOND}")
    assert told["complete"] is False
    assert told["host"]["coverage"] == 0.5
    assert told["host"]["covered_seconds"] == 1.0
    assert told["settled_mono_ns"] == asked.now


def test_response_waits_for_settlement(asked: Asked) -> None:
    end = asked.now + SECOND // 2
    asked.past.on_settled = [asked.now, asked.now, end, end]
    told = asked.energy(1.0, end=f"mono:{end}", wait="2s")
    assert told["complete"] is True
    assert len(asked.pauses) == 2


def test_response_waits_at_most_the_requested_time(asked: Asked) -> None:
    told = asked.energy(1.0, end=f"mono:{asked.now + 1}", wait="100ms")
    assert told["complete"] is False
    assert sum(asked.pauses) == pytest.approx(0.1)


def test_queries_beyond_the_waiting_limit_are_answered_at_once(asked: Asked) -> None:
    assert all(asked.service._waiting.acquire((user,)) for user in range(MAX_WAITING))
    assert asked.energy(1.0, end=f"mono:{asked.now + 1}", wait="1s")["complete"] is False
    assert asked.pauses == []


def test_response_waits_only_on_request(asked: Asked) -> None:
    asked.energy(1.0, end=f"mono:{asked.now + 1}")
    assert asked.pauses == []


def test_exited_process_is_identified_by_its_start_time(asked: Asked) -> None:
    asked.energy(pid=OURS.pid)
    del asked.directory.infos[OURS]
    assert "started=TICKS" in asked.problem(404, pid=OURS.pid, start="-1s")
    told = asked.energy(pid=OURS.pid, started=OURS.started)
    assert told["process"]["joules"]["cpu"] == 8.0


# -------------------------------------------------------------------------------------- rights


@pytest.mark.parametrize("path", ["/v1/energy", "/v1/watch"])
def test_energy_of_another_users_process_is_refused(asked: Asked, path: str) -> None:
    times = {"start": "-1s"} if path == "/v1/energy" else {}
    sentence = asked.problem(403, path, pid=OURS.pid, peer=STRANGER, **times)
    assert "belongs to another user" in sentence
    assert asked.problem(403, path, pid=ROOTS.pid, **times)
    assert asked.past.watched == []


def test_energy_of_the_host_is_available_to_every_user_of_the_socket(asked: Asked) -> None:
    assert asked.energy(peer=STRANGER)["host"]["joules"]["cpu"] == 60.0
    assert asked.energy(peer=UNPROVEN)["host"]["joules"]["cpu"] == 60.0


def test_root_reads_every_process(asked: Asked) -> None:
    assert asked.energy(pid=OURS.pid, peer=ROOT)["process"]["joules"]["cpu"] == 8.0
    gone = asked.energy(pid=77, started=1, peer=ROOT)
    assert gone["process"]["pid"] == 77


def test_unverified_sender_has_no_access(asked: Asked) -> None:
    assert asked.problem(403, pid=OURS.pid, start="-1s", peer=Peer(pid=OURS.pid))
    assert "does not identify the caller" in asked.problem(
        400, pid="self", start="-1s", peer=UNPROVEN
    )
    assert "does not identify the caller" in asked.problem(
        400, pid="self", start="-1s", peer=local_peer(0, 0)
    )


@pytest.mark.parametrize("path", ["/v1/watch", "/v1/jobs"])
def test_refusal_of_user_65534_names_the_cause_and_the_remedy(asked: Asked, path: str) -> None:
    query = {"pid": "self"} if path == "/v1/watch" else {}
    nobody = Peer(pid=OURS.pid, uid=65534)
    told = asked.problem(403, path, method="POST", peer=nobody, **query)
    assert told.startswith("user 65534: it stands for every user without a number here")
    assert told.endswith("Ask as another user.")


def test_process_with_several_users_is_readable_by_root_only(asked: Asked) -> None:
    asked.energy(pid=OURS.pid)
    asked.uids[OURS.pid] = authorization.NOBODY
    assert "not known to be yours" in asked.problem(403, pid=OURS.pid, start="-1s")
    del asked.directory.infos[OURS]  # and its earlier owner is forgotten
    assert asked.problem(403, pid=OURS.pid, started=OURS.started, start="-1s")


def test_exited_process_is_readable_by_its_user(asked: Asked) -> None:
    asked.get("/v1/watch", pid=OURS.pid)
    del asked.directory.infos[OURS]
    asked.uids[OURS.pid] = 2000  # the pid is another's now
    told = asked.energy(pid=OURS.pid, started=OURS.started)
    assert told["process"]["joules"]["cpu"] == 8.0
    assert asked.problem(403, pid=OURS.pid, started=OURS.started, start="-1s", peer=STRANGER)


def test_pid_with_another_start_time_is_nobodys(asked: Asked) -> None:
    assert asked.problem(403, pid=OURS.pid, started=OURS.started - 1, start="-1s")


def test_device_power_resolution_is_limited() -> None:
    (interval,) = [key for key in keys(AgentSettings).values() if key.name == "interval"]
    assert interval.least == "10ms"


def test_owners_of_the_dead_are_remembered_within_bounds() -> None:
    asked = Asked()
    asked.service._authorization._owners.update(
        (Consumer(10**6 + i, 1), USER) for i in range(authorization.MAX_REMEMBERED)
    )
    asked.get("/v1/watch", pid=OURS.pid)
    assert len(asked.service._authorization._owners) == authorization.MAX_REMEMBERED
    assert OURS in asked.service._authorization._owners


def test_owner_of_a_process_is_remembered_for_its_own_user(asked: Asked) -> None:
    asked.problem(403, pid=OURS.pid, start="-1s", peer=STRANGER)
    assert not asked.service._authorization._owners
    asked.energy(pid=OURS.pid)
    asked.problem(403, pid=OURS.pid, start="-1s", peer=STRANGER)
    assert list(asked.service._authorization._owners) == [OURS]


def test_process_user_comes_from_the_kernel() -> None:
    child = subprocess.Popen(["true"])
    try:
        consumer = Consumer(child.pid, _started(child.pid))
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # exited and still listed
        assert authorization.owner_of(consumer) == os.getuid()
        assert authorization.owner_of(Consumer(child.pid, consumer.started + 1)) is None
    finally:
        child.wait()
    assert authorization.owner_of(consumer) is None


def _started(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


# ------------------------------------------------------------------------------ watch and status


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_process_is_watched_on_request(asked: Asked, method: str) -> None:
    response = asked.get("/v1/watch", method=method, pid="self", family="1")
    assert json.loads(response.body) == {"pid": 100, "started": 5000, "watched": True}
    assert asked.past.watched == [(OURS, True)]


def test_process_that_asks_for_its_windows_is_registered_without_a_watch(asked: Asked) -> None:
    asked.energy(pid="self")  # the agent has restarted, or others displaced the watch
    assert asked.registered == [OURS]
    asked.energy(pid=OURS.pid)  # perhaps the question of somebody else
    assert asked.registered == [OURS]
    asked.get("/v1/watch", pid=OURS.pid)
    asked.energy(pid=OURS.pid)
    assert asked.registered == [OURS] * 3


def test_watches_are_bounded_and_evicted_by_last_use(asked: Asked) -> None:
    crowd = [Consumer(1000 + i, i + 1) for i in range(MAX_WATCHED)]
    asked.directory.infos |= {one: PayerInfo(one, "crowd") for one in crowd}
    for one in (*crowd, crowd[0]):
        asked.get("/v1/watch", pid=one.pid, peer=ROOT)
    assert asked.past.forgotten == []
    asked.get("/v1/watch", pid=OURS.pid)
    assert asked.past.forgotten == [crowd[1]]
    assert len(asked.service._watches) == MAX_WATCHED


@pytest.mark.parametrize("unreadable", [True, False])
def test_exited_process_is_evicted_first(asked: Asked, unreadable: bool) -> None:
    crowd = [Consumer(1000 + i, i + 1) for i in range(MAX_WATCHED + 1)]
    asked.directory.infos |= {one: PayerInfo(one, "crowd") for one in crowd}
    for one in crowd[:MAX_WATCHED]:
        asked.get("/v1/watch", pid=one.pid, peer=ROOT)
    del asked.directory.infos[crowd[3]]
    if unreadable:  # it may live
        asked.directory.has_ended = lambda consumer: False  # type: ignore[method-assign]
    asked.get("/v1/watch", pid=crowd[MAX_WATCHED].pid, peer=ROOT)
    assert asked.past.forgotten == [crowd[0 if unreadable else 3]]


def test_containers_of_a_user_leave_the_watches_of_another() -> None:
    asked = Asked()
    watches = WatchList(asked.past, asked.directory, asked.clock)
    modest = [Consumer(10 + i, 1) for i in range(2)]
    crowd = [Consumer(1000 + i, 1) for i in range(64)]
    asked.directory.infos |= {one: PayerInfo(one, "runs") for one in (*modest, *crowd)}
    for one in modest:
        watches.add(one, family=False, owner=Principal(1001))
    for one in crowd:
        watches.add(one, family=False, owner=Principal(1002, f"minted-{one.pid}"))
    assert all(one in watches for one in (*modest, *crowd[2 - MAX_WATCHED :]))
    assert len(watches) == MAX_WATCHED


class Microscope:
    """Records the finely sampled processes."""

    def __init__(self) -> None:
        self.watched: set[Consumer] = set()
        self.watch = self.watched.add
        self.unwatch = self.watched.discard

    def take(self, consumer: Consumer) -> list[tuple[int, int]]:
        return [(1, consumer.pid)]


def test_recently_requested_processes_are_sampled_finely(asked: Asked) -> None:
    fine = Microscope()
    asked.service._watches = WatchList(asked.past, asked.directory, asked.clock, fine)
    crowd = [Consumer(1000 + i, i + 1) for i in range(MAX_WATCHED + 1)]
    for one in crowd:
        asked.service._watches.add(one, family=False)
    assert fine.watched == set(crowd[-MAX_SAMPLED:])
    asked.service._watches.add(crowd[1], family=False)
    assert fine.watched == {crowd[1], *crowd[-MAX_SAMPLED + 1 :]}
    samples = asked.past.samples[crowd[1]]
    assert samples() == [(1, 1001)]


def test_readings_renew_the_samples_of_recently_requested_processes(asked: Asked) -> None:
    """The sampler has ended those of all by itself; no profile is lost."""
    fine = Microscope()
    asked.service._watches = WatchList(asked.past, asked.directory, asked.clock, fine)
    crowd = [Consumer(1000 + i, i + 1) for i in range(MAX_SAMPLED)]
    for one in (OURS, *crowd):
        asked.directory.infos[one] = PayerInfo(one, "crowd")
        asked.get("/v1/watch", pid=one.pid, peer=ROOT)
    fine.watched.clear()
    for one in (OURS, crowd[1], crowd[2]):
        if one == crowd[2]:  # another process has its pid now, perhaps
            del asked.directory.infos[one]
        asked.energy(pid=one.pid, started=one.started, peer=ROOT)
    assert fine.watched == {crowd[1]}
    assert asked.past.forgotten == []


def test_exited_processes_are_released_after_a_minute(asked: Asked) -> None:
    asked.get("/v1/watch", pid=OURS.pid)
    del asked.directory.infos[OURS]
    for seconds, forgotten in ((0, []), (60, []), (1, [OURS])):
        asked.clock.advance(seconds)
        asked.get("/v1/watch", pid=ROOTS.pid, peer=ROOT)
        assert asked.past.forgotten == forgotten


def test_status_lists_domains_and_settlement_time(asked: Asked) -> None:
    asked.clock.advance(3)
    told = json.loads(asked.get("/v1/status").body)
    assert told["version"] == "1.2.3"
    assert told["uptime_seconds"] == 3.0
    assert told["now_mono_ns"] - told["settled_mono_ns"] == 3 * SECOND
    assert [one["hw_id"] for one in told["devices"]] == ["package-0", "package-1", "dram-0"]


def test_answers_are_of_one_moment(asked: Asked) -> None:
    assert asked.get("/v1/status").headers["cache-control"] == "no-store"


# -------------------------------------------------------------------------------- bad questions


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ({}, "start: it is missing"),
        ({"start": "yesterday"}, "start=yesterday: that is no time"),
        ({"start": "2026-01-01T00:00:00"}, "no offset"),
        ({"start": "1700000000"}, "too small for Unix nanoseconds"),
        ({"start": "mono:-5"}, "no whole number"),
        ({"start": "mono:" + "9" * 30}, "no whole number"),
        ({"start": "mono:9999999999999999999"}, "too much"),
        ({"start": "-10"}, "not a duration"),
        ({"start": "²"}, "no time"),
        ({"start": ""}, "no time"),
        ({"start": "-1s", "end": "-2s"}, "before start"),
        ({"start": "-1s", "wait": "5"}, "not a duration"),
        ({"start": "-1s", "wait": "2m"}, "too long"),
        ({"start": "-1s", "pid": "0"}, "from 1 to"),
        ({"start": "-1s", "pid": "-1"}, "from 1 to"),
        ({"start": "-1s", "pid": "4194305"}, "from 1 to"),
        ({"start": "-1s", "pid": "me"}, 'or "self"'),
        ({"start": "-1s", "pid": "1", "started": "x"}, "field 22"),
        ({"start": "-1s", "started": "1"}, "without pid"),
        ({"start": "-1s", "family": "yes"}, "Write 1 or 0"),
        ({"start": "-1s", "piid": "1"}, "Did you mean 'pid'?"),
        ({"start": "-1s", "zzz": "1"}, "Known here: end, family"),
        ({"start": "-1s", "a\nb" * 40: "1"}, "a?b"),
    ],
)
def test_invalid_query_error_names_the_cause(
    asked: Asked, query: dict[str, str], says: str
) -> None:
    assert says in asked.problem(400, **query)


def test_unknown_route_error_lists_valid_routes(asked: Asked) -> None:
    assert "Did you mean '/v1/energy'?" in asked.problem(404, "/v1/energie")
    assert "Use GET." in asked.problem(405, method="DELETE", start="-1s")
    assert asked.get("/v1/status", method="POST").headers["allow"] == "GET, HEAD"
    assert "no such parameter" in asked.problem(400, "/v1/status", verbose="1")
    assert "pid: it is missing" in asked.problem(400, "/v1/watch")


any_agent = cache(Asked)


A_TIME = st.sampled_from(
    ["-106751d", "-106752d", "-nan", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z", f"{2**63 - 1}"]
)


@given(
    st.dictionaries(
        st.sampled_from(["start", "end", "pid", "started", "wait"]), st.one_of(st.text(), A_TIME)
    )
)
def test_arbitrary_query_gets_a_response(query: dict[str, str]) -> None:
    assert any_agent().get(**query).status in {200, 400, 403, 404}


# ---------------------------------------------------------------------------------------- times

NOW = Instant(mono=50 * SECOND, wall=1_700_000_100 * SECOND)


@pytest.mark.parametrize(
    ("text", "mono"),
    [
        ("mono:49000000001", 49_000_000_001),
        ("1700000099000000001", 49_000_000_001),
        ("2023-11-14T22:14:59Z", 49 * SECOND),
        ("2023-11-14T22:14:59.000002+00:00", 49 * SECOND + 2000),
        ("2023-11-14T23:14:59 01:00", 49 * SECOND),
        ("-1.5s", 48_500_000_000),
        ("-0s", 50 * SECOND),
    ],
)
def test_moment_can_be_written_in_several_ways(text: str, mono: int) -> None:
    assert parse_time(text, NOW) == mono


@given(st.integers(0, 10**12))
def test_relative_time_is_resolved_to_the_past(nanoseconds: int) -> None:
    text = str(Duration(nanoseconds))
    assert parse_time(f"-{text}", NOW) == NOW.mono - nanoseconds


def test_root_of_a_container_is_not_root_of_the_host() -> None:
    asked = Asked()
    inside = ROOT._replace(principal=Principal(0, "0123456789ab"))
    assert "another user" in asked.problem(403, pid=OURS.pid, start="-1s", peer=inside)


def test_process_of_a_user_in_a_container_is_not_the_users_outside() -> None:
    asked = Asked()
    inside = OURSELVES._replace(principal=Principal(USER, "0123456789ab"))
    assert "another user" in asked.problem(403, pid=OURS.pid, start="-1s", peer=inside)
    assert asked.problem(403, pid=OURS.pid, start="-1s", peer=Peer(pid=OURS.pid, uid=USER))


def test_process_has_the_energy_of_each_of_many_periods(asked: Asked) -> None:
    edges = [[asked.now - 5 * SECOND, asked.now - SECOND], [asked.now - SECOND, asked.now]]
    body = json.dumps(edges).encode()
    told = json.loads(asked.get(method="POST", body=body, pid="self", family=1).body)
    alone = [
        asked.energy((asked.now - start) / SECOND, end=f"mono:{end}", pid="self", family=1)
        for start, end in edges
    ]
    assert [{"host_name": told["host_name"], **one} for one in told["windows"]] == alone
    assert asked.registered == [OURS] * 3
