"""The engine's kernels on the host, as the engine's own tests have them."""

from __future__ import annotations

from tests.cache_engine.backends.conftest import all_kernels, library

__all__ = ["all_kernels", "library"]
