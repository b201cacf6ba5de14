"""An emulated host: physics, GPUs, a powercap tree, workloads. A feature and a test bench."""
