"""Flight recorder, watchdog and preemption, which observe running ranks."""
