"""Who used the CPUs: identity, CPU clocks, cgroups, exits.

``open_processes`` puts a host's usage source and process directory together.
"""

from wattspan.processes.host import Capability, HostUsage, open_processes
from wattspan.processes.identity import groups_of

__all__ = ["Capability", "HostUsage", "groups_of", "open_processes"]
