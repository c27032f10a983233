"""Monitoring of running ranks: flight recorder, watchdog for hangs, and preemption."""
