"""The agent's own HTTP server, on real sockets."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from testbed.fixtures import entered_in
from testbed.waiting import eventually
from testbed.web import GET, Site, post, read_all, read_answer, serving, statuses

from wattspan.clock import SystemClock
from wattspan.http.limits import ServerLimits
from wattspan.http.messages import Handler, HttpRequest, HttpResponse
from wattspan.http.server import WORKER_THREADS, HttpServer
from wattspan.http.sockets import Peer, listen_tcp, listen_unix
from wattspan.ports import ListenError
from wattspan.testing import ManualClock
from wattspan.util.unix_sockets import ACKNOWLEDGEMENTS

TIGHT = ServerLimits(head=2048, body=10_000, bodies=40_000, connections=4, linger=0.2)


site = entered_in(lambda folder: serving(folder, limits=TIGHT))


async def _silent(_: HttpRequest) -> HttpResponse:
    return HttpResponse(204)


# ------------------------------------------------------------------------------ handler's view


def held_handler(
    body: bytes | None = None,
) -> tuple[threading.Event, threading.Event, Callable[[HttpRequest], Awaitable[HttpResponse]]]:
    """The begin of a call, its permission to go on, and the handler; ``body``: as was sent."""
    begun, go_on = threading.Event(), threading.Event()

    async def slow(request: HttpRequest) -> HttpResponse:
        begun.set()
        await asyncio.to_thread(go_on.wait, 20)
        return HttpResponse(200, request.body if body is None else body)

    return begun, go_on, slow


def test_request_arrives_whole(site: Site) -> None:
    with closing(site.client()) as client:
        client.request("POST", "/a%20b/c?x=1&y=&x=2", b"body", {"X-Thing": "one"})
        answer = client.getresponse()
        assert (answer.status, answer.read()) == (200, b"body")
    (request,) = site.asked
    assert (request.method, request.path, request.body) == ("POST", "/a b/c", b"body")
    assert request.query == {"x": "2", "y": ""}
    assert request.headers["x-thing"] == "one"


def test_unix_peer_credentials_come_from_the_kernel(site: Site) -> None:
    before = SystemClock().monotonic()
    with closing(site.connect_unix()) as connection:
        connection.sendall(GET)
        assert read_answer(connection)[0] == 200
    peer = site.asked[0].peer
    assert (peer.pid, peer.uid, peer.address) == (os.getpid(), os.getuid(), None)
    assert before <= peer.accepted <= SystemClock().monotonic()


def test_both_tcp_addresses_reach_the_handler(site: Site) -> None:
    with closing(site.connect()) as connection:
        connection.sendall(GET)
        read_answer(connection)
        here = connection.getsockname()
    peer = site.asked[0].peer
    assert (peer.pid, peer.address, peer.local) == (None, here, site.tcp)


@pytest.mark.parametrize("simple", [True, False])
def test_acknowledged_request_has_a_byte_long_before_its_response(
    tmp_path: Path, *, simple: bool
) -> None:
    settled = threading.Event()

    async def slow(request: HttpRequest) -> HttpResponse:
        request.acknowledge()
        await asyncio.to_thread(settled.wait)
        return HttpResponse(200, b"joules")

    chunks = b"0\r\n\r\n"
    sent = GET if simple else post(chunks, "Transfer-Encoding: chunked")
    with serving(tmp_path, lambda _: slow) as site, closing(site.connect()) as connection:
        connection.settimeout(60)
        connection.sendall(sent)
        first = b""
        while not first.endswith(b"\r\n\r\n"):
            first += connection.recv(1)
        settled.set()
        assert first.startswith(b"HTTP/1.1 100 ")
        assert read_answer(connection) == (200, b"joules")


@pytest.mark.parametrize(
    ("headers", "interim"),
    [
        ((), 1),
        (("Expect: 100-continue",), 1),
        (("Transfer-Encoding: chunked",), 1),
        ((f"{ACKNOWLEDGEMENTS}: any",), 6),
    ],
)
def test_clients_have_as_many_acknowledgements_as_they_accept(
    tmp_path: Path, headers: tuple[str, ...], interim: int
) -> None:
    async def slow(request: HttpRequest) -> HttpResponse:
        for _ in range(6):
            request.acknowledge()
        return HttpResponse(200, b"joules")

    chunked = "Transfer-Encoding: chunked" in headers
    body, length = (b"0\r\n\r\n", ()) if chunked else (b"", ("Content-Length: 1",))
    with serving(tmp_path, lambda _: slow) as site, closing(site.connect()) as connection:
        connection.settimeout(60)
        for _ in range(2):  # each request counts anew
            connection.sendall(post(body, *headers, *length))
            if "Expect: 100-continue" in headers:
                assert read_until_end(connection).startswith(b"HTTP/1.1 100 ")
            if not chunked:
                connection.sendall(b"x")
            count = int("Expect: 100-continue" in headers)
            while (head := read_until_end(connection)).startswith(b"HTTP/1.1 100 "):
                count += 1
            assert (count, head[:13]) == (interim, b"HTTP/1.1 200 ")
            assert connection.recv(6, socket.MSG_WAITALL) == b"joules"


def read_until_end(connection: socket.socket) -> bytes:
    """The next head."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += connection.recv(1)
    return head


