"""An emulated engine for language models: an OpenAI-compatible server and its GPU workers.

Run as ``python -m wattspan.emulation.inference_server SETTINGS``, where SETTINGS is an
:class:`InferenceServerSettings` in JSON; it prints its port and ends with its standard input. It
answers ``POST /v1/chat/completions`` and ``/v1/completions`` with text without meaning, one word a
token, and batches concurrent requests continuously (:mod:`wattspan.emulation.continuous_batching`).
Prompts that begin with the words of an earlier prompt use its cache.

One worker process for each GPU (tensor parallelism) loads the emulated board with the power of the
present iteration, so the server's own process has no GPU energy. Every request is sent to the agent
as a span with the attributes of vLLM's. ``GET /truth`` has the true energies of all requests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec

from wattspan.clock import SystemClock
from wattspan.emulation.boards import H100
from wattspan.emulation.continuous_batching import (
    ContinuousBatching,
    EmulatedRequest,
    EngineIteration,
    ModelCosts,
)
from wattspan.emulation.control import EmulatedGpu
from wattspan.emulation.jobs import SpanSender, otlp_attribute, set_process_name
from wattspan.model import SECOND
from wattspan.util.process import module_command

_MODULE = "wattspan.emulation.inference_server"
_SEND_INTERVAL = 0.5  # seconds
_BLOCK = 16  # tokens of the prefix cache
_MAX_PREFIXES = 10_000
_MAX_BODY = 1 << 20
_MAX_TOKENS = 4096


class InferenceServerSettings(msgspec.Struct, frozen=True):
    """``slower`` is the factor of all times of the model on an H100, of equal energies."""

    model: str = "emulated-8b"
    service: str = "vllm"
    gpus: tuple[int, ...] = (0, 1)
    slots: int = 16
    slower: float = 4.0
    host: str = ""  # the directory of the emulated host
    agent: str = ""  # the agent's socket for spans


class PrefixCache:
    """The prompts of earlier requests, in blocks of tokens, at most ``_MAX_PREFIXES`` of them."""

    def __init__(self) -> None:
        self._known: dict[int, None] = {}

    def add(self, words: Sequence[str]) -> int:
        """Add a prompt; returns how many of its first tokens were known."""
        hits, before, missed = 0, 0, False
        for end in range(_BLOCK, len(words) + 1, _BLOCK):
            before = hash((before, *words[end - _BLOCK : end]))
            missed = missed or before not in self._known
            hits += 0 if missed else _BLOCK
            self._known[before] = None
        while len(self._known) > _MAX_PREFIXES:
            self._known.pop(next(iter(self._known)))
        return hits


class _Worker:
    """A worker process and the load that it has on its GPU."""

    def __init__(self, gpu: int, host: str) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            module_command(_MODULE, "worker", str(gpu), host),
            stdin=subprocess.PIPE,
            cwd="/",
            text=True,
        )

    def load(self, load: float) -> None:
        assert self._process.stdin is not None  # noqa: S101 - it is a pipe
        self._process.stdin.write(f"{load:.6f}\n")
        self._process.stdin.flush()

    def close(self) -> None:
        assert self._process.stdin is not None  # noqa: S101 - it is a pipe
        self._process.stdin.close()
        self._process.wait()


class InferenceEngine:
    """The engine's thread: iterations in real time, requests from other threads."""

    def __init__(self, settings: InferenceServerSettings, workers: Sequence[_Worker]) -> None:
        self._settings, self._workers = settings, workers
        self._clock = SystemClock()
        self._batching = ContinuousBatching(
            ModelCosts().stretched(settings.slower), slots=settings.slots, boards=len(workers)
        )
        silicon = H100.silicon
        self._most = (silicon.busy_power(silicon.max_mhz) - silicon.idle) / 1e3  # watts at load 1
        self._sender = SpanSender(settings.agent, settings.service, "requests")
        self._changed = threading.Condition()
        self._events: dict[int, threading.Event] = {}
        self._prefixes = PrefixCache()
        self._numbers = 0
        self._spans: list[dict[str, object]] = []
        self._done: list[tuple[str, EmulatedRequest]] = []  # span id and request
        self._ended = False

    def request(self, words: Sequence[str], output: int) -> EmulatedRequest:
        """Serve a request; returns when it has ended."""
        event = threading.Event()
        with self._changed:
            self._numbers += 1
            cached = self._prefixes.add(words)
            request = EmulatedRequest(self._numbers, self._now, len(words), output, cached)
            self._events[request.number] = event
            self._batching.add(request)
            self._changed.notify()
        event.wait()
        return request

    @property
    def _now(self) -> float:
        return self._clock.monotonic() / SECOND

    def run(self) -> None:
        """Run iterations until ``close``."""
        while True:
            with self._changed:
                while not self._batching.busy and not self._ended:
                    self._load(0.0)
                    self._changed.wait()
                if self._ended:
                    return
                self._batching.now = self._now
                iteration = self._batching.iterate()
            self._load(iteration.energy / (iteration.end - iteration.start))
            with self._changed:
                self._changed.wait_for(
                    lambda: self._ended,
                    max(0.0, iteration.end - self._now),
                )
            self._finish(iteration)

    def send_spans(self) -> None:
        """Send the spans of ended requests until ``close``."""
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._ended, _SEND_INTERVAL):
                    return
                # The sender belongs to this thread: it forgets all that it has when it has sent.
                self._sender.waiting.extend(self._spans)
                self._spans.clear()
            self._sender.send()

    def close(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _load(self, watts: float) -> None:
        for worker in self._workers:
            worker.load(min(1.0, watts / self._most))

    def _finish(self, iteration: EngineIteration) -> None:
        """Answer the requests that ended with an iteration."""
        with self._changed:
            for request in iteration.finished:
                ident = os.urandom(8).hex()
                self._done.append((ident, request))
                self._spans.append(self._span(ident, request))
                self._events.pop(request.number).set()

    def _span(self, ident: str, request: EmulatedRequest) -> dict[str, object]:
        now = self._clock.now()
        offset = now.wall - now.mono
        attributes: dict[str, int | float | str] = {
            "gen_ai.request.id": f"request-{request.number}",
            "gen_ai.response.model": self._settings.model,
            "gen_ai.usage.prompt_tokens": request.prompt,
            "gen_ai.usage.completion_tokens": request.output,
            "gen_ai.usage.cached_tokens": request.cached,
            "gen_ai.latency.time_in_queue": request.scheduled - request.arrived,
            "gen_ai.latency.time_to_first_token": request.first_token - request.arrived,
            "gen_ai.latency.e2e": request.ended - request.arrived,
            "gen_ai.latency.time_in_model_prefill": request.first_token - request.scheduled,
            "gen_ai.latency.time_in_model_decode": request.ended - request.first_token,
        }
        return {
            "traceId": os.urandom(16).hex(),
            "spanId": ident,
            "name": "llm_request",
            "kind": 2,
            "startTimeUnixNano": str(round(request.arrived * SECOND) + offset),
            "endTimeUnixNano": str(round(request.ended * SECOND) + offset),
            "attributes": [otlp_attribute(key, value) for key, value in attributes.items()],
        }

    def truth(self) -> dict[str, float]:
        """The true energy of each ended request in joules, by span id."""
        return {ident: request.energy for ident, request in list(self._done)}


class _CompletionHandler(BaseHTTPRequestHandler):
    server: _CompletionServer

    def do_GET(self) -> None:
        self._answer(self.server.engine.truth())

    def do_POST(self) -> None:
        try:
            words, output = self._asked()
        except (ValueError, TypeError, AttributeError) as error:
            self._answer({"error": {"message": str(error)}}, HTTPStatus.BAD_REQUEST)
            return
        request = self.server.engine.request(words, output)
        self._answer(
            {
                "id": f"request-{request.number}",
                "object": "text_completion",
                "model": self.server.model,
                "choices": [{"index": 0, "text": " ".join(["token"] * output)}],
                "usage": {
                    "prompt_tokens": request.prompt,
                    "completion_tokens": request.output,
                    "prompt_tokens_details": {"cached_tokens": request.cached},
                },
            }
        )

    def _asked(self) -> tuple[list[str], int]:
        """The words of the prompt, and the number of tokens to generate; ValueError."""
        size = int(self.headers.get("Content-Length", "0"))
        if not 0 < size <= _MAX_BODY:
            raise ValueError(f"the body has {size} bytes; 1 to {_MAX_BODY} are allowed")
        asked = json.loads(self.rfile.read(size))
        words, output = _prompt(asked), int(asked.get("max_tokens", 16))
        if not (words and 0 < output <= _MAX_TOKENS):
            raise ValueError(f"a prompt and max_tokens up to {_MAX_TOKENS} are needed")
        return words, output

    def _answer(self, content: Mapping[str, Any], status: HTTPStatus = HTTPStatus.OK) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Requests are not logged."""


def _prompt(asked: Mapping[str, Any]) -> list[str]:
    """The words of a prompt or of all messages."""
    if "messages" in asked:
        return [word for each in asked["messages"] for word in str(each["content"]).split()]
    return str(asked.get("prompt", "")).split()


class _CompletionServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, engine: InferenceEngine, model: str) -> None:
        super().__init__(("127.0.0.1", 0), _CompletionHandler)
        self.engine, self.model = engine, model


def _serve(settings: InferenceServerSettings) -> None:
    set_process_name("inference")
    workers = [_Worker(gpu, settings.host) for gpu in settings.gpus]
    engine = InferenceEngine(settings, workers)
    server = _CompletionServer(engine, settings.model)
    threads = [
        threading.Thread(target=work, daemon=True)
        for work in (engine.run, engine.send_spans, server.serve_forever)
    ]
    try:
        for thread in threads:
            thread.start()
        sys.stdout.write(f"{server.server_port}\n")
        sys.stdout.flush()
        sys.stdin.read()
    finally:
        server.shutdown()
        engine.close()
        for thread in threads:
            thread.join()
        server.server_close()
        for worker in workers:
            worker.close()


def _work(gpu: int, host: str) -> None:
    """Load a board as the lines of standard input say, until it ends."""
    set_process_name("inference-gpu")
    with EmulatedGpu(gpu, kernel="train", host=Path(host)) as board:
        for line in sys.stdin:
            board.set(float(line))


def main() -> None:
    if sys.argv[1] == "worker":
        _work(int(sys.argv[2]), sys.argv[3])
    else:
        _serve(msgspec.json.decode(sys.argv[1], type=InferenceServerSettings))


if __name__ == "__main__":
    main()
