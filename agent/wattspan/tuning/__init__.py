"""The tuner: ``decisions`` is its pure core, the other modules drive it for each job."""
