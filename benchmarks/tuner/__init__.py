"""The tuner's bench: jobs made from measured curves, run in simulated time, whole runs scored."""
