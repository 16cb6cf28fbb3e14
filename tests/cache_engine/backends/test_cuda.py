"""The CUDA backend's Python without a GPU: what it says, what it refuses, what it hands to CuPy."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cache_engine.backends import cuda
from cache_engine.backends import device as devices
from cache_engine.backends.cpu import embedding as cpu
from cache_engine.backends.cpu import pool as pools
from tests.cache_engine.backends import gpu_table
from tests.cache_engine.backends.conftest import KERNELS
from tests.cache_engine.backends.host_device import HostDevice, kernel_names

ROOT = Path(__file__).resolve().parents[3]


def test_the_kernels_are_in_the_package() -> None:
    assert devices.kernel_source() == KERNELS.read_text() + KERNELS.with_name("transfer.cu").read_text()


def test_importing_the_backend_does_not_import_cupy() -> None:
    code = "import sys, cache_engine.backends.cuda; sys.exit('cupy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_cupy_one_sentence_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(devices.CudaUnavailableError, match=r"needs CuPy.*install helm-rl\[cuda13\]") as raised:
        devices.CupyDevice()
    assert "\n" not in str(raised.value)


def no_driver() -> int:
    raise RuntimeError("cudaErrorInsufficientDriver")


@pytest.mark.parametrize("count", [no_driver, lambda: 0], ids=["no driver", "no device"])
def test_without_a_device_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch, count: Callable[[], int]) -> None:
    """CuPy raises instead of counting no devices where there is no driver."""
    fake = SimpleNamespace(cuda=SimpleNamespace(runtime=SimpleNamespace(getDeviceCount=count)))
    monkeypatch.setitem(sys.modules, "cupy", fake)
    with pytest.raises(devices.CudaUnavailableError, match="needs an NVIDIA GPU") as raised:
        devices.CupyDevice()
    assert "\n" not in str(raised.value)


class FakeArray(np.ndarray):
    """A NumPy array with those methods of CuPy's that the backend calls."""

    device: Any = None

    def set(self, values: np.ndarray, stream: Any) -> None:
        assert (values.dtype, values.shape) == (self.dtype, self.shape)
        assert values.flags.c_contiguous
        self[...] = values

    def get(self, stream: Any) -> np.ndarray:
        return np.array(self)


class FakeContext:
    """A stream or a device of CuPy's, as a context."""

    entered = 0

    def __enter__(self) -> None:
        self.entered += 1

    def __exit__(self, *_: object) -> None:
        self.entered -= 1


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, Any, Any, tuple[Any, ...]]]]:
    """The launches that CuPy was asked for; nothing runs."""
    asked: list[tuple[str, Any, Any, tuple[Any, ...]]] = []
    stream = FakeContext()

    def record(name: str, grid: Any, block: Any, arguments: tuple[Any, ...]) -> None:
        assert stream.entered == 1
        asked.append((name, grid, block, arguments))

    def module(code: str, options: tuple[str, ...]) -> Any:
        assert code == devices.kernel_source()
        return SimpleNamespace(get_function=lambda name: lambda *call: record(name, *call))

    fake = SimpleNamespace(
        cuda=SimpleNamespace(
            runtime=SimpleNamespace(getDeviceCount=lambda: 1),
            get_current_stream=lambda: stream,
            Device=FakeContext,
        ),
        RawModule=module,
        empty=lambda shape, dtype: np.zeros(shape, dtype).view(FakeArray),
    )
    monkeypatch.setitem(sys.modules, "cupy", fake)
    return asked  # type: ignore[return-value]


def test_cupy_gets_arrays_and_64_bit_integers_and_no_empty_grid(
    launches: list[tuple[str, Any, Any, tuple[Any, ...]]],
) -> None:
    """CuPy checks no types, and a grid of no blocks still runs one."""
    device = devices.CupyDevice()
    pool = pools.new_pool_state(4, 1)
    emb = cuda.CudaEmbedding(pool, 8, 4, 0, cpu.LRU, device)
    pool.goal[0] = 4
    assert emb.accept(4) == 4
    emb.lookup(np.zeros(600, np.int16), np.arange(600))
    emb.publish()
    emb.invalidate(np.zeros(3, np.int16), np.arange(3))
    emb.lookup(np.zeros(0, np.int16), np.zeros(0, np.int64))
    emb.retract()
    storage, rows = device.empty(4 * 128, np.uint8), device.empty((0, 12), np.uint8)
    emb.store_rows(storage, 128, rows)
    emb.gather_rows(storage, 128, rows, rows)
    grids = [(name, *grid) for name, grid, _, _ in launches]
    assert grids == [
        ("begin_batch", 8),
        ("probe", 3),
        ("mark_first", 3),
        ("sum_bits", 1),
        ("base_bits", 1),
        ("number_misses", 3),
        ("claim_entries", 3),
        ("sum_bits", 1),
        ("base_bits", 1),
        ("admit", 3),
        ("take_windows", 3),
        ("deliver", 3),
        ("publish", 1),
        ("invalidate", 1),
        *((name, 1) for name in ("begin_batch", "probe", "mark_first", "sum_bits", "base_bits", "number_misses")),
        *((name, 1) for name in ("claim_entries", "sum_bits", "base_bits", "admit", "take_windows", "deliver")),
        ("publish", 1),
        ("retract", 1),
        ("store_rows_4", 1),
        ("gather_rows_4", 1),
    ]
    assert {block for _, _, block, _ in launches} == {(256,)}
    for _, _, _, arguments in launches:
        assert {type(a) for a in arguments} <= {FakeArray, np.int64}


