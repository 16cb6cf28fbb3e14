"""`helm-rl train base`: a run of `train/ppo_base.py`, or one for each of several seeds, in processes or on a cluster.

A population's folder holds a folder for each run, which is what the same command with that one --seed would have made,
bit for bit; the best schedules that validation needs are found once for all. Whatever was stopped, or lost with the
process that did it, goes on from its last checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal

import tyro
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from eval.executor import Executor, ExecutorName, working
from eval.processes import Task, Workers
from eval.results import OPTIONS, RESULTS, Kind, Results, Row, read_options
from helm_rl import __version__
from helm_rl.checkpoint import STATE_FILE, TrainingSection, check_bundle_output, load_training_state
from helm_rl.errors import UserError
from helm_rl.export import export
from helm_rl.files import kept_to_one
from helm_rl.metrics import mean_regret
from train import ppo_base

MOST_SEEDS = 1024
LOGS = "logs"
ORPHAN_S = 60.0
"""How long a run waits for the process that had it before: Ray may know of a node's end before it has ended."""
LOOK_S = 5.0
"""How often the driver looks how far the runs have come."""


@dataclass
class Args(ppo_base.Args):
    """Train the base policy with PPO, once or with several seeds. Ctrl-C saves; --resume continues.

    With --seeds the runs, one core each, lie side by side in a folder of their own, each as the same command with that
    --seed makes it. --resume with that folder trains what is missing. On a Ray cluster all nodes must share --runs.

    Example: helm-rl train base --seeds 1..8 --jobs 4
    """

    seeds: Annotated[tuple[str, ...], tyro.conf.arg(metavar="SEED|FIRST..LAST")] = ()
    """Seeds of a population, such as 1..8, or 1 2 5..7: a run for each."""
    bundle: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Also make a bundle of the run's policy here when it is trained, as `helm-rl export` does; not with --seeds."""
    jobs: int = 2
    """Runs of a population at a time; with --address as many as the cluster has cores."""
    executor: ExecutorName = "local"
    """Where a population is trained: local, in processes of this machine, or ray, on the nodes of a Ray cluster (needs
    the extra 'ray'); the policies are the same."""
    address: Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT")] = None
    """With --executor ray: the cluster, of which this machine must be a node, or auto; without it Ray starts on this
    machine alone, for as long as the command takes."""


OWN = ("seeds", "bundle", "jobs", "executor", "address")
"""Arguments of a population, and not of its runs."""


class _Stored(BaseModel):
    """What a population was started with; inputs: a hash of each scenario, trace and bundle that it is trained with."""

    model_config = ConfigDict(extra="forbid")
    helm_rl: str
    seeds: tuple[int, ...]
    arguments: dict[str, Any]
    inputs: dict[str, str]


class _Reference(BaseModel):
    """P99 (ms) of the best schedule on the held-out arrivals of one scenario."""

    model_config = ConfigDict(extra="forbid")
    key: str
    p99_ms: dict[str, float]


class _Run(BaseModel):
    """A run that has ended; regret: the least mean regret on held-out arrivals."""

    model_config = ConfigDict(extra="forbid")
    key: Literal["run"]
    seed: int
    folder: str
    steps: int
    regret: float | None
    error: str | None


def check_row(line: bytes) -> Row:
    """Return the row that a line of a population's results holds; ValueError, naming the field, if it is none."""
    try:
        return TypeAdapter[Any](_Run | _Reference).validate_json(line).model_dump()
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


POPULATION = Kind("population", (OPTIONS, RESULTS), check_row)


def parse_seeds(texts: Sequence[str]) -> tuple[int, ...]:
    """Return the seeds that numbers and ranges FIRST..LAST name, in order; UserError for what is none, or is twice."""
    found: list[int] = []
    for text in texts:
        match = re.fullmatch(r"([0-9]{1,10})(?:\.\.([0-9]{1,10}))?", text)
        if match is None:
            raise UserError(f"--seeds {text}: must be a number, or FIRST..LAST such as 1..8")
        first = int(match[1])
        last = first if match[2] is None else int(match[2])
        if last < first or last >= 2**32:
            raise UserError(f"--seeds {text}: must ascend, and stay below 2^32")
        if len(found) + last - first >= MOST_SEEDS:
            raise UserError(f"--seeds names more than {MOST_SEEDS}")
        found += range(first, last + 1)
    if len(set(found)) < len(found):
        raise UserError(f"--seeds names one twice: {' '.join(texts)}")
    return tuple(found)


