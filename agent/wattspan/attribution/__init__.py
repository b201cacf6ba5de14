"""Energy arithmetic: readings, intervals, shares, totals and history. Pure."""
