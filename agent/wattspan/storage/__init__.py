"""The embedded store: counters that survive a restart, and a history without a server."""
