"""The front door, `helm-rl COMMAND ...`: a table of commands, each imported only when it runs.

Only the standard library is imported here, so that `helm-rl --help` answers at once. The table is the one place
where `helm_rl` names folders above it; it names them as text.
"""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from helm_rl.errors import UserError, printable

PROGRAM = "helm-rl"


class Command(NamedTuple):
    """One row of the table.

    section: the heading under which `helm-rl --help` lists it; target: "module:function", where the function
    takes one argument, a dataclass that tyro fills from the command line; summary: one line.
    """

    section: str
    target: str
    summary: str


COMMANDS: dict[str, Command] = {
    "trace generate": Command(
        "traces", "helm_rl.workloads.commands:generate", "generate a seeded request trace from a scenario"
    ),
    "trace convert": Command("traces", "helm_rl.workloads.convert:convert", "convert a recorded log to a trace"),
    "trace inspect": Command("traces", "helm_rl.workloads.commands:inspect", "say what is in a trace"),
    "trace fit": Command(
        "traces", "helm_rl.workloads.commands:fit", "write a scenario whose traces come near a trace's"
    ),
    "train base": Command(
        "training", "train.population:main", "train the base policy with PPO, with one seed or several"
    ),
    "train imitate": Command(
        "training", "train.imitate_reference:main", "fit a start for it to the best schedules found offline"
    ),
    "train burst": Command(
        "training", "train.calibrate_burst:main", "set the burst detectors' thresholds, fit the recovery rule"
    ),
    "train residual": Command(
        "training", "train.fit_residual:main", "let the residual adapter learn on a service new to it"
    ),
    "control": Command(
        "serving", "helm_rl.runtime.command:main", "drive alpha of a serving system with a bundle, beside it"
    ),
    "watch": Command("serving", "helm_rl.watch.command:main", "a live view of a training run, or of a control process"),
    "export": Command("training", "helm_rl.export:main", "turn a training run into a bundle, or that into ONNX or C"),
    "checkpoints list": Command("bundles", "helm_rl.shipped:list_shipped", "the bundles that ship with helm-rl"),
    "checkpoints show": Command("bundles", "helm_rl.shipped:show", "what is in a bundle, and how it came to be"),
    "eval p99": Command("measuring", "eval.p99_latency:main", "P99 latency of a policy beside static splits"),
    "eval ratio-gap": Command(
        "measuring", "eval.ratio_gap:main", "distance of a policy's split from each segment's best one"
    ),
    "eval suite": Command("measuring", "eval.suite.command:main", "a policy beside all others, over many loads"),
    "eval compare": Command("measuring", "eval.suite.compare:main", "two suites side by side, draw by draw"),
    "eval learning": Command("measuring", "eval.learning:main", "learning curves of training runs, side by side"),
    "eval headroom": Command(
        "measuring", "eval.headroom:main", "what adapting the split could gain on a trace of one's own"
    ),
    "eval map": Command(
        "measuring", "eval.map.command:main", "where adapting the split pays, over models, links and loads"
    ),
    "eval routing": Command("measuring", "eval.routing:main", "routers on a cluster, and bursts under reallocation"),
    "eval reward": Command("measuring", "eval.reward:main", "how biased and noisy rewards for the training are"),
    "eval telemetry": Command("measuring", "eval.telemetry:main", "what sampled, late or lost telemetry costs in P99"),
    "eval live": Command(
        "measuring",
        "eval.live.command:main",
        "model clock, statics and a policy beside a live network",
    ),
    "calibrate hardware": Command("measuring", "eval.live.hardware:main", "measure this machine, for the model clock"),
    "bench engine": Command(
        "measuring", "eval.bench_engine:main", "the cache engine beside other caches, and its limits"
    ),
    "bench decision": Command(
        "measuring", "eval.bench_decision:main", "how long decisions on alpha and on routing take"
    ),
    "bench env": Command("measuring", "eval.bench_env:main", "simulated requests per second, and where the time goes"),
    "bench train": Command("measuring", "eval.bench_train:main", "what a training takes beside the simulator"),
    "bench live": Command(
        "measuring", "eval.bench_live:main", "replay a trace on the live engine, and check every byte"
    ),
    "bench control": Command(
        "measuring", "eval.bench_control:main", "the control process beside a live engine, under every fault"
    ),
    "bench model": Command(
        "measuring", "eval.bench_model:main", "the serving model against theory and an unsampled run"
    ),
    "bench telemetry": Command(
        "measuring", "eval.bench_telemetry:main", "telemetry of up to 1,024 nodes through racks: cost and loss"
    ),
    "bench trace": Command("measuring", "eval.bench_trace:main", "reading logs, drawing traces, miss ratios, fits"),
    "bench scaling": Command(
        "measuring", "eval.bench_scaling:main", "what a run costs on 1 to 1,024 nodes, and what limits it"
    ),
    "bench profiles": Command(
        "measuring", "helm_rl.profiles.fit:main", "the hardware profiles beside published measurements"
    ),
    "demo": Command("all of it", "eval.demo:main", "trace, training, export, evaluation and report in one go"),
}

