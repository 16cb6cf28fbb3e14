"""The examples of how to run the control process: what they call is a command line that it takes."""

from __future__ import annotations

import configparser
import json
import shlex
from pathlib import Path

import tyro

import helm_rl
from helm_rl.runtime.command import Args

EXAMPLES = Path(helm_rl.__file__).resolve().parent.parent / "examples" / "control"


def parsed(words: list[str]) -> Args:
    """Parse what follows `helm-rl control`, as the front door does."""
    assert [Path(words[0]).name, words[1]] == ["helm-rl", "control"]
    return tyro.cli(Args, args=words[2:], config=(tyro.conf.FlagCreatePairsOff,))


def test_the_systemd_unit_starts_reloads_and_restarts_it() -> None:
    unit = configparser.RawConfigParser(strict=True)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(EXAMPLES / "helm-rl-control.service")
    service = unit["Service"]
    args = parsed(shlex.split(service["ExecStart"]))
    assert (args.bundle, args.url, args.listen) == (
        Path("/etc/helm-rl/bundle"),
        "http://127.0.0.1:9000",
        "127.0.0.1:9464",
    )
    assert service["ExecReload"].split()[1] == "-HUP"
    assert service["Restart"] == "always"
    assert unit["Install"]["WantedBy"] == "multi-user.target"


def test_the_container_runs_it_as_nobody_in_particular() -> None:
    lines = (EXAMPLES / "Containerfile").read_text().replace("\\\n", "").splitlines()
    instructions = dict(line.split(" ", 1) for line in lines if line and not line.startswith("#"))
    args = parsed(json.loads(instructions["ENTRYPOINT"]))
    assert (args.bundle, args.slo_ms) == (Path("/bundle"), 100.0)
    assert instructions["USER"] == "helm"
    assert instructions["STOPSIGNAL"] == "SIGTERM"
