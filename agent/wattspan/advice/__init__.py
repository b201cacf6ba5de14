"""Static powers of GPUs, the use of boards by services, and advice from both. Pure."""
