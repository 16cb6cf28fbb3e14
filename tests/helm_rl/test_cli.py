"""The front door: what it lists, how fast, and what it says and returns when something is wrong."""

from __future__ import annotations

import ast
import contextlib
import importlib.metadata
import inspect
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
import tomllib
from pathlib import Path

import pytest

import helm_rl
from helm_rl import cli

ROOT = Path(helm_rl.__file__).resolve().parent.parent

PROBE = '''
"""A command that does what the test asks for."""
import errno
import os
import sys
import time
from dataclasses import dataclass
from helm_rl.errors import UserError

@dataclass
class Args:
    """Do something."""
    what: str
    """What to do."""
    count: int = 1
    """How often."""

def main(args: Args) -> None:
    if args.what == "print":
        print("done " * args.count)
    elif args.what == "user":
        raise UserError("trace.parquet, column arrival_ns: not sorted; sort it by time")
    elif args.what == "bug":
        raise ValueError("a bug")
    elif args.what == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "out.parquet")
    elif args.what == "denied":
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "out.parquet")
    elif args.what == "missing":
        open("no-such-file")
    elif args.what == "long":
        open("n" * 300)
    elif args.what == "library":
        raise OSError("a library's own complaint")
    elif args.what == "extra":
        raise ModuleNotFoundError("No module named 'wandb'", name="wandb.sdk")
    elif args.what == "module":
        raise ModuleNotFoundError("No module named 'eval.nothing'", name="eval.nothing")
    elif args.what == "wait":
        print("waiting", flush=True)
        time.sleep(60)
'''


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Register the command `probe run`; give the command line that runs it in a process of its own."""
    (tmp_path / "cli_probe.py").write_text(PROBE)
    script = tmp_path / "probe_program.py"
    script.write_text(
        "import sys\nfrom helm_rl import cli\n"
        "cli.COMMANDS['probe run'] = cli.Command('probes', 'cli_probe:main', 'probe')\nsys.exit(cli.main())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cli_probe", raising=False)
    monkeypatch.setitem(cli.COMMANDS, "probe run", cli.Command("probes", "cli_probe:main", "probe"))
    return [sys.executable, str(script), "probe", "run"]


def lines_of_error(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What was printed, which must be on stderr alone."""
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


# What is listed


def test_help_lists_every_command_once_with_its_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    listed = capsys.readouterr().out
    for name, command in cli.COMMANDS.items():
        assert len(re.findall(rf"^  {name}  +{re.escape(command.summary)}$", listed, flags=re.MULTILINE)) == 1
    assert all(example in listed for example in cli.EXAMPLES)
    assert len(cli.EXAMPLES) == 2
    assert max(map(len, listed.splitlines())) <= 80
    cli.main([])
    assert capsys.readouterr().out == listed


def test_the_commands_of_this_release() -> None:
    assert set(cli.COMMANDS) == {
        "trace generate",
        "trace convert",
        "trace inspect",
        "trace fit",
        "train base",
        "train imitate",
        "train burst",
        "train residual",
        "control",
        "watch",
        "export",
        "eval p99",
        "eval ratio-gap",
        "eval routing",
        "eval reward",
        "eval telemetry",
        "checkpoints list",
        "checkpoints show",
        "eval suite",
        "eval live",
        "calibrate hardware",
        "eval compare",
        "eval learning",
        "eval headroom",
        "eval map",
        "bench engine",
        "bench decision",
        "bench env",
        "bench train",
        "bench live",
        "bench control",
        "bench telemetry",
        "bench scaling",
        "bench model",
        "bench profiles",
        "bench trace",
        "demo",
    }


def test_a_group_lists_its_own_commands_only(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["trace"], ["trace", "--help"], ["trace", "-h"]):
        assert cli.main(arguments) == 0
        listed = capsys.readouterr().out
        assert re.findall(r"^  (\S+ \S+)", listed, flags=re.MULTILINE) == [
            "trace generate",
            "trace convert",
            "trace inspect",
            "trace fit",
        ]


