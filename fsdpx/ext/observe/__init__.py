"""Records of a run: traces, clocks, the folder of a run, and pages about it."""
