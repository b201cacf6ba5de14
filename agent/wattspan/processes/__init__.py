"""Who used the CPUs: identity, CPU clocks, cgroups, exits.

``open_processes`` puts a host's usage source and process directory together.
"""

from wattspan.processes.capabilities import Capability
from wattspan.processes.groups import groups_of
from wattspan.processes.host import HostUsage, open_processes

__all__ = ["Capability", "HostUsage", "groups_of", "open_processes"]
