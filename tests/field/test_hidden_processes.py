"""Hosts that show the agent a part of their processes only, by what procfs tells of itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from testbed.field import FieldCase, build_tree, field_cases

from wattspan.processes.procfs import ProcFs


@pytest.mark.parametrize("case", field_cases("hidden_processes"))
def test_view_of_procfs_is_known_to_be_whole_or_partial(case: FieldCase, tmp_path: Path) -> None:
    procfs = ProcFs(build_tree(case["tree"], tmp_path))
    assert procfs.shows_all() is case["expected"]["visible"]
