"""Spans going on to the user's collector, with their energy added."""
