"""Helpers shared by the tests: requirements, waiting, leak watching."""
