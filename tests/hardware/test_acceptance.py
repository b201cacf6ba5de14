"""The acceptance run on a real board. It reads, works on the CPU, and changes no setting.

Run alone, with ``WATTSPAN_HARDWARE=1``, on an idle host with a GPU: ``pytest -s
tests/hardware/test_acceptance.py``. It takes three minutes; the report is a property of the test.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from wattspan.cli.doctor import Severity
from wattspan.cli.doctor.acceptance import accept
from wattspan.cli.doctor.acceptance.checks import IDLE, STEPS
from wattspan.cli.options import ConfigurationOptions
from wattspan.clock import SystemClock
from wattspan.config import FlagValue
from wattspan.model import Provenance
from wattspan.ports import SourceError

pytestmark = pytest.mark.exhaustive


def test_boards_pass_the_acceptance(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    if not os.environ.get("WATTSPAN_HARDWARE"):
        pytest.skip("real hardware is read only where WATTSPAN_HARDWARE=1 asks for it")
    directories = {"agent.state_dir": tmp_path / "state", "agent.run_dir": tmp_path / "run"}
    flags = {key: FlagValue("test", str(path)) for key, path in directories.items()}
    loaded = ConfigurationOptions(Path(os.devnull), flags).load()
    try:
        checks, document, _ = accept(loaded, SystemClock(), lambda _: None)
    except SourceError as error:
        pytest.skip(f"no counter: {error}")
    boards = [one for one in checks if one.device.startswith("gpu ")]
    if not boards or Provenance.EMULATED in {one.figures.get("provenance") for one in boards}:
        pytest.skip("no real GPU")
    print(json.dumps(document, indent=2))
    record_property("report", document)
    assert {one.test for one in boards} >= {IDLE, STEPS}
    failed = [one for one in boards if one.finding.mark is Severity.FAIL]
    assert not failed, failed
