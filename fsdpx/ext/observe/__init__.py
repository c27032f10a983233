"""Observation of a run: traces, clocks, reports, the folder of a run, and pages about it."""
