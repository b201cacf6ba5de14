"""NVIDIA GPUs: energy, status and processes through NVML."""
