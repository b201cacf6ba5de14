"""Description of the measuring machine, in one paragraph."""

from __future__ import annotations

import datetime
import os
import platform
from importlib import metadata
from pathlib import Path


def describe() -> str:
    """The machine, its software, the date and the load before the measurement."""
    load = os.getloadavg()[0]
    return (
        f"{os.cpu_count()} x {_cpu_model()}, Linux {platform.release().split('-')[0]}, "
        f"Python {platform.python_version()}, wattspan {metadata.version('wattspan')}, "
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}; load {load:.1f}."
    )


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