def test_client_of_http_1_0_is_not_told_that_its_request_is_received(tmp_path: Path) -> None:
    async def slow(request: HttpRequest) -> HttpResponse:
        request.acknowledge()
        return HttpResponse(200, b"joules")

    with serving(tmp_path, lambda _: slow) as site, closing(site.connect()) as connection:
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert statuses(read_all(connection)) == [200]


def test_repeated_headers_are_one_list(site: Site) -> None:
    site.tell(b"GET / HTTP/1.1\r\nHost: a\r\nX-A: 1\r\nX-A: 2\r\n\r\n")
    assert site.asked[0].headers["x-a"] == "1, 2"


def test_chunked_body_is_one_body(site: Site) -> None:
    chunks = b"3\r\nabc\r\n1\r\nd\r\n0\r\n\r\n"
    answers = site.tell(post(chunks, "Transfer-Encoding: chunked"))
    assert answers.endswith(b"\r\n\r\nabcd")


# ----------------------------------------------------------------------------- client's view


def test_connection_is_reused_for_the_next_request(site: Site) -> None:
    with closing(site.connect()) as connection:
        for number in (b"1", b"2"):
            connection.sendall(post(number))
            assert read_answer(connection) == (200, number)
    assert site.asked[0].peer == site.asked[1].peer


def test_requests_sent_at_once_are_answered_in_order(site: Site) -> None:
    answers = site.tell(post(b"one") + post(b"two") + post(b"three"))
    assert statuses(answers) == [200, 200, 200]
    assert answers.index(b"one") < answers.index(b"two") < answers.index(b"three")


def test_client_that_asks_to_close_is_closed(site: Site) -> None:
    with closing(site.connect()) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        answer = read_all(connection)
    assert b"connection: close" in answer.lower()


def test_http_1_0_is_answered_and_closed(site: Site) -> None:
    with closing(site.connect()) as connection:
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert statuses(read_all(connection)) == [200]


def test_head_has_the_headers_of_get_and_no_body(tmp_path: Path) -> None:
    async def page(_: HttpRequest) -> HttpResponse:
        return HttpResponse(200, b"page")

    with serving(tmp_path, lambda _: page) as site, closing(site.client()) as client:
        client.request("HEAD", "/")
        answer = client.getresponse()
        assert (answer.read(), answer.headers["Content-Length"]) == (b"", "4")
        client.request("GET", "/")
        assert client.getresponse().read() == b"page"


def test_expect_continue_is_answered(site: Site) -> None:
    with closing(site.connect()) as connection:
        connection.sendall(post(b"", "Expect: 100-continue", "Content-Length: 4"))
        assert connection.recv(100).startswith(b"HTTP/1.1 100 ")
        connection.sendall(b"body")
        assert read_answer(connection) == (200, b"body")


def test_expect_continue_with_an_oversized_body_is_refused(site: Site) -> None:
    with closing(site.connect()) as connection:
        connection.sendall(post(b"", "Expect: 100-continue", "Content-Length: 10001"))
        assert read_answer(connection)[0] == 413


def test_headers_of_a_handler_reach_the_client(tmp_path: Path) -> None:
    async def busy(_: HttpRequest) -> HttpResponse:
        return HttpResponse(503, b"later", headers={"Retry-After": "7"})

    with serving(tmp_path, lambda _: busy) as site, closing(site.client()) as client:
        client.request("GET", "/")
        answer = client.getresponse()
        assert (answer.status, answer.headers["Retry-After"]) == (503, "7")
        assert answer.headers["Date"].endswith(" GMT")


