"""What one run of a suite costs on clusters of all sizes, for `helm-rl bench scaling`."""
