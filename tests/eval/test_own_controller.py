from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from eval.comparison import check_again
from eval.own_controller import Checked, load, made, own_contestants
from helm_rl.cli import main as cli
from helm_rl.control.protocol import Controller, Timetable, Watching
from helm_rl.control.schedule import ScheduledAlpha
from helm_rl.errors import UserError
from helm_rl.scenario import Scenario
from tests.eval.fakes import FakeServing, small_scenario
from tests.eval.test_commands import fake as fake
from tests.eval.test_commands import scenario as scenario

SEEN = np.zeros(17, np.float32)

RULES = '''
import numpy as np

class Still:
    """Stays."""
    def reset(self, seed): ...
    def decide(self, observation, applied_alpha, now_ns): return 0.6
    def tick(self, arrivals, p99_ms, now_ns): return False
    def feedback(self, window): ...

class Middle(Still):
    def __init__(self, scenario): self.scenario = scenario
    def decide(self, observation, applied_alpha, now_ns):
        return np.float32(self.scenario.control.alpha_min + self.scenario.control.alpha_max) / 2

class Nan(Still):
    def decide(self, observation, applied_alpha, now_ns): return float("nan") if now_ns > 0 else 0.5

class Text(Still):
    def decide(self, observation, applied_alpha, now_ns): return "half"

class Percent(Still):
    def decide(self, observation, applied_alpha, now_ns): return 60

class Nothing(Still):
    def decide(self, observation, applied_alpha, now_ns): pass

class Raises(Still):
    def decide(self, observation, applied_alpha, now_ns):
        return np.zeros(3)[7]

class Unborn(Still):
    def __init__(self): raise OSError("no model file")

class Greedy(Still):
    def __init__(self, one, two): ...

class Deaf:
    def reset(self, seed): ...
    def decide(self, observation, applied_alpha, now_ns): return 0.5
    def tick(self, arrivals, p99_ms, now_ns): return False

class Leaves(Still):
    def decide(self, observation, applied_alpha, now_ns): raise SystemExit(0)

class Long(Still):
    def decide(self, observation, applied_alpha, now_ns): return 10**5000

class Ticks(Still):
    def tick(self, arrivals, p99_ms, now_ns): return np.zeros(3)

def factory():
    return Still()

number = 3
'''


@pytest.fixture(autouse=True)
def rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with modules of controllers, in which the command runs."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "rules_of_mine.py").write_text(RULES)
    (folder / "broken_rules.py").write_text("def f(:\n")
    (folder / "raising_rules.py").write_text("import math\nmath.sqrt(-1)\n")
    (folder / "leaving_rules.py").write_text("import sys\nsys.exit(0)\n")
    (folder / "needy_rules.py").write_text("import no_such_package\n")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "rules_of_mine", raising=False)


def make(name: str) -> Controller:
    spec = f"rules_of_mine:{name}"
    return made(spec, load(spec), small_scenario())