EXAMPLES: dict[str, str] = {
    "helm-rl demo --output demo-output": "the whole way, in a few minutes; ends with the path of a report",
    "helm-rl trace generate burst --output burst.parquet": "a trace of the shipped scenario burst",
}

FOLDERS = ("cache_engine", "checkpoints", "envs", "eval", "train")
"""Our import packages besides helm_rl; other distributions have packages with some of these names."""

EXTRAS = {
    "cachetools": "bench",
    "cupy": "cuda13",
    "libcachesim": "bench",
    "onnx": "onnx",
    "onnxruntime": "bench",
    "polars": "bench",
    "ray": "ray",
    "stable_baselines3": "bench",
    "wandb": "track",
}
"""Import packages that do not come with a plain install, and the extra that brings each."""

_QUIET_S = 0.5  # before a terminal is told what takes so long

_WRONG_PATH = {errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP}
"""What the system says where the user named the wrong path."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` (default: the process's own) names and return the exit status.

    0: done. 1: the machine refused (disk full, no permission). 2: the user's mistake, told in one sentence on
    stderr. 130: interrupted. 141: the reader of our output has gone. Anything else that is raised is a bug of
    ours and keeps its traceback.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    _open_closed_streams()
    try:
        try:
            _refuse_undecodable(arguments)
            _dispatch(arguments)
        except SystemExit:  # tyro's --help
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except UserError as error:
        return _fail(f"error: {error}", 2)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        extra = EXTRAS[package]
        advice = f"pip install '{PROGRAM}[{extra}]', or in a checkout pip install -e '.[{extra}]'"
        return _fail(f"error: this needs the Python package {package}, which is not installed; {advice}", 2)
    except MemoryError:
        return _fail("error: not enough memory for this; nothing was written", 1)
    except BrokenPipeError:
        _drop_output()
        return 141
    except OSError as error:
        # Without a number it did not come from the system, and only a traceback tells enough.
        if error.errno is None:
            raise
        _drop_output()
        where = f"{error.filename}: " if error.filename is not None else ""
        return _fail(f"error: {where}{error.strerror}", 2 if error.errno in _WRONG_PATH else 1)
    return 0


def _open_closed_streams() -> None:
    """Put /dev/null where stdout or stderr was closed: Python has None there, which many a print stumbles over."""
    import os

    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (for as long as the process)


def _refuse_undecodable(arguments: Sequence[str]) -> None:
    """Raise UserError for bytes that are no text: Parquet, JSON and HTML, where file names end up, take none."""
    for argument in arguments:
        try:
            argument.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError(f"argument {argument!r} is not UTF-8 text; rename the file") from None


def _dispatch(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
    elif arguments[0] == "--version":
        from helm_rl import __version__

        print(f"{PROGRAM} {__version__}")
    elif arguments[0] in COMMANDS:
        _run(arguments[0], arguments[1:])
    elif arguments[0] not in {name.partition(" ")[0] for name in COMMANDS}:
        raise UserError(_unknown(arguments))
    elif len(arguments) == 1 or arguments[1] in ("-h", "--help"):
        print(_group_help(arguments[0]))
    elif f"{arguments[0]} {arguments[1]}" in COMMANDS:
        _run(f"{arguments[0]} {arguments[1]}", arguments[2:])
    else:
        raise UserError(_unknown(arguments))


def load(name: str) -> tuple[Callable[[Any], None], type]:
    """Import the command `name`; return its function and the dataclass that holds its arguments."""
    import importlib
    import typing

    _refuse_foreign_folders()
    module, _, function_name = COMMANDS[name].target.partition(":")
    function = getattr(importlib.import_module(module), function_name)
    hints = typing.get_type_hints(function)
    hints.pop("return", None)
    hints.pop("given", None)
    (arguments_class,) = hints.values()
    return function, arguments_class


def given_options(arguments_class: type, arguments: Sequence[str]) -> frozenset[str]:
    """Return the fields that a command line, which has been found right, sets itself, be it to their defaults."""
    import typing

    import tyro

    # tyro leaves out of such a dictionary whatever was not given.
    hints = typing.get_type_hints(arguments_class, include_extras=True)
    kind = typing.TypedDict("kind", hints, total=False)  # type: ignore[misc]
    return frozenset(tyro.cli(kind, args=arguments))


@contextlib.contextmanager
def _told(text: str) -> Iterator[None]:
    """Show a text on a terminal while the block runs, if that takes a while."""
    import os
    import threading

    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield
        return
    shown = threading.Event()

    def show() -> None:
        shown.set()
        print(text, end="", file=sys.stderr, flush=True)

    timer = threading.Timer(_QUIET_S, show)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        if shown.is_set():
            print("\r\033[2K", end="", file=sys.stderr, flush=True)


def _run(name: str, arguments: list[str]) -> None:
    with _told(f"{PROGRAM} {name} is being loaded"):
        function, arguments_class = load(name)
    _join_lines_of_help(arguments_class)

    import inspect

    import tyro

    config = (tyro.conf.FlagCreatePairsOff,)  # --overwrite, and no --no-overwrite beside it
    parsed: Any = tyro.cli(arguments_class, prog=f"{PROGRAM} {name}", args=arguments, config=config)
    if "given" in inspect.signature(function).parameters:
        function(parsed, given=given_options(arguments_class, arguments))  # type: ignore[call-arg]
    else:
        function(parsed)


def _join_lines_of_help(arguments_class: type) -> None:
    """Give each option the text under its field as one paragraph: tyro would end its lines where the source does."""
    import ast
    import inspect
    import itertools
    import textwrap
    import typing

    import tyro

    texts = {}
    for kind in arguments_class.__mro__[-2::-1]:  # a class's own fields after those of the classes it extends
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        for field, text in itertools.pairwise(typing.cast(ast.ClassDef, body).body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                texts[ast.unparse(field.target)] = " ".join(ast.literal_eval(text.value).split())
    hints = typing.get_type_hints(arguments_class, include_extras=True)
    for option, help in texts.items():
        hints[option] = typing.Annotated[hints[option], tyro.conf.arg(help=help)]
    arguments_class.__annotations__ = hints


def _refuse_foreign_folders() -> None:
    """Raise UserError if another distribution's `envs`, `eval`, ... would be imported instead of ours."""
    import importlib.util
    from pathlib import Path

    home = Path(__file__).resolve().parent.parent
    for folder in FOLDERS:
        spec = importlib.util.find_spec(folder)
        origin = spec.origin if spec is not None else None
        if origin is None or Path(origin).resolve().parent.parent != home:
            raise UserError(
                f"importing '{folder}' finds {origin or 'nothing'} instead of {PROGRAM}'s own {home / folder}; "
                f"install {PROGRAM} into a virtual environment of its own"
            )