class FakeRuntimeError(RuntimeError):
    """An error of the CUDA runtime, as CuPy raises it."""


class FakeRuntime:
    """Registered host memory, by address."""

    CUDARuntimeError = FakeRuntimeError

    def __init__(self) -> None:
        self.registered: dict[int, tuple[int, int]] = {}  # address: bytes, flags
        self.refuses = False

    def getDeviceCount(self) -> int:
        return 1

    def hostRegister(self, address: int, size: int, flags: int) -> None:
        if self.refuses:
            raise FakeRuntimeError("cudaErrorHostMemoryAlreadyRegistered")
        self.registered[address] = size, flags

    def hostUnregister(self, address: int) -> None:
        del self.registered[address]

    def pointerGetAttributes(self, address: int) -> Any:
        inside = any(start <= address < start + size for start, (size, _) in self.registered.items())
        return SimpleNamespace(type=1 if inside else 0, devicePointer=address + 2**40)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    fake = FakeRuntime()
    cupy = SimpleNamespace(
        cuda=SimpleNamespace(
            runtime=fake,
            get_current_stream=FakeContext,
            Device=FakeContext,
            alloc_pinned_memory=lambda size: bytearray(b"x" * size),
        ),
        RawModule=lambda code, options: None,
        ndarray=FakeArray,
        asarray=lambda values: np.asarray(values.there).view(FakeArray),
        from_dlpack=lambda values: np.asarray(values.there).view(FakeArray),
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return fake


def test_tables_are_page_locked_where_they_lie(runtime: FakeRuntime) -> None:
    device = devices.CupyDevice()
    table = np.zeros((5, 3), np.int32)
    mapping = device.map(table)
    assert mapping is not None
    assert runtime.registered == {table.ctypes.data: (60, 2)}, "cudaHostRegisterMapped"
    assert mapping.address == table.ctypes.data + 2**40
    mapping.release()
    assert not runtime.registered
    table.flags.writeable = False
    assert device.map(table) is not None
    assert runtime.registered == {table.ctypes.data: (60, 2 + 8)}, "cudaHostRegisterReadOnly"


def test_memory_that_others_page_locked_is_used_and_left_as_it_is(runtime: FakeRuntime) -> None:
    device = devices.CupyDevice()
    table = np.zeros(3000, np.uint8)
    runtime.refuses = True
    start = table.ctypes.data
    for registered in ({}, {start: 1500}, {start: 1000, start + 2000: 1000}, {start + 1: 2999}):
        runtime.registered = {address: (size, 0) for address, size in registered.items()}
        assert device.map(table) is None, "in part at most"
    runtime.registered = {start - 100: (4000, 0)}
    mapping = device.map(table)
    assert mapping is not None
    mapping.release()
    assert runtime.registered


def test_what_needs_no_page_locking_or_cannot_have_it(runtime: FakeRuntime, tmp_path: Path) -> None:
    device = devices.CupyDevice()
    assert device.map(np.zeros((0, 4))) is not None
    pinned = device.pinned(64)
    assert not pinned.any()
    mapping = device.map(pinned[16:].reshape(3, 16))
    assert mapping is not None
    assert mapping.address == pinned.ctypes.data + 16 + 2**40
    np.zeros(64, np.uint8).tofile(tmp_path / "rows")
    mapped = np.memmap(tmp_path / "rows", np.uint8, "r", shape=(4, 16))
    for rows in (mapped, mapped.reshape(8, 8).view(np.uint16), np.frombuffer(memoryview(mapped)[:32], np.uint8)):
        assert device.map(rows) is None
    assert not runtime.registered


def test_arrays_of_others_are_taken_by_either_protocol(runtime: FakeRuntime) -> None:
    device = devices.CupyDevice()
    there = np.arange(3)
    FakeArray.device = device._device
    interface = SimpleNamespace(__cuda_array_interface__={}, there=there)
    dlpack, on_host = (SimpleNamespace(__dlpack_device__=lambda kind=kind: (kind, 0), there=there) for kind in (2, 1))
    for values in (interface, dlpack, there.view(FakeArray)):
        array = device.adopt(values)
        assert array is not None
        assert np.shares_memory(array, there)
    for values in (on_host, there, [1, 2]):
        assert device.adopt(values) is None
    FakeArray.device = FakeContext()
    with pytest.raises(ValueError, match="the pool is on"):
        device.adopt(dlpack)


@pytest.fixture
def emb(host_program: Callable[[str], Path]) -> Iterator[cuda.CudaEmbedding]:
    device = HostDevice(host_program("address"), "forward", kernel_names(KERNELS))
    yield cuda.CudaEmbedding(pools.new_pool_state(4, 1), 8, 4, 0, cpu.SIEVE, device)
    device.close()


def test_wrong_batches_are_refused_and_change_nothing(emb: cuda.CudaEmbedding) -> None:
    tables, keys = np.zeros(4, np.int16), np.arange(4)
    wrong: list[tuple[Any, Any, type[Exception], str]] = [
        (tables, keys.astype(np.int32), TypeError, "keys must be int64, got int32"),
        (tables.astype(np.int64), keys, TypeError, "tables must be int16, got int64"),
        (tables[:3], keys, ValueError, "3 for 4 keys"),
        (tables.reshape(2, 2), keys, ValueError, "one-dimensional"),
        (tables, np.arange(8)[::2], ValueError, "contiguous"),
    ]
    for some_tables, some_keys, error, match in wrong:
        for method in (emb.lookup, emb.invalidate):
            with pytest.raises(error, match=match):
                method(some_tables, some_keys)
    assert emb.device.read(emb.state.scalars)[0] == 0, "no batch has begun"


def test_a_batch_is_published_before_the_next(emb: cuda.CudaEmbedding) -> None:
    batch = np.zeros(4, np.int16), np.arange(4)
    with pytest.raises(RuntimeError, match="no batch to publish"):
        emb.publish()
    emb.lookup(*batch)
    emb.pool.goal[0] = 4
    for call in (lambda: emb.lookup(*batch), lambda: emb.invalidate(*batch), lambda: emb.accept(4)):
        with pytest.raises(RuntimeError, match="publish"):
            call()
    emb.publish()
    assert emb.accept(4) == 4


def test_rows_too_many_for_one_launch_are_refused(emb: cuda.CudaEmbedding) -> None:
    emb.lookup(np.zeros(3, np.int16), np.arange(3))
    huge = SimpleNamespace(shape=(3, 2**30 - 1))
    with pytest.raises(ValueError, match="too many for one batch"):
        emb.store_rows(None, 64, huge)


def test_the_table_of_speeds_measures_what_it_says(emb: cuda.CudaEmbedding) -> None:
    """On the host, at a size that is no measurement: it is a GPU's time that must not be lost to a slip here."""
    speed, hits = gpu_table.lookups_per_s(emb.device, 4096, 512, seconds=0.01)
    assert speed > 0
    # Ids log-uniform over 32,768: the 4,096 most frequent have 80 % of the accesses.
    assert 0.6 < hits < 0.8
    _, hits = gpu_table.lookups_per_s(emb.device, 4096, 512, seconds=0.01, all_hit=True)
    assert hits > 0.98, "the index, half full, keeps nearly all"


def test_the_table_of_speeds_needs_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert gpu_table.main(["--device"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: backend 'cuda' needs CuPy")
    assert said.err.count("\n") == 1


def test_the_check_of_a_gpu_fails_in_one_sentence_where_there_is_none() -> None:
    try:
        devices.CupyDevice()
    except devices.CudaUnavailableError as e:
        sentence = str(e)
    else:
        pytest.skip("there is a GPU here")
    if find_spec("cupy") is None:
        sentence = f"PYTHON={sys.executable} lacks cupy; it needs cupy, numpy, numba and pytest"
    assert gpu_check(sys.executable) == (1, "", f"error: {sentence}\n")


@pytest.mark.parametrize("lacking", [["numba"], ["cupy", "pytest"]])
def test_the_check_of_a_gpu_names_what_its_python_lacks(lacking: list[str], tmp_path: Path) -> None:
    for name in {"cupy", "numpy", "numba", "pytest"} - set(lacking):
        (tmp_path / f"{name}.py").touch()
    python = tmp_path / "python"
    # Without site-packages.
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    sentence = f"PYTHON={python} lacks {', '.join(lacking)}; it needs cupy, numpy, numba and pytest"
    assert gpu_check(str(python)) == (1, "", f"error: {sentence}\n")


def gpu_check(python: str) -> tuple[int, str, str]:
    done = subprocess.run(
        ["bash", str(ROOT / "tests" / "gpu_check.sh")],
        env={**os.environ, "PYTHON": python},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


# The host device itself: it must not pass what a GPU would choke on.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda a, b: (a, b, 4), "mark_first takes 4 arguments, not 3"),
        (lambda a, b: (a, a, a, 4), "argument 2 is an array of the wrong type i"),
        (lambda a, b: (a, a, b, a), "argument 3 must be an integer"),
        (lambda a, b: (a, 7, b, 4), "argument 1 must be an array"),
        (lambda a, b: (a, a, b, 5), "heap-buffer-overflow"),
    ],
)
def test_the_host_device_sees_wrong_launches(
    emb: cuda.CudaEmbedding, arguments: Callable[[Any, Any], tuple[Any, ...]], message: str
) -> None:
    device = emb.device
    cells, bits = device.array(np.zeros(4, np.int32)), device.array(np.zeros(1, np.uint32))
    device.launch("mark_first", 5, *arguments(cells, bits))
    with pytest.raises(AssertionError, match=message):
        device.read(bits)
