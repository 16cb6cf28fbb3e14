"""The layers: imports run downward only, and the packages that are imported are ours."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

MAY_IMPORT = {
    "cache_engine": {"cache_engine"},
    "helm_rl": {"helm_rl", "cache_engine"},
    "envs": {"envs", "helm_rl", "cache_engine"},
    # One layer: the demo trains; training validates, and imitates the reference, by what measures a policy.
    "train": {"train", "eval", "envs", "helm_rl", "cache_engine"},
    "eval": {"train", "eval", "envs", "helm_rl", "cache_engine"},
    "checkpoints": {"checkpoints"},
}

FRONT_DOOR = "helm_rl/cli.py"


def imports(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of all that `source`, a module in `package`, imports, wherever it stands.

    Seen are `import`, `from ... import` (relative ones resolved), `import_module` and `__import__`.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield node.lineno, name.name
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            yield node.lineno, ".".join([*base, *([node.module] if node.module else [])])
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def upward(source: str, package: str) -> list[tuple[int, str]]:
    """Return the imports of `source`, a module in `package`, that its layer forbids."""
    allowed = MAY_IMPORT[package.partition(".")[0]]
    ours = {*MAY_IMPORT, "tests"}
    found = imports(source, package)
    return [(line, name) for line, name in found if (top := name.partition(".")[0]) in ours and top not in allowed]


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_run_downward_only(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    found = {}
    for file in files:
        package = ".".join(file.parent.relative_to(ROOT).parts)
        if wrong := upward(file.read_text(), package):
            found[str(file.relative_to(ROOT))] = wrong
    assert found == {}


@pytest.mark.parametrize(
    ("source", "package", "wrong"),
    [
        ("import envs", "helm_rl", [(1, "envs")]),
        ("import os, train.ppo_base as t", "envs.serving", [(1, "train.ppo_base")]),
        ("from helm_rl.files import write_text", "cache_engine.backends", [(1, "helm_rl.files")]),
        ("def f():\n    from eval import sweep", "envs", [(2, "eval")]),
        ("if TYPE_CHECKING:\n    import envs.vector", "helm_rl.control", [(2, "envs.vector")]),
        ("import importlib\nimportlib.import_module('train.ppo_base')", "helm_rl", [(2, "train.ppo_base")]),
        ("__import__('envs')", "helm_rl", [(1, "envs")]),
        ("from tests.envs import helpers", "eval", [(1, "tests.envs")]),
        ("from . import pool\nfrom .backends import cpu\nfrom .. import kv", "cache_engine.backends", []),
        ("from .x import y\nimport numpy, evaluate, envs_of_others", "helm_rl", []),
        ("from train.ppo_base import main\nimport envs, cache_engine.kv", "eval", []),
    ],
)
def test_the_check_sees_every_way_to_import(source: str, package: str, wrong: list[tuple[int, str]]) -> None:
    assert upward(source, package) == wrong


def test_relative_imports_are_resolved() -> None:
    source = "from . import a\nfrom .b import c\nfrom .. import d\nfrom ..e import f"
    assert [name for _, name in imports(source, "envs.serving")] == [
        "envs.serving",
        "envs.serving.b",
        "envs",
        "envs.e",
    ]


def test_only_the_front_door_names_modules_above_helm_rl() -> None:
    """Names in strings, which the check of imports cannot follow: `"module:function"` of the table."""
    naming = set()
    for file in (ROOT / "helm_rl").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and re.fullmatch(r"(envs|train|eval)(\.\w+)+:\w+", text):
                naming.add(str(file.relative_to(ROOT)))
    assert naming == {FRONT_DOOR}


@pytest.mark.parametrize("folder", [*MAY_IMPORT, "tests"])
def test_the_packages_that_are_imported_are_ours(folder: str) -> None:
    """The registry has packages named envs, eval, train, checkpoints; and `tests/envs` must not shadow envs."""
    module = importlib.import_module(folder)
    assert module.__file__ is not None
    assert Path(module.__file__).resolve() == ROOT / folder / "__init__.py"


def test_every_folder_of_tests_is_a_package() -> None:
    for file in (ROOT / "tests").rglob("*.py"):
        assert (file.parent / "__init__.py").exists(), file
