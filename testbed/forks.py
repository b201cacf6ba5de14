"""Work in the child of a fork."""

from __future__ import annotations

import os
from typing import Any


def in_child(work: Any) -> str:
    """The result of ``work`` in a forked process."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writer, str(work()).encode())
        except BaseException as error:  # noqa: BLE001 - reported to the parent
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as result:
        text = result.read()
    os.waitpid(child, 0)
    return text
