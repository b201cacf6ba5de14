"""``agent.json``: the settings that a running agent publishes for its clients in its run directory.

A client of any user finds the agent by it, without the right to read the agent's configuration. The
file contains paths and addresses only, no secret and no path of one. A client uses the values below
of these keys only, because the owner of the file may be less trusted than the client.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from wattspan.util.files import read_regular, replace_file

PUBLISHED_FILE = "agent.json"
PUBLISHED_KEYS = frozenset(
    {
        "agent.api",
        "agent.run_dir",
        "agent.state_dir",
        "caps.host_dir",
        "exporters.prometheus.listen",
        "exporters.prometheus.tls_certificate",
        "spans.grpc",
        "spans.http",
    }
)
_MAX_BYTES = 64 * 1024
_MODE = 0o644
"""Every local user may read it."""


class _Document(msgspec.Struct):
    version: str
    pid: int
    emulated: bool
    settings: dict[str, str | bool]


@dataclass(frozen=True, slots=True)
class PublishedAgent:
    """A running agent, as its clients know it; ``settings`` are values by dotted key.

    Without ``place``, the path of the file, no agent has published anything.
    """

    place: str = ""
    version: str = ""
    pid: int = 0
    emulated: bool = False
    settings: Mapping[str, str | bool] = field(default_factory=dict)


def publish(directory: Path, agent: PublishedAgent) -> Path:
    """Replace the file in ``directory`` as a whole, whatever the umask; its path. OSError."""
    settings = {key: value for key, value in agent.settings.items() if key in PUBLISHED_KEYS}
    document = _Document(agent.version, agent.pid, agent.emulated, settings)
    path = directory / PUBLISHED_FILE
    draft = directory / f".{PUBLISHED_FILE}"
    replace_file(path, msgspec.json.encode(document), draft, _MODE, exact=True)
    return path


def withdraw(directory: Path, pid: int) -> None:
    """Remove the file of the agent ``pid`` from ``directory``, if it is there."""
    if find_published((str(directory),)).pid == pid:
        with suppress(OSError):
            (directory / PUBLISHED_FILE).unlink()


def find_published(directories: Iterable[str]) -> PublishedAgent:
    """The agent that has published its settings in the first of ``directories`` that has any."""
    for directory in directories:
        path = Path(directory) / PUBLISHED_FILE
        with suppress(OSError, ValueError, RecursionError):
            found = msgspec.json.decode(read_regular(path, _MAX_BYTES).content, type=_Document)
            settings = {key: one for key, one in found.settings.items() if key in PUBLISHED_KEYS}
            return PublishedAgent(str(path), found.version, found.pid, found.emulated, settings)
    return PublishedAgent()
