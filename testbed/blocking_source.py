"""A counter source of somebody else's that hangs while a test wants it to."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_MODULE = """
from pathlib import Path
from wattspan.ports import Batch, SourcePlugin
from wattspan.model.settings import Table

class Settings(Table, frozen=True):
    "Where it hangs."
    gate: str = ""

class Blocking:
    name = "blocking"
    def __init__(self, settings, context):
        self._gate = Path(settings.gate)
    def read(self):
        if self._gate.exists():
            self._gate.read_bytes()  # of a pipe that nobody writes to
        return Batch(domains=())
    def close(self):
        pass

PLUGIN = SourcePlugin(Settings, Blocking)
"""


class BlockingSource:
    """Installed in ``folder``, which is to be on the path of Python."""

    def __init__(self, folder: Path) -> None:
        self.gate = folder / "gate"
        (folder / "blocking_source_plugin.py").write_text(_MODULE)
        about = folder / "blocking_source_plugin-1.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: blocking-source\nVersion: 1\n"
        )
        (about / "entry_points.txt").write_text(
            "[wattspan.sources]\nblocking = blocking_source_plugin:PLUGIN\n"
        )
        self.environ = {"PYTHONPATH": str(folder)}

    def block(self) -> None:
        """Every read blocks from now on."""
        os.mkfifo(self.gate)

    def release(self) -> None:
        """Blocked reads return."""
        waiting = self.gate.rename(self.gate.with_suffix(".old"))
        with suppress(OSError):  # reads do not block
            os.close(os.open(waiting, os.O_WRONLY | os.O_NONBLOCK))
        waiting.unlink()
