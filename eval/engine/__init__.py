"""What `helm-rl bench engine` measures, one file per question."""
