"""A scenario: what is served, on what, under which load and which SLO; TOML files, validated."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from helm_rl.errors import UserError
from helm_rl.toml_file import line_of, read_toml

_SHIPPED = Path(__file__).parent / "scenarios"
MOST_TENANTS = 16
Load = Literal["limit", "moderate"]
MODERATE = 0.7
_LEAST_WEIGHT = 1e-6  # of a day's largest
_LEAST_CV = 1e-4  # of a rate that varies
# Fields of [load] that came after hashes of scenarios had been written down: at their defaults they are no part of one.
_LATER_FIELDS = (
    "think_sigma",
    "zipf_users",
    "rate_cv",
    "rate_cv_s",
    "day",
    "day_s",
    "renewed_per_hour",
    "history_quantiles",
)


def _whole(value: Any) -> Any:
    """TOML writes large counts as 3e8, which is a float: take it where it is whole; no bool, no string."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


Real = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Whole = Annotated[int, BeforeValidator(_whole), Field(strict=True)]
Text = Annotated[str, Field(strict=True, min_length=1, max_length=200)]
_Fraction = Annotated[Real, Field(ge=0, le=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ModelSection(_Section):
    """The model that is served: a shipped profile, any of whose fields may be overridden."""

    profile: Text = "decoder-0.2b"
    architecture: Literal["decoder", "hstu"] | None = None
    layers: Annotated[Whole, Field(ge=1, le=1024)] | None = None
    d_model: Annotated[Whole, Field(ge=1, le=1 << 17)] | None = None
    heads: Annotated[Whole, Field(ge=1, le=1024)] | None = None
    kv_heads: Annotated[Whole, Field(ge=1, le=1024)] | None = None
    head_dim: Annotated[Whole, Field(ge=1, le=4096)] | None = None
    ffn: Annotated[Whole, Field(ge=1, le=1 << 20)] | None = None
    features_per_token: Annotated[Whole, Field(ge=1, le=10_000)] | None = None
    row_bytes: Annotated[Whole, Field(ge=1, le=1 << 20)] | None = None
    candidates: Annotated[Whole, Field(ge=0, le=1_000_000)] | None = None
    value_bytes: Literal[2, 4] | None = None  # of a weight, key, value: bf16 or float32


_Speed = Annotated[Real, Field(gt=0, le=10_000)]
_PoolGib = Annotated[Real, Field(gt=0, le=10_000)]
_HostGib = Annotated[Real, Field(ge=0, le=100_000)]
_Link = Literal["remote-ps", "local-host"]


class NodeGroup(_Section):
    """Nodes of a cluster that differ from [hardware]: what is given here takes its place, for this many of them."""

    nodes: Annotated[Whole, Field(ge=1, le=4096)]
    profile: Text | None = None
    link: _Link | None = None
    link_gb_s: _Speed | None = None
    pcie_gb_s: _Speed | None = None
    pool_gib: _PoolGib | None = None
    kv_host_gib: _HostGib | None = None


class HardwareSection(_Section):
    """A node: accelerator, link to the embedding tables, pool shared by the two caches, admission; and their number."""

    profile: Text = "a100-80g"
    link: _Link = "remote-ps"
    link_gb_s: _Speed | None = None  # None: what the profile has for this link
    pcie_gb_s: _Speed | None = None  # over which keys and values come back from host memory; None: the profile's
    pool_gib: _PoolGib = 48.0
    page_kib: Annotated[Whole, Field(ge=1, le=1 << 20)] = 2048
    kv_host_gib: _HostGib = 0.0  # host memory for keys and values that had to leave the pool
    kv_miss: Literal["recompute", "onboard", "cheaper"] = "cheaper"  # what is done about those that lie there
    refill_share: _Fraction = 0.2  # of the link, for rows that are fetched before anybody asks for them
    nodes: Annotated[Whole, Field(ge=1, le=4096)] = 1
    queue_bound: Annotated[Whole, Field(ge=1, le=1_000_000)] = 512
    max_batch: Annotated[Whole, Field(ge=1, le=1024)] = 8
    emb_policy: Literal["lru", "sieve"] = "lru"
    group: tuple[NodeGroup, ...] = ()  # the first nodes; those left over are as this section says

    @model_validator(mode="after")
    def _check(self) -> HardwareSection:
        grouped = sum(group.nodes for group in self.group)
        if grouped > self.nodes:
            raise ValueError(f"the groups hold {grouped} nodes, but there are only nodes = {self.nodes}")
        return self


def node_kinds(hardware: HardwareSection) -> list[HardwareSection]:
    """Return what each kind of node is, as a section of one node without groups: the groups' first, then the rest."""
    plain = hardware.model_copy(update={"nodes": 1, "group": ()})
    kinds = [
        plain.model_copy(update=group.model_dump(exclude_none=True, exclude={"nodes"})) for group in hardware.group
    ]
    rest = hardware.nodes - sum(group.nodes for group in hardware.group)
    return kinds + [plain] * (rest > 0)


class ControlSection(_Section):
    """How alpha, the embedding cache's share of the pool, may be moved."""

    interval_s: Annotated[Real, Field(ge=0.005, le=10)] = 1.0
    tick_s: Annotated[Real, Field(ge=0.0005, le=10)] = 0.01
    alpha_min: Annotated[Real, Field(ge=0, le=1)] = 0.1
    alpha_max: Annotated[Real, Field(ge=0, le=1)] = 0.9
    rate_per_s: Annotated[Real, Field(gt=0, le=100)] = 0.06
    migrate_pages_per_s: Annotated[Real, Field(gt=0, le=1e9)] = 4000.0

    @model_validator(mode="after")
    def _check(self) -> ControlSection:
        if not self.alpha_min < self.alpha_max:
            raise ValueError(f"alpha_min = {self.alpha_min:g} must be below alpha_max = {self.alpha_max:g}")
        return self


_RequestRate = Annotated[Real, Field(ge=0, le=1e7)]
_RequestsPerVisit = Annotated[Real, Field(ge=1, le=10_000)]
_ThinkSeconds = Annotated[Real, Field(gt=0, le=86_400)]
_DayWeight = Annotated[Real, Field(ge=0, le=1e9)]
_HistoryTokens = Annotated[Real, Field(ge=1)]
_HotItems = Annotated[Whole, Field(ge=1, le=10**12)]


class LoadPhase(_Section):
    """A stretch of time with additional load: it adds to [load], it does not replace it."""

    start_s: Annotated[Real, Field(ge=0)]
    seconds: Annotated[Real, Field(ge=0.001)]
    rate: _RequestRate  # requests/s, at its start
    rate_end: _RequestRate | None = None  # requests/s at its end; None: constant
    ramp_s: Annotated[Real, Field(ge=0)] = 0.0  # it comes up over its first, and goes down over its last, ramp_s
    requests_per_visit: _RequestsPerVisit
    think_s: _ThinkSeconds | None = None  # mean pause between a visit's requests; None: that of [load]
    hot_fraction: _Fraction = 0.0  # share of items drawn from the phase's hot set
    hot_items: _HotItems = 4000
    label: Annotated[str, Field(strict=True, max_length=200)] = ""


class LoadSection(_Section):
    """The base load, stationary from its first instant unless it drifts, and the phases on top of it."""

    rate: _RequestRate = 140.0  # requests/s
    rate_end: _RequestRate | None = None  # requests/s at the scenario's end, reached linearly; None: constant
    requests_per_visit: _RequestsPerVisit = 1.15
    think_s: _ThinkSeconds = 4.0
    users: Annotated[Whole, Field(ge=1, le=10**10)] = 400_000
    zipf_items: Annotated[Real, Field(ge=0, le=10)] = 1.05
    items: Annotated[Whole, Field(ge=1, le=10**12)] = 300_000_000
    hot_fraction: _Fraction = 0.0
    hot_items: _HotItems = 4000
    history_mean: _HistoryTokens = 1500.0  # tokens; the mean of what is left after history_max
    history_sigma: Annotated[Real, Field(ge=0, le=4)] = 1.0  # of the logarithm
    history_quantiles: Annotated[tuple[_HistoryTokens, ...], Field(max_length=1025)] = ()  # instead: at even shares
    history_max: Annotated[Whole, Field(ge=1, le=1 << 24)] = 8192
    new_tokens_mean: Annotated[Real, Field(ge=1, le=10_000)] = 4.0  # events appended per request
    think_sigma: Annotated[Real, Field(ge=0, le=4)] = 0.0  # of the logarithm of pauses, then lognormal; 0: exponential
    zipf_users: Annotated[Real, Field(ge=0, le=10)] = 0.0  # exponent of how often users come; 0: all alike
    rate_cv: Annotated[Real, Field(ge=0, le=10)] = 0.0  # the rate of visits varies at random: sd over mean
    rate_cv_s: Annotated[Real, Field(ge=0.001, le=1e8)] = 10.0  # mean seconds for which it stays the same
    day: Annotated[tuple[_DayWeight, ...], Field(max_length=1440)] = ()  # rates over a day, against each other
    day_s: Annotated[Real, Field(gt=0, le=1e8)] = 86_400.0  # length of that day on the scenario's clock
    renewed_per_hour: Annotated[Real, Field(ge=0, le=1e4)] = 0.0  # share of items whose place a new one takes
    phase: tuple[LoadPhase, ...] = ()

    @property
    def parts(self) -> tuple[LoadSection | LoadPhase, ...]:
        """The base load and its phases, in the order of a trace's phase column."""
        return (self, *self.phase)

    @model_validator(mode="after")
    def _check(self) -> LoadSection:
        if self.history_quantiles:
            self._check_quantiles()
        elif self.history_mean > 0.95 * self.history_max:
            raise ValueError(
                f"history_mean = {self.history_mean:g} must be at most .95 of history_max = {self.history_max}"
            )
        if self.new_tokens_mean > self.history_max:
            raise ValueError(
                f"new_tokens_mean = {self.new_tokens_mean:g} must be at most history_max = {self.history_max}"
            )
        hot = [part.hot_items for part in self.parts if part.hot_fraction > 0]
        if sum(hot) > self.items:
            raise ValueError(f"the hot sets hold {sum(hot)} items together, but there are only items = {self.items}")
        if self.renewed_per_hour > 0 and max(self.items // 2, 1) + sum(hot) >= self.items:
            raise ValueError(
                f"renewed_per_hour = {self.renewed_per_hour:g} takes new items from the less popular half, beside the "
                f"hot sets; items = {self.items} leaves none"
            )
        if self.day and max(self.day) < _LEAST_WEIGHT:
            raise ValueError(
                f"day has no weight of at least {_LEAST_WEIGHT:g}: there would be no request at any hour; 1 is usual"
            )
        if 0 < self.rate_cv < _LEAST_CV:
            raise ValueError(
                f"rate_cv = {self.rate_cv:g} must be 0, for a rate that does not vary, or {_LEAST_CV:g} on"
            )
        for name, needed in (("day_s", "day"), ("rate_cv_s", "rate_cv")):
            if not getattr(self, needed) and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} = {getattr(self, name):g} has no effect without {needed}: give that too")
        return self

    def _check_quantiles(self) -> None:
        found = self.history_quantiles
        if len(found) < 2 or list(found) != sorted(found) or found[-1] > self.history_max:
            raise ValueError(
                "history_quantiles must be 2 numbers or more, ascending, the last at most history_max = "
                f"{self.history_max}"
            )
        for name in ("history_mean", "history_sigma"):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} = {getattr(self, name):g} has no effect beside history_quantiles: leave one out"
                )


