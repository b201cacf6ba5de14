"""Putting the service's files in place, and taking them away: a plan that is pure, then its doing.

Nothing here decides and acts at once. `looking` tells what is there, `plan` and `program` say what
is to be done about it and what speaks against it, `applying` does it.
"""
