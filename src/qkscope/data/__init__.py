"""Numbers that ship with the package: published results to compare a run with. Data and its reader, nothing else."""
