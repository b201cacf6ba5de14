"""The emulated server of a language model: its prefix cache and the times of its model."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest
from testbed.continuous_batching import ContinuousBatching, EmulatedRequest, ModelCosts
from testbed.inference_server import (
    CompletionServer,
    InferenceEngine,
    InferenceServerSettings,
    PrefixCache,
)

from wattspan.inference.engine_metrics import Figure, read_page

EVEN = ModelCosts(noise=0.0, drift=0.0)


def test_prompt_hits_the_cache_up_to_its_first_other_block() -> None:
    cache, words = PrefixCache(), [str(i) for i in range(100)]

    assert cache.add(words) == 0
    assert cache.add(words) == 96  # whole blocks of 16 tokens
    assert cache.add([*words[:40], "other", *words[41:]]) == 32
    assert cache.add(["other", *words[1:]]) == 0
    assert cache.add([]) == 0


def test_cache_forgets_its_oldest_prompts() -> None:
    cache, words = PrefixCache(), [str(i) for i in range(16)]
    cache.add(words)
    for number in range(10_000):
        cache.add([f"other {number}"] * 16)

    assert cache.add(words) == 0


def test_stretched_model_takes_longer_for_the_same_work() -> None:
    requests = []
    for costs in (EVEN, EVEN.stretched(4.0)):
        engine, request = ContinuousBatching(costs), EmulatedRequest(1, 0.0, 500, 20)
        engine.add(request)
        while engine.busy:
            engine.iterate()
        requests.append(request)

    fast, slow = requests
    assert slow.ended == pytest.approx(4 * fast.ended)
    active = EVEN.active_power * (slow.ended - fast.ended)
    assert slow.energy - fast.energy == pytest.approx(active)


@pytest.fixture(scope="module")
def server() -> Iterator[CompletionServer]:
    """A server whose model takes a thousandth of its time, without an agent."""
    settings = InferenceServerSettings(slower=1e-3, slots=4, agent="/nonexistent")
    engine = InferenceEngine(settings, [lambda load: None] * 2)
    found = CompletionServer(engine, "m")
    threads = [threading.Thread(target=work) for work in (engine.run, found.serve_forever)]
    for thread in threads:
        thread.start()
    yield found
    found.shutdown()
    engine.close()
    for thread in threads:
        thread.join()
    found.server_close()


def _ask(server: CompletionServer, path: str, content: object = None) -> tuple[int, str]:
    with closing(
        http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    ) as connection:
        method = "GET" if content is None else "POST"
        connection.request(method, path, None if content is None else json.dumps(content))
        response = connection.getresponse()
        return response.status, response.read().decode()


CHAT = {"messages": [{"role": "user", "content": "a b c"}], "max_tokens": 5}


def test_response_has_the_form_of_the_api(server: CompletionServer) -> None:
    chat = json.loads(_ask(server, "/v1/chat/completions", CHAT)[1])
    text = json.loads(_ask(server, "/v1/completions", {"prompt": "a b", "max_tokens": 2})[1])

    assert (chat["object"], chat["model"]) == ("chat.completion", "m")
    assert chat["choices"][0]["message"] == {"role": "assistant", "content": "token " * 5}
    assert chat["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert (text["object"], text["choices"][0]["text"]) == ("text_completion", "token " * 2)
    assert json.loads(_ask(server, "/v1/models")[1])["data"][0]["id"] == "m"
    assert len(json.loads(_ask(server, "/truth")[1])) == 2


def test_stream_has_the_tokens_and_the_usage(server: CompletionServer) -> None:
    asked = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    events = _ask(server, "/v1/chat/completions", asked)[1].split("\n\n")
    *parts, last, done, _ = (event.removeprefix("data: ") for event in events)

    words = [json.loads(part)["choices"][0]["delta"]["content"] for part in parts]
    assert "".join(words) == "token " * 5
    assert json.loads(last)["usage"]["total_tokens"] == 8
    assert (json.loads(last)["choices"], done) == ([], "[DONE]")

    plain = _ask(server, "/v1/completions", {"prompt": "a", "max_tokens": 3, "stream": True})[1]
    assert "usage" not in plain
    assert plain.count("token ") == 3


@pytest.mark.parametrize(
    ("path", "content", "status"),
    [
        ("/v1/embeddings", {}, 404),
        ("/v1/other", None, 404),
        ("/v1/completions", {"prompt": "", "max_tokens": 3}, 400),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, 400),
        ("/v1/chat/completions", {"messages": [{}]}, 400),
        ("/v1/completions", ["a"], 400),
        ("/v1/completions", {"prompt": "a" * (1 << 20)}, 400),
    ],
)
def test_bad_request_is_refused(
    server: CompletionServer, path: str, content: object, status: int
) -> None:
    found, body = _ask(server, path, content)

    assert found == status
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_models_of_a_server_have_one_page_and_their_own_truth() -> None:
    settings = InferenceServerSettings(
        slower=1e-3, slots=2, others={"small": 0.4}, parts=2, agent="/nonexistent"
    )
    engine = InferenceEngine(settings, [lambda load: None] * 2)
    thread = threading.Thread(target=engine.run)
    thread.start()
    try:
        asked = [(number % 2, engine.request(["word"] * 40, 8, ("", "small")[number % 2]))
                 for number in range(12)]  # fmt: skip
        for _, request in asked:
            for _ in engine.tokens(request):
                pass
        found, requests = read_page(engine.page()), engine.truth()
        energies = engine.model_energies()
    finally:
        engine.close()
        thread.join()
    assert found.models == {"emulated-8b", "small"}
    for model in found.models:
        assert found.sum(Figure.OUTPUT, model) == 6 * 8
        parts = {dict(labels)["engine"] for labels in found.samples[Figure.OUTPUT]}
        assert parts == {"0", "1"}
    assert sum(energies.values()) == pytest.approx(sum(requests.values()))
    by_model = [sum(one.energy for which, one in asked if which == each) for each in (0, 1)]
    assert [*energies.values()] == pytest.approx(by_model)


def test_api_servers_of_an_engine_have_one_page() -> None:
    settings = InferenceServerSettings(
        model="m", slower=1e-3, others={"small": 0.4}, agent="/nonexistent"
    )
    engine = InferenceEngine(settings, [lambda load: None])
    servers = [CompletionServer(engine, "m") for _ in range(2)]
    threads = [
        threading.Thread(target=work)
        for work in (engine.run, *(server.serve_forever for server in servers))
    ]
    for thread in threads:
        thread.start()
    try:
        for number, server in enumerate(servers):
            asked = {"prompt": "a b", "max_tokens": 3, "model": ("m", "small")[number]}
            assert json.loads(_ask(server, "/v1/completions", asked)[1])["model"] == asked["model"]
        one, other = (_ask(server, "/metrics") for server in servers)
        listed, truth = (json.loads(_ask(servers[1], path)[1])
                         for path in ("/v1/models", "/truth/models"))  # fmt: skip
    finally:
        for server in servers:
            server.shutdown()
        engine.close()
        for thread in threads:
            thread.join()
        for server in servers:
            server.server_close()
    assert one == other
    found = read_page(one[1].encode())
    assert [found.sum(Figure.OUTPUT, model) for model in ("m", "small")] == [3, 3]
    assert [each["id"] for each in listed["data"]] == ["m", "small"]
    assert truth.keys() == {"m", "small"}
    assert 0 < truth["small"] < truth["m"]
