#!/usr/bin/env bash
# Everything that only a GPU can say of the cache engine, in under five minutes: tests, compute-sanitizer, a table of speeds.
# Needs a Python with cupy, numpy, numba and pytest (PYTHON=...), no .venv; fails with one sentence where it lacks one of
# them, or where there is no GPU.
# Arguments go to the table: --json FILE.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
tests=(-q -p no:cacheprovider -W "ignore::pytest.PytestConfigWarning" tests/cache_engine/backends/test_gpu.py
    tests/cache_engine/backends/test_gpu_cache.py)

limited() { # SECONDS COMMAND...
    timeout "$@" || {
        status=$?
        [ "$status" -ne 124 ] || echo "error: this took longer than $1 s" >&2
        exit "$status"
    }
}

lacks=$("$python" - <<'END'
from importlib.util import find_spec

print(*(name for name in ("cupy", "numpy", "numba", "pytest") if find_spec(name) is None), sep=", ")
END
)
[ -z "$lacks" ] || {
    echo "error: PYTHON=$python lacks $lacks; it needs cupy, numpy, numba and pytest" >&2
    exit 1
}

# A GPU test that skips here would be a check that cannot fail: so first of all there must be a GPU.
"$python" -m tests.cache_engine.backends.gpu_table --device

echo "== tests against the CPU backend"
limited 100 "$python" -m pytest "${tests[@]}"

if command -v compute-sanitizer >/dev/null; then
    # The kernels use no shared memory, which is all that racecheck watches: it guards what will be written.
    for tool in memcheck racecheck; do
        echo "== compute-sanitizer $tool"
        limited 60 compute-sanitizer --tool "$tool" --error-exitcode 9 "$python" -m pytest "${tests[@]}" -k short
    done
else
    echo "== compute-sanitizer is not installed (part of NVIDIA's CUDA toolkit): memcheck and racecheck left out"
fi

echo "== speed"
limited 70 "$python" -m tests.cache_engine.backends.gpu_table "$@"
