"""The decisions of the tuner: pure functions from state and observation to state."""
