"""The live page on a real socket."""

from __future__ import annotations

import gzip
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from testbed.exporting import Answer, Served, serving
from testbed.fixtures import entered
from testbed.scrapes import full_host
from testbed.simulated_host import World
from testbed.snapshots import CPU, process
from testbed.waiting import eventually

from wattspan.attribution.ledger import Ledger, LedgerSettings
from wattspan.model import HwType, Instant, Microjoules, Snapshot
from wattspan.testing import ManualClock
from wattspan_exporters.page import CONTENT_TYPES, SECURITY_HEADERS, STATIC_DIRECTORY
from wattspan_exporters.page.flow import build_flow
from wattspan_exporters.page.history import PageHistory

PATHS = sorted(
    "/" + path.relative_to(STATIC_DIRECTORY).as_posix()
    for path in STATIC_DIRECTORY.rglob("*.*")
    if path.suffix[1:] in CONTENT_TYPES and path.name != "index.html"
)


served = entered(serving)


def figures(answer: Answer) -> dict[str, object]:
    assert answer.status == 200, answer.body
    told = json.loads(answer.body)
    assert isinstance(told, dict)
    return told


def snapshot_of(body: bytes) -> str:
    """The host's name in the snapshot of the document."""
    return str(json.loads(body)["snapshot"]["host_name"])


# ---------------------------------------------------------------------------------- its own files


