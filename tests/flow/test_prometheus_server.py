"""The exporter on a real socket."""

from __future__ import annotations

import gzip
import http.client
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from testbed.exporting import Served, serving
from testbed.fixtures import entered
from testbed.scrapes import full_host, parse, value
from testbed.snapshots import CPU, busy_host
from testbed.waiting import eventually

from wattspan.api.snapshot_document import decode_snapshot, snapshot_document
from wattspan.model import MILLISECOND, Microjoules, Provenance, TickCounts
from wattspan.model.settings import Listen
from wattspan.ports import ExporterContext, ExporterError
from wattspan.testing import ManualClock
from wattspan_exporters.prometheus import plugin
from wattspan_exporters.prometheus.exporter import MAX_BODY
from wattspan_exporters.prometheus.renderer import ExpositionFormat

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


served = entered(serving)


# -------------------------------------------------------------------------------------- pages


def test_metrics_are_text_by_default(served: Served) -> None:
    answer = served.ask()
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    scrape = parse(answer.body, ExpositionFormat.TEXT)
    assert value(scrape, "hw_energy_joules_total", hw_id="intel-rapl:0") == 12421.123456
    assert value(scrape, "wattspan_build_info", version="1.2.3") == 1


def test_metrics_are_openmetrics_on_request(served: Served) -> None:
    answer = served.ask(accept=OPENMETRICS)
    content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert answer.headers["Content-Type"] == content_type
    scrape = parse(answer.body, ExpositionFormat.OPENMETRICS)
    assert value(scrape, "hw_energy_joules_total", hw_id="intel-rapl:0") == 12421.123456


def test_gzip_is_the_same_scrape(served: Served) -> None:
    plain = served.ask()
    zipped = served.ask(accept_encoding="gzip")
    assert zipped.headers["Content-Encoding"] == "gzip"
    assert "Accept-Encoding" in zipped.headers["Vary"]
    assert gzip.decompress(zipped.body) == plain.body


def test_new_snapshot_is_a_new_scrape(served: Served) -> None:
    served.ask()
    served.snapshot = replace(served.snapshot, other={CPU: Microjoules(17_000_001)})
    scrape = parse(served.ask().body, ExpositionFormat.TEXT)
    name = "wattspan_process_energy_joules_total"
    assert value(scrape, name, command="other") == 17.000001
    assert value(scrape, "wattspan_scrapes_total", format="text") == 1


def test_head_matches_get(served: Served) -> None:
    got, head = served.ask(), served.ask(method="HEAD")
    assert head.status == 200
    assert head.body == b""
    assert head.headers["Content-Length"] == str(len(got.body))


@pytest.mark.parametrize("path", ["/metric", "/metrics/", "/../etc/passwd", "/%2e%2e/"])
def test_unknown_path_is_not_found(served: Served, path: str) -> None:
    answer = served.ask(path)
    assert answer.status == 404
    assert b"/metrics" in answer.body


@pytest.mark.parametrize("zipped", [False, True])
def test_snapshot_is_served_with_the_metrics(zipped: bool) -> None:
    encoding = "gzip" if zipped else "identity"
    with serving(exemplars="all") as served:
        answer = served.ask("/v1/snapshot", accept_encoding=encoding)
    body = gzip.decompress(answer.body) if zipped else answer.body
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.headers["Cache-Control"] == "no-store"
    assert decode_snapshot(body) == snapshot_document(served.snapshot, "1.2.3")


def test_query_does_not_change_the_page(served: Served) -> None:
    assert served.ask("/metrics?name[]=up").body == served.ask().body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"])
def test_other_methods_are_refused(served: Served, method: str) -> None:
    answer = served.ask(method=method)
    assert answer.status == 405
    assert answer.headers["Allow"] == "GET, HEAD"


def test_request_body_is_not_parsed_as_the_next_request(served: Served) -> None:
    with closing(served.connect()) as connection:
        for _ in range(2):
            connection.request("GET", "/healthz", body=b"GET /metric HTTP/1.1\r\n\r\n")
            answer = connection.getresponse()
            assert (answer.status, answer.read()) == (200, b"ok\n")


def test_large_body_is_refused(served: Served) -> None:
    assert served.ask(body=bytes(MAX_BODY + 1)).status == 413


pageless = entered(lambda: serving(page=False))


