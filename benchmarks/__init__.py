"""One script a claim: cost of the agent, measured next to its peers."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_TESTS = str(ROOT / "tests")
if _TESTS not in sys.path:  # for `support` and `nvml_library`
    sys.path.append(_TESTS)
