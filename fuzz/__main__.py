"""`python -m fuzz [SECONDS] [READER ...]`: fuzz each reader, with atheris where it is installed, else by mutations."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

from fuzz.mutate import fuzz
from fuzz.targets import SEEDS, target

# A process a reader: atheris ends the one that it runs in.
_ATHERIS = """
import sys
import atheris
# Not the modules with kernels, which numba could not compile then.
kernels = ["helm_rl.workloads.readers." + name for name in ("codes", "delimited", "requests", "runs")]
with atheris.instrument_imports(include=["helm_rl.workloads.readers", "json"], exclude=kernels):
    from fuzz.targets import target
run = target(sys.argv[1])
atheris.Setup([sys.argv[0], *sys.argv[2:]], lambda data: run(bytes(data)) and None)
atheris.Fuzz()
"""


def main(arguments: list[str]) -> int:
    """Fuzz each reader for so many seconds (default 120); return the exit status."""
    try:
        seconds = float(arguments[0]) if arguments else 120.0
    except ValueError:
        seconds = 0.0
    names = arguments[1:] or list(SEEDS)
    if not 0 < seconds < float("inf") or not set(names) <= set(SEEDS):
        print(f"usage: python -m fuzz [SECONDS] [READER ...], readers: {', '.join(SEEDS)}", file=sys.stderr)
        return 2
    found = importlib.util.find_spec("atheris") is not None
    print("with atheris" if found else "atheris is not installed (pip install -e '.[fuzz]'): by mutations alone")
    failed = 0
    for name in names:
        if found:
            failed += _atheris(name, seconds)
        else:
            inputs, traces = fuzz(target(name), SEEDS[name], seconds)
            print(f"{name}: {inputs:,} inputs, of which {traces:,} made a trace")
    return int(failed > 0)


def _atheris(name: str, seconds: float) -> bool:
    with tempfile.TemporaryDirectory(prefix="helm-rl-fuzz-") as folder:
        for k, seed in enumerate(SEEDS[name]):
            (Path(folder) / f"seed{k}").write_bytes(seed)
        # The first input compiles kernels, which takes a while and is no fault of its own
        limits = [f"-max_total_time={int(seconds)}", "-max_len=4096", "-report_slow_units=60"]
        limits.append(f"-artifact_prefix=fuzz-{name}-")
        result = subprocess.run([sys.executable, "-c", _ATHERIS, name, *limits, folder], check=False)
    print(f"{name}: {'failed' if result.returncode else 'nothing but UserError'}")
    return result.returncode != 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