def test_landing_page_has_no_external_resources(pageless: Served) -> None:
    answer = pageless.ask("/")
    links: list[str] = []

    class Links(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            links.extend(target for name, target in attrs if name in ("href", "src") and target)

    Links().feed(answer.body.decode())
    assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert sorted(links) == ["/healthz", "/metrics"]
    assert b"1.2.3" in answer.body
    assert b"Emulated" not in answer.body


def test_landing_page_names_an_emulated_host(pageless: Served) -> None:
    pageless.snapshot = replace(busy_host(Provenance.EMULATED), host="<b>host</b>")
    body = pageless.ask("/").body
    assert b"Emulated host" in body
    assert b"&lt;b&gt;host" in body


def test_disabled_live_page_is_not_served(pageless: Served) -> None:
    assert [pageless.ask(path).status for path in ("/live.json", "/page.js")] == [404, 404]


def test_health_is_the_age_of_the_figures() -> None:
    clock = ManualClock()
    with serving(clock) as served:
        served.snapshot = replace(full_host(), at=clock.now())
        assert served.ask("/healthz").body == b"ok\n"
        clock.advance(61)
        stale = served.ask("/healthz")
        assert stale.status == 503
        assert stale.body == b"The newest snapshot is 61 s old.\n"


def test_missed_polls_degrade_health_until_a_minute_has_none() -> None:
    clock = ManualClock()
    with serving(clock) as served:
        for ticks, said in (
            (TickCounts(600, 0, 20 * MILLISECOND), b"ok\n"),
            (
                TickCounts(600, 450, 380 * MILLISECOND),
                b"degraded: 450 of 600 polls of the last minute were missed; the longest poll took "
                b"380 ms. Keep agent.interval at auto, see wattspan_agent_consumers, "
                b"or set a longer one.\n",
            ),
            (TickCounts(300, 0, 20 * MILLISECOND), b"ok\n"),
        ):
            host = replace(full_host(), at=clock.now())
            served.snapshot = replace(host, stats=replace(host.stats, recent_ticks=ticks))
            answer = served.ask("/healthz")
            assert (answer.status, answer.body) == (200, said)


def test_failed_page_is_answered_with_500_and_logged(pageless: Served) -> None:
    pageless.snapshot = replace(full_host(), host=None)  # type: ignore[arg-type]
    assert pageless.ask("/").status == 500
    assert "A request for '/' could not be answered" in pageless.log[0]
    pageless.snapshot = full_host()
    assert pageless.ask("/").status == 200


# -------------------------------------------------------------------------------- connections


def test_fifty_scrapers_see_equal_data(served: Served) -> None:
    start = threading.Barrier(50)

    def scrape(_: int) -> bytes:
        start.wait(20)
        return served.ask().body

    with ThreadPoolExecutor(50) as pool:
        bodies = set(pool.map(scrape, range(50)))
    assert len(bodies) == 1


def test_scraper_keeps_its_connection(served: Served) -> None:
    connection = served.connect()
    for _ in range(3):
        connection.request("GET", "/metrics")
        assert connection.getresponse().read()
        assert connection.sock is not None  # http.client would have closed its side
    connection.close()


def test_connection_beyond_the_limit_is_refused_and_counted() -> None:
    entered, release = threading.Event(), threading.Event()
    with serving(max_connections=1, page=False) as served, ThreadPoolExecutor(1) as pool:

        def hold() -> None:
            entered.set()
            assert release.wait(20)

        served.before = hold
        scrape = pool.submit(served.ask)
        assert entered.wait(20), "the scrape is being rendered"
        with suppress(ConnectionError):  # the request was on its way when the server hung up
            assert served.ask("/elsewhere").status == 503
        release.set()
        assert scrape.result(20).status == 200
        served.before = lambda: None
        served.snapshot = replace(full_host(), sequence=2)
        scraped: list[bytes] = []

        def scraped_again() -> bool:  # the place is free a moment later
            with suppress(ConnectionError):
                answer = served.ask()
                scraped.append(answer.body)
                return answer.status == 200
            return False

        eventually(scraped_again, "the place is free")
        counted = parse(scraped[-1], ExpositionFormat.TEXT)
        assert value(counted, "wattspan_scrape_connections_refused_total") >= 1


class Ticking(ManualClock):
    """A clock that advances by a microsecond at each read."""

    def monotonic(self) -> int:
        self.advance(0.000_001)
        return super().monotonic()


@pytest.mark.parametrize("told", [b"", b"GET /metrics HTTP/1.1\r\nX-"], ids=["silent", "slow"])
def test_hundreds_of_slow_clients_refuse_no_health_check_of_their_own_user(told: bytes) -> None:
    with serving(Ticking()) as served, ExitStack() as held:
        for _ in range(200):
            slow = held.enter_context(socket.create_connection(("127.0.0.1", served.port)))
            with suppress(OSError):  # possibly refused
                slow.sendall(told)
        assert [served.ask("/healthz").status for _ in range(3)] == [200] * 3


def test_idle_connections_make_way() -> None:
    with serving(max_connections=2) as served, ExitStack() as held:
        for _ in range(2):
            connection = held.enter_context(closing(served.connect()))
            connection.request("GET", "/healthz")
            connection.getresponse().read()

        def served_now() -> bool:  # one whose answer was just taken rests a moment later
            try:
                return served.ask("/healthz").status == 200
            except ConnectionError:  # the request was still on its way when the server hung up
                return False

        for _ in range(3):
            eventually(served_now, "who rests makes way")


def test_connections_that_do_not_read_make_way() -> None:
    with serving(Ticking(), max_connections=2) as served, ExitStack() as held:
        served.snapshot = replace(busy_host(), processes=busy_host().processes * 20_000)
        for _ in range(2):
            idler = held.enter_context(socket.socket())
            idler.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            idler.settimeout(20)
            idler.connect(("127.0.0.1", served.port))
            idler.sendall(b"GET /v1/snapshot HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert idler.recv(1), "its answer has begun, and is far from over"
        assert served.ask("/healthz").status == 200


def closed(connection: socket.socket) -> bool:
    """True if the server has closed the connection; received data is discarded."""
    connection.settimeout(20)
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        pass
    return True


def test_trickle_of_bytes_does_not_hold_a_connection() -> None:
    with (
        serving(request_timeout="300ms") as served,
        socket.create_connection(("127.0.0.1", served.port)) as slow,
    ):
        slow.sendall(b"GET /metrics HTTP/1.1\r\nX-")
        slow.settimeout(0.02)

        def ended() -> bool:  # never silent for as long as a request may take
            try:
                slow.sendall(b"a")
                return b"408" in slow.recv(65536)
            except TimeoutError:
                return False
            except ConnectionError:
                return True

        eventually(ended, "the connection is closed")
        assert served.ask("/metrics").status == 200


def test_silent_connection_is_closed() -> None:
    with (
        serving(idle_timeout="100ms") as served,
        socket.create_connection(("127.0.0.1", served.port)) as idle,
    ):
        idle.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert idle.recv(65536).startswith(b"HTTP/1.1 200")
        assert closed(idle)


@pytest.mark.parametrize(
    "junk",
    [
        b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 a TLS hello \r\n",
        b"GET /metrics HTTP/9.9\r\n\r\n",
        b"GET " + b"a" * 70_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % n for n in range(200)) + b"\r\n",
        b"BREW /coffee HTTP/1.1\r\n\r\n",
    ],
    ids=["empty", "tls", "version", "long", "headers", "method"],
)
def test_junk_is_refused_and_forgotten(served: Served, junk: bytes) -> None:
    with socket.create_connection(("127.0.0.1", served.port)) as client:
        with suppress(OSError):  # possibly disconnected before the end
            client.sendall(junk)
            client.shutdown(socket.SHUT_WR)
        assert closed(client)
    assert served.ask().status == 200
    assert served.log == []


def test_disconnected_client_is_not_logged(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", served.port)) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert served.ask().status == 200
    assert served.log == []


# ---------------------------------------------------------------------------- start and stop


def test_stopping_ends_idle_connections_and_frees_the_port() -> None:
    with serving() as served:
        port = served.port
        idle = socket.create_connection(("127.0.0.1", port))
        idle.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert idle.recv(64).startswith(b"HTTP/1.1 200")
    assert closed(idle)
    idle.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    assert not [t for t in threading.enumerate() if t.name == "wattspan-prometheus"]
    with serving(listen=f"127.0.0.1:{port}") as again:
        assert again.ask().status == 200


def test_active_request_finishes_at_shutdown() -> None:
    entered, release = threading.Event(), threading.Event()
    with serving(page=False) as served:  # only the scrape reads

        def linger() -> None:
            entered.set()
            assert release.wait(20)

        def refused() -> bool:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
            except ConnectionRefusedError:
                return True
            return False

        served.before, port = linger, served.port
        with ThreadPoolExecutor(2) as pool:
            scrape = pool.submit(served.ask)
            assert entered.wait(20)
            stopping = pool.submit(served.exporter.stop)
            eventually(refused, "nobody new is served")
            assert not scrape.done()
            release.set()
            assert scrape.result(20).status == 200
            stopping.result(20)


def opened(listen: str) -> None:
    context = ExporterContext(ManualClock(), "1", [].append)
    exporter = plugin.open(plugin.settings(listen=Listen(listen)), context)
    assert exporter.address is None
    exporter.start(full_host)


def test_port_in_use_gets_one_sentence(served: Served) -> None:
    with pytest.raises(ExporterError) as caught:
        opened(f"127.0.0.1:{served.port}")
    assert str(caught.value) == (
        f"Cannot serve metrics on 127.0.0.1:{served.port}: the port is in use; stop its user "
        f"(`ss -ltnp sport = :{served.port}` names it) or choose another address in "
        "[exporters.prometheus] listen."
    )
    assert caught.value.exit_code == 4


@pytest.mark.parametrize("listen", ["192.0.2.1:9949", "no-such-host.invalid:9949"])
def test_address_of_another_host_gets_one_sentence(listen: str) -> None:
    with pytest.raises(ExporterError, match="this host has no such address; choose another"):
        opened(listen)


def test_empty_address_disables_the_exporter() -> None:
    context = ExporterContext(ManualClock(), "1", [].append)
    assert plugin.open(plugin.settings(listen=Listen("")), context) is None


def test_ipv6_is_served_where_there_is_any() -> None:
    try:
        with serving(listen="[::1]:0") as served:
            assert served.exporter.address == f"http://[::1]:{served.port}/metrics"
            connection = http.client.HTTPConnection("::1", served.port, timeout=20)
            connection.request("GET", "/metrics")
            assert connection.getresponse().read()
            connection.close()
    except ExporterError as error:
        pytest.skip(str(error))


def test_network_listener_without_tls_is_logged() -> None:
    with serving(listen=":0") as served:
        assert "without TLS" in served.log[0]
    with serving() as served:
        assert served.log == []
