"""``testbed.agent_on_host`` for a job that has its package for itself.

An emulated package's users are real processes of this machine. The tuner declines a package of
which a job has less than most, so that the tests of tuning packages would depend on the other work
of the machine: here the job's processes are its only users.
"""

from __future__ import annotations

from collections.abc import Collection

from testbed import agent_on_host
from wattspan.model import Payer
from wattspan.tuning.host_view import DeviceUsers

_share = DeviceUsers.share


def share(users: DeviceUsers, resource: str, payers: Collection[Payer], now: int) -> float:
    """1 for a job that uses the resource at all."""
    return float(_share(users, resource, payers, now) > 0)


if __name__ == "__main__":
    DeviceUsers.share = share  # type: ignore[method-assign]
    agent_on_host.main()
