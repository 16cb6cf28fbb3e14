"""A device on the host: kernels.cu behind a header that stands in for CUDA, in a process under sanitizers."""

from __future__ import annotations

import contextlib
import re
import struct
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

HERE = Path(__file__).parent

ADDRESS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
THREAD = ("-fsanitize=thread",)


def kernel_names(source: Path) -> list[str]:
    """The kernels of a CUDA file, in order."""
    return re.findall(r"^KERNEL (\w+)\(", source.read_text(), re.MULTILINE)


def compile_host_device(compiler: str, source: Path, program: Path, sanitizers: tuple[str, ...]) -> None:
    """Make a program of host_device.cpp and the kernels of `source`; CalledProcessError with the compiler's words."""
    each = " ".join(f"X({number},{name})" for number, name in enumerate(kernel_names(source)))
    command = [
        compiler,
        *("-std=c++17", "-O1", "-g1", "-pthread", "-Wall", "-Wextra", "-Werror", "-fno-strict-aliasing"),
        *sanitizers,
        f'-DKERNELS="{source}"',
        f"-DEACH_KERNEL={each}",
        *("-o", str(program), str(HERE / "host_device.cpp")),
    ]
    subprocess.run(command, check=True, capture_output=True, text=True)


class HostArray:
    """An array that the process holds."""

    def __init__(self, number: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.number = number
        self.shape = shape
        self.dtype = dtype
        self.ndim = len(shape)
        self.size = int(np.prod(shape))
        self.flags = SimpleNamespace(c_contiguous=True)


class HostDevice:
    """A `Device` of the CUDA backend (see there) that runs on the host.

    Args:
        program: made by `compile_host_device`.
        order: in which the threads of a launch run: "forward", "reverse", "random" or "parallel".
        names: of the kernels, in their order in the source.
    """

    def __init__(self, program: Path, order: str, names: list[str]) -> None:
        self._command = (program, order)
        self._numbers = {name: number for number, name in enumerate(names)}
        self._arrays = 0
        self._start()

    def clear(self, seed: int) -> None:
        """Forget all arrays, or begin anew after a failure; random orders are drawn from `seed` on."""
        if self._process.poll() is not None:
            self.close()
            self._start()
        self._send(b"C" + struct.pack("<I", seed))
        self._arrays = 0

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        self._process.wait()
        self._output.close()
        self._errors.close()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={
                "ASAN_OPTIONS": "detect_leaks=0",
                "UBSAN_OPTIONS": "print_stacktrace=1",
                "TSAN_OPTIONS": "halt_on_error=1",
            },
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._input, self._output, self._errors = self._process.stdin, self._process.stdout, self._process.stderr

    def array(self, values: npt.NDArray[Any]) -> HostArray:
        array = self.empty(values.shape, values.dtype)
        self.write(array, values)
        return array

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> HostArray:
        array = HostArray(self._arrays, (shape,) if isinstance(shape, int) else shape, np.dtype(dtype))
        self._arrays += 1
        self._send(b"E" + struct.pack("<IcQ", array.number, array.dtype.char.encode(), array.size))
        return array

    def write(self, array: HostArray, values: npt.NDArray[Any]) -> None:
        assert (array.dtype, array.shape) == (values.dtype, values.shape)
        data = values.tobytes()
        self._send(b"W" + struct.pack("<IQ", array.number, len(data)) + data)

    def read(self, array: HostArray, count: int | None = None) -> npt.NDArray[Any]:
        shape = array.shape if count is None else (count, *array.shape[1:])
        result = np.empty(shape, array.dtype)
        self._send(b"R" + struct.pack("<IQ", array.number, result.nbytes))
        try:
            self._input.flush()
        except BrokenPipeError:
            self._failed()
        data = self._output.read(result.nbytes)
        if len(data) != result.nbytes:
            self._failed()
        return np.frombuffer(data, array.dtype).reshape(shape).copy()

    def launch(self, kernel: str, threads: int, *arguments: Any) -> None:
        data = b"L" + struct.pack("<IQI", self._numbers[kernel], threads, len(arguments))
        for a in arguments:
            data += struct.pack("<cq", b"a", a.number) if isinstance(a, HostArray) else struct.pack("<cq", b"i", a)
        self._send(data)

    def _send(self, data: bytes) -> None:
        try:
            self._input.write(data)
        except BrokenPipeError:
            self._failed()

    def _failed(self) -> NoReturn:
        said = self._errors.read().decode(errors="replace")
        self._process.wait()
        raise AssertionError(f"the host device ended with status {self._process.returncode}: {said[:8000]}")
