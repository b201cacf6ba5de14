"""TODO wattspan.spans."""
