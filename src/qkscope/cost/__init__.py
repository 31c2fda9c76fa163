"""What a study costs before it runs: work, memory, disk and time from shapes alone."""