def main(args: Args, given: Collection[str] | None = None) -> None:
    """Train as the command line says, and tell where the result is and what can be done with it.

    given: names of the arguments that stand on it.
    """
    again = args.resume is not None and (args.resume / OPTIONS).is_file()
    if not args.seeds and not again:
        if args.executor != "local" or args.address is not None:
            raise UserError("--executor and --address go with several runs, --seeds or a --resume of these")
        _train_one(args, given)
        return
    if args.bundle is not None:
        raise UserError("--bundle is made of one run; of a population export the run that you choose: helm-rl export")
    folder = train(args, given)
    with Results(folder, POPULATION, read_options(folder / OPTIONS, POPULATION)) as store:
        ended = sorted((row for row in store.rows.values() if row["key"] == "run"), key=lambda row: row["seed"])
    Console(highlight=False, soft_wrap=True).print(_table(folder, ended))
    failed = [row for row in ended if row["error"] is not None]
    if failed:
        raise UserError(f"seed {failed[0]['seed']}{_and_more(len(failed))} ended early: {failed[0]['error']}")
    print(f"population: {folder}")
    if all(row["regret"] is not None for row in ended):
        prefix = ended[0]["folder"].rpartition("__")[0]
        print(f"next: helm-rl eval learning {folder}/{prefix}__*")
        best = min(ended, key=lambda row: row["regret"])["folder"]
        print(f"next: helm-rl export {folder / best} --output {best}-bundle  (the least regret of these)")


def _train_one(args: Args, given: Collection[str] | None) -> None:
    if args.bundle is None:
        ppo_base.main(_of_a_run(args), given)
        return
    if args.env_id != ppo_base.NODE_ENV:
        raise UserError(f"--bundle: only a controller of alpha makes one, and --env-id {args.env_id} trains another")
    check_bundle_output(args.bundle)  # now, and not after the training
    run = ppo_base.train(_of_a_run(args), given=given)
    export(run, args.bundle)
    print(f"run: {run}")
    print(f"bundle: {args.bundle}")


def train(args: Args, given: Collection[str] | None = None) -> Path:
    """Train what a population lacks; return its folder.

    given: names of the arguments that were given, as `ppo_base.changes_of` has it.

    Raises:
        UserError: An argument is wrong or must not change, or a worker has other files than this machine. What goes
            wrong within a single run ends that run alone, and stands in its row.
    """
    executor = Executor(args.executor, args.jobs, args.address)
    executor.check()
    changes = ppo_base.changes_of(args, given)
    if "seed" in changes:
        raise UserError("--seed and --seeds: give one of them; a population has the seeds that --seeds began it with")
    if args.resume is not None:
        folder, stored = args.resume, _read(args.resume)
        if args.seeds and parse_seeds(args.seeds) != stored.seeds:
            raise UserError(
                f"--seeds: {folder} has the seeds {_label(stored.seeds)}; start a new population for others"
            )
        ppo_base.check_changes(_arguments(stored, stored.seeds[0]), changes)
    else:
        stored, changes = _begin(args), {}
        label = _label(stored.seeds)
        folder = ppo_base.make_run_folder(args.runs, args.env_id, args.exp_name, label)
    console = Console(stderr=True, soft_wrap=True, markup=False, highlight=False)
    with Results(folder, POPULATION, stored.model_dump(mode="json")) as store:
        console.print(f"training {len(stored.seeds)} runs, seeds {_label(stored.seeds)}, in {folder}")
        try:
            with working(executor) as workers:
                if ppo_base.has_validation(_arguments(stored, stored.seeds[0])):
                    _find_references(stored, workers, store)
                _train_runs(stored, folder, changes, executor, workers, store)
        except (KeyboardInterrupt, OSError):
            console.print(
                "stopped: what was trained is kept up to the last checkpoint of each run; it goes on by: "
                f"helm-rl train base --resume {folder}"
            )
            raise
    return folder


# -- what a population is -------------------------------------------------------------------------------------


def _begin(args: Args) -> _Stored:
    """Check the arguments of a new population and return what it is started with."""
    seeds = parse_seeds(args.seeds)
    run = dataclasses.replace(_of_a_run(args), seed=seeds[0])
    ppo_base.check_args(run)
    arguments = ppo_base.plain_arguments(run)
    del arguments["seed"]
    return _Stored(helm_rl=__version__, seeds=seeds, arguments=arguments, inputs=inputs_of(run))


def _read(folder: Path) -> _Stored:
    options = read_options(folder / OPTIONS, POPULATION)
    try:
        stored = _Stored.model_validate(options)
        for seed in stored.seeds:
            _arguments(stored, seed)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{folder / OPTIONS}: {where}: {first['msg']}; it is no population of this version") from None
    return stored


