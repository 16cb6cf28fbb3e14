"""Ray: on this machine alone, and on a cluster of two nodes of which one is killed."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import train.ppo_base
from eval.executor import Executor
from eval.fingerprint import HOME, difference, fingerprint, source_sha256
from eval.ray_workers import MOST_LOSSES, answer, check_address
from eval.results import RESULTS, Results
from eval.suite.command import SUITE
from helm_rl.checkpoint import STATE_FILE, load_training_state
from helm_rl.cli import main as cli
from helm_rl.errors import UserError
from tests.eval import ray_tasks
from tests.eval.conftest import MakeBundle
from tests.eval.ray_nodes import Nodes, end_session, quiet_environment, session, wait_for
from tests.eval.suite.worlds import SMALL, faked, measured, small_plan
from tests.train.test_population import command as population_command
from tests.train.test_population import runs_of
from tests.train.test_ppo_base import assert_same_state, toy

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.timeout(600)

TIMES = {"cpu_s"}

DRIVER = """
import sys

from eval.executor import Executor, working
from eval.processes import Task
from tests.eval import ray_tasks

if __name__ == "__main__":
    import json

    {before}
    with working(Executor("ray", 2, {address!r})) as workers:
        bar = workers.progress.add_task("", total=1)
        tasks = [Task(*task, 1.0) for task in {tasks}]
        workers.run(tasks, lambda row: print(json.dumps(row), file=sys.stderr, flush=True), bar)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    """A cluster on which the environment Sleepy takes 2 ms a step."""
    with Nodes(TOY_SLEEP_S="0.002") as nodes:
        yield nodes


@pytest.fixture
def nodes(cluster: Nodes) -> Nodes:
    """The cluster with two nodes, whatever a test before has killed."""
    while cluster.up < 2:
        cluster.add()
    return cluster


@contextlib.contextmanager
def driven(
    folder: Path, tasks: str, address: str | None = None, before: str = "", **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """Start a process that lets workers do tasks; all that it started ends with the block."""
    script = folder / "driver.py"
    script.write_text(DRIVER.format(before=before, address=address, tasks=tasks))
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=quiet_environment(**environment),
        start_new_session=True,
    )
    try:
        yield process
    finally:
        end_session(process.pid)
        process.wait()


def on_cluster(nodes: Nodes) -> dict[str, str]:
    return {name: value for name, value in nodes.environment.items() if name.startswith("RAY_")}


def rows_of(said: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


def names(processes: list[int]) -> list[str]:
    """Return what processes call themselves, those that are still there."""
    found = []
    for pid in processes:
        with contextlib.suppress(OSError):
            found.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


def listening(processes: list[int]) -> set[str]:
    """Return the local addresses (hex, as the kernel has them) that processes listen on."""
    sockets = set()
    for pid in processes:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):
                sockets |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(link)))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                found.add(fields[1].partition(":")[0])
    return found


@pytest.mark.slow
def test_ray_of_ones_own_is_alone_and_leaves_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log"
    tasks = f"[(ray_tasks.tell, (1,)), (ray_tasks.tell, (2,)), (ray_tasks.trace, (3, 5.0, {str(log)!r}))]"
    before = set(Path("/tmp").iterdir())
    with driven(tmp_path, tasks, HOME=str(tmp_path)) as process:
        wait_for(log.exists, "the third task")
        found = listening(session(process.pid))
        assert found, "a cluster listens somewhere"
        # 127.0.0.1, as IPv4 and as IPv6 has it.
        assert found <= {"0100007F", "0000000000000000FFFF00000100007F"}
        out, said = process.communicate(timeout=120)
        assert process.returncode == 0, said
        wait_for(lambda: not session(process.pid), "all of its processes have ended", 20)
    one, two, three = sorted(rows_of(said), key=lambda row: row["key"])
    assert out == ""
    assert three == {"key": "3"}
    assert (one["value"], two["value"]) == (0.1, 0.2)
    assert one["folder"] == str(tmp_path)
    assert one["argv"] == [str(tmp_path / "driver.py")]
    assert one["threads"] == ["1", "1"]
    assert not (tmp_path / ".ray").exists()
    own = ("ray", f"helm-ray-{process.pid}-")
    assert [path for path in set(Path("/tmp").iterdir()) - before if path.name.startswith(own)] == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_the_first_process(tmp_path: Path, number: signal.Signals) -> None:
    log = tmp_path / "log"
    with driven(tmp_path, f"[(ray_tasks.trace, (i, 600.0, {str(log)!r})) for i in range(3)]") as process:
        wait_for(lambda: log.exists() and log.read_text().count("begins") == 2, "two tasks begin")
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
        # Without its head Ray's agents, which do nothing, look for it for another minute.
        idle = () if number is signal.SIGINT else ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
        wait_for(
            lambda: not [name for name in names(session(process.pid)) if not name.startswith(idle)],
            "the others end",
            30,
        )
    assert log.read_text().count("begins") == 2
    assert "ends" not in log.read_text()
    assert (process.returncode, "KeyboardInterrupt" in said) == (-number, number is signal.SIGINT)
    left = list(Path("/tmp").glob(f"helm-ray-{process.pid}-*"))
    assert len(left) == (number is signal.SIGKILL)  # nobody was there to remove it
    for folder in left:
        shutil.rmtree(folder)


