"""SECURITY.md: what it says of pickles, of code that is executed, of connections and of listeners is so."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import inspect
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from eval import ray_workers
from helm_rl.checkpoint import load_bundle
from helm_rl.errors import UserError
from helm_rl.runtime import command
from helm_rl.runtime.server import HookServer
from tests.helm_rl.policies import make_bundle, network
from tests.test_layers import imports

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "SECURITY.md").read_text()
PACKAGES = ("cache_engine", "helm_rl", "envs", "train", "eval", "checkpoints", "fuzz")

UNPICKLERS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
INTERPRETERS = {"code", "codeop", "runpy", "pty"}
CALLS = {"eval", "exec", "compile", "__import__"}
"""Built-in functions that run text."""
METHODS = {("torch", "load"), ("np", "load"), ("numpy", "load"), ("os", "system"), ("os", "popen")}
METHODS |= {("pd", "read_pickle"), ("yaml", "load"), ("onnx", "load"), ("torch", "hub")}
KEYWORDS = {("allow_pickle", True), ("shell", True), ("weights_only", False), ("trust_remote_code", True)}

CLIENTS = (
    "http.client",
    "urllib.request",
    "socket",
    "ssl",
    "ftplib",
    "smtplib",
    "requests",
    "httpx",
    "aiohttp",
    "wandb",
)
SERVERS = ("http.server", "socketserver", "asyncio", "wsgiref", "xmlrpc")
MAY_CONNECT = {"helm_rl/runtime/adapters/http.py", "helm_rl/runtime/command.py", "helm_rl/tracking.py"}
MAY_CONNECT |= {"eval/control/proxy.py", "eval/control/process.py"}  # to helm-rl's own, on the loopback address
MAY_CONNECT |= {"eval/ray_workers.py"}  # looks whether the cluster that is named is there
MAY_CONNECT |= {"helm_rl/runtime/signals.py"}  # a pair of sockets of its own, which wakes
MAY_CONNECT |= {"helm_rl/runtime/server.py"}  # ends connections that others made to it
MAY_USE_RAY = {"eval/ray_workers.py"}  # Ray pickles, and listens
MAY_LISTEN = {"helm_rl/runtime/command.py", "helm_rl/runtime/server.py", "eval/control/proxy.py"}
MAY_START = {"eval/control/process.py", "eval/whole_decision.py", "eval/workload/reading.py", "eval/cluster_speed.py"}
MAY_START |= {"fuzz/__main__.py"}
MAY_IMPORT_BY_NAME = {"helm_rl/cli.py", "eval/own_controller.py"}  # its own table; what --controller names


def sources() -> Iterator[tuple[str, str]]:
    """Yield (path, text) of every module of the packages."""
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            yield str(file.relative_to(ROOT)), file.read_text()


def dangers(source: str) -> list[tuple[int, str]]:
    """Return (line, what) of all in `source` that unpickles or runs text."""
    found = [(line, name) for line, name in imports(source, "") if name.partition(".")[0] in UNPICKLERS | INTERPRETERS]
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Name) and called.id in CALLS:
            found.append((node.lineno, called.id))
        elif isinstance(called, ast.Attribute):
            owner = ast.unparse(called.value)
            if (owner, called.attr) in METHODS or owner in ("torch.hub", "builtins"):
                found.append((node.lineno, f"{owner}.{called.attr}"))
        for keyword in node.keywords:
            value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
            if (keyword.arg, value) in KEYWORDS:
                found.append((node.lineno, f"{keyword.arg}={value}"))
    return found


def importing(modules: tuple[str, ...]) -> set[str]:
    """Return the files that import one of the modules, or something of one."""
    return {
        path
        for path, text in sources()
        if any(name == one or name.startswith(f"{one}.") for _, name in imports(text, "") for one in modules)
    }


def test_nothing_is_unpickled_and_no_text_is_executed() -> None:
    assert {path: found for path, text in sources() if (found := dangers(text))} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from pickle import loads",
        "import importlib\nimportlib.import_module('dill')",
        "eval('1')",
        "exec(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path)",
        "read(path, allow_pickle=True)",
        "subprocess.run(line, shell=True)",
        "os.system(line)",
        "builtins.eval(text)",
        "torch.hub.load(name)",
    ],
)
def test_the_check_sees_what_it_looks_for(source: str) -> None:
    assert dangers(source)


@pytest.mark.parametrize(
    "source", ["net.eval()", "re.compile(x)", "import eval", "from eval import sweep", "json.load(f)"]
)
def test_the_check_passes_over_what_only_sounds_like_it(source: str) -> None:
    assert dangers(source) == []


def test_only_the_files_that_are_meant_to_connect_listen_or_start_processes() -> None:
    assert importing(CLIENTS) == MAY_CONNECT
    assert importing(SERVERS) == MAY_LISTEN
    asking = {"helm_rl/runtime/command.py", "helm_rl/watch/metrics.py"}  # helm-rl control, helm-rl watch
    assert importing(("helm_rl.runtime.adapters.http",)) == asking
    assert importing(("subprocess",)) == MAY_START
    assert importing(("ray",)) == MAY_USE_RAY
    binding = {
        path
        for path, text in sources()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("bind", "listen", "create_server", "listen_on")
        and "sock" in ast.unparse(node.func.value).lower()
    }
    assert binding == set()


def test_modules_are_imported_by_name_where_a_user_names_one() -> None:
    computed = {
        path
        for path, text in sources()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith("import_module")
        and not isinstance(node.args[0], ast.Constant)
    }
    assert computed == MAY_IMPORT_BY_NAME


def test_listeners_are_on_the_loopback_address_by_default_and_all_told_of() -> None:
    (listen,) = (field.default for field in dataclasses.fields(command.Args) if field.name == "listen")
    assert listen == "127.0.0.1:9464"
    assert f"`--listen`, {listen} by default" in TEXT
    assert inspect.signature(HookServer).parameters["host"].default == "127.0.0.1"
    for path in ("eval/control/proxy.py", "eval/control/process.py"):
        assert "127.0.0.1" in (ROOT / path).read_text()
    for path, text in sources():
        assert "0.0.0.0" not in text, path
    # Who makes a server of QuietServer or start_http_server is in the table.
    making = {path for path, text in sources() if "QuietServer((" in text or "start_http_server(" in text}
    assert making == MAY_LISTEN
    own = dict(ray_workers.OWN_ENVIRONMENT)
    assert (own["RAY_AUTH_MODE"], ray_workers.ENVIRONMENT["RAY_USAGE_STATS_ENABLED"]) == ("token", "0")
    for name in ("`helm-rl control`", "`helm_rl.runtime.server.HookServer`", "`helm-rl bench control`"):
        assert f"| {name}" in TEXT
    assert {path for path, text in sources() if ".Manager()" in text} == {"eval/bench_scaling.py"}
    assert "| `helm-rl bench scaling`" in TEXT


class Payload:
    """What an attacker would put into a pickle: it makes a file when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.mark),)


