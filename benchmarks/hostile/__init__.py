"""Attacks by local users, one after the other, and how others are served meanwhile."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_TESTS = str(ROOT / "tests")
if _TESTS not in sys.path:  # `support`: the clients and processes that the tests have
    sys.path.append(_TESTS)
