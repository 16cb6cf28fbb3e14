"""What figures depend on besides their settings: helm-rl's own files, and the libraries that compute."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import sys
from functools import lru_cache
from pathlib import Path

from helm_rl import __version__
from helm_rl.cli import FOLDERS

LIBRARIES = ("numpy", "numba", "llvmlite", "torch")
HOME = Path(__file__).resolve().parent.parent


@lru_cache(maxsize=1)
def fingerprint() -> dict[str, str]:
    """Return, by what a user knows it as, all that must be alike wherever parts of one measurement run.

    The source is read from disk, so that two checkouts of one version differ where their files do. Processors are left
    out, but for their architecture: of one architecture some round differently, and no version tells.
    """
    found = {
        "helm-rl": __version__,
        "helm-rl's files": source_sha256(HOME)[:12],
        "Python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "architecture": platform.machine(),
    }
    return found | {name: _version(name) for name in LIBRARIES}


def source_sha256(home: Path) -> str:
    """Return a hash (hex) over the files of helm-rl's packages in `home`, by path, without what Python caches."""
    whole = hashlib.sha256()
    for folder in sorted(("helm_rl", *FOLDERS)):
        for path in sorted((home / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                whole.update(path.relative_to(home).as_posix().encode() + b"\0")
                whole.update(hashlib.sha256(path.read_bytes()).digest())
    return whole.hexdigest()


def difference(here: dict[str, str], there: dict[str, str]) -> str | None:
    """Say the first thing in which two fingerprints differ, None where they are alike."""
    for name in here:
        if here[name] != there.get(name):
            return f"{name} {there.get(name, 'none')}, and here {here[name]}"
    return None


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"
