"""Fixtures: the kernels compiled for the host once per session, and a real device where there is one."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cache_engine.backends import cuda, transfer
from cache_engine.backends.device import CupyDevice, kernel_source
from tests.cache_engine.backends.host_device import ADDRESS, THREAD, HostDevice, compile_host_device, kernel_names
from tests.cache_engine.backends.local_device import World, compile_library
from tests.cache_engine.backends.real_device import real_device

KERNELS = Path(cuda.__file__).with_name("kernels.cu")


@pytest.fixture(scope="session")
def host_program(tmp_path_factory: pytest.TempPathFactory, all_kernels: Path) -> Callable[[str], Path]:
    """Return the program under the sanitizer "address" (with undefined behaviour) or "thread"; made on first use."""
    compiler = shutil.which("g++")
    made: dict[str, Path] = {}

    def program(sanitizer: str) -> Path:
        if compiler is None:
            pytest.skip("there is no g++ (Debian: apt-get install g++)")
        if sanitizer not in made:
            path = tmp_path_factory.mktemp("host") / f"host_device_{sanitizer}"
            flags = {"address": ADDRESS, "thread": THREAD}[sanitizer]
            try:
                compile_host_device(compiler, all_kernels, path, flags)
            except subprocess.CalledProcessError as e:
                pytest.fail(e.stderr)
            made[sanitizer] = path
        return made[sanitizer]

    return program


@pytest.fixture(scope="session")
def all_kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text that a GPU gets, as a file."""
    path = tmp_path_factory.mktemp("source") / "all.cu"
    path.write_text(kernel_source())
    return path


@pytest.fixture(scope="session")
def library(all_kernels: Path) -> Path:
    """All kernels as a library for the host."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++ (Debian: apt-get install g++)")
    path = all_kernels.with_name("kernels.so")
    try:
        compile_library(compiler, all_kernels, path)
    except subprocess.CalledProcessError as e:
        pytest.fail(e.stderr)
    return path


@pytest.fixture
def world(library: Path, all_kernels: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A device in this process, from which `world.device()` is to be had."""
    monkeypatch.setattr(transfer, "TRIAL_BYTES", 4096)
    world = World(library, kernel_names(all_kernels))
    yield world
    world.check()


@pytest.fixture(scope="module", params=["forward", "reverse", "random"])
def host_device(
    request: pytest.FixtureRequest, host_program: Callable[[str], Path], all_kernels: Path
) -> Iterator[HostDevice]:
    """A device on the host whose threads run in one of three orders, under ASan and UBSan."""
    device = HostDevice(host_program("address"), request.param, kernel_names(all_kernels))
    yield device
    device.close()


@pytest.fixture(scope="module")
def parallel_device(host_program: Callable[[str], Path], all_kernels: Path) -> Iterator[HostDevice]:
    """A device on the host whose threads run at once, under ThreadSanitizer."""
    program = host_program("thread")
    # Its runtime refuses address layouts that it does not know.
    trial = subprocess.run([program, "forward"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if trial.returncode:
        pytest.skip(f"ThreadSanitizer does not start here: {trial.stderr.strip()[:200]}")
    device = HostDevice(program, "parallel", kernel_names(all_kernels))
    yield device
    device.close()


@pytest.fixture(scope="module")
def gpu() -> Iterator[CupyDevice]:
    """A real device; each array an allocation of its own, so that compute-sanitizer sees what oversteps it."""
    device = real_device()
    import cupy

    cupy.cuda.set_allocator(None)
    yield device
    cupy.cuda.set_allocator(cupy.get_default_memory_pool().malloc)
