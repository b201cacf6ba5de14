"""The keys of load tracking in ``[[autotune.job]]``."""

from __future__ import annotations

from pathlib import Path

import pytest

from wattspan.config import Config, LatencyPercentile, LatencySource, TunedJobSettings, load
from wattspan.config.settings import ineffective_settings
from wattspan.config.tuning_settings import matching_job
from wattspan.config.writing import to_toml
from wattspan.model import MILLISECOND, SECOND
from wattspan.model.settings import SettingError, convert
from wattspan.ports import ConfigError

TRACKED = {
    "service": "llm",
    "span": "chat",
    "kind": "requests",
    "control": "track",
    "slo": {"ttft_p99": "400ms", "tbt_p999": "100ms"},
}


def faults(**more: object) -> str:
    with pytest.raises(SettingError) as caught:
        convert(TRACKED | more, TunedJobSettings, "autotune.job[0]")
    return str(caught.value)


def read(text: str, folder: Path) -> Config:
    path = folder / "config.toml"
    path.write_text(text)
    return load(path, environ={})


def test_latency_limits_are_read_with_their_percentiles() -> None:
    job = convert(TRACKED, TunedJobSettings, "autotune.job[0]")
    assert job.tracked
    assert job.period == 5 * SECOND
    assert job.objectives == (
        LatencyPercentile("ttft_p99", True, 400 * MILLISECOND, 0.01),
        LatencyPercentile("tbt_p999", False, 100 * MILLISECOND, 0.001),
    )


def test_tracked_job_survives_writing(tmp_path: Path) -> None:
    config = read(
        '[autotune]\nmode = "apply"\n[[autotune.job]]\nservice = "llm"\nspan = "chat"\n'
        'kind = "requests"\ncontrol = "track"\nperiod = "2s"\nttft = "event:first"\n'
        'slo = {ttft_p99 = "400ms", tbt_p99 = "100ms"}\nclasses = "length"\n',
        tmp_path,
    )
    assert config.autotune.job[0].slo == {"ttft_p99": 400 * MILLISECOND, "tbt_p99": 10**8}
    assert read(to_toml(config), tmp_path).autotune == config.autotune


@pytest.mark.parametrize(
    ("more", "cause", "remedy"),
    [
        ({"kind": "steps"}, "load tracking is for requests", 'Set kind = "requests"'),
        ({"kind": "auto"}, "load tracking is for requests", 'Set kind = "requests"'),
        ({"span": ""}, "needs the name of the span", ""),
        ({"slo": {}}, "needs a latency limit", "slo = {ttft_p99"),
        ({"slo": {"ttft_99": "1s"}}, '"ttft_99" is not a latency', "Write ttft_p99 or tbt_p99"),
        ({"slo": {"tbt_p20": "1s"}}, '"tbt_p20" is not a latency', "from 50"),
        ({"slo": {"tbt_p99": "0s"}}, "allows no request", "Set a longer time"),
        ({"slo": {"tbt_p99": 3}}, "expected a duration", "100ms"),
        ({"ttft": "event:"}, '"event:" names nothing', "Write event:NAME"),
        ({"tbt": "span:"}, '"span:" names nothing', "Write event:NAME or span:NAME"),
        ({"latency": "1s"}, "the latency limits in slo replace it", "Remove it"),
        ({"max_slowdown": 0.05}, "the latency limits in slo replace it", "Remove it"),
        ({"compute": "step"}, "does not divide a server into ranks", "Remove it"),
        ({"period": "1ms"}, "out of bounds", '"1s"'),
        ({"service": "", "engine": "e"}, "tells no service", "Name that of the spans"),
        ({"engine": "e", "control": "search", "slo": {}}, "engine", "has no effect"),
        ({"control": "search"}, "has no effect without load tracking", 'Set control = "track"'),
    ],
)
def test_invalid_key_is_an_error_with_cause_and_remedy(
    more: dict[str, object], cause: str, remedy: str
) -> None:
    sentences = faults(**more)
    key = {"kind": "control", "control": "slo"}.get(*[next(iter(more))] * 2)
    assert f"Bad value for 'autotune.job[0].{key}': " in sentences
    assert cause in sentences
    assert remedy in sentences


@pytest.mark.parametrize("key", ["slo", "ttft", "tbt", "classes"])
def test_key_without_tracking_is_an_error(key: str, tmp_path: Path) -> None:
    value = '{ttft_p99 = "1s"}' if key == "slo" else '"length"'
    text = f'[[autotune.job]]\nspan = "a"\n{key} = {value}\n'
    with pytest.raises(ConfigError, match=r"has no effect without load tracking"):
        read(text, tmp_path)


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("", LatencySource()),
        ("llm.ttft", LatencySource(attribute="llm.ttft")),
        ("event:first", LatencySource(event="first")),
        ("span:prefill", LatencySource(child="prefill")),
        ("app:ttft", LatencySource(attribute="app:ttft")),
        ("event", LatencySource(attribute="event")),
    ],
)
def test_latency_source_is_an_attribute_unless_it_names_another(
    text: str, source: LatencySource
) -> None:
    assert LatencySource.parse(text) == source


