"""Threads and loops: where the pure core meets time."""
