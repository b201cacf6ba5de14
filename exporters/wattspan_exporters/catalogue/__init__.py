"""TODO wattspan_exporters.catalogue."""