def test_handler_failure_affects_one_request(tmp_path: Path) -> None:
    async def fails_once(request: HttpRequest) -> HttpResponse:
        if request.path == "/bad":
            raise ZeroDivisionError("oh")
        return HttpResponse(200)

    with serving(tmp_path, lambda _: fails_once) as site, closing(site.client()) as client:
        client.request("GET", "/bad")
        answer = client.getresponse()
        assert answer.status == 500
        answer.read()
        client.request("GET", "/good")
        assert client.getresponse().status == 200
        assert "ZeroDivisionError('oh')" in site.log[0]


def test_invalid_handler_response_closes_its_connection(tmp_path: Path) -> None:
    async def wrong(request: HttpRequest) -> HttpResponse:
        return HttpResponse(200, headers={"X": "a\r\nb"} if request.path == "/bad" else {})

    with serving(tmp_path, lambda _: wrong) as site:
        assert site.tell(post(b"", path="/bad")) == b""
        assert "'/bad' was answered wrongly" in site.log[0]
        assert statuses(site.tell(GET)) == [200]


def test_worker_threads_exist_from_the_start(tmp_path: Path) -> None:
    """A thread started without free memory may hang its starter."""
    begun: list[bool] = []

    async def elsewhere(_: HttpRequest) -> HttpResponse:
        there = {thread.ident for thread in threading.enumerate()}
        together = threading.Barrier(WORKER_THREADS)

        def work() -> bool:
            together.wait(20)
            return threading.get_ident() not in there

        begun.extend(
            await asyncio.gather(*(asyncio.to_thread(work) for _ in range(WORKER_THREADS)))
        )
        return HttpResponse(204)

    with serving(tmp_path, lambda _: elsewhere) as site, closing(site.connect()) as connection:
        connection.sendall(GET)
        assert read_answer(connection)[0] == 204
    assert begun == [False] * WORKER_THREADS


def test_request_received_during_a_response_is_answered_next(tmp_path: Path) -> None:
    begun, go_on, slow = held_handler()
    limits = ServerLimits(body=3 << 20)
    with serving(tmp_path, lambda _: slow, limits) as site, closing(site.connect()) as connection:
        connection.sendall(post(b"first"))
        assert begun.wait(20)
        connection.sendall(post(b"second")[:30])
        go_on.set()
        assert read_answer(connection) == (200, b"first")
        connection.sendall(post(b"second")[30:])
        assert read_answer(connection) == (200, b"second")


def test_half_closed_client_receives_its_response(tmp_path: Path) -> None:
    begun, go_on, slow = held_handler(b"late")
    with serving(tmp_path, lambda _: slow) as site, closing(site.connect()) as connection:
        connection.sendall(GET)
        assert begun.wait(20)
        connection.shutdown(socket.SHUT_WR)
        go_on.set()
        assert read_all(connection).endswith(b"late")


def test_handler_receives_no_data_after_disconnect(tmp_path: Path) -> None:
    begun, ended = threading.Event(), threading.Event()

    async def endless(_: HttpRequest) -> HttpResponse:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return HttpResponse(200)

    with serving(tmp_path, lambda _: endless) as site:
        connection = site.connect()
        connection.sendall(GET)
        assert begun.wait(20)
        # a reset, for a mere half-close may still wait for its answer
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.close()
        assert ended.wait(20)


# ---------------------------------------------------------------------------- invalid HTTP


@pytest.mark.parametrize(
    ("told", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),  # TLS
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
        (b"GET / HTTP/1.1\r\n\r\n", 400),  # no Host
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 5000 + b"\r\n\r\n", 431),
        (b"GET http://[/ HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (post(b"abcd", "Content-Length: 4", "Content-Length: 5"), 400),
        (post(b"abcd", "Content-Length: -4"), 400),
        (post(b"abcd", "Content-Length: 4_0"), 400),
        (post(b"abcd", "Content-Length: " + "9" * 1500), 400),
        (post(b"0\r\n\r\n", "Content-Length: 5", "Transfer-Encoding: chunked"), 400),
        (post(b"0\r\n\r\n", "Transfer-Encoding: chunked", "Content-Length: 5"), 400),
        (post(b"0\r\n\r\n", "Transfer-Encoding: gzip, chunked"), 501),
        (post(b"0\r\n\r\n", "Transfer-Encoding: identity"), 501),
        (post(b"0\r\n\r\n", "Transfer-Encoding: chunked, chunked"), 501),
        (post(b"zz\r\nab\r\n0\r\n\r\n", "Transfer-Encoding: chunked"), 400),
        (post(b"x" * 10_001), 413),
        (post(b"2711\r\n" + b"x" * 10_001 + b"\r\n0\r\n\r\n", "Transfer-Encoding: chunked"), 413),
        (post(b"1\r\nx\r\n" * 1500 + b"0\r\n\r\n", "Transfer-Encoding: chunked"), 400),
    ],
)
def test_malformed_request_is_answered_once_and_closed(
    site: Site, told: bytes, status: int
) -> None:
    assert statuses(site.tell(told + GET)) == [status]
    assert site.asked == []


