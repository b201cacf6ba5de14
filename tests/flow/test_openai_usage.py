"""The ASGI middleware for the energy of requests in a real FastAPI application under uvicorn."""

from __future__ import annotations

import http.client
import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from support.apps import app_environment
from support.requirements import APPS
from support.waiting import eventually

pytestmark = pytest.mark.needs_apps

APPLICATION = """
import json, sys
import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from wattspan.sdk.openai_usage import EnergyUsageMiddleware

USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
app = FastAPI()
app.add_middleware(
    EnergyUsageMiddleware, ask=lambda asked: {"joules": 2.5, "status": "provisional", **asked}
)

@app.post("/v1/chat/completions")
async def complete(body: dict):
    if not body.get("stream"):
        return {"model": body["model"], "choices": [], "usage": USAGE}
    events = [{"choices": [{"delta": {"content": word}}]} for word in "abc"]
    events.append({"model": body["model"], "choices": [], "usage": USAGE})
    lines = [f"data: {json.dumps(event)}\\n\\n" for event in events] + ["data: [DONE]\\n\\n"]
    async def stream():
        for line in lines:
            yield line
    return StreamingResponse(stream(), media_type="text/event-stream")

uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
"""


@pytest.fixture
def port(tmp_path: Path, free_port: Callable[[], int]) -> Iterator[int]:
    script, number = tmp_path / "app.py", free_port()
    script.write_text(APPLICATION)
    process = subprocess.Popen([APPS, script, str(number)], env=app_environment())

    def listens() -> bool:
        assert process.poll() is None
        with suppress(OSError):
            _post(number, {"model": "m"})
            return True
        return False

    try:
        eventually(listens, "the application listens", 30)
        yield number
    finally:
        process.terminate()
        process.wait(30)


def _post(port: int, document: object, **headers: str) -> tuple[http.client.HTTPMessage, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    sent = {"Content-Type": "application/json", **headers}
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(document), sent)
        response = connection.getresponse()
        assert response.status == 200
        return response.headers, response.read().decode()
    finally:
        connection.close()


def test_fastapi_response_has_energy_if_asked(port: int) -> None:
    headers, body = _post(port, {"model": "m"}, **{"X-Energy": "1"})
    energy = json.loads(body)["usage"]["energy"]
    assert (energy["joules"], energy["prompt"], energy["completion"]) == (2.5, "7", "5")
    assert int(headers["Content-Length"]) == len(body.encode())
    _, plain = _post(port, {"model": "m"})
    assert "energy" not in json.loads(plain)["usage"]


def test_streamed_fastapi_response_has_energy_in_its_last_event(port: int) -> None:
    _, body = _post(port, {"model": "m", "stream": True}, **{"X-Energy": "1"})
    events = [line.removeprefix("data: ") for line in body.splitlines() if line]
    assert events[-1] == "[DONE]"
    documents = [json.loads(event) for event in events[:-1]]
    assert [document.get("usage") for document in documents[:-1]] == [None] * 3
    assert documents[-1]["usage"]["energy"]["joules"] == 2.5
