"""What `helm-rl bench model` measures, one file per check."""
