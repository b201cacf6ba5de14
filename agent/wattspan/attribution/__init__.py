"""Energy arithmetic: readings, intervals, shares, totals and history. No I/O, no clock."""
