"""What is measured on the live node, on the wall clock: its hardware, the model's errors, controllers side by side."""
