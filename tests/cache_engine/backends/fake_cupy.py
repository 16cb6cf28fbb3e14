"""As much of CuPy as the backend and its GPU tests ask for, on the host: rehearses them, at once and in order.

What a GPU does, and whether CuPy is called as it wants to be, this cannot tell.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cache_engine.backends import transfer
from tests.cache_engine.backends.host_device import kernel_names
from tests.cache_engine.backends.local_device import LocalArray, World


class CudaError(RuntimeError):
    """An error of the runtime."""


class FakeCupy(SimpleNamespace):
    """Stands in for the module.

    Attributes:
        world: memory and kernels.
        used: bytes allocated by the driver.
        registered: page-locked host memory, address to bytes.
    """

    def __init__(self, library: Path, source: Path) -> None:
        world = World(library, kernel_names(source))
        self.world = world
        self.registered: dict[int, int] = {}
        self.used = 0
        fake = self

        class Context(contextlib.nullcontext[None]):
            pass

        class Device(Context):
            id = 0
            attributes = {"MemoryClockRate": 1_000_000, "GlobalMemoryBusWidth": 4096}  # noqa: RUF012

            def __eq__(self, other: object) -> bool:
                return isinstance(other, Device)

            __hash__ = None  # type: ignore[assignment]

        class Stream(Context):
            def __init__(self, non_blocking: bool = False) -> None:
                super().__init__()

            def synchronize(self) -> None:
                pass

            def wait_event(self, event: Event) -> None:
                assert event.recorded

        class Event:
            recorded = False
            done = True

            def __init__(self, disable_timing: bool = False) -> None:
                pass

            def record(self, stream: Stream) -> None:
                assert isinstance(stream, Stream)
                self.recorded = True

            def synchronize(self) -> None:
                assert self.recorded

        class Memory:
            def __init__(self, size: int) -> None:
                self.bytes = world.memory(size)
                world._buffers.pop()  # it lives as long as its owner
                fake.used += size

            def __del__(self) -> None:
                fake.used -= self.bytes.nbytes

        class MemoryPointer:
            def __init__(self, memory: Memory, offset: int) -> None:
                self.memory = memory
                self.ptr = memory.bytes.ctypes.data + offset

            def memset_async(self, value: int, size: int, stream: Stream) -> None:
                self.memory.bytes[:size] = value

        class ndarray(LocalArray):
            device = Device()

            def __init__(self, shape: Any, dtype: Any = None, memptr: Any = None) -> None:
                if isinstance(shape, np.ndarray):
                    super().__init__(world, shape)
                else:
                    super().__init__(world, memptr.memory.bytes.view(dtype).reshape(shape))
                self.owner = memptr
                self.data = SimpleNamespace(ptr=self.host.ctypes.data)

            def __getitem__(self, part: slice) -> ndarray:
                assert isinstance(part, slice)
                array = ndarray(self.host[part])
                array.owner = self.owner or self
                return array

            def set(self, values: np.ndarray, stream: Stream) -> None:
                assert (values.dtype, values.shape) == (self.dtype, self.shape)
                assert values.flags.c_contiguous
                self.host[...] = values

            def get(self, stream: Stream, out: Any = None) -> np.ndarray:
                if out is None:
                    return self.host.copy()
                assert (out.dtype, out.shape) == (self.dtype, self.shape)
                out[...] = self.host
                return out

        def ascontiguousarray(array: ndarray, dtype: Any) -> ndarray:
            host = np.ascontiguousarray(array.host, dtype)
            return array if host is array.host else ndarray(host)

        def launch(name: str, grid: Any, block: Any, arguments: tuple[Any, ...]) -> None:
            assert all(isinstance(a, (ndarray, np.int64)) for a in arguments)
            world.launch(name, grid[0] * block[0], arguments)

        def register(address: int, size: int, flags: int) -> None:
            pages = {(start // 4096, (start + n - 1) // 4096) for start, n in self.registered.items()}
            if any(first <= (address + size - 1) // 4096 and address // 4096 <= last for first, last in pages):
                raise CudaError("cudaErrorHostMemoryAlreadyRegistered")
            self.registered[address] = size

        def attributes(address: int) -> Any:
            inside = any(start <= address < start + size for start, size in self.registered.items())
            return SimpleNamespace(type=int(inside or world.is_pinned_address(address)), devicePointer=address)

        runtime = SimpleNamespace(
            CUDARuntimeError=CudaError,
            getDeviceCount=lambda: 1,
            hostRegister=register,
            hostUnregister=self.registered.pop,
            pointerGetAttributes=attributes,
            getDeviceProperties=lambda number: {"name": b"a stand-in"},
            driverGetVersion=lambda: 13000,
            memGetInfo=lambda: (2**34 - self.used, 2**34),
        )
        stream = Stream()
        self.cuda = SimpleNamespace(
            runtime=runtime,
            Device=Device,
            Stream=Stream,
            Event=Event,
            Memory=Memory,
            MemoryPointer=MemoryPointer,
            get_current_stream=lambda: stream,
            alloc_pinned_memory=world.pinned,
            set_allocator=lambda allocator: None,
        )
        self.ndarray = ndarray
        self.empty = lambda shape, dtype: ndarray(LocalArray(world, _room(world, shape, dtype)).host)
        self.asarray = lambda values: ndarray(
            np.asarray(SimpleNamespace(__array_interface__=values.__cuda_array_interface__))
        )
        self.from_dlpack = lambda values: ndarray(np.from_dlpack(values))
        self.ascontiguousarray = ascontiguousarray
        self.RawModule = lambda code, options: SimpleNamespace(
            get_function=lambda name: lambda *call: launch(name, *call)
        )
        self.get_default_memory_pool = lambda: SimpleNamespace(malloc=None)
        self.__version__ = "0"


def _room(world: World, shape: Any, dtype: Any) -> np.ndarray:
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    return world.memory(size).view(dtype).reshape(shape)


def install_fake_cupy(patch: pytest.MonkeyPatch, library: Path, source: Path) -> FakeCupy:
    """Let the backend find the stand-in where it looks for CuPy, until `patch` is undone; return it."""
    fake = FakeCupy(library, source)
    patch.setitem(sys.modules, "cupy", fake)
    # Loaded lazily from a real CuPy, as soon as hypothesis looks at what modules there are.
    for name in [name for name in sys.modules if name.partition(".")[0] == "cupyx"]:
        patch.delitem(sys.modules, name)
    patch.setattr(transfer, "TRIAL_BYTES", 4096)
    return fake
