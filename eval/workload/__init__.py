"""What `helm-rl bench trace` measures: reading logs, generating, miss-ratio curves, fitting."""
