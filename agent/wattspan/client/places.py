"""Where an agent's sockets may be."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SYSTEM = "/run/wattspan"
SOCKET = "api.sock"


def run_directories(environ: Mapping[str, str] = os.environ) -> Iterator[str]:
    """The run directories an agent may have, the likeliest first."""
    if told := environ.get("WATTSPAN_RUN_DIR"):
        yield told
        return
    yield SYSTEM
    if own := environ.get("XDG_RUNTIME_DIR"):
        yield f"{own}/wattspan"