def _arguments(stored: _Stored, seed: int) -> ppo_base.Args:
    """Return the arguments of one run of a population."""
    return TypeAdapter(ppo_base.Args).validate_python({**stored.arguments, "seed": seed})


def _of_a_run(args: Args) -> ppo_base.Args:
    return ppo_base.Args(**{name: value for name, value in vars(args).items() if name not in OWN})


def _label(seeds: Sequence[int]) -> str:
    """Name seeds as the command line does, in few letters."""
    parts: list[list[int]] = []
    for seed in seeds:
        if parts and seed == parts[-1][1] + 1:
            parts[-1][1] = seed
        else:
            parts.append([seed, seed])
    label = ",".join(f"{first}..{last}" if last > first else f"{first}" for first, last in parts)
    return label if len(label) <= 40 else f"{len(seeds)}-seeds"


def inputs_of(args: ppo_base.Args) -> dict[str, str]:
    """Return a hash (hex) of all that is read besides the arguments: scenarios, traces, the bundle to start from."""
    found: dict[str, str] = {}
    if args.env_id == ppo_base.NODE_ENV:
        from helm_rl.scenario import scenario_hash

        for name, scenario in zip(args.scenario, ppo_base.load_scenarios(args.scenario, args.load), strict=True):
            found[name] = scenario_hash(scenario)
    paths = list(args.trace)
    if args.start is not None:
        paths += sorted(path for path in args.start.rglob("*") if path.is_file()) or [args.start]
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path}: there is no such file")
        with open(path, "rb") as file:
            found[str(path)] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


# -- tasks ----------------------------------------------------------------------------------------------------


def find_reference(arguments: Mapping[str, Any], inputs: Mapping[str, str], name: str) -> Row:
    """Find the best schedule on the held-out arrivals of one scenario, on one core."""
    from eval.sweep import Work
    from train.validation import find_references, hold_out

    args = TypeAdapter(ppo_base.Args).validate_python(dict(arguments))
    _refuse_other_inputs(args, inputs)
    work = Work(1)
    try:
        held = hold_out(ppo_base.load_scenarios([name], args.load), args.validation_draws)
        return {"key": _reference_key(name), "p99_ms": find_references(held, work)}
    finally:
        work.close()


def train_run(
    arguments: Mapping[str, Any],
    inputs: Mapping[str, str],
    changes: Mapping[str, Any],
    folder: Path,
    options_sha256: str,
    threads: int,
    reference_ms: Mapping[str, float],
) -> Row:
    """Train one run of a population in `folder`, or go on with it where it was left; nothing where it is complete.

    What it has to say goes to a file in the folder of LOGS. Its row says how it ended.

    Raises:
        UserError: This machine does not see the population's folder, or has other inputs.
    """
    options = folder.parent / OPTIONS
    if not options.is_file() or hashlib.sha256(options.read_bytes()).hexdigest() != options_sha256:
        raise UserError(f"{folder.parent} is not here what it is where the command runs; all nodes must share --runs")
    args = TypeAdapter(ppo_base.Args).validate_python(dict(arguments))
    _refuse_other_inputs(args, inputs)
    error = None
    (folder.parent / LOGS).mkdir(exist_ok=True)
    path = folder.parent / LOGS / f"{folder.name}.log"
    with open(path, "a", encoding="utf-8") as log, contextlib.redirect_stderr(log):
        try:
            with _saved_when_terminated():
                _train_or_go_on(args, changes, folder, threads, reference_ms)
        except UserError as reason:
            error = str(reason)
    training = load_training_state(folder)[0].training if (folder / STATE_FILE).exists() else None
    return {
        "key": "run",
        "seed": args.seed,
        "folder": folder.name,
        "steps": 0 if training is None else training.steps,
        "regret": None if training is None else _least_regret(training),
        "error": error,
    }


def _train_or_go_on(
    args: ppo_base.Args, changes: Mapping[str, Any], folder: Path, threads: int, reference_ms: Mapping[str, float]
) -> None:
    training = None
    if folder.exists():
        with kept_to_one(folder, ORPHAN_S):
            if (folder / STATE_FILE).exists():
                training = load_training_state(folder)[0].training
            else:  # whoever made it was killed before the first checkpoint
                shutil.rmtree(folder)
    if training is not None:
        resumed = ppo_base.Args(resume=folder, **changes)
        then = ppo_base.resumed_args(resumed, training.arguments, folder, given=changes)
        if ppo_base.why_complete(then, training) is None:
            ppo_base.train(resumed, threads=threads, wait_s=ORPHAN_S, given=changes)
        return
    ppo_base.train(dataclasses.replace(args, **changes), folder, threads, reference_ms)


