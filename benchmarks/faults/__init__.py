"""Behaviour of the whole agent under faults, and the time until it has recovered."""
