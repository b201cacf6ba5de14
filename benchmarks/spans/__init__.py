"""Helpers shared by the span benchmarks: an agent, an application whose truth is known, senders."""
