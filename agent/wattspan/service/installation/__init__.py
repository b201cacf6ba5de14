"""Installation of the systemd services.

`inspection` reads the state of the host, `plan` and `program` compute actions and objections (both
pure), `apply` performs the actions.
"""
