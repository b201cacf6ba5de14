"""What the whole agent does while its world is broken, and how soon it is well afterwards."""

from __future__ import annotations

import sys
from pathlib import Path

_TESTS = str(Path(__file__).resolve().parents[2] / "tests")
if _TESTS not in sys.path:  # `support`: the emulated hosts that can be broken
    sys.path.append(_TESTS)
