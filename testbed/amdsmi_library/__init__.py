"""Building the emulated ``libamd_smi.so``, which the ``amdsmi`` package loads unchanged.

The package looks for ``$ROCM_PATH/lib/libamd_smi.so`` before anything else, when it is imported,
and binds each of its symbols then. The file of emulated GPUs is the one that the environment
variable ``WATTSPAN_EMULATED_AMD_GPUS`` names when the library is initialised.
"""

from __future__ import annotations

import functools
import importlib
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from types import ModuleType

import pytest

from testbed import nvml_library

NAME = "libamd_smi.so"
ENVIRONMENT = "WATTSPAN_EMULATED_AMD_GPUS"  # names the file of emulated GPUs
_SOURCES = Path(__file__).parent
_SHARED = Path(nvml_library.__file__).parent  # state.c reads the file of emulated GPUs


def build(rocm: Path, without: Collection[str] = (), compiler: str = "cc") -> Path:
    """Compile the library into ``rocm/lib`` and return its path.

    It has no symbol of those in ``without``, as an older one. EmulationError without a C compiler,
    or with its message if it fails.
    """
    library = rocm / "lib" / NAME
    generated = {
        "layout.h": nvml_library.layout_header(ENVIRONMENT),
        "stubs.c": nvml_library.stubs(symbols() - set(without), 2),
    }
    units = (_SOURCES / "amdsmi.c", _SHARED / "state.c")
    # No SONAME, by which any process would find it.
    nvml_library.compile_library(
        library, units, generated, "-Wl,-Bsymbolic", compiler=compiler, instead="EmulatedAmdSmi"
    )
    return library


def symbols() -> frozenset[str]:
    """The names of every function that the package binds."""
    return frozenset((_SOURCES / "symbols.txt").read_text("utf-8").split())


def environment(library: Path, gpus: Path) -> dict[str, str]:
    """Environment variables with which a client sees the emulated GPUs only."""
    return {"ROCM_PATH": str(library.parent.parent), ENVIRONMENT: str(gpus)}


@functools.cache
def load() -> ModuleType:
    """The ``amdsmi`` package over an emulated library, built at the first call.

    It is not left in ``sys.modules``: other tests of this process find the machine without AMD's
    library.
    """
    with tempfile.TemporaryDirectory() as directory:  # the mapped library outlives its file
        build(Path(directory))
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("ROCM_HOME", raising=False)
            patch.setenv("ROCM_PATH", directory)
            package = importlib.import_module("amdsmi")
    for name in [name for name in sys.modules if name.partition(".")[0] == "amdsmi"]:
        del sys.modules[name]
    return package