def test_partial_request_does_not_reach_the_handler(site: Site) -> None:
    assert statuses(site.tell(post(b"half", "Content-Length: 8"))) == [400]
    assert site.asked == []


def test_request_after_a_handler_error_is_independent(tmp_path: Path) -> None:
    def picky(asked: list[HttpRequest]) -> Handler:
        async def handle(request: HttpRequest) -> HttpResponse:
            asked.append(request)
            return HttpResponse(404 if request.path == "/none" else 200)

        return handle

    with serving(tmp_path, picky) as site:
        answers = site.tell(post(b"a", path="/none") + post(b"b") + post(b"c", path="/none"))
        assert statuses(answers) == [404, 200, 404]
        assert [request.body for request in site.asked] == [b"a", b"b", b"c"]


def test_refusal_reaches_a_client_that_is_still_sending(site: Site) -> None:
    """Closing at once would reset the connection, and the answer with it."""
    with closing(site.connect()) as connection:
        connection.sendall(post(b"x" * 5_000, "Content-Length: 4000000"))
        connection.sendall(b"x" * 500_000)
        assert read_answer(connection)[0] == 413


# ------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize(
    "told",
    [b"GET / HTT", b"GET / HTTP/1.1\r\nHost: a\r\n", post(b"half", "Content-Length: 8")],
)
def test_request_that_does_not_arrive_in_time_is_refused(tmp_path: Path, told: bytes) -> None:
    limits = ServerLimits(receive=0.05, linger=0.05)
    with serving(tmp_path, limits=limits) as site, closing(site.connect()) as connection:
        connection.sendall(told)
        assert statuses(read_all(connection)) == [408]


def test_sending_byte_by_byte_gains_no_time(tmp_path: Path) -> None:
    with (
        serving(tmp_path, limits=ServerLimits(receive=0.1, linger=60)) as site,
        closing(site.connect()) as connection,
    ):
        connection.settimeout(0.01)
        received = b""

        def drip() -> bool:
            nonlocal received
            try:
                connection.send(b"x")
                received += connection.recv(1000)
            except TimeoutError:
                pass
            except OSError:
                return True
            return b"\r\n\r\n" in received

        connection.sendall(b"GET /")
        eventually(drip, "a client that drips is refused")
        assert received.startswith(b"HTTP/1.1 408 ")


def test_connection_that_rests_too_long_is_closed(tmp_path: Path) -> None:
    with (
        serving(tmp_path, limits=ServerLimits(idle=0.05)) as site,
        closing(site.connect()) as never,
    ):
        assert never.recv(1) == b""

        def answered_and_closed() -> bool:
            try:
                with closing(site.connect()) as once:
                    once.sendall(GET)
                    return statuses(read_all(once)) == [200]
            except OSError:  # it was idle too long before its request arrived
                return False

        eventually(answered_and_closed, "a connection is closed after its answer")


def test_nonreading_client_is_disconnected(tmp_path: Path) -> None:
    async def large(_: HttpRequest) -> HttpResponse:
        return HttpResponse(200, bytes(8 << 20))

    with (
        serving(tmp_path, lambda _: large, ServerLimits(send=0.05)) as site,
        closing(site.connect_unix()) as connection,
    ):
        connection.sendall(GET * 3)
        hung_up = select.poll()
        hung_up.register(connection, select.POLLHUP)
        assert hung_up.poll(20_000)


