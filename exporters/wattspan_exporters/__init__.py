"""Ways out: every exporter shares one catalogue and reads immutable snapshots."""