def test_version_is_the_one_of_the_package_and_of_the_installed_distribution(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"helm-rl {helm_rl.__version__}\n"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == helm_rl.__version__ == importlib.metadata.version("helm-rl")


def test_help_answers_in_half_a_second_and_imports_the_standard_library_alone() -> None:
    took_s = []
    for _ in range(3):
        start_s = time.perf_counter()
        subprocess.run([sys.executable, "-m", "helm_rl.cli", "--help"], check=True, capture_output=True, cwd=ROOT)
        took_s.append(time.perf_counter() - start_s)
    assert min(took_s) < 0.5
    program = (
        "import sys; before = set(sys.modules); import helm_rl.cli; helm_rl.cli.main(['--help']);"
        "print(); print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    out = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=ROOT).stdout
    imported = set(out.splitlines()[-1].split())
    assert "helm_rl" in imported
    assert imported - set(sys.stdlib_module_names) == {"helm_rl"}


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_of_the_table_is_there_and_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([*name.split(), "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: helm-rl {name} ")


def test_the_help_of_an_option_is_one_paragraph(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for command, text in {
        "trace convert": "Units of time: s, ms, us, ns, iso, auto. user=uid:text takes ids as text",  # over two lines
        "eval p99": "KV first, EMB first, hill climbing, and ours, weighted margins. (default: False)",  # inherited
    }.items():
        with pytest.raises(SystemExit):
            cli.main([*command.split(), "--help"])
        assert text in capsys.readouterr().out


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_option_of_every_command_is_explained(name: str) -> None:
    _, arguments_class = cli.load(name)
    for kind in arguments_class.__mro__[:-1]:
        body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
        assert isinstance(body, ast.ClassDef)
        assert ast.get_docstring(body), kind
        for field, after in itertools.pairwise([*body.body, ast.Pass()]):
            if isinstance(field, ast.AnnAssign):
                text = after.value if isinstance(after, ast.Expr) else None
                assert isinstance(text, ast.Constant), ast.unparse(field)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_a_wrong_option_is_refused_by_every_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([*name.split(), "--no-such-option-at-all", "1"])
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    # Where a command needs a file, that it is missing is said instead of what is wrong with the option.
    assert re.search("no-such-option-at-all|Missing value for argument", captured.err)
    assert f"helm-rl {name} --help" in captured.err


@pytest.mark.parametrize("example", cli.EXAMPLES)
def test_the_examples_of_the_help_are_accepted_by_their_commands(example: str) -> None:
    import tyro

    program, *words = shlex.split(example)
    assert program == "helm-rl"
    size = 1 if words[0] in cli.COMMANDS else 2
    _, arguments_class = cli.load(" ".join(words[:size]))
    tyro.cli(arguments_class, args=words[size:])  # exits if an option of the example does not exist


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("", set()),
        ("--resume run --total-timesteps 61440", {"resume", "total_timesteps"}),
        ("--no-paired --track --jobs=2 --num_envs 8", {"paired", "track", "jobs", "num_envs"}),
        ("--scenario burst trend steady --gamma None", {"scenario", "gamma"}),
    ],
)
def test_what_is_given_is_told_from_defaults(words: str, given: set[str]) -> None:
    _, arguments_class = cli.load("train base")
    assert cli.given_options(arguments_class, words.split()) == given


@pytest.mark.parametrize(
    ("seconds", "term", "told"), [(2.0, "xterm", True), (0.0, "xterm", False), (2.0, "dumb", False)]
)
def test_a_terminal_is_told_of_what_takes_long_to_load(
    probe: list[str], tmp_path: Path, seconds: float, term: str, told: bool
) -> None:
    with (tmp_path / "cli_probe.py").open("a") as file:
        file.write(f"\ntime.sleep({seconds})\n")
    ours, theirs = os.openpty()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "TERM": term}
    done = subprocess.run(
        [*probe, "--what", "print"], stdout=subprocess.PIPE, stderr=theirs, text=True, env=environment, check=False
    )
    os.close(theirs)
    seen = b""
    with contextlib.suppress(OSError):  # it ends with an error where nobody has the other end
        while part := os.read(ours, 1024):
            seen += part
    os.close(ours)
    assert (done.returncode, done.stdout) == (0, "done \n")
    assert seen == (b"helm-rl probe run is being loaded\r\033[2K" if told else b"")


# What is wrong on the command line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trace", "generte"], "there is no command 'trace generte'; did you mean 'helm-rl trace generate'?"),
        (["trce", "generate"], "there is no command 'trce'; did you mean 'helm-rl trace generate'?"),
        (["generate"], "there is no command 'generate'; did you mean 'helm-rl trace generate'?"),
        (["evl"], "there is no command 'evl'; did you mean 'helm-rl eval'?"),
        (["dmo", "--output", "x"], "there is no command 'dmo'; did you mean 'helm-rl demo'?"),
        (["trace", "xyzzy"], "there is no command 'trace xyzzy'; helm-rl trace has generate, convert, inspect, fit"),
        (
            ["trace", "--seed"],
            "there is no command 'trace --seed'; helm-rl trace has generate, convert, inspect, fit",
        ),
        (["xyzzy"], "there is no command 'xyzzy'; helm-rl --help lists them"),
        ([""], "there is no command ''; helm-rl --help lists them"),
        (["--sed"], "there is no option '--sed' before the command; helm-rl --help shows what there is"),
    ],
)
def test_an_unknown_command_is_named_with_the_nearest_one(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    assert lines_of_error(capsys) == [f"error: {said}"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--what"),
        (["--what", "print", "--count", "many"], "many"),
        (["--what", "print", "--cont", "3"], "--cont"),
    ],
)
def test_a_wrong_option_exits_2_and_shows_the_whole_name_of_the_command(
    probe: list[str], arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["probe", "run", *arguments])
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert said in captured.err
    assert "helm-rl probe run" in captured.err


