"""Flight record, watchdog and preemption: what looks after ranks that run."""
