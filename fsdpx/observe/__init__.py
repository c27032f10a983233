"""What ranks did and how it went: traces, clocks, the folder of a run, and pages about it."""
