"""Callbacks for trainers of other packages; each module needs the extra of its name."""

from __future__ import annotations

import functools
from typing import Any

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def lazy_class(name: str, hooks: type, base: Callable[[], type]) -> Callable[[str], Any]:
    """``__getattr__`` of the module of ``hooks``, which has the class ``name`` at its first use.

    The class has ``hooks`` and the class of a framework, which ``base`` imports, as its bases. It
    is found under its name, so that its objects can be pickled.
    """

    @functools.cache
    def made() -> type:
        return type(
            name, (hooks, base()), {"__doc__": hooks.__doc__, "__module__": hooks.__module__}
        )

    def found(asked: str) -> Any:
        if asked == name:
            return made()
        raise AttributeError(f"module {hooks.__module__!r} has no attribute {asked!r}")

    return found
