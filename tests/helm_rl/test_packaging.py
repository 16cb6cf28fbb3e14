"""What is shipped: wheel and sdist, dependencies, pinned versions, make targets, and what the documents promise."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

import pytest
import tyro
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import helm_rl
from helm_rl import cli

ROOT = Path(helm_rl.__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FOLDERS = ("helm_rl", *cli.FOLDERS)


def requirements(*extras: str) -> dict[str, Requirement]:
    """Canonical name -> requirement of the plain package and of the extras named."""
    lines = [
        *PROJECT["dependencies"],
        *(line for extra in extras for line in PROJECT["optional-dependencies"][extra]),
    ]
    return {canonicalize_name(found.name): found for found in map(Requirement, lines)}


def sources(folder: str) -> list[Path]:
    """Files of a package in the tree that belong into the wheel."""
    ignored = {"__pycache__", ".mypy_cache", ".ruff_cache"}
    return [f for f in sorted((ROOT / folder).rglob("*")) if f.is_file() and not ignored & set(f.parts)]


# Dependencies


def imported(body: list[ast.stmt], inside_functions: bool) -> Iterator[str]:
    """Yield the top-level names that `body` imports: at import time, or also when functions are called."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (name.name.partition(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield (node.module or "").partition(".")[0]
        elif inside_functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for block in ("body", "orelse", "finalbody", "handlers"):
                yield from imported(getattr(node, block, []), inside_functions)


def provided(names: dict[str, Requirement]) -> set[str]:
    """Import names that the distributions `names` provide, as installed here."""
    return {
        package
        for package, distributions in importlib.metadata.packages_distributions().items()
        if {canonicalize_name(name) for name in distributions} & set(names)
    }


def test_a_plain_install_brings_everything_that_is_imported_when_a_module_is() -> None:
    allowed = provided(requirements()) | set(sys.stdlib_module_names) | set(FOLDERS)
    for folder in FOLDERS:
        for file in sources(folder):
            if file.suffix == ".py":
                found = set(imported(ast.parse(file.read_text()).body, inside_functions=False))
                assert found <= allowed, f"{file.relative_to(ROOT)} needs {found - allowed} at import"


def test_what_functions_import_is_in_the_package_or_an_extra() -> None:
    allowed = provided(requirements()) | set(cli.EXTRAS) | set(sys.stdlib_module_names) | set(FOLDERS)
    for folder in FOLDERS:
        for file in sources(folder):
            if file.suffix == ".py":
                found = set(imported(ast.parse(file.read_text()).body, inside_functions=True))
                assert found <= allowed, f"{file.relative_to(ROOT)} needs {found - allowed}"


def test_every_dependency_is_pinned_to_a_version_that_its_range_allows() -> None:
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if not line.startswith("#"):
            name, version = re.fullmatch(r"([\w.\-]+)==([\w.]+)", line).groups()  # type: ignore[union-attr]
            assert canonicalize_name(name) not in pins, name
            pins[canonicalize_name(name)] = version
    assert pins["torch"] == "2.13.0"  # no "+cpu": no registry but PyTorch's own has that
    for name, wanted in requirements(*PROJECT["optional-dependencies"]).items():
        assert name in pins, name
        assert wanted.specifier.contains(pins[name]), (name, pins[name])


# Wheel and sdist


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the sdist of this tree and the wheel made from it."""
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def plain(built: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Install the wheel apart; return its folder and an environment in which only its own dependencies are found.

    Hidden is every package that a plain install would not have brought, though the tests' environment has it. Kernels
    that this tree has compiled go with it: which are sound is told by their sources, wherever those lie.
    """
    target = tmp_path_factory.mktemp("plain")
    (wheel,) = built.glob("*.whl")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
        "--no-index",
        "--no-deps",
    ]
    subprocess.run([*pip, "--target", str(target), str(wheel)], check=True)
    for kind in ("nbi", "nbc"):  # each index before the code that it names
        for file in (file for folder in FOLDERS for file in (ROOT / folder).rglob(f"__pycache__/*.{kind}")):
            place = target / file.relative_to(ROOT)
            place.parent.mkdir(exist_ok=True)
            shutil.copy(file, place)

    closure, todo = set(), list(requirements().values())
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if name in closure or (requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})):
            continue
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # torch's CUDA libraries beside its CPU build
        closure.add(name)
        todo += map(Requirement, needs)
    hidden = {
        package
        for package, distributions in importlib.metadata.packages_distributions().items()
        if not {canonicalize_name(name) for name in distributions} & {*closure, "pip"} and package not in FOLDERS
    }
    assert {"pytest", "hypothesis", "hatchling"} <= hidden
    assert not hidden & {"numpy", "torch", "numba", "pyarrow", "tyro", "rich", "tensorboard"}
    (target / "sitecustomize.py").write_text(
        "import importlib.machinery, sys\n"
        f"HIDDEN = {sorted(hidden)!r}\n"
        "class Plain(importlib.machinery.PathFinder):\n"
        "    @classmethod\n"
        "    def find_spec(cls, name, path=None, target=None):\n"
        "        return None if name.partition('.')[0] in HIDDEN else super().find_spec(name, path, target)\n"
        "sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Plain\n"
    )
    return target, {**os.environ, "PYTHONPATH": str(target), "COLUMNS": "100"}


