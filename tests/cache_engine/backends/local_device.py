"""A device in the tests' own process: its memory can be shared through DLPack, its streams run as late as they may.

Nothing given to a stream runs before somebody must wait for it: a mark that was forgotten shows as wrong bytes.
"""

from __future__ import annotations

import ctypes
import subprocess
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from cache_engine.backends.device import Mapping, is_mapped_file
from tests.cache_engine.backends.host_device import HERE, kernel_names

GARBAGE = 0xA5
REDZONE = 64


def compile_library(compiler: str, source: Path, library: Path) -> None:
    """Make a library of host_library.cpp and the kernels of `source`; CalledProcessError with the compiler's words."""
    each = " ".join(f"X({number},{name})" for number, name in enumerate(kernel_names(source)))
    command = [
        compiler,
        *("-std=c++17", "-O1", "-g1", "-pthread", "-Wall", "-Wextra", "-Werror", "-fno-strict-aliasing"),
        *("-fsanitize=undefined", "-fno-sanitize-recover=all", "-shared", "-fPIC"),
        f'-DKERNELS="{source}"',
        f"-DEACH_KERNEL={each}",
        *("-o", str(library), str(HERE / "host_library.cpp")),
    ]
    subprocess.run(command, check=True, capture_output=True, text=True)


class LocalArray:
    """An array of the device; like CuPy's, NumPy does not take it for one of its own."""

    def __init__(self, world: World, host: npt.NDArray[Any]) -> None:
        self.world = world
        self.host = host  # for tests: after World.run
        self.shape, self.dtype, self.ndim, self.size = host.shape, host.dtype, host.ndim, host.size
        self.nbytes = host.nbytes
        self.flags = SimpleNamespace(c_contiguous=host.flags.c_contiguous)

    def __getitem__(self, part: slice) -> LocalArray:
        assert isinstance(part, slice), "arrays of the device are cut, not read"
        return LocalArray(self.world, self.host[part])

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("implicit conversion to a NumPy array is not allowed")

    def __bool__(self) -> NoReturn:
        raise TypeError("an array of the device has no truth value here")

    def __len__(self) -> int:
        return len(self.host)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **options: Any) -> Any:
        self.world.run()  # the consumer's stream waits for ours
        return self.host.__dlpack__(**options)


class LocalEvent:
    """A mark: all that was given to a stream before it."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.end = stream.given

    def done(self) -> bool:
        self.stream.world.asked += 1
        if self.stream.world.slow:
            return self.stream.ran >= self.end
        self.wait()
        return True

    def wait(self) -> None:
        self.stream.run(self.end)


class Stream:
    """Work in order, done when it must be."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.given = 0
        self.ran = 0
        self._work: deque[tuple[str, Callable[[], None]]] = deque()

    def give(self, what: str, work: Callable[[], None]) -> None:
        self._work.append((what, work))
        self.given += 1

    def run(self, end: int | None = None) -> None:
        with self.world.lock:
            while self._work and (end is None or self.ran < end):
                what, work = self._work.popleft()
                self.ran += 1
                work()
                self.world.log.append((self.name, what))


class World:
    """What all streams of a device share.

    Attributes:
        slow: marks are not done before somebody waits for them.
        can_map: whether kernels can read memory that `pinned` did not make.
        mapped: addresses of host memory that kernels may read now.
        log: (stream, what) of all that was done, in order.
        asked: how often a mark was asked whether it is done.
    """

    def __init__(self, library: Path, names: list[str], order: str = "forward", seed: int = 0) -> None:
        self.slow = False
        self.can_map = True
        self.mapped: list[int] = []
        self.log: list[tuple[str, str]] = []
        self.asked = 0
        self.lock = threading.RLock()
        self.order = order
        self.seed = seed
        self.streams: list[Stream] = []
        self.numbers = {name: number for number, name in enumerate(names)}
        self._buffers: list[npt.NDArray[np.uint8]] = []
        self._pinned: list[tuple[int, int]] = []
        self._kept: list[npt.NDArray[np.uint8]] = []
        self._launch = ctypes.CDLL(str(library)).launch_kernel
        self._launch.restype = ctypes.c_char_p

    def device(self) -> LocalDevice:
        """Return the device, with the foreground's stream."""
        return LocalDevice(self, "front")

    def run(self) -> None:
        """Do all that was given to any stream."""
        for stream in self.streams:
            stream.run()

    def check(self) -> None:
        """Assert that no kernel wrote beside an array; forget those made so far."""
        self.run()
        for buffer in self._buffers:
            assert (buffer[:REDZONE] == GARBAGE).all()
            assert (buffer[-REDZONE:] == GARBAGE).all(), "a write beside an array"
        self._buffers.clear()

    def memory(self, size: int) -> npt.NDArray[np.uint8]:
        """Return garbage, with more of it on both sides."""
        buffer = np.full(size + 2 * REDZONE + 64, GARBAGE, np.uint8)
        start = REDZONE + -(buffer.ctypes.data + REDZONE) % 64
        self._buffers.append(buffer[: start + size + REDZONE])
        return buffer[start : start + size]

    def launch(self, kernel: str, threads: int, arguments: tuple[Any, ...]) -> None:
        types = bytes(ord(a.dtype.char) if isinstance(a, LocalArray) else 0 for a in arguments)
        values = [a.host.ctypes.data if isinstance(a, LocalArray) else int(a) for a in arguments]
        self.seed += 1
        wrong = self._launch(
            self.numbers[kernel],
            ctypes.c_uint64(threads),
            len(arguments),
            types,
            (ctypes.c_int64 * len(values))(*values),
            self.order.encode(),
            self.seed,
        )
        assert wrong is None, wrong

    def is_pinned_address(self, address: int) -> bool:
        return any(low <= address < high for low, high in self._pinned)

    def is_pinned(self, array: npt.NDArray[Any]) -> bool:
        start, end = array.ctypes.data, array.ctypes.data + array.nbytes
        return any(low <= start and end <= high for low, high in self._pinned)

    def pinned(self, size: int) -> npt.NDArray[np.uint8]:
        array = np.zeros(size, np.uint8)
        self._pinned.append((array.ctypes.data, array.ctypes.data + size))
        self._kept.append(array)  # lest another array comes to its address
        return array


