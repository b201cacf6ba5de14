"""Principals: the users of a host as the kernel proves them.

A principal owns processes, their energy, shares of bounded pools and the right to query them. Names
that a user can choose (service, span, cgroup below a delegated directory) are claims and no part
of it. `wattspan.processes.principals` finds the principal of a process or connection.
"""

from __future__ import annotations

import json
from collections.abc import Hashable
from typing import NamedTuple

SHORT_CONTAINER = 12
"""Characters of a container's id in labels, as in the listings of container runtimes."""


class Principal(NamedTuple):
    """A pod; else a user id and a container; else a user id.

    ``user`` is None for a pod as a whole, since user ids separate nobody among pods. A subordinate
    user id (subuid) counts as its owner's. ``container`` and ``pod`` are names of cgroup
    directories that root created; directories below a delegated one belong to their owner.
    """

    user: int | None
    container: str = ""
    pod: str = ""

    @property
    def is_host_root(self) -> bool:
        """True for user 0 outside of containers and pods: root in a container is not root here."""
        return self == HOST_ROOT

    @property
    def path(self) -> tuple[Hashable, ...]:
        """The levels of fair shares: the owner, then the container.

        All containers of a user share the user's part of a pool, so that a user who creates
        containers gains nothing. A pod is an owner of its own.
        """
        if self.pod:
            pod: tuple[Hashable, ...] = (("pod", self.pod),)
            return pod if self.user is None else (*pod, ("uid", self.user))
        user = ("uid", self.user)
        return (user, ("container", self.container)) if self.container else (user,)


HOST_ROOT = Principal(0)


def principal_text(principal: Principal) -> str:
    """A stable text of a principal, for files; `parse_principal` reads it. Printable ASCII."""
    return json.dumps(principal, separators=(",", ":"))


def parse_principal(text: str) -> Principal:
    """The principal of a `principal_text`. ValueError for other texts."""
    try:
        user, container, pod = json.loads(text)
        found = Principal(user, container, pod)
    except (ValueError, TypeError, RecursionError):
        found = None
    if found is None or principal_text(found) != text or not _is_principal(found):
        raise ValueError(f"{text[:100]!r} is not the text of a principal")
    return found


def _is_principal(found: Principal) -> bool:
    kinds = tuple(map(type, found))
    return kinds[0] in (int, type(None)) and kinds[1:] == (str, str)
