"""A matrix product that stands for the model: it takes as long as the profile says, on this machine."""

from __future__ import annotations

import importlib
import threading
import time
from typing import Any

import numpy as np

# So large that the call itself hardly counts. On the CPU so small that a BLAS library keeps to one thread: several wait
# for each other by spinning, and on a busy machine a product of 30 us then took milliseconds.
_EDGE = {"cpu": 64, "cuda": 1024}
_CALIBRATION = 40  # products; the fastest counts, for what else runs on the machine only slows them down


class MatrixProduct:
    """Square float32 products on NumPy (backend "cpu") or CuPy ("cuda"), of which one takes `product_s` seconds."""

    def __init__(self, backend: str) -> None:
        self._xp: Any = np if backend == "cpu" else importlib.import_module("cupy")
        edge = _EDGE[backend]
        self._left = self._xp.full((edge, edge), 0.5, np.float32)
        self._right = self._xp.full((edge, edge), 0.25, np.float32)
        self._out = self._xp.empty((edge, edge), np.float32)
        self.product_s = min(self._time_one() for _ in range(_CALIBRATION))

    def run(self, seconds: float, stop: threading.Event) -> None:
        """Multiply for about `seconds` of an idle machine: a fixed amount of work, so a busy one takes longer."""
        for _ in range(round(seconds / self.product_s)):
            if stop.is_set():
                return
            self._multiply()

    def _time_one(self) -> float:
        begun = time.perf_counter()
        self._multiply()
        return time.perf_counter() - begun

    def _multiply(self) -> None:
        self._xp.matmul(self._left, self._right, out=self._out)
        if self._xp is not np:
            self._xp.cuda.get_current_stream().synchronize()
