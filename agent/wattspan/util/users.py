"""Names of users."""

from __future__ import annotations

import functools


@functools.lru_cache(maxsize=1024)
def user_name(user_id: int) -> str:
    """The name of a user; the number without one."""
    import pwd  # absent on some systems of applications that import this package

    try:
        return pwd.getpwuid(user_id).pw_name
    except (KeyError, OverflowError):
        return str(user_id)