def run(plain: tuple[Path, dict[str, str]], cwd: Path, *arguments: str) -> str:
    """Run the installed helm-rl with `arguments`; it must succeed; return what it printed."""
    target, env = plain
    done = subprocess.run(
        [sys.executable, str(target / "bin" / "helm-rl"), *arguments],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_holds_the_packages_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert wheel.name == f"helm_rl-{helm_rl.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = f"helm_rl-{helm_rl.__version__}.dist-info"
        licence = archive.read(f"{info}/licenses/LICENSE")
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
    wanted = {str(f.relative_to(ROOT)) for folder in FOLDERS for f in sources(folder)}
    assert {name for name in names if not name.startswith(info)} == wanted
    assert {f"{folder}/py.typed" for folder in FOLDERS} <= names
    assert {f"helm_rl/scenarios/{name}.toml" for name in ("steady", "trend", "burst")} <= names
    assert any(name.startswith("eval/templates/") for name in names)
    assert "checkpoints/README.md" in names
    assert licence == (ROOT / "LICENSE").read_bytes()
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert entry_points.split() == ["[console_scripts]", "helm-rl", "=", "helm_rl.cli:main"]
    plain = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert {canonicalize_name(Requirement(line).name) for line in plain} == set(requirements())


@pytest.mark.slow
def test_the_sdist_holds_what_is_needed_to_test_and_build_again(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "constraints.txt"} <= names
    assert {"pyproject.toml", "tests/test_layers.py", "helm_rl/scenarios/burst.toml"} <= names
    assert not [name for name in names if name.startswith((".venv/", "demo-output/", "runs/", "shared/"))]


@pytest.mark.slow
def test_the_installed_wheel_answers(plain: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    target, env = plain
    assert run(plain, tmp_path, "--version") == f"helm-rl {helm_rl.__version__}\n"
    assert "trace generate" in run(plain, tmp_path, "--help")
    program = f"import {', '.join(FOLDERS)}\nprint({', '.join(f'{folder}.__file__' for folder in FOLDERS)})"
    done = subprocess.run([sys.executable, "-c", program], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.split() == [str(target / folder / "__init__.py") for folder in FOLDERS], done.stderr


@pytest.mark.slow
def test_every_module_of_the_installed_wheel_imports_without_the_extras(
    plain: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    target, env = plain
    modules = sorted(
        ".".join(file.relative_to(target).with_suffix("").parts).removesuffix(".__init__")
        for folder in FOLDERS
        for file in (target / folder).rglob("*.py")
        if file.name != "__main__.py"
    )
    assert "helm_rl.cli" in modules
    program = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    done = subprocess.run(
        [sys.executable, "-c", program, *modules], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)  # alone in a new checkout it compiles every kernel, and two cores may be shared
def test_the_installed_wheel_goes_the_whole_way(plain: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    """Trace, training, export and evaluation of a minute of load: what only runs may miss a package too."""
    steady = (ROOT / "helm_rl" / "scenarios" / "steady.toml").read_text()
    short = re.sub(r"(?m)^warm_s = .*", "warm_s = 20", re.sub(r"(?m)^seconds = .*", "seconds = 60", steady))
    (tmp_path / "short.toml").write_text(short)
    run(plain, tmp_path, "trace", "generate", "short.toml", "--output", "short.parquet")
    assert "trace steady" in run(plain, tmp_path, "trace", "inspect", "short.parquet")
    small = ("--total-timesteps", "32", "--num-envs", "2", "--num-steps", "16")
    run(plain, tmp_path, "train", "base", "--scenario", "short.toml", *small)
    (trained,) = (tmp_path / "runs").iterdir()
    run(plain, tmp_path, "export", str(trained), "--output", "bundle")
    on = ("--scenario", "short.toml", "--policy", "bundle", "--trace", "short.parquet", "--step", "0.2")
    run(plain, tmp_path, "eval", "p99", *on, "--json", "figures.json")
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    (p99_ms,) = (row["value"] for name, row in figures.items() if name.endswith(".policy.p99_ms"))
    assert 1 < p99_ms <= 100 * 100  # from a fixed cost to a shed request's


# make and CI

# These tests run under `make test`, whose flags would make the inner make announce its folders.
NO_OUTER_MAKE = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(
    ("python", "said"),
    [
        (None, "there is no ./fake-python; install Python 3.11 or newer"),
        (
            "case $2 in *version_info*) exit 1;; esac; echo Python 3.9.2",
            "3.11 or newer, and ./fake-python is Python 3.9.2",
        ),
        (
            "case $2 in *ensurepip*) exit 1;; esac",
            "install its venv module (Debian: apt-get install python3-venv)",
        ),
    ],
    ids=["none", "old", "no-venv"],
)
def test_make_says_what_python_lacks(tmp_path: Path, python: str | None, said: str) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    if python is not None:
        (tmp_path / "fake-python").write_text(f"#!/bin/sh\n{python}\n")
        (tmp_path / "fake-python").chmod(0o755)
    done = subprocess.run(
        ["make", "demo", "PYTHON=./fake-python"], cwd=tmp_path, capture_output=True, text=True, env=NO_OUTER_MAKE
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert said in done.stderr.splitlines()[0]
    assert done.stderr.startswith("error: ")
    assert not (tmp_path / ".venv").exists()


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_sets_up_once_and_again_when_the_versions_change(tmp_path: Path) -> None:
    """With a Python that only notes its calls: `install` runs it, then does nothing until constraints.txt changes."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    fake = tmp_path / "fake-python"
    fake.write_text(
        '#!/bin/sh\necho "$@" >> calls\n[ "$2" != venv ] || { mkdir -p .venv/bin; cp $0 .venv/bin/python; }\n'
    )
    fake.chmod(0o755)

    def calls() -> list[str]:
        subprocess.run(
            ["make", "install", "PYTHON=./fake-python"],
            cwd=tmp_path,
            check=True,
            capture_output=True,
            env=NO_OUTER_MAKE,
        )
        return [line for line in (tmp_path / "calls").read_text().splitlines() if line.startswith("-m")]

    first = calls()
    assert [line.split()[1] for line in first] == ["venv", "pip"]
    assert first[1].endswith("-c constraints.txt -e .[dev]")
    assert calls() == first
    later = (tmp_path / ".venv" / ".installed").stat().st_mtime + 10
    os.utime(tmp_path / "constraints.txt", (later, later))
    assert calls() == first + first


def test_the_ci_script_can_run() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in text


# What the documents say


@pytest.mark.parametrize(
    "document", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "checkpoints/README.md", "docs/scaling.md"]
)
def test_commands_in_documents_are_accepted(document: str) -> None:
    text = (ROOT / document).read_text().replace("\\\n", " ")
    blocks = re.findall(r"^(?: {4}|\$ )(helm-rl .*)$", text, flags=re.MULTILINE)
    blocks += [
        line
        for fenced in re.findall(r"^```\w*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
        for line in fenced.splitlines()
        if line.startswith("helm-rl ")
    ]
    for line in blocks + re.findall(r"`(helm-rl [a-z][^`]*)`", text):
        words = shlex.split(line, comments=True)[1:]
        name = words[0] if words[0] in cli.COMMANDS else " ".join(words[:2])
        assert name in cli.COMMANDS, line
        _, arguments_class = cli.load(name)
        options = words[len(name.split()) :]
        if options:
            tyro.cli(arguments_class, args=options)


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_make_targets_in_documents_exist(document: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"^(?: {4})make ([\w-]+)|`make ([\w-]+)", (ROOT / document).read_text(), flags=re.MULTILINE))
    named_flat = {"".join(pair) for pair in named}
    assert named_flat
    assert named_flat <= targets


@pytest.mark.parametrize(
    "document",
    ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "checkpoints/README.md", "docs/scaling.md"],
)
def test_links_in_documents_lead_somewhere(document: str) -> None:
    text = (ROOT / document).read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("https://") or (ROOT / document).parent.joinpath(target).exists(), target


def test_files_that_the_map_names_exist() -> None:
    """Paths in the map of CONTRIBUTING.md: `folder/file.py`, and bare `file.py` after a folder on the same line."""
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## The map")[2].partition("## Style")[0]
    for bullet in re.findall(r"^- .*(?:\n  .*)*", text, flags=re.MULTILINE):
        names = re.findall(r"`([\w/.*]+)`", bullet)
        folder = next((name for name in names if name.endswith("/")), "")
        for name in names:
            path = name if name.partition("/")[0] in (*FOLDERS, "fuzz") else folder + name
            assert list(ROOT.glob(path.rstrip("/"))), path


HALF_A_PAGE = 0.5 / 256
"""Of the smallest pool in the examples: the target keeps to its bounds, and is then rounded to whole pages."""


@pytest.mark.slow
def test_the_python_of_the_readme_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        done = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        alpha, *rest = done.stdout.split()
        assert 0.1 - HALF_A_PAGE <= float(alpha) <= 0.9 + HALF_A_PAGE
        if "gymnasium" in block:
            (p99_ms,) = map(float, rest)
            assert p99_ms > 0
        elif "ControlLoop" in block:
            assert int(rest[0]) >= 5
            assert float(alpha) < 0.4  # users return: it went where they want it
        else:
            assert "EmbeddingStats(requested=4, hits=0, misses=4, fetched=3," in done.stdout
