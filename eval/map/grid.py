"""The cells of the map and the load of each: a burst of users who return, on a base of users who hardly do."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from helm_rl.errors import UserError
from helm_rl.profiles.hardware import check_fits, link_gb_s, resolve_hardware
from helm_rl.profiles.model import resolve_model
from helm_rl.scenario import HardwareSection, LoadSection, ModelSection, Scenario

MODELS = ("hstu-5", "decoder-0.2b", "decoder-1.5b")
LINKS = ("remote-ps", "local-host")
HOST_GIB = (0.0, 96.0, 960.0)
HISTORIES = (1500.0, 4000.0)
SLOW_MODELS_HISTORIES = (500.0, 1500.0)
HOT_SHARES = (0.5, 0.8)

LOADS = {"moderate": 0.7 * 0.95, "limit": 0.95}
"""Shares of the largest load that the best static bears."""

SLO_MS = 100.0
SLOW_MODELS_SLO_MS = 200.0
"""For slow models, on which a full history alone takes longer than SLO_MS; 100 to 200 ms are what is promised."""

ALPHA_MIN, ALPHA_MAX = 0.1, 0.9
WARM_S = 30.0
BURST_START_S = 60.0
BURST_S = 80.0
RAMP_S = 20.0
SECONDS = 200.0
MOST_REQUESTS = 80_000
DENSE_PACE = 0.5
"""A pattern of more requests than that is run in half the time, all of it but the users' pauses: P99 is as sure."""

SEEDS_FROM = 3_000_000
PREPARING_SEED = 3_500_000
MOST_SEEDS = 1_000
"""Arrivals are drawn from SEEDS_FROM up, those that loads and deployable statics are chosen on from PREPARING_SEED;
evaluations take 1,000,000 to 2,999,999 (eval/comparison.py), training those from 2**32 up."""


@dataclass(frozen=True)
class Setting:
    """A cell without its load.

    host_gib: host memory for keys and values that leave the pool; history: mean tokens of a user's history;
    hot_share: share of all requests that hot users make while the burst is at its height.
    """

    model: str
    link: str
    host_gib: float
    history: float
    hot_share: float

    @property
    def key(self) -> str:
        """Name in the results."""
        return f"{self.model} {self.link} {self.host_gib:g} {self.history:g} {self.hot_share:g}"


@dataclass(frozen=True)
class Cell:
    """One cell of the map; load: a key of LOADS."""

    setting: Setting
    load: str

    @property
    def key(self) -> str:
        """Name in the results."""
        return f"{self.setting.key} {self.load}"


def requests(setting: Setting, rate: float, pace: float) -> float:
    """Return the requests of a pattern, in the mean; pace: its length over that of the full one."""
    hot = setting.hot_share
    return pace * rate * ((1 - hot) * (WARM_S + SECONDS) + hot * (BURST_S - RAMP_S))


def pace(setting: Setting, rate: float) -> float:
    """Return the length of the pattern over that of the full one."""
    return DENSE_PACE if requests(setting, rate, 1.0) > MOST_REQUESTS else 1.0


