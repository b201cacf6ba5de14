"""An emulated engine for language models: an OpenAI-compatible server and its GPU workers.

Run as ``python -m testbed.inference_server SETTINGS``, where SETTINGS is an
:class:`InferenceServerSettings` in JSON; it prints its port and ends with its standard input. It
answers ``POST /v1/chat/completions`` and ``/v1/completions``, whole or as a stream of events, with
text without meaning, one word a token, and ``GET /metrics`` with the names of vLLM. It batches
concurrent requests continuously
(:mod:`testbed.continuous_batching`). Prompts that begin with the words of an earlier
prompt use its cache.

One worker process for each GPU (tensor parallelism) loads the emulated board with the power of the
present iteration, so the server's own process has no GPU energy. Every request is sent to the agent
as a span with the attributes of vLLM's. ``GET /truth`` has the true energies of all requests, and
``GET /truth/models`` those of all iterations of each model.

Several models, and data-parallel parts of each, are engine cores that take turns on the boards.
Their counters are on one page, which all API servers have.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from testbed.continuous_batching import (
    ContinuousBatching,
    EmulatedRequest,
    EngineIteration,
    ModelCosts,
)
from testbed.engine_pages import VLLM, as_part, joined, page
from wattspan.clock import SystemClock
from wattspan.emulation.boards import H100
from wattspan.emulation.control import EmulatedGpu
from wattspan.emulation.jobs import SpanSender, otlp_attribute, set_process_name
from wattspan.model import SECOND

_SEND_INTERVAL = 0.5  # seconds
_BLOCK = 16  # tokens of the prefix cache
_MAX_PREFIXES = 10_000
_MAX_BODY = 1 << 20
_MAX_TOKENS = 4096


ROOT = Path(__file__).parent.parent


def module_command(*arguments: str) -> tuple[str, ...]:
    """The command that runs this module with this interpreter; start it with ``cwd=ROOT``."""
    return (sys.executable, "-m", "testbed.inference_server", *arguments)


class InferenceServerSettings(msgspec.Struct, frozen=True):
    """``slower`` is the factor of all times of the model on an H100, of equal energies.

    ``others`` are further models by name, with their size relative to the first. Each model has
    ``parts`` engine cores. Each of ``api_servers`` prints its port, of which the first is ``port``.
    """

    model: str = "emulated-8b"
    others: dict[str, float] = {}
    parts: int = 1
    api_servers: int = 1
    service: str = "vllm"
    gpus: tuple[int, ...] = (0, 1)
    slots: int = 16
    slower: float = 4.0
    host: str = ""  # the directory of the emulated host
    agent: str = ""  # the agent's socket for spans; "" sends none
    port: int = 0


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


@dataclass(eq=False)
class _Core:
    """An engine core: a part of a model with a batch of its own."""

    model: str
    number: int
    batching: ContinuousBatching
    prefixes: PrefixCache = field(default_factory=PrefixCache)
    counts: Counter[str] = field(default_factory=Counter)
    energy: float = 0.0  # joules of all boards

    def page(self) -> bytes:
        running = len(self.batching.running)
        return as_part(page(VLLM, self.model, **self.counts, running=running), self.number)


class _Worker:
    """A worker process and the load that it has on its GPU."""

    def __init__(self, gpu: int, host: str) -> None:
        self._process = subprocess.Popen(
            module_command("worker", str(gpu), host),
            stdin=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )

    def load(self, load: float) -> None:
        self._process.stdin.write(f"{load:.6f}\n")
        self._process.stdin.flush()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


class InferenceEngine:
    """The engine's thread: iterations in real time, requests from other threads.

    ``boards`` set the load of each board, from 0 to 1.
    """

    def __init__(
        self, settings: InferenceServerSettings, boards: Sequence[Callable[[float], None]]
    ) -> None:
        self._settings, self._boards = settings, boards
        self._clock = SystemClock()
        costs = ModelCosts().stretched(settings.slower)
        self._cores = [
            _Core(
                model,
                number,
                ContinuousBatching(costs.scaled(size), slots=settings.slots, boards=len(boards)),
            )
            for model, size in {settings.model: 1.0, **settings.others}.items()
            for number in range(settings.parts)
        ]
        self._turns = deque(self._cores)
        silicon = H100.silicon
        self._most = (silicon.busy_power(silicon.max_mhz) - silicon.idle) / 1e3  # watts at load 1
        self._sender = SpanSender(settings.agent, settings.service, "requests")
        self._changed = threading.Condition()
        self._generated: dict[int, int] = {}  # tokens of unfinished requests, by number
        self._numbers = 0
        self._spans: list[dict[str, object]] = []
        self._done: list[tuple[str, EmulatedRequest]] = []  # span id and request
        self._ended = False

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys(core.model for core in self._cores))

    def request(self, words: Sequence[str], output: int, model: str = "") -> EmulatedRequest:
        """Queue a request of a model, or of the first one, at its core with the least load."""
        with self._changed:
            self._numbers += 1
            model = model if model in self.models else self.models[0]
            own = [core for core in self._cores if core.model == model]
            core = min(own, key=lambda one: len(one.batching.running) + len(one.batching.waiting))
            cached = core.prefixes.add(words)
            request = EmulatedRequest(self._numbers, self._now, len(words), output, cached)
            self._generated[request.number] = 0
            core.batching.add(request)
            self._changed.notify_all()
        return request

    def tokens(self, request: EmulatedRequest) -> Iterator[int]:
        """The numbers of tokens that each iteration adds to a request, until it has ended."""
        sent = 0
        while sent < request.output:
            new = self._wait(request, sent)
            if new == sent:
                return
            yield new - sent
            sent = new

    def _wait(self, request: EmulatedRequest, sent: int) -> int:
        """The tokens of a request once there are more than ``sent``; ``sent`` after ``close``."""

        def generated() -> int:
            return self._generated.get(request.number, request.output)

        with self._changed:
            self._changed.wait_for(lambda: generated() > sent or self._ended)
            return sent if self._ended else generated()

    def unix_time(self, time: float) -> int:
        """A time of the engine as Unix nanoseconds."""
        now = self._clock.now()
        return round(time * SECOND) + now.wall - now.mono

    @property
    def _now(self) -> float:
        return self._clock.monotonic() / SECOND

    def run(self) -> None:
        """Run iterations until ``close``; the cores with requests take turns."""
        while True:
            with self._changed:
                while (core := self._next()) is None and not self._ended:
                    self._load(0.0)
                    self._changed.wait()
                if core is None or self._ended:
                    return
                core.batching.now = self._now
                iteration = core.batching.iterate()
            self._load(iteration.energy / (iteration.end - iteration.start))
            with self._changed:
                self._changed.wait_for(
                    lambda: self._ended,
                    max(0.0, iteration.end - self._now),
                )
            self._finish(core, iteration)

    def _next(self) -> _Core | None:
        """The core that has waited longest for a turn; None without a request."""
        core = next((one for one in self._turns if one.batching.busy), None)
        if core is not None:
            self._turns.remove(core)
            self._turns.append(core)
        return core

    def send_spans(self) -> None:
        """Send the spans of ended requests until ``close``."""
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._ended, _SEND_INTERVAL):
                    return
                # The sender belongs to this thread: it forgets all that it has when it has sent.
                self._sender.waiting.extend(self._spans)
                self._spans.clear()
            if self._settings.agent:
                self._sender.send()

    def close(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _load(self, watts: float) -> None:
        for load in self._boards:
            load(min(1.0, watts / self._most))

    def _finish(self, core: _Core, iteration: EngineIteration) -> None:
        """Publish the tokens of an iteration, and the spans of the requests that it ended."""
        prompts = iteration.prompts
        with self._changed:
            core.energy += len(self._boards) * iteration.energy
            core.counts.update(
                generated=iteration.generated,
                iterations=iteration.generated > 0,
                prompts=len(prompts),
                prompt=sum(one.prompt for one in prompts),
                computed=sum(one.prompt - min(one.cached, one.prompt - 1) for one in prompts),
                cached=sum(min(one.cached, one.prompt - 1) for one in prompts),
                finished=len(iteration.finished),
            )
            for request in iteration.finished:
                ident = os.urandom(8).hex()
                self._done.append((ident, request))
                self._spans.append(self._span(ident, request, core.model))
                del self._generated[request.number]
            self._generated.update((each.number, each.generated) for each in core.batching.running)
            self._changed.notify_all()

    def _span(self, ident: str, request: EmulatedRequest, model: str) -> dict[str, object]:
        attributes: dict[str, int | float | str] = {
            "gen_ai.request.id": f"request-{request.number}",
            "gen_ai.response.model": model,
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
            "startTimeUnixNano": str(self.unix_time(request.arrived)),
            "endTimeUnixNano": str(self.unix_time(request.ended)),
            "attributes": [otlp_attribute(key, value) for key, value in attributes.items()],
        }

    def page(self) -> bytes:
        """The Prometheus page."""
        with self._changed:
            return joined(*(core.page() for core in self._cores))

    def truth(self) -> dict[str, float]:
        """The true energy of each ended request in joules, by span id."""
        return {ident: request.energy for ident, request in list(self._done)}

    def model_energies(self) -> dict[str, float]:
        """The true joules of the iterations of each model."""
        with self._changed:
            found = dict.fromkeys(self.models, 0.0)
            for core in self._cores:
                found[core.model] += core.energy
        return found


class _Asked(NamedTuple):
    """A request of a client. ``usage`` asks for an event with the usage of a stream."""

    words: list[str]
    output: int
    stream: bool
    usage: bool
    model: str


class _Kind(NamedTuple):
    """The names of the objects of an endpoint."""

    whole: str
    part: str
    chat: bool


_KINDS = {
    "/v1/completions": _Kind("text_completion", "text_completion", chat=False),
    "/v1/chat/completions": _Kind("chat.completion", "chat.completion.chunk", chat=True),
}


class _Completion(NamedTuple):
    """The documents of a response."""

    kind: _Kind
    model: str
    created: int  # Unix seconds
    request: EmulatedRequest

    @property
    def usage(self) -> dict[str, Any]:
        request = self.request
        return {
            "prompt_tokens": request.prompt,
            "completion_tokens": request.output,
            "total_tokens": request.prompt + request.output,
            "prompt_tokens_details": {"cached_tokens": request.cached},
        }

    def whole(self) -> dict[str, Any]:
        text = "token " * self.request.output
        message = {"message": {"role": "assistant", "content": text}}
        choice = message if self.kind.chat else {"text": text}
        return {**self._document(self.kind.whole, choice, "length"), "usage": self.usage}

    def part(self, count: int) -> dict[str, Any]:
        """The event with ``count`` tokens."""
        text = "token " * count
        choice = {"delta": {"content": text}} if self.kind.chat else {"text": text}
        return self._document(self.kind.part, choice, None)

    def _document(
        self, name: str, choice: Mapping[str, Any], finish_reason: str | None
    ) -> dict[str, Any]:
        return {
            "id": f"request-{self.request.number}",
            "object": name,
            "created": self.created,
            "model": self.model,
            "choices": [{"index": 0, **choice, "finish_reason": finish_reason}],
        }


class _CompletionHandler(BaseHTTPRequestHandler):
    server: CompletionServer

    def do_GET(self) -> None:
        names = [self.server.model, *self.server.engine.models[1:]]
        models = [{"id": name, "object": "model", "owned_by": "wattspan"} for name in names]
        if self.path == "/truth":
            self._answer(self.server.engine.truth())
        elif self.path == "/truth/models":
            self._answer(self.server.engine.model_energies())
        elif self.path == "/metrics":
            self._send(self.server.engine.page(), "text/plain; version=0.0.4")
        elif self.path == "/v1/models":
            self._answer({"object": "list", "data": models})
        else:
            self._refuse(f"there is no {self.path}", HTTPStatus.NOT_FOUND)

    def do_POST(self) -> None:
        kind = _KINDS.get(self.path)
        if kind is None:
            self._refuse(f"there is no {self.path}", HTTPStatus.NOT_FOUND)
            return
        try:
            asked = self._asked()
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            self._refuse(str(error), HTTPStatus.BAD_REQUEST)
            return
        request = self.server.engine.request(asked.words, asked.output, asked.model)
        created = self.server.engine.unix_time(request.arrived) // SECOND
        completion = _Completion(kind, asked.model, created, request)
        if asked.stream:
            self._stream(completion, asked)
            return
        for _ in self.server.engine.tokens(request):
            pass
        self._answer(completion.whole())

    def _stream(self, completion: _Completion, asked: _Asked) -> None:
        """Send an event for the tokens of each iteration, then one with the usage if asked for."""
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()  # HTTP/1.0: the end of the connection ends the stream
        try:
            for count in self.server.engine.tokens(completion.request):
                self._event(completion.part(count))
            if asked.usage:
                self._event({**completion.part(0), "choices": [], "usage": completion.usage})
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            self.close_connection = True  # the client has left; the engine finishes the request

    def _event(self, content: Mapping[str, Any]) -> None:
        self.wfile.write(b"data: %b\n\n" % json.dumps(content).encode())

    def _asked(self) -> _Asked:
        """The request in the body; ValueError and others for a bad one."""
        size = int(self.headers.get("Content-Length", "0"))
        if not 0 < size <= _MAX_BODY:
            # A client that is still sending when the connection closes receives no response.
            self.rfile.read(max(0, min(size, 2 * _MAX_BODY)))
            raise ValueError(f"the body has {size} bytes; 1 to {_MAX_BODY} are allowed")
        content = json.loads(self.rfile.read(size))
        words, output = _prompt(content), int(content.get("max_tokens", 16))
        if not (words and 0 < output <= _MAX_TOKENS):
            raise ValueError(f"a prompt and max_tokens up to {_MAX_TOKENS} are needed")
        usage = (content.get("stream_options") or {}).get("include_usage") is True
        wanted = content.get("model")
        model = wanted if wanted in self.server.engine.models else self.server.model
        return _Asked(words, output, content.get("stream") is True, usage, model)

    def _refuse(self, message: str, status: HTTPStatus) -> None:
        self._answer({"error": {"message": message, "type": "invalid_request_error"}}, status)

    def _answer(self, content: Mapping[str, Any], status: HTTPStatus = HTTPStatus.OK) -> None:
        self._send(json.dumps(content).encode(), "application/json", status)

    def _send(self, body: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
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


class CompletionServer(ThreadingHTTPServer):
    """The OpenAI-compatible server of an engine, on a free port of loopback."""

    daemon_threads = True

    def __init__(self, engine: InferenceEngine, model: str, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _CompletionHandler)
        self.engine, self.model = engine, model


def _serve(settings: InferenceServerSettings) -> None:
    set_process_name("inference")
    workers = [_Worker(gpu, settings.host) for gpu in settings.gpus]
    engine = InferenceEngine(settings, [worker.load for worker in workers])
    ports = (settings.port, *(0,) * (settings.api_servers - 1))
    servers = [CompletionServer(engine, settings.model, port) for port in ports]
    threads = [
        threading.Thread(target=work, daemon=True)
        for work in (engine.run, engine.send_spans, *(one.serve_forever for one in servers))
    ]
    try:
        for thread in threads:
            thread.start()
        for server in servers:
            sys.stdout.write(f"{server.server_port}\n")
        sys.stdout.flush()
        sys.stdin.read()
    finally:
        for server in servers:
            server.shutdown()
        engine.close()
        for thread in threads:
            thread.join()
        for server in servers:
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
