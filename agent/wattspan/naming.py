"""Totals by service and span name, with room for so many and no more."""
