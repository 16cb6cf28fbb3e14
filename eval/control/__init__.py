"""What `helm-rl bench control` is made of: faults, the proxy that injects them, and the process that must bear them."""