class RewardSection(_Section):
    """What the reward takes beside the tail cost of the latencies."""

    move_cost: Annotated[Real, Field(ge=0, le=1e6)] = 0.01  # per unit of alpha moved


class RouterSection(_Section):
    """How a cluster chooses the node of a request."""

    policy: Literal["helm", "kv-aware", "least-loaded", "two-choices", "user-hash", "round-robin", "random"] = "helm"
    load_limit: _Fraction = 0.85  # of the SLO, in waiting: a best node above it gives way to the least loaded
    affinity: Annotated[Real, Field(ge=0, le=10)] = 0.05  # what a user's own node, by a hash, has in its favour
    refresh_s: Annotated[Real, Field(ge=0, le=3600)] = (
        0.0  # age up to which it sees loads and hit rates; 0: as they are
    )


class NodeEvent(_Section):
    """A node is lost, with what it held and had to serve, or comes back, empty."""

    at_s: Annotated[Real, Field(ge=-1e9, le=1e9)]
    node: Annotated[Whole, Field(ge=0)]
    action: Literal["lose", "return"]


class Tenant(_Section):
    """Users who share the nodes with others under terms of their own."""

    name: Text
    share: Annotated[Real, Field(gt=0, le=1e6)] = 1.0  # of the users, against the others' shares
    slo_ms: Annotated[Real, Field(gt=0, le=1e6)] | None = None  # None: the scenario's
    priority: Annotated[Whole, Field(ge=0, le=100)] = 0  # higher ones are served first
    weight: Annotated[Real, Field(gt=0, le=1e6)] = 1.0  # share of link and accelerator, among those of equal priority


