"""Installation of the systemd services.

`files` has the service files and their state on a host, `program` checks the program that the
services run, `plan` computes the actions and performs them.
"""