def test_page_and_its_resources_are_served(served: Served) -> None:
    page = served.ask("/")
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    wanted: list[str] = []

    class Wanted(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            wanted.extend(
                target
                for name, target in attrs
                if tag in ("link", "script", "img") and name in ("href", "src") and target
            )

    Wanted().feed(page.body.decode())
    local = [target for target in wanted if not target.startswith("data:")]
    assert local
    for target in local:
        assert "//" not in target
        assert served.ask("/" + target.removeprefix("/")).status == 200, target


@pytest.mark.parametrize("path", ["/", "/live.json", *PATHS])
def test_every_answer_is_guarded(served: Served, path: str) -> None:
    answer = served.ask(path)
    assert answer.status == 200
    for name, value in SECURITY_HEADERS.items():
        assert answer.headers[name] == value
    assert "unsafe" not in answer.headers["Content-Security-Policy"]
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Access-Control-Allow-Origin"] is None


@pytest.mark.parametrize("path", ["/", *PATHS])
def test_file_is_zipped_on_request_and_not_sent_twice(served: Served, path: str) -> None:
    plain, zipped = served.ask(path), served.ask(path, accept_encoding="gzip")
    assert gzip.decompress(zipped.body) == plain.body
    assert plain.headers["Cache-Control"] == "no-cache"
    again = served.ask(path, if_none_match=plain.headers["ETag"])
    assert (again.status, again.body) == (304, b"")
    assert again.headers["Content-Length"] is None, "it is not nothing that the browser has"
    assert served.ask(path, if_none_match='"another"').status == 200


def test_whole_page_is_small(served: Served) -> None:
    assert sum(len(served.ask(path).body) for path in ["/", *PATHS]) <= 150_000


@pytest.mark.parametrize(
    "path",
    [
        "/../facts.py",
        "/page/../../facts.py",
        "/%2e%2e/facts.py",
        "/static/index.html",
        "/index.html",
        "/page/",
        "//etc/passwd",
        "/live.json/",
        "/page.css%00.js",
        "/..%2fflow.py",
        "\\..\\flow.py",
        "/PAGE.CSS",
    ],
)
def test_only_page_files_are_served(served: Served, path: str) -> None:
    with socket.create_connection(("127.0.0.1", served.port)) as client:
        client.sendall(
            f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
        )
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert b"404" in answer.split(b"\r\n")[0]
    assert b"import" not in answer


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_page_can_only_be_read(served: Served, method: str) -> None:
    assert served.ask("/live.json", method=method).status == 405


# ------------------------------------------------------------------------------------ its figures


def test_figures_are_those_of_the_newest_snapshot(served: Served) -> None:
    assert snapshot_of(served.ask("/live.json").body) == full_host().host
    served.snapshot = replace(full_host(), host="another")
    answer = served.ask("/live.json", accept_encoding="gzip")
    assert snapshot_of(gzip.decompress(answer.body)) == "another"
    assert answer.headers["Cache-Control"] == "no-store"


def test_head_matches_get(served: Served) -> None:
    got, head = served.ask("/live.json"), served.ask("/live.json", method="HEAD")
    assert head.body == b""
    assert head.headers["Content-Length"] == str(len(got.body))


def test_fifty_viewers_see_equal_data(served: Served) -> None:
    start = threading.Barrier(50)

    def look(_: int) -> bytes:
        start.wait(20)
        return served.ask("/live.json").body

    with ThreadPoolExecutor(50) as pool:
        assert len(set(pool.map(look, range(50)))) == 1


def test_age_of_the_snapshot_is_in_a_header() -> None:
    clock = ManualClock()
    with serving(clock) as served:
        served.snapshot = replace(full_host(), at=clock.now())
        assert served.ask("/live.json").headers["Age"] == "0"
        clock.advance(7)
        assert served.ask("/live.json").headers["Age"] == "7"


@pytest.mark.exhaustive
def test_history_is_recorded_without_viewers() -> None:
    clock = ManualClock()
    world = World(Ledger(LedgerSettings(), now=0), clock)
    world.born(1)
    with serving(clock) as served:
        served.snapshot = first = world.turn(10**9, {1: 50})
        seen = threading.Event()
        served.before = seen.set
        for _ in range(4):
            for _ in range(60):  # longer than a period of the history
                served.snapshot = world.turn(10**8, {1: 50})
            # The history looks when it is asked whether it is due, and again to record: the third
            # look follows a record of this snapshot.
            for _ in range(3):
                seen.clear()
                assert seen.wait(20), "the history looks"
        told = figures(served.ask("/live.json"))
    hour = told["hour"]
    assert isinstance(hour, dict)
    assert hour["seconds"] >= 18  # the first of the four stretches may be the base
    assert hour["seconds"] * 10**9 <= served.snapshot.at.mono - first.at.mono + 10**6
    assert {node["layer"] for node in hour["nodes"]} >= {"device", "type", "group", "process"}
    power = told["power"]
    assert isinstance(power, dict)
    assert any(watts for series in power["series"] for watts in series["watts"])


def test_host_of_ten_thousand_rows_is_shown_in_few() -> None:
    rows = tuple(process(n, f"p{n}", f"pod {n % 500}", {}, {CPU: 1 + n % 7}) for n in range(10_000))
    total = sum(sum(row.energy.values()) for row in rows)
    host = full_host()
    cpu = next(a for a in host.cover if a.domain.hw_type is HwType.CPU)
    cpu = replace(
        cpu,
        energy=Microjoules(total),
        consumers=Microjoules(total),
        idle=Microjoules(0),
        unattributed=Microjoules(0),
    )
    empty = replace(cpu, energy=Microjoules(0), consumers=Microjoules(0))
    begin = Instant(10**12, 10**18)
    memory = PageHistory()
    memory.record(Snapshot(begin, 1, "host", (empty,)))
    end = Instant(begin.mono + 6 * 10**9, begin.wall)
    now, hour = memory.recent(Snapshot(end, 2, "host", (cpu,), rows))
    for stretch in (now, hour):
        flow = build_flow(stretch)
        assert flow.total == total
        assert len(flow.nodes) < 100
    assert len(hour.processes) <= 64


# ---------------------------------------------------------------------------------- permitted
# readers


@pytest.mark.parametrize("path", ["/", "/live.json", "/metrics", "/healthz"])
def test_foreign_host_name_is_rejected(served: Served, path: str) -> None:
    answer = served.ask(path, host="rebound.example:9949")
    assert answer.status == 421
    assert b"Host: localhost" in answer.body
    ours = (
        "localhost",
        f"localhost:{served.port}",
        "localhost.localdomain",
        "[::1]:9949",
        "127.0.0.1",
    )
    for name in ours:
        assert served.ask("/live.json", host=name).status == 200


def test_network_listener_accepts_any_host_name() -> None:
    with serving(listen="0.0.0.0:0") as served:
        assert served.ask("/live.json", host="node7.example:9949").status == 200


# -------------------------------------------------------------------------------- start and stop


def test_stopped_exporter_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with serving() as served:
        served.ask("/live.json")
    eventually(lambda: not set(threading.enumerate()) - before, "every thread has ended")


def test_failure_of_the_history_is_logged_once() -> None:
    with serving() as served:
        eventually(lambda: served.ask("/live.json").status == 200, "the page is up")
        served.snapshot = None  # type: ignore[assignment]
        eventually(lambda: served.log, "the failure is told")
        looked = threading.Semaphore(0)
        served.before = looked.release
        for _ in range(3):
            assert looked.acquire(timeout=20)
        assert len([line for line in served.log if "periodic work failed" in line]) == 1
        served.snapshot = full_host()
        assert served.ask("/live.json").status == 200