class TelemetrySection(_Section):
    """What of a node's measurements reaches its controller."""

    sample: Annotated[Real, Field(gt=0, le=1)] = 1.0  # share of requests that are measured
    delay_s: Annotated[Real, Field(ge=0, le=600)] = 0.0  # how late a window arrives
    loss: Annotated[Real, Field(ge=0, lt=1)] = 0.0  # share of windows that never arrive


class Scenario(_Section):
    """One workload on one cluster, with its SLO.

    Times are seconds on the scenario's clock: the load runs from -warm_s to `seconds`, and is measured from 0.
    """

    name: Text
    slo_ms: Annotated[Real, Field(gt=0, le=1e6)]
    seconds: Annotated[Real, Field(gt=0, le=4e9)] = 600.0
    warm_s: Annotated[Real, Field(ge=0, le=4e9)] = 60.0
    seed: Annotated[Whole, Field(ge=0, lt=2**63)] = 1
    model: ModelSection = ModelSection()
    hardware: HardwareSection = HardwareSection()
    control: ControlSection = ControlSection()
    load: LoadSection = LoadSection()
    reward: RewardSection = RewardSection()
    router: RouterSection = RouterSection()
    telemetry: TelemetrySection = TelemetrySection()
    tenant: tuple[Tenant, ...] = ()  # none: one, without a name
    event: tuple[NodeEvent, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Scenario:
        for index, phase in enumerate(self.load.phase):
            end_s = phase.start_s + phase.seconds
            if 2 * phase.ramp_s > phase.seconds:
                raise ValueError(
                    f"load.phase[{index}].ramp_s = {phase.ramp_s:g} must be at most half of seconds = {phase.seconds:g}"
                )
            if end_s > self.seconds * (1 + 1e-12):
                raise ValueError(
                    f"load.phase[{index}] ends at {end_s:g} s, after the end at seconds = {self.seconds:g}"
                )
        for index, event in enumerate(self.event):
            if event.node >= self.hardware.nodes:
                raise ValueError(
                    f"event[{index}].node = {event.node} must be below hardware.nodes = {self.hardware.nodes}"
                )
        if len(self.tenant) > MOST_TENANTS:
            raise ValueError(f"there are {len(self.tenant)} tenants; at most {MOST_TENANTS} can be")
        names = [tenant.name for tenant in self.tenant]
        if len(set(names)) < len(names):
            raise ValueError(f"two tenants have one name: {', '.join(names)}")
        if not any(part.rate > 0 or (part.rate_end or 0) > 0 for part in self.load.parts):
            raise ValueError("load.rate is 0 and no phase adds load: there would be no request")
        return self


def scenario_names() -> list[str]:
    """Return the names of the scenarios that ship with helm-rl."""
    return sorted(path.stem for path in _SHIPPED.glob("*.toml"))


def scenario_hash(scenario: Scenario) -> str:
    """Return the sha256 (hex) of the canonical JSON: equal for equal fields, however the file was written."""
    document = scenario.model_dump(mode="json")
    for name in _LATER_FIELDS:
        if getattr(scenario.load, name) == LoadSection.model_fields[name].default:
            del document["load"][name]
    if scenario.model.value_bytes is None:
        del document["model"]["value_bytes"]
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def at_load(scenario: Scenario, multiple: float) -> Scenario:
    """Return the scenario with every rate of its load multiplied."""

    def scaled(rate: float | None) -> float | None:
        return None if rate is None else rate * multiple

    def part(one: LoadSection | LoadPhase) -> dict[str, float | None]:
        return {"rate": one.rate * multiple, "rate_end": scaled(one.rate_end)}

    phases = tuple(phase.model_copy(update=part(phase)) for phase in scenario.load.phase)
    load = scenario.load.model_copy(update={**part(scenario.load), "phase": phases})
    return scenario.model_copy(update={"load": load})


def for_nodes(scenario: Scenario, nodes: int) -> Scenario:
    """Return a scenario of one node for a cluster of `nodes` of them: its rates and users times as many."""
    load = at_load(scenario, nodes).load
    return scenario.model_copy(
        update={
            "load": load.model_copy(update={"users": load.users * nodes}),
            "hardware": scenario.hardware.model_copy(update={"nodes": nodes}),
        }
    )


def load_scenario(name_or_path: str | Path, load: Load = "limit") -> Scenario:
    """Return a shipped scenario by its name, or read one from a TOML file.

    load: "limit" takes its rates as they stand, which for shipped ones is near what a node bears; "moderate" takes
    MODERATE of each, and says so in the scenario's name.

    Raises UserError, naming the file, the line where it can be had, and the field.
    """
    scenario = _load(name_or_path)
    if load == "moderate":
        return at_load(scenario, MODERATE).model_copy(update={"name": f"{scenario.name}-moderate"})
    return scenario


def _load(name_or_path: str | Path) -> Scenario:
    names = scenario_names()
    if str(name_or_path) in names:
        path = _SHIPPED / f"{name_or_path}.toml"
    else:
        path = Path(name_or_path)
        if not path.exists():
            shipped = ", ".join(names)
            raise UserError(f"{name_or_path} is neither a shipped scenario ({shipped}) nor a file")
    text, document = read_toml(path, "a scenario", "name and slo_ms")
    try:
        scenario = Scenario.model_validate(document)
    except ValidationError as error:
        raise UserError(_explain(path, text, error)) from None
    _resolve_profiles(path, text, scenario)
    return scenario


def _resolve_profiles(path: Path, text: str, scenario: Scenario) -> None:
    """Raise UserError unless the profiles exist and the model can be, here, where file and line are known."""
    from helm_rl.profiles.hardware import check_fits, resolve_hardware  # these import this module
    from helm_rl.profiles.model import resolve_model

    try:
        model = resolve_model(scenario.model)
        for section in node_kinds(scenario.hardware):
            check_fits(model, resolve_hardware(section), section)
    except UserError as error:  # its first word is the field
        line = line_of(text, str(error).split(" ", 1)[0].split("."))
        raise UserError(f"{path}, line {line}: {error}" if line else f"{path}: {error}") from None


def _explain(path: Path, text: str, error: ValidationError) -> str:
    """Put the first thing that pydantic found into one sentence."""
    # A misspelt key is reported twice, as unknown and as missing: the first tells more.
    first, *others = sorted(error.errors(), key=lambda found: found["type"] != "extra_forbidden")
    location = first["loc"]
    field = _dotted(location)
    line = line_of(text, location)
    where = f"{path}, line {line}" if line else f"{path}"
    kind, given = first["type"], first.get("input")
    if kind == "extra_forbidden":
        known = _fields_at(location[:-1])
        near = difflib.get_close_matches(str(location[-1]), known, n=1)
        message = f"unknown key {field}; " + (f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}")
    elif kind == "missing":
        message = f"{field} is missing"
    elif kind in ("model_type", "tuple_type"):
        message = f"{field} must be " + _wanted(kind, location, field)
    elif kind == "value_error":
        message = str(first["ctx"]["error"])
        message = message if not field else f"[{field}] {message}"
    elif isinstance(given, (dict, list)):
        message = f"{field}: {_lower(first['msg'])}"
    else:
        message = f"{field} = {_short(given)}: {_lower(first['msg'])}"
    return f"{where}: {message}" + (f" (and {len(others)} more)" if others else "")


def _wanted(kind: str, location: Sequence[str | int], field: str) -> str:
    if kind == "model_type":
        return f"a table, [{field}]"
    (name,) = [part for part in location if isinstance(part, str)][-1:]
    annotation = _section_at(location[:-1]).model_fields[name].annotation
    tables = any(isinstance(one, type) and issubclass(one, BaseModel) for one in get_args(annotation))
    return f"a list of tables, [[{field}]]" if tables else "a list of numbers, such as [1, 2.5]"


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _dotted(location: Sequence[str | int]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _fields_at(location: Sequence[str | int]) -> list[str]:
    return list(_section_at(location).model_fields)


def _section_at(location: Sequence[str | int]) -> type[BaseModel]:
    model: type[BaseModel] = Scenario
    for part in location:
        if isinstance(part, int):
            continue
        annotation = model.model_fields[part].annotation
        model = next(t for t in (annotation, *get_args(annotation)) if isinstance(t, type) and issubclass(t, BaseModel))
    return model
