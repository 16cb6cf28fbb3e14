"""The decorator of every compiled kernel."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

_ENGINE = Path(__file__).parent

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """Compile `function` with numba: no Python objects, the GIL released, the machine code cached on disk.

    numba's disk cache notices an edit of the file that holds the function, but not of a file that holds something it
    calls, and would run stale code. So the cache entry is stamped with a digest of every source file of `cache_engine` and
    of the function's own folder.
    """
    dispatcher = numba.njit(cache=True, nogil=True)(function)
    dispatcher._cache._cache_file._source_stamp = _digest(Path(function.__code__.co_filename).parent)
    return cast(F, dispatcher)


@functools.cache
def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for root in sorted({_ENGINE, folder}):
        for path in sorted(root.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
