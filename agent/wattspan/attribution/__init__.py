"""TODO wattspan.attribution."""
