"""Energy counters: one file a device family, each behind the CounterSource port."""
