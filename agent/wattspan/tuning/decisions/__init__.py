"""TODO wattspan.tuning.decisions."""
