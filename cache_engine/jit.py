"""The decorators of every compiled kernel."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

_ENGINE = Path(__file__).parent
# numba's stubs name its public options alone.
_njit: Any = numba.njit

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """Compile `function` with numba for calls from Python and from other kernels.

    No Python objects, the GIL released, the machine code cached on disk. Reference counts are left out (`_nrt=False`):
    counting those of all arrays of a state at every call costs more than the work, and halves the simulator's speed.
    So a kernel must not allocate; numba refuses one that does.
    """
    return _compile(function)


def inner(function: F) -> F:
    """Compile `function` as `kernel` does, for calls from kernels only.

    Leaving out its Python entry halves its compile time.
    """
    return _compile(function, no_cpython_wrapper=True)


def _compile(function: F, **options: bool) -> F:
    dispatcher = _njit(nogil=True, _nrt=False, no_cfunc_wrapper=True, **options)(function)
    try:
        dispatcher.enable_caching()
    except RuntimeError:
        # Nowhere to write: a read-only installation, no home. Each process compiles for itself then.
        return cast(F, dispatcher)
    # numba's disk cache notices an edit of the file that holds a function, but not of a file that holds something it
    # calls, and would run stale code. So its stamp is a digest of all of `cache_engine` and the function's own folder.
    dispatcher._cache._cache_file._source_stamp = _digest(Path(function.__code__.co_filename).parent)
    # What numba lets pass here on Windows alone.
    dispatcher._cache._guard_against_spurious_io_errors = functools.partial(_forget_damaged, dispatcher._cache)
    return cast(F, dispatcher)


@contextlib.contextmanager
def _forget_damaged(cache: Any) -> Iterator[None]:
    """Go on without the cached code if it cannot be written (a full disk) or read (a file cut off by a power cut).

    The kernel is compiled then. A damaged pickle may raise anything; its index is emptied, lest it be met again.
    """
    try:
        yield
    except Exception:
        with contextlib.suppress(OSError):
            cache.flush()


@functools.cache
def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for root in sorted({_ENGINE, folder}):
        for path in sorted(root.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