@dataclass(frozen=True)
class Grid:
    """What the map spans; no histories: HISTORIES or, for slow models, SLOW_MODELS_HISTORIES."""

    models: tuple[str, ...] = MODELS
    links: tuple[str, ...] = LINKS
    host_gib: tuple[float, ...] = HOST_GIB
    histories: tuple[float, ...] = ()
    hot_shares: tuple[float, ...] = HOT_SHARES
    loads: tuple[str, ...] = tuple(LOADS)
    hardware: str = "a100-80g"
    pool_gib: float = 48.0
    link_gb_s: float | None = None

    def settings(self) -> list[Setting]:
        """All settings, in an order of which every part is a balanced picture of the whole."""
        every = [
            Setting(model, *values)
            for model in self.models
            for values in itertools.product(self.links, self.host_gib, self.histories_of(model), self.hot_shares)
        ]
        random.Random(0).shuffle(every)
        return every

    def cells(self) -> list[Cell]:
        """All cells, in the order of their settings."""
        return [Cell(setting, load) for setting in self.settings() for load in self.loads]

    def scenario(self, setting: Setting, rate: float) -> Scenario:
        """Return the burst on its base; rate: requests/s of all users at its height."""
        scale = pace(setting, rate)
        phase = {
            "label": "burst",
            "start_s": scale * BURST_START_S,
            "seconds": scale * BURST_S,
            "ramp_s": scale * RAMP_S,
            "rate": rate * setting.hot_share,
            "requests_per_visit": 15,
            "think_s": 4.0,
            "hot_fraction": 0.6,
            "hot_items": 4000,
        }
        return self._scenario(setting, rate * (1 - setting.hot_share), scale * SECONDS, scale * WARM_S, (phase,))

    def base(self, setting: Setting, rate: float, seconds: float) -> Scenario:
        """Return the base of `scenario(setting, rate)` alone."""
        return self._scenario(setting, rate * (1 - setting.hot_share), seconds, WARM_S, ())

    def _scenario(
        self, setting: Setting, base_rate: float, seconds: float, warm_s: float, phases: Sequence[Any]
    ) -> Scenario:
        return Scenario.model_validate(
            {
                "name": setting.key,
                "slo_ms": SLOW_MODELS_SLO_MS if self._slow(setting.model) else SLO_MS,
                "seconds": seconds,
                "warm_s": warm_s,
                "model": {"profile": setting.model},
                "hardware": {
                    "profile": self.hardware,
                    "link": setting.link,
                    "link_gb_s": self.link_gb_s,
                    "pool_gib": self.pool_gib,
                    "kv_host_gib": setting.host_gib,
                },
                "control": {"alpha_min": ALPHA_MIN, "alpha_max": ALPHA_MAX},
                "load": {
                    "rate": base_rate,
                    "requests_per_visit": 1.15,
                    "think_s": 4.0,
                    "history_mean": setting.history,
                    "phase": phases,
                },
            }
        )

    def histories_of(self, model: str) -> tuple[float, ...]:
        """Mean history lengths that the map has for a model, ascending as given."""
        return self.histories or (SLOW_MODELS_HISTORIES if self._slow(model) else HISTORIES)

    def _slow(self, model: str) -> bool:
        """Whether the longest history alone takes longer than SLO_MS to compute."""
        profile = resolve_model(ModelSection(profile=model))
        tokens = LoadSection().history_max + profile.candidates
        flop = tokens * profile.flops_per_token, tokens**2 / 2 * profile.flops_per_pair
        return resolve_hardware(HardwareSection(profile=self.hardware)).prefill_ns(*flop) * 1e-6 > SLO_MS

    def check(self) -> None:
        """Raise UserError for anything of which no cell can be made."""
        from envs.serving.node import MAX_PAGES  # numba is slow to load, and most of this module does without

        for name, values in asdict(self).items():
            if isinstance(values, tuple):
                option = "--" + name.replace("_", "-")
                if not values and name != "histories":
                    raise UserError(f"{option} needs at least one value")
                if len(set(values)) < len(values):
                    raise UserError(f"{option} names a value twice: {' '.join(map(str, values))}")
        for load in self.loads:
            if load not in LOADS:
                raise UserError(f"--loads: {load!r} is unknown; known: {', '.join(LOADS)}")
        for link in self.links:
            if link not in LINKS:
                raise UserError(f"--links: {link!r} is unknown; known: {', '.join(LINKS)}")
        for hot_share in self.hot_shares:
            if not 0.05 <= hot_share <= 0.95:
                raise UserError(f"--hot-shares must lie in .05 to .95, got {hot_share:g}")
        for history in self.histories:
            if not 1 <= history <= 7782:
                raise UserError(f"--histories must lie in 1 to 7782 tokens, .95 of the longest, got {history:g}")
        most_gib = MAX_PAGES * HardwareSection().page_kib / 2**20
        for gib in self.host_gib:
            if not 0 <= gib <= most_gib:
                raise UserError(f"--host-gib must lie in 0 to {most_gib:,g}, got {gib:g}")
        for option, value in (("--pool-gib", self.pool_gib), ("--link-gb-s", self.link_gb_s)):
            if value is not None and not 0 < value <= 10_000:
                raise UserError(f"{option} must be above 0 and at most 10,000, got {value:g}")
        for model in self.models:
            try:
                self._check_profiles(model)
            except UserError as error:
                raise UserError(_as_options(str(error), model)) from None

    def _check_profiles(self, model: str) -> None:
        """Raise UserError, in the words of a scenario, unless a node can hold the model and the pool."""
        from envs.serving.node import page_layout

        one = replace(self, models=(model,)).settings()[0]
        scenario = self.scenario(one, 100.0)
        profile = resolve_model(scenario.model)
        check_fits(profile, resolve_hardware(scenario.hardware), scenario.hardware)
        page_layout(scenario.hardware, profile)

    def options(self) -> dict[str, Any]:
        """What results depend on, for a later run to compare: the grid, the load's shape, the profiles behind it."""
        found = asdict(self)
        del found["link_gb_s"]  # it is in those of the links below
        for model in self.models:
            scenario = self.scenario(replace(self, models=(model,)).settings()[0], 100.0)
            found[f"profile {model}"] = asdict(resolve_model(scenario.model)) | {"slo_ms": scenario.slo_ms}
        hardware = scenario.hardware
        found[f"profile {self.hardware}"] = asdict(resolve_hardware(hardware))
        for link in self.links:
            found[f"GB/s of {link}"] = link_gb_s(hardware.model_copy(update={"link": link}))
        scenario = scenario.model_copy(update={"name": ""})
        found["scenario"] = {
            name: scenario.model_dump(mode="json")[name] for name in ("seconds", "warm_s", "control", "load")
        }
        return found


def _as_options(message: str, model: str) -> str:
    """Put the options that the user typed in the place of a scenario's fields."""
    message = re.sub(r"model\.(layers|profile) = [^ :]+", f"--models {model}", message)
    message = re.sub(r"hardware\.profile = '([^']*)'", r"--hardware \1", message)
    return message.replace("hardware.pool_gib = ", "--pool-gib ").replace("hardware.page_kib = ", "")
