"""Observability: traces, logs, progress, reports on traffic, memory and time, and the folder of a run."""
