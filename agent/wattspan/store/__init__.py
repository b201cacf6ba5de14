"""The embedded store: what was measured survives a restart and answers ``wattspan report``."""
