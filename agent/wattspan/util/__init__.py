"""TODO wattspan.util."""
