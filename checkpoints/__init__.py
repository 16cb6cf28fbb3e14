"""Bundles that ship with helm-rl, each with a model card."""
