"""Stability of the agent's resources over its run time: memory, descriptors, threads, files.

.venv/bin/python -m benchmarks.soak [--minutes 10] [--hours 24] [--interval 10ms]
"""
