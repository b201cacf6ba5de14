"""Clocks for pipeline-parallel training, with less energy (Perseus, SOSP '24)."""
