"""The decorators of every compiled kernel."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.dispatcher import Dispatcher
from numba.cpython.unsafe import numbers
from numba.extending import intrinsic

MOST_BYTES = 16_384  # of a value in memory

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
    # calls, and would run stale code. So its stamp is a digest of all of `cache_engine`, of the function's own folder,
    # and of the files of kernels that its module has imported by name from elsewhere.
    imported = {_file_of(value.py_func) for value in function.__globals__.values() if isinstance(value, Dispatcher)}
    dispatcher._cache._cache_file._source_stamp = _digest(frozenset({_file_of(function).parent, *imported}))
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


def _file_of(function: Callable[..., Any]) -> Path:
    return Path(function.__code__.co_filename)


@functools.cache
def _digest(places: frozenset[Path]) -> str:
    """Return a digest of the sources of the engine and of `places`, files and folders."""
    paths: set[Path] = set()
    for place in {_ENGINE, *places}:
        paths.update(place.rglob("*.py") if place.is_dir() else [place])
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _prefetch(context: Any, array: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = signature.args[0]
        made = context.make_array(kind)(context, builder, arguments[0])
        item = cgutils.get_item_pointer(context, builder, kind, made, [arguments[1]], wraparound=False)
        address = builder.bitcast(item, ir.IntType(8).as_pointer())
        i32 = ir.IntType(32)
        declared = ir.FunctionType(ir.VoidType(), [address.type, i32, i32, i32])
        llvm = builder.module.declare_intrinsic("llvm.prefetch", [address.type], declared)
        builder.call(llvm, [address, i32(1), i32(3), i32(1)])  # for a write, keep in all levels, data
        return context.get_dummy_value()

    return types.none(array, types.intp), generate


def _copy_bytes(context: Any, to: Any, to_at: Any, source: Any, source_at: Any, count: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        places = []
        for array, at, kind in (
            (arguments[0], arguments[1], signature.args[0]),
            (arguments[2], arguments[3], signature.args[2]),
        ):
            made = context.make_array(kind)(context, builder, array)
            places.append(builder.gep(made.data, [at]))
        to_place, source_place = places
        cgutils.raw_memcpy(builder, to_place, source_place, arguments[4], 1)
        return context.get_dummy_value()

    return types.none(to, types.intp, source, types.intp, types.intp), generate


def in_memory(example: Any) -> tuple[Any, Any]:
    """Return (store, load), for kernels, of values of the example's type, such as tuples of arrays.

    store(buffer, value) writes the value as the machine code has it, pointers and sizes, into uint8 [MOST_BYTES];
    load(buffer) reads it back. So Python hands over one array instead of thirty, which takes it 5 us less. Whoever
    holds the buffer must hold the arrays too.
    """
    kind = numba.typeof(example)

    def place(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = context.get_value_type(kind)
        if context.get_abi_sizeof(value) > MOST_BYTES:
            raise ValueError(f"a value of {context.get_abi_sizeof(value)} bytes does not fit {MOST_BYTES}")
        buffer = context.make_array(signature.args[0])(context, builder, arguments[0])
        return builder.bitcast(buffer.data, value.as_pointer())

    @intrinsic
    def store(context: Any, buffer: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            builder.store(arguments[1], place(context, builder, signature, arguments))
            return context.get_dummy_value()

        return types.none(buffer, kind), generate

    @intrinsic
    def load(context: Any, buffer: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.load(place(context, builder, signature, arguments))

        return kind(buffer), generate

    return store, load


# For kernels. numba's stubs give its intrinsics the signature that its compiler calls.
# prefetch(array, index): begin to fetch the cache line of array[index], to write to it; the index must be in range.
prefetch: Any = intrinsic(_prefetch)
# copy_bytes(to, to_at, source, source_at, count): as memcpy, between uint8 arrays [n], C-contiguous, without bounds.
copy_bytes: Any = intrinsic(_copy_bytes)
# trailing_zeros(bits): how many zeros end a uint64 that is not zero; a uint64.
trailing_zeros: Any = numbers.trailing_zeros