def test_longest_idle_connection_is_closed_first(site: Site) -> None:
    with ExitStack() as stack:
        resting = [stack.enter_context(closing(site.connect())) for _ in range(4)]
        for connection in resting:
            connection.sendall(GET)
            read_answer(connection)
        late = stack.enter_context(closing(site.connect()))
        late.sendall(GET)
        assert read_answer(late)[0] == 200
        assert is_over(resting[0])
        resting[1].sendall(GET)
        assert read_answer(resting[1])[0] == 200


def is_over(connection: socket.socket) -> bool:
    """True if the other side has closed, with or without a shutdown."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_connection_beyond_the_limit_receives_retry_after(site: Site) -> None:
    with ExitStack() as stack:
        busy = [stack.enter_context(closing(site.connect())) for _ in range(4)]
        for connection in busy:
            connection.sendall(post(b"", "Expect: 100-continue", "Content-Length: 8"))
            assert connection.recv(100).startswith(b"HTTP/1.1 100 ")
        late = stack.enter_context(closing(site.connect()))
        answer = read_all(late)
        assert statuses(answer) == [503]
        assert b"Retry-After: 1" in answer
        busy[0].sendall(b"halfrest")
        assert read_answer(busy[0]) == (200, b"halfrest")


def test_connections_far_beyond_the_limit_are_closed_without_a_response(tmp_path: Path) -> None:
    limits = ServerLimits(connections=2, linger=60)
    with serving(tmp_path, limits=limits) as site:
        with ExitStack() as stack:
            for _ in range(2):
                busy = stack.enter_context(closing(site.connect()))
                busy.sendall(post(b"", "Expect: 100-continue", "Content-Length: 8"))
                assert busy.recv(100).startswith(b"HTTP/1.1 100 ")
            for _ in range(2):
                told = stack.enter_context(closing(site.connect()))
                assert read_answer(told)[0] == 503
            assert is_over(stack.enter_context(closing(site.connect())))
        eventually(lambda: b" 200 " in heard(site), "there is room again")


def heard(site: Site) -> bytes:
    try:
        return site.tell(GET)
    except OSError:
        return b""


def test_bodies_of_all_connections_have_one_bound(site: Site) -> None:
    with ExitStack() as stack:
        holding = [stack.enter_context(closing(site.connect())) for _ in range(3)]
        for connection in holding[:2]:
            connection.sendall(post(b"", "Expect: 100-continue", "Content-Length: 10000"))
            assert connection.recv(100).startswith(b"HTTP/1.1 100 ")
            connection.sendall(b"x" * 9_999)
        eventually(lambda: statuses(site.tell(post(b"x" * 6_000))) == [503], "the room is full")
        for connection in holding[:2]:
            connection.sendall(b"x")
            assert read_answer(connection)[0] == 200
        assert statuses(site.tell(post(b"x" * 10_000))) == [200]


# ----------------------------------------------------------------------------------- listening


def server() -> HttpServer:
    return HttpServer(SystemClock(), log=lambda _: None)


def test_port_in_use_is_one_sentence(site: Site) -> None:
    host, port = site.tcp
    with pytest.raises(ListenError) as caught:
        listen_tcp(host, port, what="spans", setting="[spans] http")
    assert str(caught.value) == (
        f"Cannot receive spans on 127.0.0.1:{port}: the port is in use; stop its user "
        f"(`ss -ltnp sport = :{port}` names it) or choose another address in [spans] http."
    )
    assert caught.value.exit_code == 4


def test_address_that_is_not_ours_is_one_sentence() -> None:
    with pytest.raises(ListenError, match="this host has no such address; choose another"):
        listen_tcp("192.0.2.1", 0, what="spans", setting="[spans] http")


def test_socket_that_is_answered_on_is_another_agents(site: Site) -> None:
    with pytest.raises(ListenError, match="another agent listens there; stop it, or set another"):
        listen_unix(site.unix, what="spans")
    with closing(site.connect_unix()) as connection:
        connection.sendall(GET)
        assert read_answer(connection)[0] == 200


def test_directory_that_cannot_be_had_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ListenError, match="file is no directory; set another"):
        listen_unix(tmp_path / "file" / "a.sock", what="spans")


def test_socket_of_a_dead_agent_is_replaced(tmp_path: Path) -> None:
    with closing(socket.socket(socket.AF_UNIX)) as dead:
        dead.bind(str(tmp_path / "web.sock"))
    with serving(tmp_path) as site, closing(site.connect_unix()) as connection:
        connection.sendall(GET)
        assert read_answer(connection)[0] == 200


def test_other_files_are_not_replaced_by_a_socket(tmp_path: Path) -> None:
    (tmp_path / "web.sock").write_text("precious")
    with pytest.raises(ListenError, match="something else has that name"):
        listen_unix(tmp_path / "web.sock", what="spans")
    assert (tmp_path / "web.sock").read_text() == "precious"


def test_path_too_long_for_a_socket_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ListenError, match="at most 107 bytes; set a shorter"):
        listen_unix(tmp_path / ("x" * 120), what="spans")


def test_socket_has_the_configured_mode(tmp_path: Path) -> None:
    listening = server()
    listening.add_http(listen_unix(tmp_path / "run" / "a.sock", 0o660, what="spans"), _silent)
    assert (tmp_path / "run" / "a.sock").stat().st_mode & 0o777 == 0o660
    listening.stop()


@pytest.mark.parametrize("umask", [0o077, 0o000])
def test_socket_permissions_do_not_depend_on_the_umask(tmp_path: Path, umask: int) -> None:
    program = f"""
