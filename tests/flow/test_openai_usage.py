"""The ASGI middleware for the energy of requests in a real FastAPI application under uvicorn."""

from __future__ import annotations

import http.client
import json
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest
from testbed.apps import app_environment
from testbed.query_server import QueryServer
from testbed.requirements import APPS

from wattspan.inference.estimate import RequestEstimate
from wattspan.inference.requests import InferenceRequest
from wattspan.model import Consumer, Microjoules

pytestmark = pytest.mark.needs_apps

APPLICATION = """
import json, socket
import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse, StreamingResponse
from wattspan.sdk.openai_usage import EnergyUsageMiddleware

USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
app = FastAPI()
app.add_middleware(EnergyUsageMiddleware)

@app.post("/v1/chat/completions")
async def complete(body: dict):
    if body["model"] != "m":
        return JSONResponse({"error": {"message": "no such model"}}, status_code=404)
    if not body.get("stream"):
        return {"model": body["model"], "choices": [], "usage": USAGE}
    events = [{"choices": [{"delta": {"content": word}}]} for word in "abc"]
    events.append({"model": body["model"], "choices": [], "usage": USAGE})
    lines = [f"data: {json.dumps(event)}\\n\\n" for event in events] + ["data: [DONE]\\n\\n"]
    async def stream():
        for line in lines:
            yield line
        if body.get("fail"):
            raise RuntimeError("on purpose")
    return StreamingResponse(stream(), media_type="text/event-stream")

listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
uvicorn.Server(uvicorn.Config(app, log_level="critical")).run(sockets=[listener])
"""

ASKED = {"X-Energy": "1"}
ESTIMATE = RequestEstimate(
    Microjoules(2_500_000), Microjoules(500_000), Microjoules(2_000_000), Microjoules(250_000)
)


class Agent:
    """The agent's API over its real socket, with one estimate for every request."""

    def __init__(self) -> None:
        self.estimate: RequestEstimate | None = ESTIMATE
        self.asked: list[tuple[Consumer, InferenceRequest]] = []

    def __call__(self, process: Consumer, request: InferenceRequest) -> RequestEstimate | None:
        self.asked.append((process, request))
        return self.estimate


class Application(NamedTuple):
    port: int
    pid: int


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture
def agent(run_directory: Path) -> Iterator[Agent]:
    found = Agent()
    with QueryServer(run_directory, inference=found):
        yield found


@pytest.fixture(scope="module")
def application(
    run_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Application]:
    script = tmp_path_factory.mktemp("app") / "app.py"
    script.write_text(APPLICATION)
    process = subprocess.Popen(
        [APPS, script],
        env=app_environment(WATTSPAN_RUN_DIR=str(run_directory)),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        # The kernel queues connections until the server accepts them.
        yield Application(int(process.stdout.readline()), process.pid)
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


def _post(
    port: int, document: object, status: int = 200, **headers: str
) -> tuple[http.client.HTTPMessage, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    sent = {"Content-Type": "application/json", **headers}
    with closing(connection):
        connection.request("POST", "/v1/chat/completions", json.dumps(document), sent)
        response = connection.getresponse()
        assert response.status == status
        return response.headers, response.read().decode()


def _usages(stream: str) -> list[dict | None]:
    """The usage in each event of a stream."""
    events = [line.removeprefix("data: ") for line in stream.splitlines() if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event).get("usage") for event in events[:-1]]


def test_response_has_the_energy_of_the_agent_if_asked(
    application: Application, agent: Agent
) -> None:
    headers, body = _post(application.port, {"model": "m"}, **ASKED)

    energy = json.loads(body)["usage"]["energy"]
    assert energy["joules"] == energy["input_joules"] + energy["output_joules"] == 2.5
    assert (energy["status"], energy["uncertainty_joules"]) == ("provisional", 0.25)
    assert int(headers["Content-Length"]) == len(body.encode())
    ((process, request),) = agent.asked
    assert process.pid == application.pid
    assert (request.model, request.context, request.decode) == ("m", 7, 4)


def test_response_without_the_header_is_unchanged(application: Application, agent: Agent) -> None:
    _, plain = _post(application.port, {"model": "m"})
    _, refused = _post(application.port, {"model": "m"}, **{"X-Energy": "0"})

    assert plain == refused
    assert "energy" not in json.loads(plain)["usage"]
    assert agent.asked == []


def test_stream_has_the_energy_in_its_event_with_usage(
    application: Application, agent: Agent
) -> None:
    _, body = _post(application.port, {"model": "m", "stream": True}, **ASKED)

    *others, usage = _usages(body)
    assert others == [None] * 3
    assert usage is not None
    assert usage["energy"]["joules"] == 2.5
    assert len(agent.asked) == 1


def test_error_response_is_unchanged(application: Application, agent: Agent) -> None:
    _, body = _post(application.port, {"model": "other"}, 404, **ASKED)

    assert json.loads(body) == {"error": {"message": "no such model"}}
    assert agent.asked == []


def test_failure_within_a_stream_ends_it(application: Application, agent: Agent) -> None:
    asked = {"model": "m", "stream": True, "fail": True}
    with pytest.raises(http.client.IncompleteRead) as failed:
        _post(application.port, asked, **ASKED)

    usage = _usages(failed.value.partial.decode())[-1]
    assert usage is not None
    assert usage["energy"]["joules"] == 2.5
    assert json.loads(_post(application.port, {"model": "m"}, **ASKED)[1])["usage"]["energy"]
    assert len(agent.asked) == 2


def test_unknown_energy_is_unavailable(application: Application, agent: Agent) -> None:
    agent.estimate = None
    _, body = _post(application.port, {"model": "m"}, **ASKED)

    energy = json.loads(body)["usage"]["energy"]
    assert energy["status"] == "unavailable"
    assert "not known yet" in energy["reason"]


@pytest.mark.parametrize("stream", [False, True])
def test_response_without_an_agent_says_so(application: Application, stream: bool) -> None:
    _, body = _post(application.port, {"model": "m", "stream": stream}, **ASKED)

    usage = _usages(body)[-1] if stream else json.loads(body)["usage"]
    assert usage is not None
    assert usage["energy"]["status"] == "unavailable"
    assert "No wattspan agent answers" in usage["energy"]["reason"]
    assert usage["total_tokens"] == 12
