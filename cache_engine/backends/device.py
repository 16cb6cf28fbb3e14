"""What the CUDA backend asks of a device, and CuPy as one.

The CUDA backend has never run on a GPU yet; `make gpu-check` is what a GPU has still to say.
"""

from __future__ import annotations

import copy
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

CHUNK_BYTES = 1 << 20  # of a copy in the background, at most: so long a fetch may wait for it
THREADS = 256  # of a block; the kernels' launch bounds

_CUDA_MEMORY = (2, 13)  # DLPack's device types of device and managed memory
_HOST_MEMORY = 1  # cudaMemoryTypeHost
_MAPPED = 2  # cudaHostRegisterMapped
_READ_ONLY = 8  # cudaHostRegisterReadOnly


class CudaUnavailableError(RuntimeError):
    """CuPy or a CUDA device is missing; the message says which."""


class Event(Protocol):
    """A mark in the work of one stream."""

    def done(self) -> bool:
        """Whether all work before the mark is done; does not wait."""
        ...

    def wait(self) -> None:
        """Return when all work before the mark is done."""
        ...


@dataclass(frozen=True)
class Mapping:
    """Host memory that kernels can read."""

    address: int  # as kernels see it
    release: Callable[[], None]  # call once, when no kernel reads it any more


class Device(Protocol):
    """Memory of a device and one stream of work on it; arrays are the device's own, with a NumPy dtype and a shape."""

    def array(self, values: npt.NDArray[Any]) -> Any:
        """Return a new array with a copy of `values`."""
        ...

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        """Return a new array whose contents are not defined."""
        ...

    def allocate(self, size: int) -> Any:
        """Return `size` zero bytes, uint8, an allocation that ends with the last view on it."""
        ...

    def adopt(self, values: Any) -> Any | None:
        """Return an array over the device memory of an object with DLPack or the CUDA array interface, no copy.

        None if it has neither, or lies in the memory of the host.
        """
        ...

    def cast(self, array: Any, dtype: npt.DTypeLike) -> Any:
        """Return the array's values as C-contiguous `dtype`: the array itself if it is that already."""
        ...

    def write(self, array: Any, values: npt.NDArray[Any]) -> None:
        """Copy `values`, of the array's dtype and shape, into it; they may change as soon as this returns."""
        ...

    def send(self, array: Any, values: npt.NDArray[Any]) -> None:
        """Begin to copy `values`, in memory of `pinned`, into the array: they must stay until a later mark is done."""
        ...

    def read(self, array: Any, count: int | None = None) -> npt.NDArray[Any]:
        """Return a copy of the array, or of its first `count` rows, after all work so far."""
        ...

    def read_into(self, array: Any, out: npt.NDArray[Any]) -> None:
        """Copy the array into `out`, of its dtype and shape, after all work so far."""
        ...

    def launch(self, kernel: str, threads: int, *arguments: Any) -> None:
        """Run at least `threads` threads of a kernel after all work so far; arguments are arrays and integers."""
        ...

    def fork(self) -> Device:
        """Return the same device with a stream of its own, not ordered with this one but by marks."""
        ...

    def record(self) -> Event:
        """Mark the work given to the stream so far."""
        ...

    def after(self, event: Event) -> None:
        """Let the work given to the stream from now on begin when the event, of any stream, is done."""
        ...

    def pinned(self, size: int) -> npt.NDArray[np.uint8]:
        """Return new page-locked host memory, zero bytes."""
        ...

    def map(self, array: npt.NDArray[Any]) -> Mapping | None:
        """Let kernels read an array of the host, page-locked for it if it is not already; None if that cannot be."""
        ...


