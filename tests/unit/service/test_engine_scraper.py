"""The reader of engines' pages: whom it believes, what it sends, and the energy of the tokens."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from testbed.engine_pages import VLLM, joined, page
from testbed.token_host import CPU_SHARE, TICK, WATTS, TokenHost

from wattspan.config import ServingEngineSettings
from wattspan.inference.engine_energy import Estimate
from wattspan.inference.engine_metrics import MAX_BODY
from wattspan.model import Checkpoint, Consumer, EngineRow, Microjoules, PayerInfo, Principal
from wattspan.model.settings import Duration
from wattspan.processes.inspector import LiveProcess, SocketOwner
from wattspan.service.engine_finder import EngineFinder
from wattspan.service.engine_neighbours import EngineNeighbours
from wattspan.service.engine_scraper import (
    PAUSE,
    EngineScraper,
    _rounded,
    engine_rows,
)
from wattspan.storage.deltas import spans_between, total_usage
from wattspan.util.http_get import FetchError, HttpAnswer, KeptConnection

Answer = HttpAnswer | Exception


class Kernel:
    """The processes of a host, and the one that holds the other end of each connection."""

    shortage: OSError | None = None

    def __init__(self, host: TokenHost, listener: str | None) -> None:
        self.host, self.listener = host, listener
        self.visible = self.proven = True

    def _info(self, pid: int) -> PayerInfo | None:
        name = next((name for name, one in self.host.pids.items() if one == pid), None)
        return None if name is None else self.host._info(name)

    def owner_of(self, end: object, other: object) -> SocketOwner | None:
        if self.listener is None:
            return None
        pid = self.host.pids[self.listener]
        principal = self._info(pid).principal
        return SocketOwner(principal.user, pid, 1)

    def socket_principal(self, owner: SocketOwner) -> Principal | None:
        return self._info(owner.inode).principal if self.proven else None

    def holds(self, pid: int, inode: int) -> bool | None:
        return pid == inode if self.visible else None

    def pids(self) -> list[int]:
        return list(self.host.pids.values())

    def user_id(self, pid: int) -> int | None:
        return self._info(pid).principal.user

    def principal(self, pid: int) -> Principal | None:
        return self._info(pid).principal

    def identify(self, pid: int) -> Consumer | None:
        info = self._info(pid)
        return None if info is None else info.payer

    def cgroup(self, pid: int) -> str | None:
        return None

    def look(self, pid: int) -> LiveProcess | None:
        info = self._info(pid)
        if info is None:
            return None
        users = frozenset({info.principal.user})
        return LiveProcess(
            info.payer, info.parent, pid, users, info.principal, (pid,), False, False
        )

    def describe(self, consumer: Consumer) -> PayerInfo | None:
        return self._info(consumer.pid)


class Pages:
    """A connection to an engine whose answers are given; it counts what was sent."""

    def __init__(self, answer: Callable[[str], Answer]) -> None:
        self._answer = answer
        self.connected = False
        self.opened: Callable[[], object] = lambda: None
        self.sent: list[tuple[str, Mapping[str, str]]] = []

    def open(self, timeout: float) -> None:
        if not self.connected:
            self.opened()
        self.connected = True

    @property
    def ends(self) -> Any:
        return (("127.0.0.1", 40_000), ("127.0.0.1", 8000)) if self.connected else None

    def get(
        self, path: str, *, timeout: float, most: int, headers: Mapping[str, str]
    ) -> HttpAnswer:
        self.sent.append((path, headers))
        answer = self._answer(path)
        if isinstance(answer, Exception):
            self.close()
            raise answer
        return answer

    def close(self) -> None:
        self.connected = False


UNIT = {"unit": "vllm.service"}
ENGINE = ({"name": "api", **UNIT}, {"name": "worker", "parent": "api", "gpu": "g0", **UNIT})
STRANGER = {"name": "squatter", "user": 1001}
GPU_USER = {"name": "user", "user": 1003, "gpu": "g1"}


class Stage:
    """A host in virtual time with an engine that generates 50 tokens a second."""

    def __init__(
        self,
        processes: Sequence[Mapping[str, Any]] = ENGINE,
        listener: str | None = "api",
        host: TokenHost | None = None,
        neighbours: EngineNeighbours | None = None,
        **settings: Any,
    ) -> None:
        self.host = host or TokenHost(processes)
        self.kernel = Kernel(self.host, listener)
        self.host.run(1)
        self.answer: Answer | None = None
        self.rate, self.model, self.zero = 50, "m", 0
        self.pages = Pages(self._page)
        self.settings = ServingEngineSettings(**{"url": "http://127.0.0.1:8000", **settings})
        self.listeners: dict[Consumer, str] = {}
        self.offered: list[Any] = []
        finder = EngineFinder(
            self.settings, self.host.clock, self.host.history, self.kernel, self.kernel,
            self.listeners,
        )  # fmt: skip
        self.scraper = EngineScraper(
            self.settings, self.host.clock, self.host.history, finder, self.pages,
            observe=lambda *page: self.offered.append(page),
            neighbours=neighbours,
        )  # fmt: skip

    def _page(self, path: str) -> Answer:
        if path != "/metrics":
            return HttpAnswer(404, b"")
        if self.answer is not None:
            return self.answer
        tokens = self.rate * self.host.clock.monotonic() // 10**9 - self.zero
        body = page(VLLM, self.model, prompt=4 * tokens, generated=tokens, finished=tokens // 100)
        return HttpAnswer(200, body)

    def run(self, seconds: int) -> tuple[EngineRow, ...]:
        """Read each 5 s for some time."""
        for _ in range(seconds // 5):
            self.scraper.turn()
            self.host.run(5)
        return self.scraper.rows

    @property
    def failure(self) -> str:
        (health,) = self.scraper.health()
        assert health.up == (not health.failures)
        return " ".join(map(str, health.failures))


def test_engine_has_the_energy_of_its_workers_for_each_token() -> None:
    stage = Stage(name="chat")
    (row,) = stage.run(120)
    assert stage.failure == ""
    value, uncertainty = row.token_energy["all"]
    assert value == pytest.approx(WATTS * 1e6 / 250, rel=0.01)
    assert 0 < uncertainty < 0.01 * value
    assert row.key == ("chat", "m", row.owner)
    assert row.owner
    assert row.tokens["input"] == 4 * row.tokens["output"]
    assert row.energy == pytest.approx(WATTS * 1e6 * row.tokens["output"] / 50, rel=0.01)


def test_connection_is_kept_and_a_closed_one_is_opened_again() -> None:
    stage = Stage()
    stage.run(20)
    stage.answer = FetchError("the connection was closed")
    stage.run(5)
    assert "the connection was closed" in stage.failure
    stage.answer = None
    assert stage.run(100)
    assert stage.failure == ""


def test_first_request_that_a_kept_connection_fails_is_repeated() -> None:
    stage = Stage()
    stage.run(10)
    failures = iter([FetchError("remote end closed connection")])
    usual = stage._page
    stage.pages._answer = lambda path: next(failures, None) or usual(path)
    stage.run(5)
    assert stage.failure == ""


def assert_one_engine(stage: Stage) -> None:
    """Three servers answer in turn, and all tokens and joules are those of one engine."""
    for number in range(30):
        stage.kernel.listener = f"api{number % 3}"
        stage.pages.close()
        stage.run(5)
    (row,) = stage.scraper.rows
    assert row.token_energy["all"][0] == pytest.approx(WATTS * 1e6 / 250, rel=0.01)


def test_requests_to_several_api_servers_of_an_engine_are_one_engine() -> None:
    servers = [{"name": f"api{n}", "parent": "main", **UNIT} for n in range(3)]
    worker = {"name": "worker", "parent": "main", "gpu": "g0", **UNIT}
    stage = Stage(({"name": "main", **UNIT}, *servers, worker), "api0")
    assert_one_engine(stage)
    assert len(stage.listeners) == 1


def test_servers_of_a_named_engine_are_one_engine() -> None:
    servers = [{"name": f"api{n}", **UNIT} for n in range(3)]
    stage = Stage((*servers, {**ENGINE[1], "parent": "api0"}), "api0", process="vllm.service")
    assert_one_engine(stage)


def test_series_that_a_page_lacks_once_does_not_count_its_whole_time() -> None:
    stage = Stage()
    (before,) = stage.run(120)
    whole = stage._page("/metrics").body
    stage.answer = HttpAnswer(
        200, b"\n".join(
            line.rpartition(b" ")[0] + b" NaN" if b"generation_tokens_total" in line else line
            for line in whole.split(b"\n")
        )
    )  # fmt: skip
    stage.run(5)
    stage.answer = None
    (after,) = stage.run(60)
    assert after.tokens["output"] - before.tokens["output"] <= 70 * stage.rate


def test_no_request_is_repeated_at_the_end() -> None:
    stage = Stage()
    stage.run(10)
    stage.answer = FetchError("timed out")
    sent = len(stage.pages.sent)
    stage.scraper._stop.set()
    stage.run(5)
    assert len(stage.pages.sent) == sent + 1


def test_turn_that_takes_long_is_followed_by_a_pause() -> None:
    stage, waits = Stage(), list[float]()

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0)
            stage.host.run(timeout or 0)
            return len(waits) > 4

    usual = stage._page
    stage.pages._answer = lambda path: (stage.host.run(12), usual(path))[1]
    stage.scraper.run(Stop())
    assert min(waits[1:]) >= stage.settings.interval / 2e9


@pytest.mark.parametrize("doubt", [1, 4])
def test_doubt_of_the_division_among_engines_is_stated(doubt: int) -> None:
    other = (
        {"name": "api2", "user": 1001},
        {"name": "worker2", "parent": "api2", "gpu": "g0", "user": 1001},
    )
    stage = Stage((*ENGINE, *other))
    stage.host.doubt = Microjoules(WATTS * 10_000 * doubt)  # of 5 W s in a tenth of a second
    (row,) = stage.run(120)
    if doubt == 4:
        assert not row.token_energy
        return
    value, uncertainty = row.token_energy["all"]
    assert uncertainty / value == pytest.approx(0.2 * doubt, abs=0.01)


def test_token_is_not_sent_where_the_kernel_shows_the_user_only(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("geheim")
    secret.chmod(0o600)
    stage = _unprivileged(ENGINE, "api", token_file=str(secret), process="vllm.service")
    stage.kernel.proven = False
    stage.run(10)
    assert stage.pages.sent == []
    assert "only the user" in stage.failure
    stage.kernel.visible = True
    stage.run(10)
    assert stage.failure == ""


def test_root_that_may_be_the_proxy_of_a_port_is_no_engine() -> None:
    program = {"name": "train", "user": 0, "gpu": "g0"}
    stage = _unprivileged((program, PROXY), "docker-proxy")
    assert stage.run(120) == ()
    assert "root listens there" in stage.failure


def test_uncertainty_is_never_rounded_to_none() -> None:
    assert _rounded(Estimate(100.4, 0.1)) == (100, 1)


def test_token_is_sent_again_after_the_engine_has_closed_the_connection(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("geheim")
    secret.chmod(0o600)
    stage = Stage(token_file=str(secret), process="vllm.service")
    stage.run(10)
    stage.kernel.listener = None  # the connection has ended at the engine's side
    stage.pages.opened = lambda: setattr(stage.kernel, "listener", "api")
    stage.run(5)
    assert stage.failure == ""


def test_figures_vanish_with_the_engine() -> None:
    stage = Stage()
    (row,) = stage.run(120)
    stage.answer = FetchError("refused")
    (later,) = stage.run(120)
    assert row.token_energy
    assert not later.token_energy
    assert later.tokens["output"] >= row.tokens["output"]


def test_engine_that_moves_to_another_gpu_has_its_energy() -> None:
    stage = Stage((*ENGINE, {"name": "other", "user": 1002, "gpu": "g1"}))
    stage.run(60)
    stage.host.processes["other"] = {"name": "other", "user": 1002, "gpu": "g0"}
    stage.host.processes["worker"] = {**stage.host.processes["worker"], "gpu": "g1"}
    (row,) = stage.run(150)
    assert row.token_energy["all"][0] == pytest.approx(WATTS * 1e6 / 250, rel=0.01)


def test_engine_that_loses_a_gpu_has_the_energy_of_the_other_one() -> None:
    workers = [{"name": f"worker{n}", "parent": "api", "gpu": f"g{n}", **UNIT} for n in range(2)]
    stage = Stage(({"name": "api", **UNIT}, *workers))
    (row,) = stage.run(120)
    assert row.token_energy["all"][0] == pytest.approx(2 * WATTS * 1e6 / 250, rel=0.01)
    stage.host.gpus.remove("g1")
    (row,) = stage.run(240)
    assert row.token_energy["all"][0] == pytest.approx(WATTS * 1e6 / 250, rel=0.01)


def test_squatter_of_the_port_is_not_believed() -> None:
    stage = Stage((*ENGINE, STRANGER), "squatter")
    assert stage.run(120) == ()
    assert "has used no GPU" in stage.failure


def test_squatter_that_uses_another_gpu_has_its_own_energy_only() -> None:
    stage = Stage((*ENGINE, {**STRANGER, "gpu": "g1"}), "squatter", process="vllm.service")
    assert stage.run(120) == ()
    assert "no process of 'vllm.service'" in stage.failure


@pytest.mark.parametrize("listener", ["squatter", "user", None])
def test_token_is_sent_to_the_engine_only(tmp_path: Path, listener: str | None) -> None:
    secret = tmp_path / "token"
    secret.write_text("geheim\n")
    secret.chmod(0o600)
    stage = Stage(
        (*ENGINE, STRANGER, GPU_USER), listener, token_file=str(secret), process="vllm.service"
    )
    stage.run(30)
    assert stage.pages.sent == []
    assert stage.failure
    stage.kernel.listener = "api"
    assert stage.run(120)
    assert {headers["Authorization"] for _, headers in stage.pages.sent} == {"Bearer geheim"}


@pytest.mark.parametrize(("content", "mode"), [("a", 0o644), ("", 0o600), ("a b", 0o600)])
def test_token_of_an_open_or_bad_file_is_not_sent(tmp_path: Path, content: str, mode: int) -> None:
    secret = tmp_path / "token"
    secret.write_text(content)
    secret.chmod(mode)
    stage = Stage(token_file=str(secret), process="vllm.service")
    assert stage.run(30) == ()
    assert stage.pages.sent == []
    assert str(secret) in stage.failure


def test_connection_that_no_process_has_accepted_is_proven_after_the_answer() -> None:
    stage = Stage(listener=None)
    usual = stage._page

    def accepted(path: str) -> Answer:
        stage.kernel.listener = "api"
        return usual(path)

    stage.pages._answer = accepted
    stage.run(5)
    assert stage.failure == ""


def test_token_is_sent_once_the_engine_has_accepted_the_connection(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("geheim")
    secret.chmod(0o600)
    stage = Stage(token_file=str(secret), process="vllm.service")
    usual, asked = stage.kernel.owner_of, iter(range(3))
    finder = stage.scraper._finder._request
    finder.owner_of = lambda end, other: (
        None if next(asked, None) is not None else usual(end, other)
    )
    stage.run(5)
    assert stage.failure == ""
    assert stage.pages.sent


PROXY = {"name": "docker-proxy", "user": 0}


@pytest.mark.parametrize("process", ["vllm.service", "pid"])
def test_root_of_the_host_may_stand_in_for_the_named_processes(process: str) -> None:
    stage = Stage((*ENGINE, PROXY), "docker-proxy", process=process.replace("pid", "1000"))
    (row,) = stage.run(120)
    assert row.token_energy["all"][0] == pytest.approx(WATTS * 1e6 / 250, rel=0.01)


def test_container_is_named_by_its_whole_id() -> None:
    inside = {"container": "0123456789ab"}
    stage = Stage([{**each, **inside} for each in ENGINE], process="0123456789ab" + "f" * 52)
    stage.run(10)
    assert stage.failure == ""


@pytest.mark.parametrize("process", ["other.service", "99999"])
def test_named_processes_without_a_gpu_have_no_figure(process: str) -> None:
    stage = Stage(process=process)
    assert stage.run(120) == ()
    assert f"no process of '{process}' uses a GPU" in stage.failure


# --------------------------------------- without rights to see the descriptors of other users

WORKERS = (
    {"name": "main"},
    {"name": "core", "parent": "main", "command": "VLLM::EngineCore"},
    *({"name": f"worker{n}", "parent": "core", "gpu": f"g{n}"} for n in range(2)),
)
SECOND = ({"name": "api2"}, {"name": "worker2", "parent": "api2", "gpu": "g0"})


def _unprivileged(*args: Any, **settings: Any) -> Stage:
    stage = Stage(*args, **settings)
    stage.kernel.visible = False
    return stage


@pytest.mark.parametrize(
    ("processes", "listener", "boards"), [(ENGINE, "api", 1), (WORKERS, "main", 2)]
)
def test_single_program_of_the_listeners_user_on_gpus_is_the_engine(
    processes: Any, listener: str, boards: int
) -> None:
    stage = _unprivileged((*processes, {**GPU_USER, "gpu": "g9"}), listener)
    (row,) = stage.run(120)
    assert stage.failure == ""
    assert row.token_energy["all"][0] == pytest.approx(boards * WATTS * 1e6 / 250, rel=0.01)


@pytest.mark.parametrize(
    ("others", "words"),
    [
        (SECOND, "several programs"),
        (({"name": "main", "command": "bash"},), ""),
    ],
)
def test_several_programs_of_the_user_need_a_name(others: Any, words: str) -> None:
    stage = _unprivileged((*ENGINE, *others), "api")
    rows = stage.run(120)
    assert words in stage.failure
    assert bool(rows) == (not words)


@pytest.mark.parametrize("shell", ["bash", "tmux: server"])
def test_programs_of_one_shell_are_several(shell: str) -> None:
    programs = [{"name": f"llama{n}", "parent": "shell", "gpu": "g0"} for n in range(2)]
    stage = _unprivileged(({"name": "shell", "command": shell}, *programs), "llama0")
    assert stage.run(120) == ()
    assert "several programs" in stage.failure


def test_listener_of_another_user_is_not_the_engine() -> None:
    stage = _unprivileged((*ENGINE, STRANGER), "squatter")
    assert stage.run(120) == ()
    assert "has none on GPUs" in stage.failure


def test_named_unit_is_proven_by_its_user() -> None:
    stage = _unprivileged((*ENGINE, *SECOND, STRANGER), "api", process="vllm.service")
    stage.host.doubt = Microjoules(1)
    (row,) = stage.run(120)
    assert row.token_energy["all"][0] == pytest.approx(WATTS * 1e6 / 250 / 2, rel=0.01)
    stage.kernel.listener = "squatter"
    stage.pages.close()
    stage.run(10)
    assert "no process of 'vllm.service'" in stage.failure


def test_one_program_is_not_two_engines() -> None:
    stage = _unprivileged(ENGINE, "api")
    stage.listeners[stage.host.consumers["worker"]] = "another"
    assert stage.run(120) == ()
    assert "another" in stage.failure


def test_engines_of_two_users_on_one_gpu_have_their_own_energy() -> None:
    other = (
        {"name": "api2", "user": 1001},
        {"name": "worker2", "parent": "api2", "gpu": "g0", "user": 1001},
    )
    stage = Stage((*ENGINE, *other))
    (row,) = stage.run(120)
    assert row.energy == pytest.approx(WATTS * 1e6 * row.tokens["output"] / 50 / 2, rel=0.01)
    assert not row.token_energy  # the error of the division is unknown
    stage.host.doubt = Microjoules(1)
    (row,) = stage.run(120)
    assert row.token_energy["all"][0] == pytest.approx(WATTS * 1e6 / 250 / 2, rel=0.01)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (HttpAnswer(302, b""), "redirects are not followed"),
        (HttpAnswer(401, b""), "401"),
        (HttpAnswer(200, b"<html>vllm:prompt_tokens_total 5</html>"), "HTML"),
        (HttpAnswer(200, b"\nup 1\n"), "not the counters"),
        (HttpAnswer(200, b"x" * (MAX_BODY + 1)), "larger than"),
        (FetchError("timed out"), "timed out"),
    ],
)
def test_bad_answer_is_a_failure_and_no_figure(answer: Answer, words: str) -> None:
    stage = Stage()
    stage.run(80)
    stage.answer = answer
    (row,) = stage.run(120)
    assert words in stage.failure
    stage.answer = None
    (after,) = stage.run(int(PAUSE / 1e9) + 120)
    assert stage.failure == ""
    assert after.tokens["output"] > row.tokens["output"]
    assert after.token_energy["all"][0] == pytest.approx(WATTS * 1e6 / 250, rel=0.01)


def test_figures_vanish_while_something_else_than_a_page_is_not_read() -> None:
    stage = Stage()
    assert stage.run(120)[0].token_energy
    stage.answer = HttpAnswer(200, b"[{}]")
    assert not stage.run(120)[0].token_energy


def test_page_is_sought_again_where_it_has_moved() -> None:
    stage = Stage()
    stage.run(20)
    usual = stage._page
    stage.pages._answer = lambda path: usual(
        path.replace("/prometheus/metrics", "/metrics") if path != "/metrics" else "/gone"
    )
    stage.run(20)
    assert stage.failure == ""
    assert stage.pages.sent[-1][0] == "/prometheus/metrics"


def test_json_is_not_read_again_for_a_while() -> None:
    stage = Stage()
    stage.answer = HttpAnswer(200, b"[{}]")
    stage.run(300)
    assert [path for path, _ in stage.pages.sent] == ["/prometheus/metrics", "/metrics"]


def test_named_tensorrt_llm_is_never_asked_for_its_json() -> None:
    stage = Stage(kind="tensorrt-llm")
    stage.run(30)
    assert {path for path, _ in stage.pages.sent} == {"/prometheus/metrics"}


def test_restart_of_the_engine_costs_one_interval() -> None:
    stage = Stage()
    (before,) = stage.run(120)
    stage.zero = stage.rate * stage.host.clock.monotonic() // 10**9
    (later,) = stage.run(75)
    assert later.tokens["output"] - before.tokens["output"] <= 75 * stage.rate
    assert later.token_energy["all"][0] == pytest.approx(WATTS * 1e6 / 250, rel=0.01)


def test_another_model_has_a_row_of_its_own_and_models_are_bounded() -> None:
    stage = Stage()
    for number in range(12):
        stage.model = f"m{number}"
        stage.run(20)
    rows = stage.run(20)
    assert len(rows) <= 9
    assert {"m0", "other"} <= {row.model for row in rows}


def test_thread_ends_and_closes_its_connection() -> None:
    stage = Stage()
    stop = threading.Event()
    stop.set()
    stage.scraper.run(stop)
    assert not stage.pages.connected


def test_default_label_and_interval() -> None:
    settings = ServingEngineSettings(url="http://127.0.0.1:8000")
    assert settings.label == "127.0.0.1:8000"
    assert settings.interval == Duration.parse("5s")


# ---------------------------------------------------------------------- the whole host


def test_engine_has_the_energy_of_the_whole_host_by_part() -> None:
    (row,) = Stage().run(120)
    assert row.host.energy.keys() == {"gpu", "cpu"}
    assert row.host.energy["gpu"] == row.energy
    ticks = row.energy / (WATTS * TICK / 1000)
    assert row.host.energy["cpu"] == pytest.approx(len(ENGINE) * CPU_SHARE * ticks, rel=1e-6)
    assert (row.host.tokens, row.host.requests) == (row.tokens, row.requests)


def test_energy_without_that_of_the_cpu_is_not_the_whole_hosts() -> None:
    stage = Stage()
    stage.host.counts_cpu = False
    (row,) = stage.run(120)
    assert row.energy
    assert (row.host.energy, row.host.tokens, row.host.requests) == ({}, {}, 0)


def test_lost_counter_of_the_cpu_ends_the_energy_of_the_whole_host() -> None:
    stage = Stage()
    (before,) = stage.run(60)
    stage.host.counts_cpu = False
    (after,) = stage.run(120)
    assert after.energy > 2 * before.energy
    assert after.token_energy
    assert after.host.energy["gpu"] - before.host.energy["gpu"] <= 11 * WATTS * 1e6
    stage.host.counts_cpu = True
    (again,) = stage.run(120)
    assert again.host.energy["gpu"] - after.host.energy["gpu"] >= 60 * WATTS * 1e6


def test_long_steps_of_the_cpu_are_waited_for() -> None:
    host = TokenHost(ENGINE)
    host.cpu_ticks = 450
    (row,) = Stage(host=host).run(400)
    ticks = row.host.energy["gpu"] / (WATTS * TICK / 1000)
    assert row.energy - row.host.energy["gpu"] <= 45 * WATTS * 1e6  # before the first step
    assert row.host.energy["cpu"] == pytest.approx(len(ENGINE) * CPU_SHARE * ticks, rel=1e-3)


def test_totals_continue_from_an_earlier_run() -> None:
    stage = Stage(name="chat")
    (before,) = stage.run(60)
    others = EngineRow("other", "m", "ann", Microjoules(7))
    stage.scraper = EngineScraper(
        stage.settings, stage.host.clock, stage.host.history, stage.scraper._finder, stage.pages,
        earlier=[before, others],
    )  # fmt: skip
    (restored,) = stage.scraper.rows
    assert restored == replace(before, token_energy={}, request_energy=None, idle=None)
    (after,) = stage.run(60)
    seconds = (after.energy - before.energy) / (WATTS * 1e6)
    assert seconds == pytest.approx(50, abs=6)
    assert after.tokens["output"] - before.tokens["output"] == pytest.approx(seconds * stage.rate)
    assert after.host.energy["gpu"] == after.energy


def test_spans_and_page_of_an_engine_are_the_same_joules_and_tokens() -> None:
    stage = Stage(name="chat")
    stage.rate, count = 40, 60
    attributes = {
        "gen_ai.usage.prompt_tokens": 400, "gen_ai.usage.completion_tokens": 100,
        "gen_ai.request.model": "m", "gen_ai.latency.time_to_first_token": 0.5,
    }  # fmt: skip
    times = {"start": 0.0, "end": 2.5}
    for number in range(1, count + 1):
        if number % 2:
            stage.scraper.turn()
        stage.host.run(2.5)
        ids = {"process": "api", "name": "llm_request", "trace": number, "id": number}
        stage.host.send([{**ids, **times, "attributes": attributes}], {}, json=False, end=2.5)
    stage.host.run(1)
    stage.scraper.turn()
    (row,) = engine_rows([stage.scraper], stage.host.joiner.accounts())
    accounts = stage.host.accounts()
    (spans,) = accounts.inference

    assert row.services == ("api",)
    # Spans give requests, and the page gives totals.
    assert sum(spans.requests.values()) == count
    assert spans.tokens == {"input": 400 * count, "output": 100 * count}
    assert row.requests == pytest.approx(count, abs=3)
    assert row.tokens["output"] == pytest.approx(100 * count, abs=300)
    ticks = round((count * 2.5 + 1) * 10)  # since the first request
    whole = sum(spans.energy.values()) + accounts.inference_idle
    assert whole == ticks * WATTS * TICK // 1000
    assert row.energy == pytest.approx(whole, rel=0.05)
    cpu = spans.host.energy["cpu"] + accounts.inference_host_idle["cpu"]
    assert cpu == ticks * len(ENGINE) * CPU_SHARE
    assert row.host.energy["cpu"] == pytest.approx(cpu, rel=0.05)
    # The history counts each token and joule once.
    saved = Checkpoint(stage.host.clock.now(), "boot", inference=accounts.inference, engines=(row,))
    used = total_usage(spans_between(None, saved).values())
    assert (used.tokens_in, used.tokens_out) == (400 * count, 100 * count)
    assert sum(used.energy.values()) == sum(spans.energy.values())


# ------------------------------------------------------ uncertainty, models, and neighbours


def test_figures_vanish_once_another_program_of_the_user_may_be_the_engine() -> None:
    """Until its first energy, the other program is not known to use a GPU."""
    stage = _unprivileged((*ENGINE, {"name": "api2"}, {"name": "worker2", "parent": "api2"}))
    (row,) = stage.run(120)
    assert row.token_energy
    stage.host.processes["worker2"] = {**stage.host.processes["worker2"], "gpu": "g0"}
    (row,) = stage.run(15)
    assert "several programs" in stage.failure
    assert not row.token_energy


def _two_models(stage: Stage) -> Callable[[str], Answer]:
    begin = stage.host.clock.monotonic()

    def answer(path: str) -> Answer:
        first = stage._page(path)
        tokens = 20 * (stage.host.clock.monotonic() - begin) // 10**9
        if isinstance(first, HttpAnswer) and first.status == 200:
            second = page(VLLM, "b", prompt=tokens, generated=tokens, finished=tokens // 100)
            return HttpAnswer(200, first.body + second)
        return first

    return answer


def test_models_of_one_engine_have_rows_of_tokens_and_one_row_has_their_energy() -> None:
    stage = Stage()
    (alone,) = stage.run(60)
    stage.pages._answer = _two_models(stage)
    rows = {row.model: row for row in stage.run(120)}
    assert rows.keys() == {"", "m", "b"}
    assert rows["m"].tokens["output"] > alone.tokens["output"]
    assert (rows["m"].energy, rows[""].tokens, rows[""].requests) == (None, {}, None)
    assert rows[""].energy > alone.energy
    tokens = sum(rows[name].tokens["output"] for name in ("m", "b"))
    assert rows[""].energy == pytest.approx(WATTS * 1e6 * tokens / 70, rel=0.2)
    assert rows[""].token_energy
    stage.pages._answer = stage._page  # its other series are gone: the page is another one's
    later = {row.model: row for row in stage.run(60)}
    assert later.keys() == rows.keys()
    assert later["m"].tokens["output"] > rows["m"].tokens["output"]


@pytest.mark.parametrize("boards", [1, 2])
def test_models_of_one_page_that_counts_their_iterations_have_figures(boards: int) -> None:
    """Iterations of one model take 10 ms, of the other 30 ms, at the same power."""
    second = {"name": "worker2", "parent": "api", "gpu": "g1", **UNIT}
    stage = Stage((*ENGINE, second)[: 1 + boards], name="chat")
    chance, done = random.Random(4), {"a": 0, "b": 0}

    def answer(path: str) -> Answer:
        bodies = [
            page(
                VLLM, name, prompt=count, computed=count, generated=4 * count, iterations=count,
                prompts=count // 50, finished=count // 50, running=4,
            )
            for name, count in done.items()
        ]  # fmt: skip
        return HttpAnswer(200, joined(*bodies)) if path == "/metrics" else HttpAnswer(404, b"")

    stage.pages._answer = answer
    for _ in range(200 if boards == 1 else 20):
        stage.scraper.turn()
        one = chance.randint(50, 400)
        done["a"], done["b"] = done["a"] + one, done["b"] + (500 - one) // 3
        stage.host.run(5)
    rows = {row.model: row for row in stage.scraper.rows}
    assert rows["a"].energy is rows["b"].energy is None
    assert rows[""].energy
    if boards > 1:  # each may have one of its own
        assert not rows["a"].token_energy
        assert not rows["b"].token_energy
        return
    for name, seconds in (("a", 0.01), ("b", 0.03)):
        value, uncertainty = rows[name].token_energy["all"]
        truth = WATTS * 1e6 * seconds / 5
        assert value == pytest.approx(truth, rel=0.1)
        assert abs(value - truth) <= uncertainty
    done |= dict.fromkeys(("c", "d", "e"), 0)  # too many to be divided
    stage.run(20)
    assert not any(row.token_energy for row in stage.scraper.rows if row.model)


SECOND_ENGINE = (
    {"name": "api2", "unit": "two.service"},
    {"name": "worker2", "parent": "api2", "gpu": "g0", "unit": "two.service"},
)


def test_engines_of_one_owner_on_one_board_have_the_energy_of_their_work() -> None:
    """Iterations of one take 10 ms, of the other 30 ms, at the same power."""
    host, neighbours = TokenHost((*ENGINE, *SECOND_ENGINE)), EngineNeighbours()
    stages = [
        Stage(listener=listener, host=host, neighbours=neighbours, name=listener)
        for listener in ("api", "api2")
    ]
    host.run(3)
    chance, done = random.Random(4), [0, 0]

    def answers(at: int) -> Callable[[str], Answer]:
        def answer(path: str) -> Answer:
            if path != "/metrics":
                return HttpAnswer(404, b"")
            count = done[at]
            return HttpAnswer(
                200,
                page(
                    VLLM, "m", prompt=count, computed=count, generated=4 * count, iterations=count,
                    prompts=count // 50, finished=count // 50, running=4,
                ),
            )  # fmt: skip

        return answer

    for at, stage in enumerate(stages):
        stage.pages._answer = answers(at)
    first = [0, 0]
    for number in range(200):
        for stage in stages:
            stage.scraper.turn()
        if number == 187:
            first = list(done)
        one = chance.randint(50, 400)
        done[0], done[1] = done[0] + one, done[1] + (500 - one) // 3
        host.run(5)
    for stage, seconds, counts in zip(
        stages, (0.01, 0.03), ((done[0] - first[0]), (done[1] - first[1])), strict=True
    ):
        (row,) = stage.scraper.rows
        assert counts
        value, uncertainty = row.token_energy["all"]
        truth = WATTS * 1e6 * seconds / 5
        assert value == pytest.approx(truth, rel=0.1)
        assert abs(value - truth) <= uncertainty
        assert row.host.energy["gpu"] == row.energy
        ticks = row.energy / (WATTS * TICK / 1000 / len(stages))
        assert row.host.energy["cpu"] == pytest.approx(len(ENGINE) * CPU_SHARE * ticks, rel=1e-6)


# ---------------------------------------------------------------------- a real connection


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    connections: ClassVar[list[object]]

    def do_GET(self) -> None:
        if self.client_address not in self.connections:
            self.connections.append(self.client_address)
        status, body = (302, b"") if self.path == "/moved" else (200, b"x" * 1000)
        self.send_response(status)
        self.send_header("Location", "/metrics")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server() -> Any:
    class Handler(_Handler):
        connections: ClassVar[list[object]] = []

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        made.daemon_threads = True
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def test_requests_share_a_connection_and_follow_no_redirect(server: Any) -> None:
    connection = KeptConnection("127.0.0.1", server.server_port)
    for path, status in (("/metrics", 200), ("/moved", 302), ("/metrics", 200)):
        connection.open(10)
        answer = connection.get(path, timeout=10, most=2000, headers={})
        assert answer.status == status
    assert len(server.RequestHandlerClass.connections) == 1
    assert connection.ends is not None
    assert connection.ends[1] == ("127.0.0.1", server.server_port)
    connection.close()
    assert connection.ends is None
    with pytest.raises(FetchError):
        connection.get("/metrics", timeout=10, most=2000, headers={})


def test_larger_answer_ends_the_connection(server: Any) -> None:
    connection = KeptConnection("127.0.0.1", server.server_port)
    connection.open(10)
    assert len(connection.get("/metrics", timeout=10, most=100, headers={}).body) == 101
    assert connection.ends is None


def test_no_listener_is_a_fetch_error(free_port: Callable[[], int]) -> None:
    with pytest.raises(FetchError, match="refused"):
        KeptConnection("127.0.0.1", free_port()).open(10)


def test_each_page_is_offered_with_the_processes_of_the_engine() -> None:
    stage = Stage()
    stage.run(10)
    settings, at, reading, latencies, listener, processes = stage.offered[-1]
    assert settings is stage.settings
    assert at == stage.host.clock.monotonic() - 5 * 10**9
    assert latencies.waiting == 0
    assert reading.page.kind == "vllm"
    assert processes[0] == listener
    assert listener.pid == stage.host.pids["api"]
    assert {one.pid for one in processes} == set(stage.host.pids.values())
