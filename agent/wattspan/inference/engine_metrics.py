"""The Prometheus pages of serving engines: which series count what, and their scan.

An engine counts its tokens at different moments: with each iteration, at intervals of its log, or
when a request finishes. Counters of prompt tokens include those that the prefix cache held, or do
not. Ranks of a parallel engine report the same tokens, data-parallel parts others.

A page is scanned for the wanted names only. A line that is no sample is ignored, and so is every
value that no counter can have.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import chain
from typing import NamedTuple

from wattspan.model import ModelEnum


class Figure(ModelEnum):
    """The meaning of a series of an engine."""

    INPUT = "input"  # prompt tokens, those from the prefix cache included
    COMPUTED = "computed"  # prompt tokens that were computed
    CACHED = "cached"  # prompt tokens from the prefix cache
    OUTPUT = "output"  # generated tokens
    DECODED = "decoded"  # those but the first of each request, where they are counted sooner
    REQUESTS = "requests"  # finished requests
    PROMPTS = "prompts"  # prompts whose first token was generated
    ITERATIONS = "iterations"  # forward passes that generated tokens
    DECODE = "decode"  # seconds that requests have waited for tokens but their first ones
    PREFILL = "prefill"  # seconds in which the prompts of finished requests were computed
    RUNNING = "running"  # requests in the batch, now


GAUGES = frozenset({Figure.RUNNING})
"""Figures of the moment; all others are counters."""


class Moves(ModelEnum):
    """When the counters of tokens move."""

    ITERATION = "iteration"
    LOG_INTERVAL = "log_interval"
    FINISH = "finish"  # when a request finishes


class Series(NamedTuple):
    """The samples of one name that have these labels, of each one of the given values."""

    name: str
    where: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def has(self, labels: Mapping[str, str]) -> bool:
        return all(labels.get(name) in values for name, values in self.where)


@dataclass(frozen=True, slots=True)
class EnginePage:
    """The page of an engine from a version on.

    ``only`` are names that together no other engine's page has, the last of which tells this one
    where the kind is named; ``never`` are prefixes of names that others have which reuse its names.
    ``without`` are names of a newer version. ``ranks`` are
    labels by which the same tokens appear several times. ``cached`` says whether the counter of
    prompt tokens includes those from the prefix cache, ``first`` whether that of generated tokens
    includes the first one of a request. ``mixed``: prompts are computed beside generated tokens;
    otherwise in passes of their own, which are no iterations.
    """

    kind: str
    version: str
    moves: Moves
    cached: bool
    series: Mapping[Figure, Series]
    only: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    ranks: frozenset[str] = frozenset()
    path: str = "/metrics"
    switch: str = "default"
    note: str = ""
    lag: int = 0  # iterations by which counters that do not move with each one are late
    first: bool = True
    mixed: bool = True

    @property
    def names(self) -> frozenset[str]:
        return frozenset(series.name for series in self.series.values())


_VLLM = {
    Figure.INPUT: Series("vllm:prompt_tokens_total"),
    Figure.OUTPUT: Series("vllm:generation_tokens_total"),
    Figure.REQUESTS: Series("vllm:request_success_total"),
    Figure.PROMPTS: Series("vllm:time_to_first_token_seconds_count"),
    Figure.ITERATIONS: Series("vllm:iteration_tokens_total_count"),
    Figure.RUNNING: Series("vllm:num_requests_running"),
}
_BY_SOURCE = "vllm:prompt_tokens_by_source_total"
_VLLM_MARKS = ("vllm:iteration_tokens_total_count", "vllm:cache_config_info")
_REUSED = ("mlx_serve:", "atom:", "sglang:")
_SGLANG_TOKENS = "sglang:realtime_tokens_total"
_SGLANG_RANKS = frozenset({"tp_rank", "pp_rank", "moe_ep_rank"})
_SGLANG_DECODE = (("mode", ("decode_cuda_graph", "decode_none")),)
_SGLANG = {
    Figure.REQUESTS: Series("sglang:num_requests_total"),
    Figure.PROMPTS: Series("sglang:time_to_first_token_seconds_count"),
    Figure.RUNNING: Series("sglang:num_running_reqs"),
}
_LLAMA = {
    Figure.COMPUTED: Series("llamacpp:prompt_tokens_total"),
    Figure.OUTPUT: Series("llamacpp:tokens_predicted_total"),
    Figure.RUNNING: Series("llamacpp:requests_processing"),
}
_LLAMA_CACHED = "llamacpp:prompt_tokens_cached_total"
PAGES = (
    EnginePage(
        "vllm", "with `prompt_tokens_by_source` (0.18)", Moves.ITERATION, True,
        _VLLM | {
            Figure.COMPUTED: Series(_BY_SOURCE, (("source", ("local_compute",)),)),
            Figure.CACHED: Series("vllm:prompt_tokens_cached_total"),
            Figure.DECODE: Series("vllm:inter_token_latency_seconds_sum"),
            Figure.PREFILL: Series("vllm:request_prefill_time_seconds_sum"),
        },
        only=(*_VLLM_MARKS, _BY_SOURCE), never=_REUSED,
        note="data-parallel parts (`engine`) are summed",
    ),
    EnginePage(
        "vllm", "without it (0.10)", Moves.ITERATION, True, _VLLM,
        only=(*_VLLM_MARKS, "vllm:generation_tokens_total"), never=_REUSED, without=(_BY_SOURCE,),
        note="`prefix_cache_hits` counts waiting requests again: not read",
    ),
    EnginePage(
        "sglang", "with `realtime_tokens` (December 2025)", Moves.LOG_INTERVAL, True,
        _SGLANG | {
            Figure.COMPUTED: Series(_SGLANG_TOKENS, (("mode", ("prefill_compute",)),)),
            Figure.CACHED: Series(_SGLANG_TOKENS, (("mode", ("prefill_cache",)),)),
            Figure.OUTPUT: Series(_SGLANG_TOKENS, (("mode", ("decode",)),)),
            Figure.DECODED: Series("sglang:inter_token_latency_seconds_count"),
            Figure.ITERATIONS: Series("sglang:cuda_graph_passes_total", _SGLANG_DECODE),
        },
        only=(_SGLANG_TOKENS,), ranks=_SGLANG_RANKS, switch="`--enable-metrics`", lag=50,
        first=False, mixed=False,
        note="recomputed tokens count again; ranks count once; split without"
        " `--enable-mixed-chunk`",
    ),
    EnginePage(
        "sglang", "without it (0.4)", Moves.FINISH, True,
        _SGLANG | {
            Figure.INPUT: Series("sglang:prompt_tokens_total"),
            Figure.OUTPUT: Series("sglang:generation_tokens_total"),
            Figure.CACHED: Series("sglang:cached_tokens_total"),
        },
        only=("sglang:prompt_tokens_total",), without=(_SGLANG_TOKENS,),
        ranks=_SGLANG_RANKS, switch="`--enable-metrics`",
    ),
    EnginePage(
        "tgi", "3", Moves.FINISH, True,
        {
            Figure.INPUT: Series("tgi_request_input_length_sum"),
            Figure.OUTPUT: Series("tgi_request_generated_tokens_sum"),
            Figure.REQUESTS: Series("tgi_request_success"),
            Figure.RUNNING: Series("tgi_batch_current_size"),
        },
        only=("tgi_request_generated_tokens_sum",), note="names no model",
    ),
    EnginePage(
        "llama.cpp", "with `prompt_tokens_cached` (13 August 2026)", Moves.FINISH, False,
        _LLAMA | {Figure.CACHED: Series(_LLAMA_CACHED)},
        only=("llamacpp:tokens_predicted_total", _LLAMA_CACHED), switch="`--metrics`",
        note="names no model; reading resets the averages `*_seconds`",
    ),
    EnginePage(
        "llama.cpp", "without it", Moves.FINISH, False, _LLAMA,
        only=("llamacpp:tokens_predicted_total",), without=(_LLAMA_CACHED,), switch="`--metrics`",
        note="names no model; reading keeps it awake despite `--sleep-idle-seconds`",
    ),
    EnginePage(
        "tensorrt-llm", "with `generation_tokens` (2026)", Moves.FINISH, True,
        {
            Figure.REQUESTS: Series("trtllm_request_success_total"),
            Figure.RUNNING: Series("trtllm_num_requests_running"),
            Figure.INPUT: Series("trtllm_prompt_tokens_total"),
            Figure.OUTPUT: Series("trtllm_generation_tokens_total"),
            Figure.CACHED: Series("trtllm_prompt_cached_tokens_total"),
        },
        only=("trtllm_generation_tokens_total",), path="/prometheus/metrics",
        switch="`return_perf_metrics` and `enable_iter_perf_stats`",
        note="`/prometheus/metrics`: a reading of `/metrics` removes what it shows",
    ),
    EnginePage(
        "dynamo", "1.2, frontend", Moves.FINISH, True,
        {
            Figure.INPUT: Series("dynamo_frontend_input_sequence_tokens_sum"),
            Figure.OUTPUT: Series("dynamo_frontend_output_tokens_total"),
            Figure.CACHED: Series("dynamo_frontend_cached_tokens_sum"),
            Figure.REQUESTS: Series("dynamo_frontend_requests_total"),
            Figure.RUNNING: Series("dynamo_frontend_inflight_requests"),
        },
        only=("dynamo_frontend_output_tokens_total",),
        note="output counts each chunk; name the unit or container of frontend and workers",
    ),
)  # fmt: skip
"""The known pages, of each engine the newest first."""

MAX_BODY = 8 << 20
MAX_SAMPLES = 2048
"""Samples of wanted names that are read of one page; with more, the page is refused."""

MAX_LABELS, MAX_LABELS_OF_PAGE = 4096, 256 << 10
"""Bytes of labels of a sample that is read, and of all such samples: readings are kept."""

_MAX_MODEL = 200
_MOST_COUNTED, _MOST = 1e15, 1e12  # in all, and between two readings: no engine reaches them
_MODEL_LABELS = ("model_name", "model")
_NAME = rb"[a-zA-Z_][a-zA-Z0-9_]*"
_TEXT = rb'"(?:[^"\\\n]|\\.)*"'
_KEY, _MORE = rb"(?:" + _NAME + rb"|" + _TEXT + rb")", rb"[ \t]*(?:,[ \t]*|(?=\}))"
_LABELS = re.compile(  # after the name of the series, if it is quoted
    rb"\{[ \t]*(?:(" + _TEXT + rb")" + _MORE + rb")?"
    rb"((?:" + _KEY + rb"[ \t]*=[ \t]*" + _TEXT + _MORE + rb")*)\}"
)
_LABEL = re.compile(rb"(" + _KEY + rb")[ \t]*=[ \t]*(" + _TEXT + rb")")
_OTHER = re.compile(rb"\s*(?:[<\[]|\{\s*(?:\}|\Z|" + _TEXT + rb"\s*:))")
"""The beginning of HTML and JSON, and of no line of a Prometheus page."""
_VALUE = re.compile(rb"[ \t]*([-+]?[0-9.]{1,64}(?:[eE][-+]?[0-9]{1,9})?)(?=[ \t\r\n]|\Z)")
_ESCAPED = re.compile(r"\\(.)")
_ESCAPES = {"n": "\n"}

_Labels = tuple[tuple[str, str], ...]
Samples = Mapping[str, Sequence[tuple[_Labels, float]]]
"""Labels and values in the order of a page, by the name."""


class PageError(Exception):
    """A body that is no page of a known engine; the message is a clause in lower case."""


class OtherPageError(PageError):
    """A body of another kind, such as JSON."""


class EngineReading(NamedTuple):
    """The samples of one page by figure and labels, without those of ranks, and its models."""

    page: EnginePage
    samples: Mapping[Figure, Mapping[_Labels, float]]
    models: frozenset[str]

    def sum(self, figure: Figure, model: str | None = None) -> float | None:
        """The sum of a figure over all labels, or those of a model; None if the page has none."""
        samples = self.samples.get(figure, {})
        own = [
            value for labels, value in samples.items() if model is None or model == _model(labels)
        ]
        return sum(own) if own else None


def _model(labels: _Labels) -> str:
    """The model that labels name; "" for none."""
    found = dict(labels)
    return next((found[name][:_MAX_MODEL] for name in _MODEL_LABELS if name in found), "")


_Series = tuple[str, _Labels, int]  # its name, its labels and their characters
KnownSeries = dict[bytes, _Series]
"""Series by their text: the next page of an engine has most of them again."""


def scan(
    body: bytes, names: Collection[str], known: KnownSeries | None = None
) -> dict[str, list[tuple[_Labels, float]]]:
    """The samples of the wanted names on a page, in its order; PageError for too many.

    ``known`` are the series of the engine's last page, which those of this page replace.
    """
    if _OTHER.match(body):
        raise OtherPageError("it is no Prometheus page but HTML or JSON")
    text, found = b"\n" + body, dict[str, list[tuple[_Labels, float]]]()
    before, present = known or {}, KnownSeries()
    count = size = 0
    for match in _pattern(frozenset(names)).finditer(text):
        count += 1
        if count > MAX_SAMPLES:
            raise PageError(f"it has more than {MAX_SAMPLES} samples of tokens")
        end = text.find(b"\n", match.end())
        line = text[match.start() + 1 : end if end >= 0 else None]
        own, _, value = line.rpartition(b" ")
        series = before.get(own)
        if series is None:
            series, at = _series((match[1] or match[2]).decode(), line)
            value = line[at:]
            own = own if at == len(own) else b""
        number = None if series is None else _number(value)
        if series is None or number is None:
            continue
        name, labels, length = series
        found.setdefault(name, []).append((labels, number))
        size += length
        if size > MAX_LABELS_OF_PAGE:
            raise PageError(f"its labels are longer than {MAX_LABELS_OF_PAGE >> 10} KiB")
        if own:
            present[own] = series
    if known is not None:
        known.clear()
        known.update(present)
    return found


@lru_cache(maxsize=16)
def _pattern(names: frozenset[str]) -> re.Pattern[bytes]:
    """The beginnings of lines with these names: faster than a search for each name."""
    each = b"|".join(re.escape(name.encode()) for name in sorted(names))
    return re.compile(
        rb"\n(?:(" + each + rb")(?=[{ \t])|\{[ \t]*\"(" + each + rb")\"(?=[ \t]*[,}]))"
    )


def _series(name: str, line: bytes) -> tuple[_Series | None, int]:
    """The series of a line with this name, and where it ends; None if its labels are invalid.

    A name of UTF-8 stands quoted before the labels, as Prometheus 3 and OpenMetrics 2 permit.
    """
    quoted = line[:1] == b"{"
    at = 0 if quoted else len(name)
    while line[at : at + 1] in (b" ", b"\t"):
        at += 1
    if line[at : at + 1] != b"{":
        return (name, (), 0) if at > len(name) else None, len(name)
    match = _LABELS.match(line, at, at + MAX_LABELS)
    if match is None or quoted == (match[1] is None):
        return None, at
    labels = tuple(
        sorted(
            (_unquoted(key) if key[:1] == b'"' else key.decode(), _unquoted(text))
            for key, text in _LABEL.findall(match[2])
        )
    )
    return (name, labels, sum(map(len, chain(*labels)))), match.end()


def _number(text: bytes) -> float | None:
    """The value at the beginning of a text; None if no counter can have it."""
    value = _VALUE.match(text)
    if value is None:
        return None
    try:
        number = float(value[1])
    except ValueError:
        return None
    return number if 0 <= number < _MOST_COUNTED else None


def _unquoted(quoted: bytes) -> str:
    """The text in quotation marks."""
    text = quoted[1:-1].decode(errors="replace")
    return _ESCAPED.sub(lambda match: _ESCAPES.get(match[1], match[1]), text)


def read_page(body: bytes, kind: str = "auto", known: KnownSeries | None = None) -> EngineReading:
    """The counters of an engine's page; PageError.

    Other programs reuse the names of vLLM: without a ``kind``, a page must have all names that
    only this engine has.
    """
    return read_page_with(body, kind, (), known)[0]


def read_page_with(
    body: bytes, kind: str, more: Collection[str], known: KnownSeries | None = None
) -> tuple[EngineReading, Samples]:
    """The counters of a page, and the samples of further names by the same scan; PageError."""
    samples = scan(body, _names(kind).union(more), known)
    for page in PAGES:
        if kind not in ("auto", page.kind):
            continue
        needed = page.only if kind == "auto" else page.only[-1:]
        complete = all(name in samples for name in needed)
        newer = any(name in samples for name in page.without)
        reused = kind == "auto" and any(
            start + one.encode() in body for one in page.never for start in (b"\n", b'\n{"')
        )
        if complete and not newer and not reused:
            return _reading(page, samples), samples
    which = "of a known engine" if kind == "auto" else f"of {kind}"
    raise PageError(f"it has not the counters {which}")


@cache
def _names(kind: str) -> frozenset[str]:
    """The names that tell the pages of a kind, and have their figures."""
    pages = [page for page in PAGES if kind in ("auto", page.kind)]
    marks = {mark for page in pages for mark in (*page.only, *page.without)}
    return frozenset().union(*(page.names for page in pages)) | marks


def _reading(page: EnginePage, samples: Samples) -> EngineReading:
    found: dict[Figure, dict[_Labels, float]] = {}
    models: set[str] = set()
    for figure, series in page.series.items():
        for labels, value in samples.get(series.name, ()):
            if not series.has(dict(labels)):
                continue
            key = tuple(one for one in labels if one[0] not in page.ranks)
            own = found.setdefault(figure, {})
            own[key] = max(value, own.get(key, 0.0))  # ranks report the same tokens
            if figure in (Figure.OUTPUT, Figure.REQUESTS):
                models.add(_model(labels))
    return EngineReading(page, found, frozenset(models - {""}))


@dataclass(frozen=True, slots=True)
class Progress:
    """The work of an engine between two readings; a figure that its page lacks is missing.

    ``running`` are the requests in the batch at both readings; None if that is unknown. ``models``
    are the parts of each model, if the page has several.
    """

    page: EnginePage
    figures: Mapping[Figure, float] = field(default_factory=dict)
    running: tuple[float, float] | None = None
    model: str = ""  # "" for several, or none
    models: tuple[Progress, ...] = ()

    @property
    def tokens(self) -> Mapping[str, float]:
        """Tokens by type; those from the prefix cache are input."""
        found = self.figures
        prompt = found.get(Figure.INPUT)
        if prompt is None and Figure.COMPUTED in found:
            prompt = found[Figure.COMPUTED] + found.get(Figure.CACHED, 0.0)
        output = found.get(Figure.DECODED, found.get(Figure.OUTPUT))
        if output is not None and not self.page.first:
            output += found.get(Figure.PROMPTS, 0.0)
        both = {"input": prompt, "output": output}
        return {way: count for way, count in both.items() if count is not None}


def progress(before: EngineReading, after: EngineReading, *, whole: bool = True) -> Progress | None:
    """The work between two readings of one process; None if a counter fell or leapt.

    Then the engine has started again, or its page is another one's. A series that was not there
    before counts from 0; unless ``whole``, the earlier page may have lacked some, and nothing is
    known.
    """
    if before.page is not after.page:
        return None
    found = {}
    for figure in after.samples.keys() | before.samples.keys():
        if figure in GAUGES:
            continue
        old, new = before.samples.get(figure, {}), after.samples.get(figure, {})
        fell = any(new.get(key, -1.0) < value for key, value in old.items())
        if fell or (not whole and new.keys() - old.keys()):
            return None
        found[figure] = sum(new.values()) - sum(old.values())
        if found[figure] > _MOST:
            return None
    models, running = sorted(after.models), _running(before, after)
    if len(models) == 1:
        return Progress(after.page, found, running, models[0])
    parts = tuple(_of_model(before, after, found, model) for model in models)
    return Progress(after.page, found, running, "", parts)


def _running(
    before: EngineReading, after: EngineReading, model: str | None = None
) -> tuple[float, float] | None:
    first, last = before.sum(Figure.RUNNING, model), after.sum(Figure.RUNNING, model)
    return None if first is None or last is None else (first, last)


def _of_model(
    before: EngineReading, after: EngineReading, figures: Collection[Figure], model: str
) -> Progress:
    """The part of a model in the progress of ``figures``; those that do not name it are missing."""
    found = {
        figure: last - (before.sum(figure, model) or 0.0)
        for figure in figures
        if (last := after.sum(figure, model)) is not None
    }
    return Progress(after.page, found, _running(before, after, model), model)


def page_paths(kind: str) -> tuple[str, ...]:
    """The paths at which an engine of a kind may have its page, in the order of trials.

    An engine with a page elsewhere may have at ``/metrics`` what is lost when it is read.
    """
    found = {page.path for page in PAGES if kind in ("auto", page.kind)}
    return tuple(sorted(found, key=len, reverse=True))