def test_a_class_in_the_folder_is_a_contestant() -> None:
    (still, middle, factory) = own_contestants(
        ["rules_of_mine:Still", "rules_of_mine:Middle", "rules_of_mine:factory"], small_scenario(), {"policy"}
    )
    assert (still.key, still.title) == ("still", "Still")
    assert still.make().decide(SEEN, 0.5, 0) == factory.make().decide(SEEN, 0.5, 0) == 0.6
    assert middle.make().decide(SEEN, 0.5, 0) == 0.5
    assert still.make() is not still.make()
    assert still.own


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("rules_of_mine", "must be MODULE:CLASS"),
        (":Still", "must be MODULE:CLASS"),
        ("no_such_rules:Still", "there is no module no_such_rules, neither installed nor in"),
        ("rules_of_mine.deeper:Still", "there is no module rules_of_mine.deeper"),
        ("needy_rules:A", r"importing needy_rules raised ModuleNotFoundError: No module named 'no_such_package'"),
        ("broken_rules:A", r"importing broken_rules raised SyntaxError: .*line 1"),
        ("raising_rules:A", r"importing raising_rules raised ValueError: .* \(raising_rules.py, line 2\)"),
        ("rules_of_mine:Other", "rules_of_mine has no Other"),
        ("rules_of_mine:number", "number is no class"),
        ("rules_of_mine:Unborn", r"making it raised OSError: no model file \(rules_of_mine.py, line \d+\)"),
        ("rules_of_mine:Greedy", "needs one, two; a controller is made without arguments, or of the scenario alone"),
        ("rules_of_mine:Deaf", r"is not a Controller, it has no feedback\(\)"),
    ],
)
def test_what_is_no_controller_is_a_sentence(spec: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as error:
        own_contestants([spec], small_scenario(), set())
    assert str(error.value).startswith(f"controller {spec}: ")


def test_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(UserError, match="still is the name of another controller"):
        own_contestants(["rules_of_mine:Still", "rules_of_mine:Still"], small_scenario(), set())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Nan", "decide returned nan at 2.000 s; it must return alpha, a number from 0 to 1"),
        ("Text", "decide returned 'half' at 2.000 s"),
        ("Percent", "decide returned 60 at 2.000 s"),
        ("Nothing", "decide returned None at 2.000 s"),
        ("Long", "decide returned a value of type int that cannot be shown at 2.000 s"),
        ("Raises", r"decide raised IndexError: index 7 is out of bounds.* \(rules_of_mine.py, line \d+\)"),
    ],
)
def test_what_it_does_wrong_is_a_sentence(name: str, said: str) -> None:
    with pytest.raises(UserError, match=f"controller rules_of_mine:{name}: {said}"):
        make(name).decide(SEEN, 0.5, 2_000_000_000)


def test_a_checked_controller_is_what_it_was() -> None:
    assert not isinstance(make("Still"), (Timetable, Watching))
    plan = Checked("plan", ScheduledAlpha([0, 10], [0.2, 0.4]))
    assert isinstance(plan, Timetable)
    assert plan.at(12) == 0.4


def test_eval_p99_measures_it(scenario: str, fake: FakeServing, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["eval", "p99", "--scenario", scenario, "--seeds", "1", "--step", "0.1", "--controller"]
    assert cli([*arguments, "rules_of_mine:Still"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "Still" in line and "│" in line]
    assert "198.1" in line  # stays at .6, as the deployable static does
    assert cli([*arguments, "rules_of_mine:Nan"]) == 2
    said = capsys.readouterr()
    assert said.err.splitlines()[-1].startswith("error: controller rules_of_mine:Nan: decide returned nan at ")
    assert said.out == ""


def test_a_scenario_is_told_to_those_that_ask(tmp_path: Path) -> None:
    scenario = small_scenario()
    assert isinstance(scenario, Scenario)
    assert made("m", lambda one: load("rules_of_mine:Middle")(one), scenario).decide(SEEN, 0.5, 0) == 0.5


def test_what_ends_the_process_ends_no_measurement_in_silence() -> None:
    with pytest.raises(UserError, match=r"decide raised SystemExit: 0 \(rules_of_mine.py, line \d+\)"):
        make("Leaves").decide(SEEN, 0.5, 0)
    with pytest.raises(UserError, match=r"importing leaving_rules raised SystemExit: 0 \(leaving_rules.py, line 2\)"):
        load("leaving_rules:A")


def test_a_tick_that_is_neither_true_nor_false_is_a_sentence() -> None:
    assert make("Still").tick(1, 10.0, 0) is False
    with pytest.raises(UserError, match="rules_of_mine:Ticks: what tick returned raised ValueError: The truth value"):
        make("Ticks").tick(1, 10.0, 0)


def test_a_controller_that_plays_at_random_is_a_sentence() -> None:
    check_again("Still", 81.0, 81.0, own=True)
    with pytest.raises(UserError, match=r"controller Dice: .* 81.0 ms, then 82.0 ms; .* from the seed"):
        check_again("Dice", 81.0, 82.0, own=True)
    with pytest.raises(RuntimeError, match="policy: the same arrivals"):  # a mistake of ours
        check_again("policy", 81.0, 82.0, own=False)