@pytest.mark.slow
def test_a_killed_nodes_tasks_are_taken_up_again_and_nothing_runs_twice(tmp_path: Path, nodes: Nodes) -> None:
    log = tmp_path / "log"
    tasks = f"[(ray_tasks.trace, (i, 1.0 if i < 4 else 4.0, {str(log)!r})) for i in range(8)]"
    with driven(tmp_path, tasks, nodes.address, **on_cluster(nodes)) as process:
        wait_for(lambda: log.exists() and log.read_text().count("begins") == 6, "four tasks are done, two at work")
        other = len(nodes.started) - 1
        killed = set(session(nodes.started[other]))
        nodes.kill(other)
        out, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    events = [line.split() for line in log.read_text().splitlines()]
    begun = Counter(number for number, event, _ in events if event == "begins")
    lost = {number for number, event, pid in events if event == "begins" and int(pid) in killed} - {
        number for number, event, _ in events if event == "ends" and begun[number] == 1
    }
    assert len(lost) == 1
    assert begun == {str(i): 2 if str(i) in lost else 1 for i in range(8)}
    assert Counter(number for number, event, _ in events if event == "ends") == {str(i): 1 for i in range(8)}
    assert sorted(row["key"] for row in rows_of(said)) == [str(i) for i in range(8)]
    assert said.count("a worker was lost, and its task is started again") == 1
    assert out == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "before", "said"),
    [
        ("refuse", "", r"UserError: on node .*: 7 is refused"),
        ("overfill", "", r"OSError: \[Errno 28\] No space left on device \(on node .*\): '7\.json'"),
        ("fail", "", r"ZeroDivisionError: 7 cannot be"),
        ("die", "", rf"UserError: the same task lost its worker {MOST_LOSSES} times"),
        (
            "tell",
            "import eval.ray_workers as r; ours = r.fingerprint(); r.fingerprint = lambda: {**ours, 'numba': '0.1'}",
            r"UserError: node .* has numba [\d.]+, and here 0\.1; every node must have what this one has",
        ),
    ],
)
def test_what_goes_wrong_on_a_node_is_said(tmp_path: Path, nodes: Nodes, task: str, before: str, said: str) -> None:
    with driven(tmp_path, f"[(ray_tasks.{task}, (7,))]", nodes.address, before, **on_cluster(nodes)) as process:
        out, error = process.communicate(timeout=120)
    assert process.returncode == 1
    assert re.search(said, error), error
    assert out == ""


@pytest.mark.slow
def test_who_does_not_know_the_token_is_kept_out(tmp_path: Path, nodes: Nodes) -> None:
    environment = on_cluster(nodes) | {"RAY_AUTH_TOKEN": "0" * 64}
    with driven(tmp_path, "[(ray_tasks.tell, (7,))]", nodes.address, **environment) as process:
        _, error = process.communicate(timeout=120)
    assert process.returncode == 1
    assert f"UserError: --address {nodes.address}: Ray did not start" in error


@pytest.mark.slow
def test_a_map_is_the_same_to_the_last_bit(tmp_path: Path, nodes: Nodes) -> None:
    # A model so slow that its cell has few requests.
    small = ["--models", "decoder-1.5b", "--links", "local-host", "--host-gib", "0", "--histories", "1500",
             "--hot-shares", "0.5", "--loads", "limit", "--seeds", "1"]  # fmt: skip
    found = {}
    for name, where in (("local", []), ("ray", ["--executor", "ray", "--address", nodes.address])):
        command = ["eval", "map", "--output", str(tmp_path / name), *small, *where]
        subprocess.run(
            [sys.executable, "-m", "helm_rl.cli", *command],
            env=quiet_environment(**on_cluster(nodes)),
            check=True,
            stdout=subprocess.DEVNULL,
        )
        rows = [json.loads(line) for line in (tmp_path / name / "results.jsonl").read_text().splitlines()]
        found[name] = sorted(map(without_times, rows), key=repr)
    assert len(found["local"]) == 2
    assert found["local"] == found["ray"]