def _help() -> str:
    sections: dict[str, list[str]] = {}
    for name, command in COMMANDS.items():
        sections.setdefault(command.section, []).append(f"  {name:<16}  {command.summary}")
    lines = [
        f"usage: {PROGRAM} COMMAND [options]",
        "",
        "Train and evaluate controllers that split GPU memory between the embedding cache",
        "and the KV cache of a generative recommender.",
    ]
    for section, rows in sections.items():
        lines += ["", section, *rows]
    lines += ["", "options", "  -h, --help        show this", "  --version         show the version"]
    lines += ["", "examples"]
    for example, purpose in EXAMPLES.items():
        lines += [f"  {example}", f"      {purpose}"]
    lines += ["", f"{PROGRAM} COMMAND --help explains a command and its options."]
    return "\n".join(lines)


def _group_help(group: str) -> str:
    rows = [f"  {name:<16}  {command.summary}" for name, command in _members(group).items()]
    usage = f"usage: {PROGRAM} {group} COMMAND [options]"
    return "\n".join([usage, "", *rows, "", f"{PROGRAM} {group} COMMAND --help explains a command and its options."])


def _members(group: str) -> dict[str, Command]:
    return {name: command for name, command in COMMANDS.items() if name.startswith(f"{group} ")}


def _unknown(arguments: list[str]) -> str:
    """Say that there is no such command or option, and name the nearest command or all there are."""
    import difflib

    first = arguments[0]
    members = {name.partition(" ")[2]: name for name in _members(first)}
    if members:
        typed, candidates = [arguments[1]], members
        otherwise = f"{PROGRAM} {first} has {', '.join(members)}"
    elif first.startswith("-"):
        return f"there is no option '{first}' before the command; {PROGRAM} --help shows what there is"
    else:
        # One word may be a group, or a member without its group; a full name wins over both.
        typed = [" ".join(arguments[:2]), first]
        names = {name: name for name in COMMANDS}
        groups = {group: group for group in (name.partition(" ")[0] for name in COMMANDS) if group not in names}
        candidates = {name.rpartition(" ")[2]: name for name in COMMANDS} | groups | names
        otherwise = f"{PROGRAM} --help lists them"
    near = [match for text in typed for match in difflib.get_close_matches(text, candidates, n=1)]
    hint = f"did you mean '{PROGRAM} {candidates[near[0]]}'?" if near else otherwise
    wanted = f"{first} {arguments[1]}" if members else first
    return f"there is no command '{wanted}'; {hint}"


def _fail(message: str, status: int) -> int:
    print(printable(message), file=sys.stderr)
    return status


def _drop_output() -> None:
    """Point stdout at nothing if what it holds cannot be written, lest the interpreter try again as it ends."""
    import os

    try:
        sys.stdout.flush()
    except OSError:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