class _Terminated(KeyboardInterrupt):
    """The process is to end; as after Ctrl-C, the last finished iteration is saved."""


@contextlib.contextmanager
def _saved_when_terminated() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does, and then the process, even if nothing more could be saved.

    Another error of the saving, such as a full disk's, would else be told to a driver that waits for the end.
    """
    told = False
    if threading.current_thread() is not threading.main_thread():  # signals come to the main thread alone
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal told
        told = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise _Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        if told:
            with contextlib.suppress(OSError):
                sys.stderr.flush()
            os._exit(128 + signal.SIGTERM)
        signal.signal(signal.SIGTERM, before)


def _refuse_other_inputs(args: ppo_base.Args, inputs: Mapping[str, str]) -> None:
    for name, sha256 in inputs_of(args).items():
        if inputs.get(name) != sha256:
            raise UserError(f"{name}: is not here what it was when the population was started")


def _least_regret(training: TrainingSection) -> float | None:
    found = training.validation
    return None if found.best is None else mean_regret(found.regrets[found.best].values())


# -- the driver -----------------------------------------------------------------------------------------------


def _find_references(stored: _Stored, workers: Workers, store: Results) -> None:
    """Store the P99s of the best schedules that are not there yet."""
    args = _arguments(stored, stored.seeds[0])
    missing = [name for name in args.scenario if store.get(_reference_key(name)) is None]
    if missing:
        bar = workers.progress.add_task("held-out arrivals: the best schedules", total=len(missing))
        arguments = ppo_base.plain_arguments(args)
        workers.run([Task(find_reference, (arguments, stored.inputs, name), 1.0) for name in missing], store.add, bar)
        workers.progress.remove_task(bar)


def _train_runs(
    stored: _Stored, folder: Path, changes: Mapping[str, Any], executor: Executor, workers: Workers, store: Results
) -> None:
    options_sha256 = hashlib.sha256((folder / OPTIONS).read_bytes()).hexdigest()
    threads = 1 if executor.name == "ray" else max(1, len(os.sched_getaffinity(0)) // executor.jobs)
    reference_ms: dict[str, float] = {}
    tasks, folders, iterations = [], [], 0
    for seed in stored.seeds:
        args = _arguments(stored, seed)
        for name in args.scenario:
            row = store.get(_reference_key(name))
            reference_ms |= {} if row is None else row["p99_ms"]
        run = (folder / ppo_base.run_name(args.env_id, args.exp_name, seed)).absolute()
        arguments = ppo_base.plain_arguments(args)
        given = (arguments, stored.inputs, dict(changes), run, options_sha256, threads, reference_ms)
        tasks.append(Task(train_run, given, 0.0))
        folders.append(run)
        steps = max(args.total_timesteps, changes.get("total_timesteps", 0))
        iterations += steps // (args.num_envs * args.num_steps)
    bar = workers.progress.add_task(f"{len(tasks)} runs", total=iterations)
    with _watching(folders, workers.progress, bar):
        workers.run(tasks, store.add, bar)
    workers.progress.remove_task(bar)


@contextlib.contextmanager
def _watching(folders: Sequence[Path], progress: Progress, bar: TaskID) -> Iterator[None]:
    """Show on a bar how many iterations the runs have saved."""
    over = threading.Event()

    def look() -> None:
        while True:
            progress.update(bar, completed=sum(map(_saved_iterations, folders)))
            if over.wait(LOOK_S):
                return

    thread = threading.Thread(target=look, name="population", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _saved_iterations(folder: Path) -> int:
    try:
        return int(json.loads((folder / STATE_FILE).read_bytes())["training"]["iterations"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _reference_key(name: str) -> str:
    return f"reference {name}"


def _table(folder: Path, ended: Sequence[Row]) -> Table:
    table = Table(title=f"runs in {folder}", title_justify="left")
    for heading in ("seed", "run", "steps", "least mean regret on held-out arrivals"):
        table.add_column(heading, justify="left" if heading == "run" else "right")
    for row in ended:
        regret = "" if row["regret"] is None else f"{100 * row['regret']:.1f} %"
        table.add_row(str(row["seed"]), row["folder"], f"{row['steps']:,}", regret)
    return table


def _and_more(count: int) -> str:
    return "" if count == 1 else f" and {count - 1} more"
