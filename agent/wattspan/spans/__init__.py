"""Energy of spans: profiles, joining, aggregation and wall time. Pure."""
