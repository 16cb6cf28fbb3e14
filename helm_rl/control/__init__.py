"""Controllers of alpha."""
