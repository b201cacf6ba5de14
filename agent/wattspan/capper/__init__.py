"""The capper: the only process that ever writes to hardware, small enough to be read whole.

It holds caps under leases, for known peers, within bounds, and gives the original settings back
however anybody ends.
"""
