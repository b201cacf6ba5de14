"""Every metric of wattspan: name, unit, attributes, help and values."""
