"""The query API: energy of periods, snapshot and tuning over HTTP (``docs/reference/api.md``)."""
