"""Fuzzing of the readers: any bytes make a sound trace or a UserError, nothing else."""
