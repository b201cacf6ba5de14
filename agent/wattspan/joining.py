"""A process's energy divided among its spans, exactly."""
