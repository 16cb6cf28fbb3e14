"""`helm-rl watch`: what a training run or a control process does, as it does it."""
