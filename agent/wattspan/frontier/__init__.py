"""The measured frontier of time and energy of a command over its settings."""
