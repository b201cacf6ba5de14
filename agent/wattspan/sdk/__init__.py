"""What people write to measure by hand: ``with wattspan.window("train") as w: ...``.

Standard library only, and next to nothing of it until a figure is read. Import it as
``wattspan.window``, ``wattspan.measured`` and so on.
"""