def test_a_bundle_that_is_a_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    make_bundle(tmp_path / "bundle", network())
    evil = pickle.dumps(Payload(tmp_path / "ran"))
    (tmp_path / "bundle" / "policy.safetensors").write_bytes(evil)
    config = json.loads((tmp_path / "bundle" / "config.json").read_text())
    config["files"]["policy.safetensors"] = hashlib.sha256(evil).hexdigest()  # an attacker would
    (tmp_path / "bundle" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="not a safetensors file"):
        load_bundle(tmp_path / "bundle")
    assert not (tmp_path / "ran").exists()
    pickle.loads(evil)
    assert (tmp_path / "ran").exists()  # it would have worked


AUDITED = """
import pickle, sys
from pathlib import Path
from helm_rl.checkpoint import load_bundle, load_training_state
from helm_rl.export import ExportArgs, main
from helm_rl.scenario import load_scenario
from helm_rl.workloads.trace import Trace
folder, control = Path(sys.argv[1]), sys.argv[2] == "control"
seen = []
WATCHED = ("pickle.find_class", "socket.", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork")
sys.addaudithook(lambda event, arguments: seen.append(event) if event.startswith(WATCHED) else None)
if control:
    pickle.loads((folder / "evil").read_bytes())
load_scenario(folder / "scenario.toml")
Trace.load(folder / "trace.parquet")
load_bundle(folder / "bundle")
load_training_state(folder / "run")
main(ExportArgs(source=folder / "run", output=folder / "new", hub=folder / "hub", overwrite=True))
print(sorted(set(seen)))
"""


def test_reading_every_kind_of_file_unpickles_connects_and_starts_nothing(tmp_path: Path) -> None:
    """Python itself tells of it, by its audit events, whatever library would do it."""
    from helm_rl.workloads.generate import generate
    from tests.envs.worlds import QUICK, scenario
    from tests.helm_rl.policies import make_run
    from tests.test_examples import toml

    small = scenario(**QUICK, seconds=5)
    (tmp_path / "scenario.toml").write_text(toml(small.model_dump(mode="json", exclude_defaults=True)))
    generate(small).save(tmp_path / "trace.parquet")
    make_bundle(tmp_path / "bundle", network())
    make_run(tmp_path / "run", network())
    (tmp_path / "evil").write_bytes(pickle.dumps(Payload(tmp_path / "ran")))

    def said(mode: str) -> str:
        command = [sys.executable, "-c", AUDITED, str(tmp_path), mode]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[-1]

    assert said("plain") == "[]"
    assert said("control") == "['pickle.find_class']"


def test_the_workflow_runs_the_audit_of_all_pins() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "audit.yml").read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert [step["run"] for step in workflow["jobs"]["pip-audit"]["steps"] if "run" in step] == ["make audit"]
    triggers = workflow[True]  # YAML 1.1 reads "on" so
    assert triggers["schedule"]
    assert "constraints.txt" in triggers["pull_request"]["paths"]


OUTER_MAKE = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_the_audit_fails_where_it_learns_nothing(tmp_path: Path) -> None:
    """With a stand-in for the network: --strict and the pins reach pip-audit, and its exit status reaches make's."""
    for name in ("Makefile", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    fake = tmp_path / "fake-python"
    fake.write_text(
        '#!/bin/sh\necho "$0 $@" >> calls\n'
        '[ "$2" != venv ] || { mkdir -p .venv-audit/bin; '
        "for each in python pip-audit; do cp $0 .venv-audit/bin/$each; done; }\n"
        '[ "$1" != --strict ] || exit 3\n'
    )
    fake.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name not in OUTER_MAKE}
    done = subprocess.run(
        ["make", "audit", "PYTHON=./fake-python"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 2
    last = (tmp_path / "calls").read_text().splitlines()[-1]
    assert last.endswith("pip-audit --strict --disable-pip --no-deps -r constraints.txt")
