"""Monitoring of running ranks: a flight recorder, a watchdog that detects hangs, and preemption."""
