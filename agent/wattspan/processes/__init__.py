"""Who used the CPUs: identity, CPU clocks, cgroups, exits."""
