"""Model and hardware profiles."""
