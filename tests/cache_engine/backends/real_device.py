"""The GPU that there is."""

from __future__ import annotations

import pytest

from cache_engine.backends.device import CudaUnavailableError, CupyDevice


def real_device() -> CupyDevice:
    """Return a device as users get it; the test is skipped, and says why, where there is none."""
    try:
        return CupyDevice()
    except CudaUnavailableError as e:
        pytest.skip(str(e))
