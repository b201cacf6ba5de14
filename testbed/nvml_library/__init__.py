"""Building the emulated ``libnvidia-ml.so.1``, which any NVML client loads unchanged.

Put its directory in ``LD_LIBRARY_PATH`` and the file of emulated GPUs in
``WATTSPAN_EMULATED_GPUS`` before a client starts; or load it with ``ctypes.CDLL`` before the
client's binding does, since it has the real library's SONAME.
"""

from __future__ import annotations

import _ctypes
import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from wattspan.emulation import gpu_file
from wattspan.emulation.gpu_file import EmulationError

SONAME = "libnvidia-ml.so.1"
ENVIRONMENT = "WATTSPAN_EMULATED_GPUS"  # names the file of emulated GPUs
_SOURCES = Path(__file__).parent
_STRUCTURES = (
    *(gpu_file.ProcessEntry, gpu_file.SampleEntry, gpu_file.InstanceEntry),
    *(gpu_file.Identity, gpu_file.Live),
    *(gpu_file.GpuRecord, gpu_file.Header, gpu_file.HostRecord),
)
_CONSTANTS = {
    name: value
    for name, value in vars(gpu_file).items()
    if name.isupper() and isinstance(value, int) and not name.startswith("_")
}
_MESSAGES = {
    0: "The operation was successful",
    1: "Uninitialized",
    2: "Invalid Argument",
    3: "Not Supported",
    4: "Insufficient Permissions",
    5: "Already Initialized",
    6: "Not Found",
    7: "Insufficient Size",
    8: "Insufficient External Power",
    9: "Driver Not Loaded",
    10: "Timeout",
    12: "NVML Shared Library Not Found",
    13: "Function Not Found",
    15: "GPU is lost",
    16: "GPU requires restart",
    18: "RM has detected an NVML/RM version mismatch.",
    25: "Argument version mismatch",
    28: "GPU not found",
}
_NAMES = {ctypes.c_uint32: "uint32_t", ctypes.c_uint64: "uint64_t", ctypes.c_char: "char"}
_FLAGS = (
    *("-std=c11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread"),
    *("-Wall", "-Wextra", "-Werror"),
)


def build(directory: Path, compiler: str = "cc", without: Iterable[str] = ()) -> Path:
    """Compile the library into ``directory`` and return its path.

    It does not export the functions ``without``, as that of an older driver.
    Raises EmulationError without a C compiler, or with its message if it fails.
    """
    messages = "".join(f'case {code}: return "{text}";\n' for code, text in _MESSAGES.items())
    generated = {
        "layout.h": layout_header(),
        "stubs.c": stubs(symbols(), 3),
        "messages.inc": messages,
    }
    units = sorted(_SOURCES.glob("*.c"))
    library = directory / SONAME
    flags = [f"-Wl,-soname,{SONAME}"]
    if hidden := " ".join(f"{name};" for name in without):
        exports = directory / "exports"
        exports.write_text(f"{{ global: nvml*; local: {hidden} }};")
        flags.append(f"-Wl,--version-script={exports}")
    compile_library(library, units, generated, *flags, compiler=compiler, instead="EmulatedNvml")
    return library


@contextmanager
def loaded(library: Path) -> Iterator[ctypes.CDLL]:
    """The library in this process, where bindings find it by its SONAME, until the block ends.

    Other tests of the process find no driver again, however often the bindings have opened it.
    """
    try:
        yield ctypes.CDLL(str(library))
    finally:
        with suppress(OSError):
            while True:
                one = ctypes.CDLL(str(library), mode=os.RTLD_NOLOAD)._handle
                _ctypes.dlclose(one)  # what was opened by this look
                _ctypes.dlclose(one)


def compile_library(
    library: Path,
    units: Iterable[Path],
    generated: Mapping[str, str],
    *flags: str,
    compiler: str,
    instead: str,
) -> None:
    """Compile ``units`` and the ``generated`` files, by name, into a shared library.

    ``instead`` is the class with the same functions in Python.
    Raises EmulationError without a C compiler, or with its message if it fails.
    """
    found = shutil.which(compiler)
    if found is None:
        raise EmulationError(
            f"Cannot build {library.name}: no C compiler {compiler!r} on PATH. "
            f"Install one (Debian: gcc libc6-dev), or use {instead}, which needs none."
        )
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        files = [Path(directory) / name for name in generated]
        for file in files:
            file.write_text(generated[file.name])
        sources = [*units, *(file for file in files if file.suffix == ".c")]
        command = [found, *_FLAGS, *flags, f"-I{directory}", f"-I{_SOURCES}", "-o", str(library)]
        result = subprocess.run(
            [*command, *map(str, sources)], capture_output=True, text=True, check=False
        )
    if result.returncode:
        raise EmulationError(f"Cannot build {library.name}: {found} says: {result.stderr.strip()}")


def symbols() -> frozenset[str]:
    """The names of every function that the real library exports."""
    return frozenset((_SOURCES / "symbols.txt").read_text("utf-8").split())


def environment(library: Path, gpus: Path) -> dict[str, str]:
    """Environment variables with which a client sees the emulated GPUs only."""
    return {"LD_LIBRARY_PATH": str(library.parent), ENVIRONMENT: str(gpus)}


def layout_header(environment: str = ENVIRONMENT) -> str:
    """The structures of ``gpu_file`` in C, with every offset asserted.

    ``environment`` names the variable with the path of the file.
    """
    lines = ["#pragma once", "#include <stddef.h>", "#include <stdint.h>"]
    lines += [f"#define {name} {value:#x}ull" for name, value in _CONSTANTS.items()]
    lines.append(f'#define ENVIRONMENT "{environment}"')
    for structure in _STRUCTURES:
        name = structure.__name__
        fields = [_field(field, kind) for field, kind, *_ in structure._fields_]
        lines += [f"struct {name} {{", *fields, "};"]
        lines.append(f'_Static_assert(sizeof(struct {name}) == {ctypes.sizeof(structure)}, "");')
        for field, *_ in structure._fields_:
            offset = getattr(structure, field).offset
            lines.append(f'_Static_assert(offsetof(struct {name}, {field}) == {offset}, "");')
    return "\n".join(lines) + "\n"


def _field(name: str, kind: Any) -> str:
    if issubclass(kind, ctypes.Array):
        return f"    {_type(kind._type_)} {name}[{kind._length_}];"
    return f"    {_type(kind)} {name};"


def _type(kind: Any) -> str:
    return _NAMES.get(kind, f"struct {kind.__name__}")


def stubs(names: Iterable[str], code: int) -> str:
    """Functions that return ``code``; weak, so that a real definition replaces one."""
    attributes = '__attribute__((weak, visibility("default")))'
    return "".join(
        f"{attributes} int {name}(void) {{ return {code}; }}\n" for name in sorted(names)
    )