import os
from pathlib import Path
from wattspan.http.sockets import listen_unix
os.umask({umask})
for mode in (0o666, 0o600):
    path = Path({str(tmp_path)!r}) / oct(mode)
    listen_unix(path, mode, what="spans")
    assert path.stat().st_mode & 0o777 == mode, oct(path.stat().st_mode)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


REPLACED = """
import os, stat, sys
from pathlib import Path
from wattspan.ports import ListenError
from wattspan.http.sockets import listen_unix

path, victim, moment = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
replaced = []

def replace(event, arguments):
    if event == moment and not replaced and path.is_socket():
        replaced.append(event)
        path.rename(path.with_name("moved"))
        path.symlink_to(victim)

sys.addaudithook(replace)
try:
    listen_unix(path, 0o666, what="spans")
except ListenError as error:
    print(error)
assert replaced, "the moment never came"
"""
"""Replaces the socket by a link in the moment before the agent opens it or changes its mode."""


@pytest.mark.parametrize("moment", ["open", "os.chmod"])
def test_socket_permissions_are_set_through_no_link(tmp_path: Path, moment: str) -> None:
    victim = tmp_path / "victim"
    victim.touch(mode=0o600)
    (tmp_path / "run").mkdir()
    command = [sys.executable, "-c", REPLACED, str(tmp_path / "run" / "a.sock"), str(victim)]
    done = subprocess.run([*command, moment], check=True, timeout=60, capture_output=True)
    assert stat.S_IMODE(victim.stat().st_mode) == 0o600
    assert (b"another user replaced the socket" in done.stdout) == (moment == "open")


@pytest.mark.parametrize(
    ("mode", "cause", "remedy"),
    [
        (0o777, "can be written by its group and every user", "run `chmod go-w"),
        (0o775, "can be written by its group,", "run `chmod go-w"),
        (0o1777, "can be written by its group and every user", "a directory inside it, such as"),
    ],
)
def test_run_directory_that_others_can_write_is_refused(
    tmp_path: Path, mode: int, cause: str, remedy: str
) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(ListenError) as caught:
        listen_unix(directory / "a.sock", 0o666, what="spans")
    assert f"{directory} {cause}" in str(caught.value)
    assert remedy in str(caught.value)
    assert list(directory.iterdir()) == []


@pytest.mark.needs_root
def test_run_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    os.chown(directory, 20_001, 20_001)
    with pytest.raises(ListenError, match="belongs to user 20001, who can replace the sockets"):
        listen_unix(directory / "a.sock", 0o666, what="spans")
    assert list(directory.iterdir()) == []


def test_directory_inside_a_sticky_one_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    listening = listen_unix(tmp_path / "shared" / "own" / "a.sock", 0o666, what="spans")
    listening.remove()
    listening.socket.close()


@pytest.mark.parametrize("host", ["", "::"] if socket.has_dualstack_ipv6() else [""])
def test_listening_to_the_network_both_families_are_heard(host: str) -> None:
    log: list[str] = []
    peers: list[Peer] = []

    async def remembered(request: HttpRequest) -> HttpResponse:
        peers.append(request.peer)
        return HttpResponse(204)

    wide = HttpServer(SystemClock(), log=log.append)
    tcp = listen_tcp(host, 0, what="OTLP/HTTP", setting="[spans] http")
    address = wide.add_http(tcp, remembered)
    port = int(address.rpartition(":")[2])
    wide.start()
    with closing(socket.create_connection(("127.0.0.1", port))) as one:
        one.sendall(GET)
        assert read_answer(one) == (204, b"")
        assert (peers[0].address, peers[0].local) == (one.getsockname(), ("127.0.0.1", port))
    wide.stop()
    assert log == []


