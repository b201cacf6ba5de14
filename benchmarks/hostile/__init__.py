"""Attacks by local users, one after the other, and how others are served meanwhile."""
