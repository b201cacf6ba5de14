"""Rates that are looked up: accepted rates, their lifetime, and the messages without one."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest
from testbed.rate_server import answer, serving, vector
from testbed.waiting import eventually

from wattspan.footprint.price_and_carbon import (
    ConstantRate,
    ExternalRate,
    NumberError,
    PolledRate,
    TariffRate,
    TimedNumber,
    parse_number,
    query_number,
    read_number,
)
from wattspan.model import SECOND, Instant, RateOrigin, Trouble
from wattspan.testing import ManualClock

BILLION = 10**9


# ------------------------------------------------------------------------------ asking a server


def test_rate_is_the_single_value_of_the_query_result() -> None:
    with serving(vector("87.5")) as (url, asked):
        assert query_number(f"{url}/", 'avg(price{zone="DE"})', 5) == (87.5, 0)
    assert asked == ["/api/v1/query?query=avg%28price%7Bzone%3D%22DE%22%7D%29"]


def test_scalar_is_a_number_too() -> None:
    assert parse_number(answer("scalar", [1.5, "0.3"])) == 0.3


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (vector(), "the query yields nothing"),
        (vector("1", "2", "3"), r"yields 3 series; make it one, as with avg\(\)"),
        (answer("matrix", []), 'yields a "matrix" instead of a number'),
        (b"<html>", "not that of a Prometheus server"),
        (b"", "not that of a Prometheus server"),
        (b"[]", "not that of a Prometheus server"),
        (b"null", "not that of a Prometheus server"),
        (b'{"status":"success"}', "not that of a Prometheus server"),
        (b'{"status":"success","data":{"resultType":"vector","result":[1]}}', "not that of"),
        (b"[" * 60_000, "not that of a Prometheus server"),
        (vector("many"), "not that of a Prometheus server"),
        (b'{"status":"error","error":"parse error\\n1:1"}', r'reports "parse error\?1:1"'),
    ],
)
def test_query_result_without_a_single_value_is_reported(body: bytes, why: str) -> None:
    with pytest.raises(NumberError, match=why) as caught:
        parse_number(body)
    assert caught.value.answered


def test_http_error_is_reported_by_reason_or_status() -> None:
    reason = b'{"status":"error","errorType":"bad_data","error":"unknown function"}'
    with (
        serving(reason, status=400) as (url, _),
        pytest.raises(NumberError, match='the server reports "unknown function"'),
    ):
        query_number(url, "x", 5)
    with serving(b"no", status=503) as (url, _), pytest.raises(NumberError, match="answers 503"):
        query_number(url, "x", 5)


def test_redirects_to_other_servers_are_not_followed() -> None:
    with serving(vector("1")) as (other, asked):
        moved = serving(b"", status=302, headers={"Location": f"{other}/api/v1/query"})
        with moved as (url, _), pytest.raises(NumberError, match="answers 302"):
            query_number(url, "x", 5)
    assert asked == []


def test_endless_response_is_bounded() -> None:
    with serving(b" " * 200_000) as (url, _), pytest.raises(NumberError, match="too long"):
        query_number(url, "x", 5)


def test_refused_connection_is_a_failed_query() -> None:
    with socket.socket() as taken:  # bound, and not listening
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(NumberError, match="connection refused") as caught:
            query_number(url, "x", 5)
    assert not caught.value.answered


def test_silent_server_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(NumberError, match="timed out") as caught:
            query_number(url, "x", 0.05)
    assert not caught.value.answered


def test_non_http_server_is_a_failed_query() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def babble() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"SSH-2.0-OpenSSH\r\n\r\n")

        thread = threading.Thread(target=babble)
        thread.start()
        with pytest.raises(NumberError):
            query_number(f"http://127.0.0.1:{server.getsockname()[1]}", "x", 5)
        thread.join()


# -------------------------------------------------------------------------------- reading a file


def test_file_is_one_number_as_old_as_the_file(tmp_path: Path) -> None:
    path = tmp_path / "price"
    path.write_text(" 0.287\n")
    os.utime(path, (1000, 1000))
    assert read_number(path, 1030 * SECOND) == (0.287, 30 * SECOND)
    assert read_number(path, 990 * SECOND) == (0.287, 0)  # a clock that was set back


@pytest.mark.parametrize("text", ["", "dear", "0.3 EUR", "1\n2", "\xff", "x" * 100_000])
def test_rate_file_without_a_single_number_is_reported(tmp_path: Path, text: str) -> None:
    path = tmp_path / "price"
    path.write_text(text)
    with pytest.raises(NumberError, match="is not a number") as caught:
        read_number(path, 0)
    assert len(str(caught.value)) < 100


def test_missing_rate_file_is_a_failed_read(tmp_path: Path) -> None:
    with pytest.raises(NumberError, match="no such file"):
        read_number(tmp_path / "none", 0)
    with pytest.raises(NumberError, match="is a directory"):
        read_number(tmp_path, 0)


# -------------------------------------------------------------------------------- accepted rates


class Oracle:
    """Returns or raises the scripted value."""

    def __init__(self, says: TimedNumber | Exception) -> None:
        self.says = says

    def __call__(self) -> TimedNumber:
        if isinstance(self.says, Exception):
            raise self.says
        return self.says


class Scene:
    """A figure that asks an oracle, and the clock that they share."""

    def __init__(self, factor: float = 1.0) -> None:
        self.clock = ManualClock()
        self.oracle = Oracle(TimedNumber(0.3))
        self.figure = ExternalRate(
            "cost", "the price from somewhere", self.oracle, self.clock,
            factor=factor, interval=SECOND, max_age=60 * SECOND,
        )  # fmt: skip

    def look(self, says: TimedNumber | Exception | None = None) -> int | None:
        if says is not None:
            self.oracle.says = says
        self.figure.poll()
        return self.figure.at(self.clock.now())


def test_rate_is_unknown_before_the_first_response() -> None:
    scene = Scene()
    assert scene.figure.at(scene.clock.now()) is None
    assert scene.figure.health().up


def test_answer_is_multiplied_by_the_factor() -> None:
    assert Scene(factor=0.001).look(TimedNumber(87.43)) == 87_430_000


def test_last_rate_is_used_until_it_expires() -> None:
    scene = Scene()
    scene.look()
    scene.clock.advance(60)
    assert scene.look(NumberError("connection refused", answered=False)) == 300_000_000
    scene.clock.advance(1)
    assert scene.figure.at(scene.clock.now()) is None
    assert scene.look(TimedNumber(0.4)) == 400_000_000


def test_rate_expires_during_suspend() -> None:
    scene = Scene()
    scene.look()
    woken = scene.clock.now()
    assert scene.figure.at(woken._replace(asleep=woken.asleep + 60 * SECOND)) == 300_000_000
    assert scene.figure.at(woken._replace(asleep=woken.asleep + 61 * SECOND)) is None


@pytest.mark.parametrize("number", [-0.01, float("nan"), float("inf"), -float("inf"), 1e7, 1e300])
def test_invalid_rate_makes_the_rate_unknown_at_once(number: float) -> None:
    scene = Scene()
    scene.look()
    assert scene.look(TimedNumber(number)) is None
    (failure,) = scene.figure.health().failures
    assert "is no rate per kilowatt-hour" in str(failure)
    assert failure.trouble is Trouble.MALFORMED


def test_zero_price_is_valid() -> None:
    assert Scene().look(TimedNumber(0.0)) == 0


def test_stale_rate_file_is_unknown() -> None:
    scene = Scene()
    assert scene.look(TimedNumber(0.3, age=61 * SECOND)) is None
    assert "it was last written 61s ago" in str(scene.figure.health().failures[0])
    assert scene.look(TimedNumber(0.3, age=59 * SECOND)) == 300_000_000
    scene.clock.advance(2)
    assert scene.figure.at(scene.clock.now()) is None


def test_failures_are_reported_until_recovery() -> None:
    scene = Scene()
    refused = NumberError("connection refused", answered=False)
    for says in (refused, TimedNumber(1), refused):
        scene.look(says)
    health = scene.figure.health()
    assert (health.source, health.up, health.reads, health.failed) == ("cost", False, 3, 2)
    (failure,) = health.failures
    assert failure.trouble is Trouble.RETRY
    assert str(failure) == (
        "Cannot read the price from somewhere: connection refused. Energy without a known rate "
        "is reported separately and is in no total."
    )
    scene.look(TimedNumber(2))
    assert (scene.figure.health().up, scene.figure.health().failures) == (True, ())


def test_unexpected_error_loses_only_the_rate() -> None:
    scene = Scene()
    assert scene.look(RuntimeError("oh")) is None
    assert "RuntimeError: oh" in str(scene.figure.health().failures[0])


def test_constant_is_always_known() -> None:
    assert ConstantRate(5).at(Instant(0, 0)) == 5
    assert ConstantRate(5).origin is RateOrigin.CONSTANT


# ----------------------------------------------------------------------------- the tariff's file


def tariff(path: Path, rate: float) -> None:
    path.write_text(f'zone = "UTC"\notherwise = {rate}\n')


def told(rate: TariffRate) -> str:
    (failure,) = rate.health().failures
    return str(failure)


def test_changed_tariff_file_is_reloaded(tmp_path: Path) -> None:
    path = tmp_path / "tariff.toml"
    tariff(path, 0.25)
    rate = TariffRate("cost", path)
    assert rate.at(Instant(0, 0)) == BILLION // 4
    tariff(path, 0.125)
    rate.poll()
    assert rate.at(Instant(0, 0)) == BILLION // 8
    assert rate.health().up


def test_invalid_tariff_change_keeps_the_last_valid_one(tmp_path: Path) -> None:
    path = tmp_path / "tariff.toml"
    tariff(path, 0.25)
    rate = TariffRate("cost", path)
    path.write_text('zone = "UTC"\notherwise = -1\n[[period]]\n')
    rate.poll()
    rate.poll()
    assert rate.at(Instant(0, 0)) == BILLION // 4
    assert told(rate).startswith(f"Cannot read the tariff {path}: {path}:2: ")
    assert told(rate).endswith(
        "(1 more: see `wattspan doctor`). The previous schedule stays in force."
    )
    path.unlink()
    rate.poll()
    assert rate.at(Instant(0, 0)) == BILLION // 4
    tariff(path, 0.5)
    rate.poll()
    assert rate.at(Instant(0, 0)) == BILLION // 2
    assert rate.health().up


def test_missing_tariff_is_unknown_until_created(tmp_path: Path) -> None:
    path = tmp_path / "tariff.toml"
    rate = TariffRate("cost", path)
    assert rate.at(Instant(0, 0)) is None
    assert told(rate) == (
        f"Cannot read the tariff {path}: there is no such file. Write one, or name another. "
        "No rate is known."
    )
    tariff(path, 0.5)
    rate.poll()
    assert rate.at(Instant(0, 0)) == BILLION // 2


def test_restored_tariff_file_clears_the_error(tmp_path: Path) -> None:
    path, aside = tmp_path / "tariff.toml", tmp_path / "aside"
    tariff(path, 0.5)
    rate = TariffRate("cost", path)
    path.rename(aside)
    rate.poll()
    assert not rate.health().up
    aside.rename(path)
    rate.poll()
    assert rate.health().up


# ------------------------------------------------------------------------------------ its thread


class Counting(PolledRate):
    def __init__(self, interval: int) -> None:
        super().__init__("cost", interval)
        self.looked = 0

    def _poll(self) -> None:
        self.looked += 1


@pytest.mark.parametrize(("interval", "polls"), [(1_000_000, 3), (3600 * SECOND, 1)])
def test_poller_reads_at_once_and_periodically_until_its_stop(interval: int, polls: int) -> None:
    counting, stop = Counting(interval), threading.Event()
    thread = threading.Thread(target=counting.run, args=(stop,))
    thread.start()
    eventually(lambda: counting.looked >= polls, "so many polls")
    stop.set()
    thread.join(20)
    assert not thread.is_alive()
