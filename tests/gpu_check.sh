#!/usr/bin/env bash
# Everything that only a GPU can say of the cache engine, in under five minutes: tests, compute-sanitizer, a table of speeds;
# then of the network on it, in another five.
# Needs a Python with cupy, numpy, numba and pytest (PYTHON=...), no .venv; fails with one sentence where it lacks one of
# them, or where there is no GPU. What needs torch, hypothesis or gymnasium is left out, and named, where they are missing.
# Arguments go to the table: --json FILE.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
options=(-q -p no:cacheprovider -W "ignore::pytest.PytestConfigWarning" -rs)
tests=("${options[@]}" tests/cache_engine/backends/test_gpu.py tests/cache_engine/backends/test_gpu_cache.py)

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

echo "== the network on the engine's pages"
limited 120 "$python" -m pytest "${options[@]}" tests/helm_rl/models/test_hstu_gpu.py tests/envs/serving/test_live_gpu.py

if "$python" -c 'import gymnasium, matplotlib, pydantic, torch, tyro' 2>/dev/null; then
    echo "== the live node: what the engine adds to a request, what cached prefixes save"
    limited 180 "$python" -m helm_rl.cli eval live --backend cuda --parts overhead reuse
else
    echo "== gymnasium, matplotlib, pydantic, torch or tyro is missing: the live node is left out"
fi