# ------------------------------------------------------------------------------------ stopping


def open_files() -> set[str]:
    return {each.name for each in Path("/proc/self/fd").iterdir()}


def test_server_shutdown_leaves_no_files(tmp_path: Path) -> None:
    before, threads = open_files(), set(threading.enumerate())
    with serving(tmp_path) as site, ExitStack() as stack:
        for _ in range(5):
            connection = stack.enter_context(closing(site.connect()))
            connection.sendall(GET)
            read_answer(connection)
        stack.enter_context(closing(site.connect_unix()))
        refused = stack.enter_context(closing(site.connect()))
        refused.sendall(b"nonsense\r\n\r\n")
        read_answer(refused)
        site.server.stop()
        assert not site.unix.exists()
    assert open_files() <= before
    assert set(threading.enumerate()) <= threads


def test_active_request_completes_before_shutdown(tmp_path: Path) -> None:
    begun, go_on, slow = held_handler(b"done")
    with serving(tmp_path, lambda _: slow) as site, closing(site.connect()) as connection:
        connection.sendall(GET)
        assert begun.wait(20)
        stopping = threading.Thread(target=site.server.stop)
        stopping.start()
        go_on.set()
        assert read_answer(connection) == (200, b"done")
        stopping.join()


BUSY = """
import asyncio, threading
from pathlib import Path
from testbed.web import GET, serving
from wattspan.http.messages import HttpResponse

working = threading.Event()

def work():
    working.set()
    threading.Event().wait()

async def handler(_):
    await asyncio.to_thread(work)
    return HttpResponse(204)

with serving(Path({directory!r}), lambda _: handler) as site, site.connect() as client:
    client.sendall(GET)
    working.wait()
print("over")
"""


@pytest.mark.slow
def test_server_and_its_program_end_while_a_thread_works_aside(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BUSY.format(directory=str(tmp_path))],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert (done.returncode, done.stdout) == (0, "over\n"), done.stderr


def test_successor_keeps_its_socket_when_the_old_server_stops(tmp_path: Path) -> None:
    with serving(tmp_path) as old:
        old.unix.unlink()
        with serving(tmp_path) as new:
            old.server.stop()
            with closing(new.connect_unix()) as connection:
                connection.sendall(GET)
                assert read_answer(connection)[0] == 200


def test_server_that_never_started_stops(tmp_path: Path) -> None:
    idle = server()
    idle.add_http(listen_unix(tmp_path / "a.sock", what="spans"), _silent)
    idle.stop()
    idle.stop()
    assert not (tmp_path / "a.sock").exists()


def test_repeated_error_is_logged_once_a_minute() -> None:
    clock, said = ManualClock(), list[str]()
    server = HttpServer(clock, log=said.append)
    with closing(asyncio.new_event_loop()) as loop:
        loop.set_exception_handler(server._report_error)
        for _ in range(100):
            loop.call_exception_handler({"message": "no descriptors"})
        loop.call_exception_handler({"message": "another"})
        assert said == ["The web server: no descriptors.", "The web server: another."]
        clock.advance(61)
        loop.call_exception_handler({"message": "no descriptors"})
        assert len(said) == 3
        for number in range(200):
            loop.call_exception_handler({"message": f"kind {number}"})
        assert len(server._errors._logged) <= 50


def test_periodic_work_runs_in_a_worker_thread_while_it_is_due() -> None:
    checks, ran = list[str](), list[str]()
    due = threading.Event()

    def is_due() -> bool:
        checks.append(threading.current_thread().name)
        return due.is_set()

    server = HttpServer(ManualClock(), log=print, name="periodic")
    server.every(lambda: 0.001, lambda: ran.append(threading.current_thread().name), due=is_due)
    server.start()
    try:
        eventually(lambda: len(checks) > 3, "it is checked again")
        assert not ran
        due.set()
        eventually(lambda: ran, "the work runs")
    finally:
        server.stop()
    assert set(checks) == {"wattspan-periodic"}
    assert all(name.startswith("wattspan-aside-") for name in ran)
