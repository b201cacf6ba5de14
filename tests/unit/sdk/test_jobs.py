"""Declarations of jobs by an application, against a real socket."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from testbed.query_server import Living, QueryServer
from testbed.requirements import ROOT
from testbed.waiting import eventually

from wattspan.api.requests import json_response
from wattspan.clock import SystemClock
from wattspan.config import AutotuneSettings
from wattspan.http.messages import HttpRequest, HttpResponse
from wattspan.http.server import HttpServer
from wattspan.http.sockets import listen_unix
from wattspan.sdk import jobs as sdk_jobs
from wattspan.sdk.client import request_json
from wattspan.sdk.jobs import JobDeclaration, declare
from wattspan.tuning.declared_jobs import DeclaredJobs


class Agent:
    """An agent in ``folder`` that advises, until it is stopped; each start is a new instance."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.starts = folder, 0
        self._server: QueryServer | None = None
        self.start()

    def start(self) -> None:
        self.starts += 1
        settings = AutotuneSettings(mode="advise")
        self.jobs = DeclaredJobs(settings, Living(), f"instance {self.starts}")
        self._server = QueryServer(self.folder, directory=Living(), jobs=self.jobs)
        self._server.__enter__()

    def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    @property
    def names(self) -> list[str]:
        return [one.answer.name for one in self.jobs.living()]


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path)
    yield agent
    agent.stop()


def declared(folder: Path, **terms: object) -> JobDeclaration:
    known: dict[str, object] = {"name": "train", "service": "trainer", "span": "train_step"}
    return declare(**(known | terms), directories=(str(folder),))  # type: ignore[arg-type]


def renewed(declaration: JobDeclaration) -> JobDeclaration:
    """As after a while: the pause between two looks for an agent is over."""
    declaration._due = declaration._retry_at = 0.0
    return declaration.renew()


@contextmanager
def serving(
    folder: Path, respond: Callable[[HttpRequest], Awaitable[HttpResponse]]
) -> Iterator[None]:
    """An agent in ``folder`` that answers each request as ``respond``."""
    server = HttpServer(SystemClock(), log=print)
    server.add_http(listen_unix(folder / "api.sock", what="questions"), respond)
    server.start()
    try:
        yield
    finally:
        server.stop()


def test_declaration_holds_the_answer(agent: Agent) -> None:
    found = declared(agent.folder, max_slowdown=0.2, work="samples", knobs=("gpu_power",))
    assert (found.decision, found.instance) == ("limited", "instance 1")
    assert found.reason.startswith("The budget of 20 % is limited to 5 %")
    assert found.given == {
        "mode": "advise",
        "max_slowdown": 0.05,
        "objective": "energy",
        "eta": 0.5,
        "knobs": ["gpu_power"],
        "first_watts": None,
        "floor_watts": None,
    }
    assert found.asked["max_slowdown"] == 0.2
    (job,) = agent.jobs.living()
    assert ([one.pid for one in job.processes], job.answer.uid) == ([os.getpid()], os.geteuid())
    assert repr(found).startswith("<JobDeclaration 'train': limited. The budget")


def test_withdrawn_declaration_is_gone(agent: Agent) -> None:
    with declared(agent.folder, name="trainer/step 1") as declaration:
        assert agent.names == ["trainer/step 1"]
    assert agent.names == []
    declaration.withdraw()
    assert renewed(declaration) is declaration
    assert agent.names == []


@pytest.mark.parametrize(
    "terms",
    [
        {"name": ""},
        {"service": ""},
        {"span": ""},
        {"max_slowdown": -0.01},
        {"max_slowdown": float("nan")},
        {"max_slowdown": float("inf")},
        {"eta": 1.01},
        {"eta": -0.01},
    ],
)
def test_invalid_terms_are_a_value_error(terms: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=next(iter(terms))):
        declared(tmp_path, **terms)


def test_missing_agent_is_no_error(tmp_path: Path) -> None:
    found = declared(tmp_path)
    assert (found.decision, found.given) == ("unavailable", {})
    assert f"No wattspan agent answers at {tmp_path}/api.sock" in found.reason
    assert "wattspan run" in found.reason
    found.withdraw()


def test_refused_declaration_holds_the_sentence(agent: Agent) -> None:
    found = declared(agent.folder, objective="speed")
    assert (found.decision, found.given) == ("declined", {})
    assert "$.objective" in found.reason
    assert agent.names == []


def test_declaration_is_repeated_after_a_restart_of_the_agent(agent: Agent) -> None:
    declaration = declared(agent.folder, max_slowdown=0.03)
    agent.stop()
    assert renewed(declaration).decision == "unavailable"
    agent.start()
    assert agent.names == []
    assert renewed(declaration).decision == "accepted"
    assert (declaration.instance, agent.names) == ("instance 2", ["train"])
    assert declaration.given["max_slowdown"] == 0.03


