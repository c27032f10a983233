"""Observation of a run: traces, clocks, reports, the folder of a run, and pages that describe it."""
