"""Prometheus pages of serving engines, with the names, labels and types of their versions.

A file has ``page``, perhaps ``kind``, and ``[expected]``: the ``version``, the sum of each figure
and the ``models``, or the word of the refusal (``refused``). ``[latencies]`` are counts up to
some bounds.
"""

from __future__ import annotations

import re
import tomllib

import pytest
from testbed.field import FieldCase, field_cases
from testbed.requirements import ROOT

from wattspan.config import ServingEngineSettings
from wattspan.inference.engine_metrics import Figure, PageError, page_paths, read_page
from wattspan.inference.latency_histograms import read_tracked_page
from wattspan.model.settings import convert

CASES = field_cases("engine_pages")
PAGES = [one for one in CASES if "refused" not in one.values[0]["expected"]]
REFUSED = [one for one in CASES if "refused" in one.values[0]["expected"]]


@pytest.mark.parametrize("case", PAGES)
def test_page_is_recognised_and_its_counters_read(case: FieldCase) -> None:
    expected = dict(case["expected"])
    found = read_page(case["page"].encode(), case.get("kind", "auto"))
    assert found.page.version == expected.pop("version")
    assert sorted(found.models) == expected.pop("models")
    sums = {figure.value: found.sum(figure) for figure in Figure}
    assert {name: value for name, value in sums.items() if value is not None} == expected


@pytest.mark.parametrize("case", REFUSED)
def test_page_of_no_engine_is_refused(case: FieldCase) -> None:
    with pytest.raises(PageError, match=case["expected"]["refused"]):
        read_page(case["page"].encode())


@pytest.mark.parametrize("case", [one for one in PAGES if one.id.startswith("vllm")])
def test_block_of_the_how_to_reads_the_pages_of_vllm(case: FieldCase) -> None:
    text = (ROOT / "docs" / "how-to" / "measure-llm-requests.md").read_text()
    (block,) = re.findall(r"^```toml\n(\[\[serving.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (table,) = tomllib.loads(block)["serving"]["engine"]
    settings = convert(table, ServingEngineSettings, "serving.engine")
    assert "/metrics" in page_paths(settings.kind)
    found = read_page(case["page"].encode(), settings.kind)
    assert found.page.kind == "vllm"
    assert (found.sum(Figure.INPUT) or 0) > 0
    assert (found.sum(Figure.OUTPUT) or 0) > 0


@pytest.mark.parametrize("case", PAGES)
def test_named_kind_reads_the_same_page(case: FieldCase) -> None:
    page, kind = case["page"].encode(), case.get("kind", "auto")
    found = read_page(page, kind)
    assert read_page(page, found.page.kind) == found


@pytest.mark.parametrize("case", [one for one in PAGES if one.values[0].get("latencies")])
def test_latencies_of_a_page_are_read(case: FieldCase) -> None:
    body, expected = case["page"].encode(), case["latencies"]
    _, found = read_tracked_page(body)
    assert (found.waiting, found.by_token) == (expected["waiting"], expected["by_token"])
    for histograms, name in ((found.first, "first"), (found.between, "between")):
        (histogram,) = histograms.values()
        assert [[bound, histogram[bound]] for bound, _ in expected[name]] == expected[name]