# ------------------------------------------------------------------------------ pages of engines

BY_PAGE = """[autotune]
mode = "apply"
[[serving.engine]]
name = "llm"
url = "http://127.0.0.1:8000"
{engine}
[[autotune.job]]
engine = "llm"
kind = "requests"
control = "track"
{job}
"""


def advice(folder: Path, engine: str = "", job: str = 'slo = {ttft_p99 = "500ms"}') -> list[str]:
    config = read(BY_PAGE.format(engine=engine, job=job), folder)
    return list(ineffective_settings(config))


def test_job_of_an_engine_needs_no_span(tmp_path: Path) -> None:
    assert advice(tmp_path, 'kind = "vllm"') == []
    (job,) = read(BY_PAGE.format(engine="", job='slo = {tbt_p99 = "1s"}'), tmp_path).autotune.job
    assert job.unit == ("llm", "")
    assert matching_job([job], "llm", "") is job
    assert matching_job([job], "llm", "chat") is None


@pytest.mark.parametrize(
    ("engine", "job", "part"),
    [
        ('kind = "vllm"', 'slo = {ttft_p99 = "400ms"}', "400ms: an engine's page has no such bound,"
         " and counts the requests by the next lower one: 250ms (vllm)."),
        ("", 'slo = {tbt_p99 = "450ms"}', "400ms (vllm), 400ms (sglang), 400ms (tensorrt-llm)."),
        ('kind = "sglang"', 'slo = {tbt_p99 = "1ms"}', "sglang has no bound up to it, and every"),
        ('kind = "llama.cpp"', 'slo = {tbt_p99 = "1s"}', "llama.cpp has no histogram of this"),
        ('kind = "tgi"', 'slo = {ttft_p99 = "1s"}', "tgi has no histogram of this latency"),
        ('kind = "vllm"\ninterval = "30s"', 'slo = {tbt_p99 = "1s"}', "over 30s, the interval"),
        ('kind = "vllm"', 'slo = {tbt_p99 = "1s"}\nclasses = "length"',
         "cannot track the job, only announced spans can"),
    ],
)  # fmt: skip
def test_limit_that_a_page_does_not_show_is_told(
    engine: str, job: str, part: str, tmp_path: Path
) -> None:
    (sentence,) = advice(tmp_path, engine, job)
    assert part in sentence
    assert sentence.startswith("[[autotune.job]] 0 ")


def test_unknown_engine_of_a_job_is_told(tmp_path: Path) -> None:
    text = BY_PAGE.format(engine="", job='slo = {tbt_p99 = "1s"}')
    config = read(text.replace('engine = "llm"', 'engine = "other"'), tmp_path)
    (sentence,) = ineffective_settings(config)
    assert '"other" names no [[serving.engine]]' in sentence


def test_two_jobs_of_one_engine_are_refused(tmp_path: Path) -> None:
    job = '[[autotune.job]]\nengine = "llm"\nservice = "x"\nkind = "requests"\ncontrol = "track"\n'
    text = BY_PAGE.format(engine="", job='slo = {tbt_p99 = "1s"}')
    with pytest.raises(ConfigError, match="has its engine"):
        read(f'{text}{job}slo = {{tbt_p99 = "1s"}}\n', tmp_path)


def test_agent_without_spans_may_track_by_pages(tmp_path: Path) -> None:
    text = BY_PAGE.format(engine="", job='slo = {tbt_p99 = "1s"}')
    assert read(f"{text}[spans]\nenabled = false\n", tmp_path).warnings == ()


def test_jobs_without_an_engine_are_declined_without_spans(tmp_path: Path) -> None:
    text = BY_PAGE.format(engine="", job='slo = {tbt_p99 = "1s"}')
    other = '[[autotune.job]]\nspan = "step"\n[spans]\nenabled = false\n'
    (sentence,) = read(f"{text}{other}", tmp_path).warnings
    assert sentence.endswith("the tuner will decline [[autotune.job]] 1.")


def test_each_engine_that_a_page_may_be_of_has_its_own_sentence(tmp_path: Path) -> None:
    lacking, stand_in = advice(tmp_path, "", 'slo = {ttft_p99 = "500ms"}')
    assert "tgi has no histogram" in lacking
    assert stand_in.endswith("lower one: 400ms (sglang).")
