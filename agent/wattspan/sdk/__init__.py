"""Measurement by hand: ``with wattspan.window("train") as w: ...``.

Imports the standard library only, and most of it only when a value is read. Import the names from
``wattspan``: ``wattspan.window``, ``wattspan.measured`` and so on.
"""
