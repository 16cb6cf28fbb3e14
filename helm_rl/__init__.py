"""The agent and what it ships with: workloads, profiles, control, bundles, the command line."""

__version__ = "0.1.0"