# What goes wrong while a command runs


def test_a_command_gets_its_arguments(probe: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["probe", "run", "--what", "print", "--count", "2"]) == 0
    assert capsys.readouterr().out.split() == ["done", "done"]


@pytest.mark.parametrize(
    ("what", "status", "said"),
    [
        ("user", 2, "error: trace.parquet, column arrival_ns: not sorted; sort it by time"),
        ("full", 1, "error: out.parquet: No space left on device"),
        ("denied", 1, "error: out.parquet: Permission denied"),
        ("missing", 2, "error: no-such-file: No such file or directory"),
        ("long", 2, f"error: {'n' * 300}: File name too long"),
        (
            "extra",
            2,
            "error: this needs the Python package wandb, which is not installed; "
            "pip install 'helm-rl[track]', or in a checkout pip install -e '.[track]'",
        ),
    ],
)
def test_what_is_not_a_bug_is_one_sentence(
    probe: list[str], what: str, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["probe", "run", "--what", what]) == status
    assert lines_of_error(capsys) == [said]


@pytest.mark.parametrize(("what", "kind"), [("bug", ValueError), ("library", OSError), ("module", ModuleNotFoundError)])
def test_a_bug_keeps_its_traceback(probe: list[str], what: str, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        cli.main(["probe", "run", "--what", what])
    done = subprocess.run([*probe, "--what", what], capture_output=True, text=True)
    assert done.returncode == 1
    assert "Traceback (most recent call last)" in done.stderr
    assert "cli_probe.py" in done.stderr


def test_a_file_name_that_is_no_text_is_refused(probe: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["probe", "run", "--what", os.fsdecode(b"n\xff.parquet")]) == 2
    assert lines_of_error(capsys) == [r"error: argument 'n\udcff.parquet' is not UTF-8 text; rename the file"]


@pytest.mark.parametrize(("arguments", "status"), [("--what print", 0), ("--what user", 2), ("--no-such-option 1", 2)])
def test_closed_streams_are_no_bug(probe: list[str], arguments: str, status: int) -> None:
    line = f"{shlex.join(probe)} {arguments}"
    done = subprocess.run(["sh", "-c", f"{line} >&-"], stderr=subprocess.PIPE, text=True)
    assert done.returncode == status
    assert "Traceback" not in done.stderr
    assert subprocess.run(["sh", "-c", f"{line} >&- 2>&-"]).returncode == status


def test_ctrl_c_ends_with_130_and_without_a_traceback(probe: list[str]) -> None:
    with subprocess.Popen(
        [*probe, "--what", "wait"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "waiting\n"
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=20)
    assert child.returncode == 130
    assert err == "interrupted\n"


@pytest.mark.parametrize("count", [10, 1_000_000])  # found by the last flush; found while printing
def test_a_reader_that_has_gone_is_no_error(probe: list[str], count: int) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*probe, "--what", "print", "--count", str(count)], stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert done.returncode == 141
    assert done.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a device that is always full")
@pytest.mark.parametrize("arguments", [["--what", "print"], ["--help"]])
def test_output_onto_a_full_disk_is_one_sentence(probe: list[str], arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*probe, *arguments], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == "error: No space left on device\n"


# Our folders and other people's


@pytest.mark.parametrize("folder", cli.FOLDERS)
def test_another_distributions_package_of_the_same_name_is_refused(tmp_path: Path, folder: str) -> None:
    """The registry has packages named envs, eval, train and checkpoints; theirs could be found first."""
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "__init__.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from helm_rl.cli import main; sys.exit(main(['demo', '--help']))"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    found, ours = tmp_path.resolve() / folder / "__init__.py", ROOT / folder
    assert done.stderr == (
        f"error: importing '{folder}' finds {found} instead of helm-rl's own {ours}; "
        "install helm-rl into a virtual environment of its own\n"
    )


def test_the_extras_named_in_errors_are_the_ones_of_the_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for package, extra in cli.EXTRAS.items():
        names = [re.split(r"[<>=\[]", line)[0] for line in extras[extra]]
        assert any(name.replace("-", "_").startswith(package) for name in names), (package, extra)
    brought = {name for extra in ("bench", "track") for name in extras[extra]}
    named = {package for package, extra in cli.EXTRAS.items() if extra in ("bench", "track")}
    assert {re.split(r"[<>=\[]", line)[0].replace("-", "_") for line in brought} == named
