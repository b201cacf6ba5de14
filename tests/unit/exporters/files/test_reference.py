"""The page about the files matches the code."""

import re

from testbed.requirements import ROOT

from wattspan_exporters.files import DEFAULT_METRICS
from wattspan_exporters.files.rows import COLUMNS, FORMAT_VERSION

PAGE = (ROOT / "docs" / "reference" / "files.md").read_text(encoding="utf-8")


def test_reference_lists_every_column_in_order() -> None:
    table = re.findall(r"^\| `(\w+)` \| (\w+(?:\[.*\])?) \| \S.*\|$", PAGE, re.MULTILINE)
    assert table == [(column.name, column.kind) for column in COLUMNS]
    assert f"(schema {FORMAT_VERSION})" in PAGE


def test_default_metrics_are_those_of_the_page() -> None:
    (listing,) = re.findall(r"metrics = \[\n(.*?)\]", PAGE, re.DOTALL)
    assert re.findall(r'"(.*?)"', listing) == list(DEFAULT_METRICS)
