"""The capper: the only process that writes to hardware, small enough to be reviewed as a whole.

It holds caps under leases, for permitted users and within bounds, and restores the original
settings after any exit.
"""