class CupyDevice:
    """A CUDA device of CuPy, by default the current one.

    Args:
        stream: the stream; by default CuPy's current one.

    Raises:
        CudaUnavailableError: CuPy is not installed, or there is no device.
    """

    def __init__(self, stream: Any = None) -> None:
        try:
            import cupy
        except ImportError as e:
            raise CudaUnavailableError(
                f"backend 'cuda' needs CuPy, which cannot be imported ({e}): install helm-rl[cuda13], or "
                "helm-rl[cuda12] for a driver of CUDA 12"
            ) from e
        try:
            devices = cupy.cuda.runtime.getDeviceCount()
        except Exception as e:  # without a driver CuPy raises instead of counting none
            raise CudaUnavailableError(
                f"backend 'cuda' needs an NVIDIA GPU and its driver; CuPy finds none ({e})"
            ) from e
        if devices < 1:
            raise CudaUnavailableError("backend 'cuda' needs an NVIDIA GPU; CuPy finds none")
        self._cupy = cupy
        self._device = cupy.cuda.Device()
        self.stream = cupy.cuda.get_current_stream() if stream is None else stream
        self._module = cupy.RawModule(code=kernel_source(), options=("-std=c++17",))
        self._kernels: dict[str, Any] = {}

    def array(self, values: npt.NDArray[Any]) -> Any:
        """Return a new array with a copy of `values`."""
        array = self.empty(values.shape, values.dtype)
        self.write(array, values)
        return array

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        """Return a new array whose contents are not defined."""
        with self._device, self.stream:
            return self._cupy.empty(shape, dtype)

    def allocate(self, size: int) -> Any:
        """Return `size` zero bytes, an allocation of the driver's own: closing a pool gives it back to all."""
        with self._device, self.stream:
            pointer = self._cupy.cuda.MemoryPointer(self._cupy.cuda.Memory(size), 0)
            pointer.memset_async(0, size, self.stream)
            return self._cupy.ndarray((size,), np.uint8, memptr=pointer)

    def adopt(self, values: Any) -> Any | None:
        """Return an array over the memory of a CuPy array, a torch CUDA tensor or the like; None if it is no such."""
        cupy = self._cupy
        if isinstance(values, cupy.ndarray):
            array = values
        elif hasattr(values, "__dlpack_device__") and int(values.__dlpack_device__()[0]) in _CUDA_MEMORY:
            # First of the two: it lets our stream wait for the producer's.
            with self._device, self.stream:
                array = cupy.from_dlpack(values)
        elif hasattr(values, "__cuda_array_interface__"):
            with self._device, self.stream:
                array = cupy.asarray(values)
        else:
            return None
        if array.device != self._device:
            raise ValueError(f"the pool is on {self._device}, the array on {array.device}")
        return array

    def cast(self, array: Any, dtype: npt.DTypeLike) -> Any:
        """Return the array's values as C-contiguous `dtype`: the array itself if it is that already."""
        with self._device, self.stream:
            return self._cupy.ascontiguousarray(array, dtype=dtype)

    def write(self, array: Any, values: npt.NDArray[Any]) -> None:
        """Copy `values`, of the array's dtype and shape, into it; they may change as soon as this returns."""
        if values.size:
            with self._device:
                array.set(np.ascontiguousarray(values), stream=self.stream)
            # Pageable memory has been read by now. Page-locked memory, which `values` may be, has not.
            if isinstance(values, _Pinned):
                self.stream.synchronize()

    def send(self, array: Any, values: npt.NDArray[Any]) -> None:
        """Begin to copy `values`, in memory of `pinned`, into the array: they must stay until a later mark is done."""
        if values.size:
            with self._device:
                array.set(values, stream=self.stream)

    def read(self, array: Any, count: int | None = None) -> npt.NDArray[Any]:
        """Return a copy of the array, or of its first `count` rows, after all work so far."""
        with self._device:
            result: npt.NDArray[Any] = array[:count].get(stream=self.stream)
        return result

    def read_into(self, array: Any, out: npt.NDArray[Any]) -> None:
        """Copy the array into `out`, of its dtype and shape, after all work so far."""
        with self._device:
            array.get(stream=self.stream, out=out)

    def launch(self, kernel: str, threads: int, *arguments: Any) -> None:
        """Run at least `threads` threads of a kernel after all work so far; arguments are arrays and integers."""
        if kernel not in self._kernels:
            self._kernels[kernel] = self._module.get_function(kernel)
        # CuPy passes arguments as they come: every integer of these kernels is 64 bits wide.
        values = tuple(np.int64(a) if isinstance(a, (int, np.integer)) else a for a in arguments)
        with self._device, self.stream:
            self._kernels[kernel]((max(1, -(-threads // THREADS)),), (THREADS,), values)

    def fork(self) -> CupyDevice:
        """Return the same device with a stream of its own, not ordered with this one but by marks."""
        other = copy.copy(self)
        with self._device:
            other.stream = self._cupy.cuda.Stream(non_blocking=True)
        return other

    def record(self) -> CupyEvent:
        """Mark the work given to the stream so far."""
        with self._device:
            event = self._cupy.cuda.Event(disable_timing=True)
            event.record(self.stream)
        return CupyEvent(event)

    def after(self, event: Any) -> None:
        """Let the work given to the stream from now on begin when the event, of any stream, is done."""
        self.stream.wait_event(event.event)

    def pinned(self, size: int) -> npt.NDArray[np.uint8]:
        """Return new page-locked host memory, zero bytes."""
        with self._device:
            memory = self._cupy.cuda.alloc_pinned_memory(max(size, 1))
        array = np.frombuffer(memory, np.uint8, size).view(_Pinned)
        array[:] = 0
        return array

    def map(self, array: npt.NDArray[Any]) -> Mapping | None:
        """Let kernels read an array of the host, page-locked for it if it is not already; None if that cannot be.

        Not a file's pages, which may have to be read, and fail to, while a kernel waits.
        """
        if not array.size:
            return Mapping(0, _nothing)
        if isinstance(array, _Pinned):
            return Mapping(self._address(array), _nothing)
        if is_mapped_file(array):
            return None
        runtime = self._cupy.cuda.runtime
        start = array.ctypes.data
        with self._device:
            try:
                runtime.hostRegister(start, array.nbytes, _MAPPED | (0 if array.flags.writeable else _READ_ONLY))
            except runtime.CUDARuntimeError:
                # Page-locked by its owner, as torch's pinned tensors are; or it shares pages with such memory, and
                # then is not page-locked all along.
                points = (start, start + array.nbytes // 2, start + array.nbytes - 1)
                if all(runtime.pointerGetAttributes(p).type == _HOST_MEMORY for p in points):
                    return Mapping(self._address(array), _nothing)
                return None
        return Mapping(self._address(array), lambda: runtime.hostUnregister(start))

    def _address(self, array: npt.NDArray[Any]) -> int:
        with self._device:
            return int(self._cupy.cuda.runtime.pointerGetAttributes(array.ctypes.data).devicePointer)


@dataclass(frozen=True)
class CupyEvent:
    """An event of CuPy's."""

    event: Any

    def done(self) -> bool:
        """Whether all work before the mark is done; does not wait."""
        return bool(self.event.done)

    def wait(self) -> None:
        """Return when all work before the mark is done."""
        self.event.synchronize()


class _Pinned(np.ndarray):
    """Page-locked host memory."""


def is_mapped_file(array: npt.NDArray[Any]) -> bool:
    """Whether the array's memory is that of a memory-mapped file."""
    base: Any = array
    while base is not None:
        if isinstance(base, mmap.mmap):
            return True
        base = base.obj if isinstance(base, memoryview) else getattr(base, "base", None)
    return False


def kernel_source() -> str:
    """Return the text of all kernels: kernels.cu, then transfer.cu."""
    folder = resources.files(__package__)
    return "".join(folder.joinpath(name).read_text(encoding="utf-8") for name in ("kernels.cu", "transfer.cu"))


def _nothing() -> None:
    pass
