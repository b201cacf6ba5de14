"""CPU and DRAM energy: RAPL counters through powercap or pyRAPL."""
