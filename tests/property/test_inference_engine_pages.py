"""The scan of engines' pages, judged by prometheus_client's own parser and writer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from wattspan.inference.engine_metrics import (
    MAX_LABELS,
    MAX_LABELS_OF_PAGE,
    MAX_SAMPLES,
    PAGES,
    KnownSeries,
    PageError,
    progress,
    read_page,
    scan,
)

NAMES = sorted({name for page in PAGES for name in page.names})
LABELS = st.dictionaries(
    st.sampled_from(["engine", "model_name", "tp_rank", "source", "le"]),
    st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=12)
    | st.sampled_from(['"', "\\", "\n", "} 5 {", " 7\nvllm:prompt_tokens_total 9", "a,b=c"]),
    max_size=4,
)
VALUES = st.floats(width=64) | st.integers(0, 2**53)
BESIDE = st.sampled_from(["", "_created", "_bucket", "x", "5", "_sum"])
SAMPLES = st.lists(st.tuples(st.sampled_from(NAMES), BESIDE, LABELS, VALUES), max_size=20)
JUNK = st.binary(max_size=60).map(lambda text: text.replace(b"\n", b" ")) | st.sampled_from(
    [
        b"vllm:prompt_tokens_total{",
        b'vllm:prompt_tokens_total{engine="0" 7',
        b"vllm:prompt_tokens_total 1_000",
        b"vllm:prompt_tokens_total 0x10",
        b"vllm:prompt_tokens_total",
        b"vllm:prompt_tokens_total NaN",
        b"vllm:prompt_tokens_total -1",
        b'vllm:prompt_tokens_total{a="b\\',
        b"vllm:prompt_tokens_total " + b"9" * 400,
        b"# vllm:prompt_tokens_total 5",
        b'{"vllm:prompt_tokens_total',
        b'{"vllm:prompt_tokens_total" a="b"} 7',
        b'{"vllm:prompt_tokens_total","again"} 7',
        b'{"vllm:prompt_tokens_total": 7}',
        b'vllm:prompt_tokens_total{"again"} 7',
        b" vllm:prompt_tokens_total 5",
        b"\xff\xfe vllm:prompt_tokens_total 5",
    ]
)


def _line(name: str, labels: dict[str, str], value: float, *, quoted: bool = False) -> str:
    """A sample; with ``quoted``, its names are written as those of UTF-8."""

    def escaped(text: str) -> str:
        return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")

    if quoted:
        inside = "".join(f',"{key}"="{escaped(text)}"' for key, text in labels.items())
        return f'{{"{name}"{inside}}} {value!r}'
    inside = ",".join(f'{key}="{escaped(text)}"' for key, text in labels.items())
    return f"{name}{{{inside}}} {value!r}" if labels else f"{name} {value!r}"


def _judged(lines: list[str]) -> list[tuple[str, tuple[tuple[str, str], ...], float]]:
    families = text_string_to_metric_families("\n".join(lines) + "\n")
    found = [one for family in families for one in family.samples]
    return sorted(
        (one.name, tuple(sorted(one.labels.items())), one.value)
        for one in found
        if one.name in NAMES and 0 <= one.value < 1e15
    )


def _scanned(body: bytes) -> list[tuple[str, tuple[tuple[str, str], ...], float]]:
    return sorted(
        (name, labels, value)
        for name, samples in scan(body, NAMES).items()
        for labels, value in samples
    )


@given(SAMPLES, st.integers(0, 2**20 - 1))
def test_scan_finds_what_the_parser_finds(
    samples: list[tuple[str, str, dict[str, str], float]], quoted: int
) -> None:
    lines = [
        _line(name + beside, labels, value, quoted=bool(quoted >> at & 1))
        for at, (name, beside, labels, value) in enumerate(samples)
    ]
    assert _scanned("\n".join(lines).encode()) == _judged(lines)


@given(SAMPLES, st.lists(st.tuples(SAMPLES, st.sampled_from(["", " 1700000000000"])), max_size=3))
def test_series_of_the_page_before_change_no_sample(
    first: list[tuple[str, str, dict[str, str], float]],
    changes: list[tuple[list[tuple[str, str, dict[str, str], float]], str]],
) -> None:
    known = KnownSeries()
    for more, time in [([], ""), *changes, ([], "")]:
        lines = [
            _line(name + beside, labels, 7, quoted=len(name) % 2 == 0)
            for name, beside, labels, _ in first
        ]
        lines += [_line(name, labels, value) + time for name, _, labels, value in more]
        body = "\n".join(lines).encode()
        assert scan(body, NAMES, known) == scan(body, NAMES)


@given(SAMPLES, st.lists(st.tuples(st.integers(0, 20), JUNK), max_size=8))
def test_malformed_lines_never_cost_their_neighbours(
    samples: list[tuple[str, str, dict[str, str], float]], junk: list[tuple[int, bytes]]
) -> None:
    lines = [_line(name, labels, value) for name, _, labels, value in samples]
    valid = _judged(lines)
    body = [b"# a page", *(line.encode() for line in lines)]
    for at, one in junk:
        body.insert(1 + at % len(body), one)
    found = _scanned(b"\n".join(body))
    for one in valid:
        assert found.count(one) >= valid.count(one)


@given(st.binary(max_size=2000))
def test_any_body_is_read_or_refused(body: bytes) -> None:
    for kind in ("auto", "vllm", "sglang", "llama.cpp"):
        for page in (
            body,
            b"vllm:prompt_tokens_total" + body,
            b'x\nvllm:generation_tokens_total{"' + body,
            b'{"vllm:generation_tokens_total"' + body,
        ):
            try:
                reading = read_page(page, kind)
            except PageError:
                continue
            assert progress(reading, reading) is not None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'vllm:prompt_tokens_total{engine="%d"} 1\n', "samples"),
        (b"vllm:prompt_tokens_total{%d\n", "samples"),
        (b'vllm:prompt_tokens_total{a="%0*d"} 1\n', "labels"),
    ],
)
def test_page_with_too_many_samples_or_labels_is_refused(line: bytes, words: str) -> None:
    size = MAX_LABELS_OF_PAGE // MAX_SAMPLES + 1
    count = MAX_SAMPLES + (words == "samples")
    values = [(size, number) if b"*" in line else (number,) for number in range(count)]
    with pytest.raises(PageError, match=words):
        scan(b"".join(line % each for each in values), NAMES)


def test_value_with_several_points_is_ignored() -> None:
    assert scan(b"vllm:prompt_tokens_total 1.2.3\nvllm:prompt_tokens_total 4", NAMES) == {
        "vllm:prompt_tokens_total": [((), 4.0)]
    }


def test_sample_with_longer_labels_is_ignored() -> None:
    lines = [b'vllm:prompt_tokens_total{a="%s"} 1' % (b"x" * n) for n in (9, MAX_LABELS)]
    assert len(scan(b"\n".join(lines), NAMES)["vllm:prompt_tokens_total"]) == 1