class LocalDevice:
    """A `Device` of the CUDA backend; see there."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.stream = Stream(world, name)
        world.streams.append(self.stream)

    def array(self, values: npt.NDArray[Any]) -> LocalArray:
        array = self.empty(values.shape, values.dtype)
        self.write(array, values)
        return array

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> LocalArray:
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        return LocalArray(self.world, self.world.memory(size).view(dtype).reshape(shape))

    def allocate(self, size: int) -> LocalArray:
        array = self.empty(size, np.uint8)
        self.stream.give("zero", lambda: array.host.fill(0))
        return array

    def adopt(self, values: Any) -> LocalArray | None:
        if isinstance(values, LocalArray):
            return values
        if hasattr(values, "__cuda_array_interface__"):
            interface = values.__cuda_array_interface__
            return LocalArray(self.world, np.asarray(SimpleNamespace(__array_interface__=interface)))
        if hasattr(values, "__dlpack_device__") and values.__dlpack_device__()[0] == 2:
            return LocalArray(self.world, np.from_dlpack(values))
        return None

    def cast(self, array: LocalArray, dtype: npt.DTypeLike) -> LocalArray:
        if array.dtype == dtype and array.flags.c_contiguous:
            return array
        result = self.empty(array.shape, dtype)
        self.stream.give("cast", lambda: result.host.__setitem__(..., array.host.astype(dtype)))
        return result

    def write(self, array: LocalArray, values: npt.NDArray[Any]) -> None:
        assert (array.dtype, array.shape) == (values.dtype, values.shape)
        now = values.copy()
        self.stream.give("write", lambda: array.host.__setitem__(..., now))

    def send(self, array: LocalArray, values: npt.NDArray[Any]) -> None:
        assert (array.dtype, array.shape) == (values.dtype, values.shape)
        assert self.world.is_pinned(values), "only page-locked memory is copied while others go on"
        self.stream.give("send", lambda: array.host.__setitem__(..., values))

    def read(self, array: LocalArray, count: int | None = None) -> npt.NDArray[Any]:
        self.stream.run()
        return array.host[:count].copy()

    def read_into(self, array: LocalArray, out: npt.NDArray[Any]) -> None:
        assert (array.dtype, array.shape) == (out.dtype, out.shape)
        self.stream.give("read", lambda: out.__setitem__(..., array.host))
        self.stream.run()

    def launch(self, kernel: str, threads: int, *arguments: Any) -> None:
        assert kernel in self.world.numbers
        for a in arguments:
            assert isinstance(a, (LocalArray, int, np.integer)), f"{kernel}: {type(a)}"
            assert not isinstance(a, LocalArray) or a.flags.c_contiguous, kernel
        self.stream.give(kernel, lambda: self.world.launch(kernel, threads, arguments))

    def fork(self) -> LocalDevice:
        return LocalDevice(self.world, f"back {len(self.world.streams)}")

    def record(self) -> LocalEvent:
        return LocalEvent(self.stream)

    def after(self, event: Any) -> None:
        self.stream.give("after", event.wait)

    def pinned(self, size: int) -> npt.NDArray[np.uint8]:
        return self.world.pinned(size)

    def map(self, array: npt.NDArray[Any]) -> Mapping | None:
        if is_mapped_file(array) or not (self.world.can_map or self.world.is_pinned(array)):
            return None
        address = array.ctypes.data
        self.world.mapped.append(address)
        return Mapping(address, lambda: self.world.mapped.remove(address))
