"""Observability: traces, logs, progress, reports of traffic, memory and time, and the folder of a run."""
