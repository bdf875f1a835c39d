"""The ops in plain fp64 torch: the oracle of tests and benches, imported by nothing else."""