@pytest.mark.slow
def test_a_suite_that_was_begun_here_goes_on_there(tmp_path: Path, nodes: Nodes, make_bundle: MakeBundle) -> None:
    plan = small_plan(make_bundle(action=0.2), replace(SMALL, seeds=1, capacity_draws=0))
    plan = replace(plan, entries=tuple(entry for entry in plan.entries if entry.key in ("policy", "naive", "kv_first")))
    with faked():
        whole = measured(plan, tmp_path / "whole").store
    with Results(tmp_path / "part", SUITE, {"helm_rl": "test"}) as part:
        for row in list(whole.rows.values())[:5]:
            part.add(row)
    script = tmp_path / "driver.py"
    script.write_text(
        "import pickle, sys\nfrom pathlib import Path\nfrom eval.executor import Executor\n"
        "from eval.results import Results\nfrom eval.suite import run\nfrom eval.suite.command import SUITE\n"
        "from eval.suite.suite import Suite\nfrom tests.eval.suite.worlds import perform_faked\n"
        "if __name__ == '__main__':\n"
        "    run.perform = perform_faked\n"
        "    plan = pickle.loads(Path('plan').read_bytes())\n"
        "    with Results(Path('part'), SUITE, {'helm_rl': 'test'}) as store:\n"
        f"        run.run(Suite(plan, store), Executor('ray', 2, {nodes.address!r}))\n"
    )
    (tmp_path / "plan").write_bytes(pickle.dumps(plan))
    environment = quiet_environment(**on_cluster(nodes))
    subprocess.run([sys.executable, str(script)], env=environment, cwd=tmp_path, check=True)
    with Results(tmp_path / "part", SUITE, {"helm_rl": "test"}) as part:
        found = part.rows
    assert len((tmp_path / "part" / RESULTS).read_text().splitlines()) == len(found) > 15
    assert {key: without_times(row) for key, row in found.items()} == {
        key: without_times(row) for key, row in whole.rows.items()
    }


@pytest.mark.slow
def test_a_population_outlives_a_node(tmp_path: Path, nodes: Nodes) -> None:
    runs = tmp_path / "runs"
    given = [*population_command("Sleepy", runs, "1..3", 12), "--checkpoint-every", "2", "--executor", "ray"]
    process = subprocess.Popen(
        [sys.executable, "-m", "helm_rl.cli", *given, "--address", nodes.address],
        env=quiet_environment(**on_cluster(nodes)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_for(lambda: len(iterations(runs)) == 2 and min(iterations(runs)) >= 4, "two runs are under way")
        nodes.kill(len(nodes.started) - 1)
        out, said = process.communicate(timeout=200)
    finally:
        end_session(process.pid)
    assert process.returncode == 0, said
    (folder,) = runs.iterdir()
    assert f"population: {folder}" in out
    assert said.count("a worker was lost, and its task is started again") == 1
    commands = []
    for seed, run in runs_of(folder).items():
        alone = toy("Sleepy", tmp_path, seed=seed, total_timesteps=12 * 4 * 64, checkpoint_every=2)
        assert_same_state(train.ppo_base.train(alone), run)
        commands.append(load_training_state(run)[0].training.commands)
    # The lost run went on from its checkpoint; no other began twice.
    assert sorted(map(len, commands)) == [1, 1, 2]
    assert all(line.startswith("cli.py train base") for lines in commands for line in lines)


def iterations(runs: Path) -> list[int]:
    """Iterations that the runs of a population have saved."""
    return [json.loads(path.read_text())["training"]["iterations"] for path in runs.glob(f"*/*/{STATE_FILE}")]


def without_times(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in TIMES}


def test_nodes_must_have_the_same_files(tmp_path: Path) -> None:
    ours = fingerprint()
    assert ours["helm-rl's files"] == source_sha256(HOME)[:12]
    for folder in ("helm_rl", "envs", "cache_engine", "train", "eval", "checkpoints"):
        shutil.copytree(HOME / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    assert source_sha256(tmp_path)[:12] == ours["helm-rl's files"]
    with open(tmp_path / "helm_rl" / "scenarios" / "burst.toml", "a") as file:
        file.write("\n")
    assert source_sha256(tmp_path)[:12] != ours["helm-rl's files"]
    there = ours | {"helm-rl's files": source_sha256(tmp_path)[:12]}
    assert difference(ours, ours) is None
    files = "helm-rl's files"
    assert difference(ours, there) == f"{files} {there[files]}, and here {ours[files]}"


def test_nothing_is_called_where_a_node_differs() -> None:
    from ray import cloudpickle

    packed = cloudpickle.dumps((ray_tasks.fail, (1,)))
    kind, node, said = answer(packed, fingerprint() | {"numpy": "0.1"}, "there")
    assert (kind, node) == ("differs", "there")
    assert re.fullmatch(r"has numpy [\d.]+, and here 0\.1", said)
    with pytest.raises(ZeroDivisionError):
        answer(packed, fingerprint(), "there")


@pytest.mark.parametrize("address", ["ray://host:1", "host", "host:", ":1", "host:0", "host:70000", "host:x"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(UserError, match="must be HOST:PORT as `ray start` says it, or auto"):
        check_address(address)


@pytest.mark.parametrize("host", ["a..b", "x" * 70])
def test_a_host_whose_name_is_none_is_told_in_a_sentence(host: str) -> None:
    with pytest.raises(UserError, match=f"--address {re.escape(host)}:6379: no Ray cluster answers there: .*label"):
        check_address(f"{host}:6379")


def test_a_cluster_that_does_not_answer_is_told_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["eval", "map", "--output", str(tmp_path / "map"), "--executor", "ray", "--address", "127.0.0.1:9"]
    assert cli(command) == 2
    assert "--address 127.0.0.1:9: no Ray cluster answers there: Connection refused" in capsys.readouterr().err
    assert not (tmp_path / "map").exists()
    with pytest.raises(UserError, match="goes with --executor ray"):
        Executor(address="127.0.0.1:9").check()
