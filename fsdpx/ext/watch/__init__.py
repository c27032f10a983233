"""Flight record, watchdog and preemption, which look after running ranks."""
