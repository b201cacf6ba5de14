"""Usage of the CPUs by process: identity, CPU clocks, cgroups, exits.

``open_processes`` assembles a host's usage source and process directory.
"""

from wattspan.processes.host import Capability, HostUsage, open_processes

__all__ = ["Capability", "HostUsage", "open_processes"]
