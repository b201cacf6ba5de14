"""The pages of engines: what is no page, and where a page is looked for."""

import pytest

from wattspan.inference.engine_metrics import (
    Figure,
    KnownSeries,
    OtherPageError,
    PageError,
    page_paths,
    read_page,
    scan,
)


@pytest.mark.parametrize(
    "body",
    [
        b"<!doctype html>",
        b' \n{"status": "ok"}',
        b'{\n  "a, b" : {}}',
        b'{"cut": ',
        b"{}",
        b"{",
        b"[]",
        b'[{"iter": 1}]',
    ],
)
def test_html_and_json_are_no_page(body: bytes) -> None:
    with pytest.raises(OtherPageError):
        scan(body, ["vllm:prompt_tokens_total"])


@pytest.mark.parametrize(
    "first", ['{"a.b"} 1', '{"a: b",c="d"} 1', '{ "a" , "c"="d" } 1', '{c="d","a"} 1', "{", '{"a']
)
def test_page_with_quoted_names_is_read(first: str) -> None:
    """Names of UTF-8 as in Prometheus 3; no first line hides the others."""
    page = [
        first,
        '{"vllm:prompt_tokens_total"} 2',
        '{ "vllm:generation_tokens_total" , "model_name"="m", engine="0"} 3',
        'vllm:iteration_tokens_total_count{"model_name"="m"} 4',
        '{"vllm:cache_config_info",engine="0",} 1',
    ]
    reading = read_page("\n".join(page).encode())
    assert reading.page.kind == "vllm"
    assert reading.sum(Figure.OUTPUT) == 3
    assert reading.models == {"m"}
    page.append('{"sglang:num_requests_total"} 1')
    with pytest.raises(PageError, match="of a known engine"):
        read_page("\n".join(page).encode())


def test_page_that_a_reading_drains_is_asked_for_last() -> None:
    assert page_paths("tensorrt-llm") == ("/prometheus/metrics",)
    assert page_paths("vllm") == ("/metrics",)
    assert page_paths("auto") == ("/prometheus/metrics", "/metrics")


def test_series_of_the_last_page_are_known_without_times() -> None:
    name, known = "vllm:prompt_tokens_total", KnownSeries()
    for page in (b'%s{engine="0"} 1\n%s{engine="1"} 2 1700000000000', b'%s{engine="0"} 3\n%s 4'):
        body = page % (name.encode(), name.encode())
        assert scan(body, [name], known) == scan(body, [name])
    assert set(known) == {b'vllm:prompt_tokens_total{engine="0"}', b"vllm:prompt_tokens_total"}


@pytest.mark.parametrize("mark", ["cache_config_info", "iteration_tokens_total_count", "other"])
def test_page_of_a_named_kind_needs_no_marks_of_it(mark: str) -> None:
    page = f"vllm:{mark} 1\nvllm:prompt_tokens_total 2\nvllm:generation_tokens_total 3"
    assert read_page(page.encode(), "vllm").page.kind == "vllm"