def test_declaration_reaches_an_agent_that_starts_later(tmp_path: Path) -> None:
    declaration = declared(tmp_path)
    agent = Agent(tmp_path)
    try:
        assert renewed(declaration).decision == "accepted"
        assert agent.names == ["train"]
    finally:
        agent.stop()


def test_first_of_two_agents_gets_the_declaration(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("system", "user")]
    for folder in folders:
        folder.mkdir(mode=0o755)
    first, second = map(Agent, folders)
    try:
        declaration = declare(
            name="train",
            service="trainer",
            span="train_step",
            directories=tuple(map(str, folders)),
        )
        assert (first.names, second.names) == (["train"], [])
        first.stop()
        assert renewed(declaration).decision == "accepted"
        assert second.names == ["train"]
    finally:
        first.stop()
        second.stop()


def test_renewal_asks_a_running_agent_nothing(agent: Agent) -> None:
    declaration = declared(agent.folder)
    agent.jobs.withdraw(agent.jobs.living()[0].processes[0], "train")
    for _ in range(100):
        renewed(declaration)
    assert agent.names == []  # no request has declared it again


def test_renewal_waits_between_looks_and_retries(agent: Agent) -> None:
    declaration = declared(agent.folder)
    declaration.renew()
    agent.stop()
    agent.start()
    declaration.renew()  # too early
    assert agent.names == []
    declaration._due = 0.0
    declaration.renew()
    assert agent.names == ["train"]


def test_provisional_answer_is_asked_for_again_until_it_is_final(tmp_path: Path) -> None:
    answers = [{"provisional": True}, {"provisional": True}, {"decision": "declined"}]
    asked: list[str] = []
    given: dict[str, object] = {"mode": "apply"}
    known = {"decision": "accepted", "reason": "", "given": given, "instance": "1"}

    async def respond(request: HttpRequest) -> HttpResponse:
        asked.append(request.method)
        return json_response(known | answers[len(asked) - 1])

    with serving(tmp_path, respond):
        found = declared(tmp_path)
        assert found.decision == "accepted"
        found._due = 0.0
        assert found.renew().decision == "accepted"
        assert len(asked) == 1, "the next attempt is not due yet"
        assert renewed(found).decision == "accepted"
        assert renewed(found).decision == "declined"
        assert renewed(found).decision == "declined"
    assert asked == ["POST"] * 3


def test_refused_declaration_is_retried(agent: Agent) -> None:
    declaration = declared(agent.folder, objective="speed")
    declaration.asked["objective"] = "time"
    declaration._due = 0.0
    assert declaration.renew().decision == "declined"  # too early
    assert renewed(declaration).decision == "accepted"


@pytest.mark.parametrize(
    "answer", [{"decision": "accepted"}, {"decision": 1, "reason": 2, "given": 3, "instance": 4}]
)
def test_strange_answer_is_no_error(answer: dict[str, object], tmp_path: Path) -> None:
    async def strange(request: HttpRequest) -> HttpResponse:
        return json_response(answer)

    with serving(tmp_path, strange):
        found = declared(tmp_path)
    assert (found.decision, found.given) == ("unavailable", {})
    assert "is not understood" in found.reason


def in_child(action: Callable[[], bool]) -> bool:
    """The result of ``action`` in a child of this process."""
    pid = os.fork()
    if pid == 0:
        os._exit(0 if action() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_child_does_nothing_with_the_declaration_of_its_parent(tmp_path: Path) -> None:
    agent = subprocess.Popen(  # not in this process: a child of a threaded process may not ask
        [sys.executable, "-c", SERVER, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}"},
        stdin=subprocess.PIPE,
    )
    try:
        eventually((tmp_path / "api.sock").exists, "the agent listens")
        declaration = eventually_accepted(tmp_path)

        def act() -> bool:
            declaration.withdraw()
            declaration._sockets = ()
            return renewed(declaration).decision == "accepted" and declaration._sockets == ()

        assert in_child(act)
        (job,) = request_json("/v1/jobs", {}, directories=(str(tmp_path),))["jobs"]
        assert (job["processes"], job["own"]) == (1, True)
    finally:
        agent.communicate()


SERVER = """
import sys
from pathlib import Path
from unit.sdk.test_jobs import Agent
agent = Agent(Path(sys.argv[1]))
sys.stdin.read()
agent.stop()
"""


def eventually_accepted(folder: Path) -> JobDeclaration:
    declaration = declared(folder)
    eventually(lambda: renewed(declaration).decision == "accepted", "the agent accepts the job")
    return declaration


def test_import_is_light() -> None:
    code = (
        "import sys; before = set(sys.modules); import wattspan.sdk.jobs\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # Another program at the start, such as a coverage tool, may have imported `__future__`.
    imported = set(told.stdout.split()) - {"__future__", "_collections"}  # a part of Python's core
    assert imported == {"wattspan", "wattspan.sdk", sdk_jobs.__name__}
