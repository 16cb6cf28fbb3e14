"""A controller of one's own, by module and class, as a contestant; what goes wrong in it is told in a sentence."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, TypeVar

from eval.comparison import Contestant, figure_word
from helm_rl.control.protocol import Controller, FloatArray, Resuming, Timetable, Watching
from helm_rl.errors import UserError
from helm_rl.metrics import WindowStats
from helm_rl.scenario import Scenario

METHODS = ("reset", "decide", "tick", "feedback")
"""Of `helm_rl.control.protocol.Controller`."""

_Result = TypeVar("_Result")


def own_contestants(specs: Sequence[str], scenario: Scenario, taken: Collection[str]) -> list[Contestant]:
    """Return the controllers that MODULE:CLASS name; UserError for one that cannot be, or whose name is taken.

    A class is looked for among what is installed, then in the folder that the command runs in. It is called without
    arguments or, where it needs one, with the scenario.
    """
    found: list[Contestant] = []
    for spec in specs:
        key = figure_word(spec.rpartition(":")[2])
        if key in {*taken, *(one.key for one in found)}:
            raise UserError(f"controller {spec}: {key} is the name of another controller here; rename the class")
        make = partial(made, spec, load(spec), scenario)
        make()  # what is wrong with it shows before any replay
        found.append(
            Contestant(key, spec.rpartition(":")[2], f"{spec}, a controller of one's own", make, origin=spec, own=True)
        )
    return found


def load(spec: str) -> Callable[..., Any]:
    """Import what MODULE:CLASS names; UserError if there is none."""
    module, _, name = spec.partition(":")
    if not module or not name:
        raise UserError(f"controller {spec}: must be MODULE:CLASS, such as my_rules:HotUsers")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last, so that it hides nothing
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise UserError(f"controller {spec}: importing {module} {_raised(error)}") from None
        raise UserError(
            f"controller {spec}: there is no module {module}, neither installed nor in {os.getcwd()}"
        ) from None
    except (Exception, SystemExit) as error:  # a script that ends itself would end the command, without a word
        raise UserError(f"controller {spec}: importing {module} {_raised(error)}") from None
    for part in name.split("."):
        if not hasattr(found, part):
            raise UserError(f"controller {spec}: {module} has no {name}")
        found = getattr(found, part)
    if not callable(found):
        raise UserError(f"controller {spec}: {name} is no class, nor a function that makes a controller")
    return found


def made(spec: str, make: Callable[..., Any], scenario: Scenario) -> Controller:
    """Make a controller and return it behind checks; UserError if it cannot be made, or is none."""
    try:
        needed = [
            one
            for one in inspect.signature(make).parameters.values()
            if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        ]
    except (TypeError, ValueError):  # of some compiled classes there is no signature
        needed = []
    if len(needed) > 1 or any(one.kind is one.KEYWORD_ONLY for one in needed):
        raise UserError(
            f"controller {spec}: it needs {', '.join(one.name for one in needed)}; a controller is made without "
            "arguments, or of the scenario alone"
        )
    found = _called(spec, "making it", make, *([scenario] if needed else []))
    missing = [name for name in METHODS if not callable(getattr(found, name, None))]
    if missing:
        raise UserError(
            f"controller {spec}: is not a Controller, it has no {missing[0]}(); helm_rl.control.protocol says what "
            f"{', '.join(METHODS)} do"
        )
    return Checked(spec, found)


class Checked:
    """Stands before a controller of somebody else's: what it raises, and what is no alpha, becomes a UserError.

    It is `Watching`, a `Timetable` or `Resuming` where the other is.
    """

    def __init__(self, spec: str, controller: Controller) -> None:
        self._spec = spec
        self._controller = controller
        # Set on this very object: what is looked up by a __getattr__ is not seen by isinstance.
        if isinstance(controller, Watching):
            self.detector = controller.detector
        if isinstance(controller, Timetable):
            self.at = lambda time_ns: self._alpha("at", controller.at, time_ns, time_ns)
        if isinstance(controller, Resuming):
            self.resume = controller.resume

    def reset(self, seed: int) -> None:
        """Reset the controller, whose detector may be another afterwards."""
        _called(self._spec, "reset", self._controller.reset, seed)
        if isinstance(self._controller, Watching):
            self.detector = self._controller.detector

    def decide(self, observation: FloatArray, applied_alpha: float, now_ns: int) -> float:
        """Return the controller's target."""
        return self._alpha("decide", self._controller.decide, now_ns, observation, applied_alpha, now_ns)

    def tick(self, arrivals: int, p99_ms: float, now_ns: int) -> bool:
        """Ask the controller."""
        answer = _called(self._spec, "tick", self._controller.tick, arrivals, p99_ms, now_ns)
        return _called(self._spec, "what tick returned", bool, answer)

    def feedback(self, window: WindowStats) -> None:
        """Tell the controller."""
        _called(self._spec, "feedback", self._controller.feedback, window)

    def _alpha(self, name: str, call: Callable[..., Any], now_ns: int, *arguments: object) -> float:
        answer = _called(self._spec, name, call, *arguments)
        try:
            alpha = float(answer)
        except Exception:  # no number, or one of another's making
            alpha = float("nan")
        if not 0.0 <= alpha <= 1.0:  # NaN fails too
            raise UserError(
                f"controller {self._spec}: {name} returned {_shown(answer)} at {now_ns * 1e-9:.3f} s; it must "
                "return alpha, a number from 0 to 1"
            )
        return alpha


def _called(spec: str, what: str, call: Callable[..., _Result], *arguments: object) -> _Result:
    try:
        return call(*arguments)
    except UserError as error:
        raise UserError(f"controller {spec}: {what}: {error}") from None
    except (Exception, SystemExit) as error:  # sys.exit(0) would end the command as if all were done
        raise UserError(f"controller {spec}: {what} {_raised(error)}") from None


def _shown(answer: object) -> str:
    try:
        return repr(answer)[:60]
    except Exception:  # Python writes no integer of thousands of digits
        return f"a value of type {type(answer).__name__} that cannot be shown"


def _raised(error: BaseException) -> str:
    """Say what was raised, and where: in the last line that is not of an installed package."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    own = [frame for frame in frames if "site-packages" not in frame.filename and "<frozen" not in frame.filename]
    text = f"raised {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if isinstance(error, SyntaxError):
        return f"{text}, line {error.lineno}" if "line" not in text else text
    last = own[-1:] or frames[-1:]
    return text + "".join(f" ({os.path.basename(frame.filename)}, line {frame.lineno})" for frame in last)
