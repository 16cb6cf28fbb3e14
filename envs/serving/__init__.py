"""The serving model: latency, one node."""
