"""Scenarios: the shipped ones, validation, and errors that name file, line and field."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import ValidationError

import helm_rl
from helm_rl.errors import UserError
from helm_rl.profiles.hardware import HARDWARE, REMOTE_PS_GB_S, link_gb_s, pcie_gb_s
from helm_rl.profiles.model import resolve_model
from helm_rl.scenario import (
    ControlSection,
    HardwareSection,
    LoadPhase,
    LoadSection,
    ModelSection,
    NodeEvent,
    NodeGroup,
    RewardSection,
    RouterSection,
    Scenario,
    TelemetrySection,
    Tenant,
    load_scenario,
    node_kinds,
    scenario_hash,
    scenario_names,
)

SMALL = """\
name = "mine"
slo_ms = 80

[load]
rate = 10
items = 3e8

[[load.phase]]
start_s = 10
seconds = 5
rate = 20
requests_per_visit = 3

[[load.phase]]
start_s = 20
seconds = 5
rate = 30
requests_per_visit = 3
"""


DEFAULTS = """\
name = "burst"
slo_ms = 100
seconds = 600
seed = 1

[model]
profile = "decoder-0.2b"

[hardware]
profile = "a100-80g"
link = "remote-ps"
kv_host_gib = 0
kv_miss = "cheaper"
refill_share = 0.2
pool_gib = 48
page_kib = 2048
nodes = 1

[control]
interval_s = 1.0
tick_s = 0.01
alpha_min = 0.1
alpha_max = 0.9
rate_per_s = 0.06
migrate_pages_per_s = 4000

[load]
rate = 140
requests_per_visit = 1.15
think_s = 4.0
users = 400000
zipf_items = 1.05
items = 3e8

[[load.phase]]
start_s = 120
seconds = 60
rate = 420
requests_per_visit = 15
hot_fraction = 0.6
hot_items = 4000
label = "burst"

[reward]
move_cost = 0.01

[router]
policy = "helm"

[telemetry]
sample = 1.0
"""


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "mine.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_shipped_scenarios_load_by_name_and_carry_it() -> None:
    assert {"burst", "steady", "trend"} <= set(scenario_names())
    for name in scenario_names():
        assert load_scenario(name).name == name


def test_burst_explains_every_field_and_states_true_defaults(tmp_path: Path) -> None:
    """It is what people copy: a field that it does not name, nobody finds."""
    text = (Path(helm_rl.__file__).parent / "scenarios" / "burst.toml").read_text()
    sections = (Scenario, ModelSection, HardwareSection, ControlSection, LoadSection, LoadPhase, RewardSection)
    for section in (*sections, RouterSection, TelemetrySection, Tenant, NodeEvent, NodeGroup):
        for field in section.model_fields:
            assert re.search(rf"\b{field}\b", text), f"{section.__name__}.{field}"
    spelt = load_scenario(write(tmp_path, re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE)))
    burst = load_scenario("burst")
    assert spelt.model.row_bytes is not None
    assert resolve_model(spelt.model) == resolve_model(burst.model)
    assert spelt.model_copy(update={"model": burst.model}) == burst


def test_a_file_that_spells_the_defaults_out_means_the_same(tmp_path: Path) -> None:
    full = load_scenario(write(tmp_path, DEFAULTS))
    phase = full.load.phase[0].model_dump()
    bare = Scenario.model_validate({"name": "burst", "slo_ms": 100, "load": {"phase": [phase]}})
    assert bare == full
    assert (full.control.alpha_min, full.control.alpha_max, full.control.rate_per_s) == (0.1, 0.9, 0.06)
    assert (full.load.rate, full.load.requests_per_visit, full.load.items) == (140, 1.15, 300_000_000)
    assert (link_gb_s(full.hardware), full.hardware.pool_gib, full.hardware.page_kib) == (REMOTE_PS_GB_S, 48, 2048)
    assert pcie_gb_s(full.hardware) == HARDWARE["a100-80g"].pcie_gb_s
    assert (phase["start_s"], phase["seconds"], phase["rate"], phase["requests_per_visit"]) == (120, 60, 420, 15)


def test_the_shipped_family_has_one_cluster_and_three_loads() -> None:
    """All but the rates and the phases is the same."""
    burst, steady, trend = (load_scenario(name) for name in ("burst", "steady", "trend"))
    load = burst.load.model_copy(update={"phase": (), "rate": steady.load.rate})
    assert steady == burst.model_copy(update={"name": "steady", "load": load})
    assert (trend.model, trend.hardware, trend.control, trend.slo_ms) == (
        burst.model,
        burst.hardware,
        burst.control,
        burst.slo_ms,
    )
    assert len(burst.load.phase) == 1
    assert burst.load.phase[0].hot_fraction > 0
    assert trend.load.rate_end is not None
    # Near the limit at both ends of the drift: 168 requests/s of users who hardly return, 391 of a mix.
    assert steady.load.rate == trend.load.rate == pytest.approx(0.95 * 168, rel=0.01)
    assert trend.load.rate_end + trend.load.phase[0].rate_end == pytest.approx(0.95 * 391, rel=0.01)


def test_defaults_fill_what_a_file_leaves_out(tmp_path: Path) -> None:
    scenario = load_scenario(write(tmp_path, SMALL))
    assert scenario.warm_s == 60
    assert scenario.load.items == 300_000_000
    assert isinstance(scenario.load.items, int)
    assert scenario.load.phase[1].rate == 30
    assert scenario.load.phase[1].think_s is None
    assert scenario.load.parts == (scenario.load, *scenario.load.phase)


def test_hash_depends_on_values_not_on_spelling(tmp_path: Path) -> None:
    first = load_scenario(write(tmp_path, SMALL))
    spelled = "# a comment\n" + SMALL.replace("3e8", "300_000_000").replace("slo_ms = 80", "slo_ms = 80.0")
    second = load_scenario(write(tmp_path, spelled))
    third = load_scenario(write(tmp_path, SMALL.replace("rate = 30", "rate = 30.5")))
    assert scenario_hash(first) == scenario_hash(second)
    assert scenario_hash(first) != scenario_hash(third)
    assert len(scenario_hash(first)) == 64


def test_a_list_of_tables_is_asked_for_where_one_is_wanted(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"load\.phase must be a list of tables, \[\[load\.phase\]\]"):
        load_scenario(write(tmp_path, 'name = "x"\nslo_ms = 1\n[load]\nphase = 3\n'))


def test_a_scenario_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        load_scenario("burst").slo_ms = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ("slo_ms = 80", "", None, "slo_ms is missing"),
        ("slo_ms = 80", "slo_sm = 80", 2, "unknown key slo_sm; did you mean slo_ms?"),
        ("slo_ms = 80", "slo_ms = 80\ncolour = 3", 3, "unknown key colour; known: name, slo_ms, "),
        ("rate = 30", "", 14, "load.phase[1].rate is missing"),
        ("rate = 30", "rat = 30", 17, "unknown key load.phase[1].rat; did you mean rate?"),
        ("rate = 30", "rate = 30\nhot = 3", 18, "unknown key load.phase[1].hot"),
        ("rate = 30", "rate = -30", 17, "load.phase[1].rate = -30"),
        ("rate = 20", 'rate = "20"', 11, "load.phase[0].rate = '20'"),
        ("rate = 20", "rate = nan", 11, "load.phase[0].rate = nan"),
        ("rate = 20", "rate = inf", 11, "load.phase[0].rate = inf"),
        ("rate = 20", "rate = true", 11, "load.phase[0].rate = True"),
        ("items = 3e8", "items = 3.5", 6, "load.items = 3.5"),
        ("items = 3e8", "items = 0", 6, "load.items = 0"),
        ("items = 3e8", "items = 3\nusers = [1]", 7, "load.users: "),
        ("requests_per_visit = 3\n\n", "requests_per_visit = 0.5\n\n", 12, "load.phase[0].requests_per_visit = 0.5"),
        ('name = "mine"', 'name = ""', 1, "name = ''"),
        (
            "start_s = 20",
            "start_s = 20\nramp_s = 3",
            None,
            "load.phase[1].ramp_s = 3 must be at most half of seconds = 5",
        ),
        ("start_s = 20\nseconds = 5", "start_s = 20\nseconds = 1e-15", 16, "load.phase[1].seconds = 1e-15"),
        ("start_s = 20", "start_s = 596", None, "load.phase[1] ends at 601 s, after the end at seconds = 600"),
        ("[load]", "[control]\nalpha_min = 0.9\nalpha_max = 0.2\n[load]", 4, "alpha_min = 0.9 must be below"),
        ("[load]", "[control]\ninterval_s = 60\n[load]", 5, "control.interval_s = 60"),
        ("[load]", "[hardware]\nlink = 'carrier-pigeon'\n[load]", 5, "hardware.link = 'carrier-pigeon'"),
        ("[load]", "[model]\nprofile = 'gpt'\n[load]", 5, "model.profile = 'gpt' is unknown; known: decoder-0.2b"),
        ("[load]", "[hardware]\nprofile = 'tpu'\n[load]", 5, "hardware.profile = 'tpu' is unknown; known: a100-80g"),
        ("[load]", "[model]\nheads = 6\n[load]", 5, "model.heads = 6 must be a multiple of model.kv_heads = 4"),
        ("[load]", "[load]\nhistory_mean = 9000", 4, "history_mean = 9000 must be at most .95 of history_max"),
        ("[load]", "[load]\nhistory_quantiles = [5]", 4, "history_quantiles must be 2 numbers or more, ascending"),
        ("[load]", "[load]\nhistory_quantiles = [9, 5]", 4, "history_quantiles must be 2 numbers or more, ascending"),
        ("[load]", "[load]\nhistory_quantiles = [9, 9e4]", 4, "the last at most history_max = 8192"),
        (
            "[load]",
            "[load]\nhistory_mean = 9\nhistory_quantiles = [9, 10]",
            4,
            "history_mean = 9 has no effect beside history_quantiles",
        ),
        ("[load]", "[load]\nrate_cv = 1e-300", 4, "rate_cv = 1e-300 must be 0, "),
        ("[load]", "[load]\nrate_cv_s = 3", 4, "rate_cv_s = 3 has no effect without rate_cv"),
        ("[load]", "[load]\nday_s = 600", 4, "day_s = 600 has no effect without day"),
        ("[load]", "[load]\nday = [5e-324, 0]", 4, "day has no weight of at least 1e-06"),
        ("[load]", "[load]\nday = [0.0, 0]", 4, "day has no weight of at least 1e-06"),
        ("[load]", '[load]\nday = "x"', 5, "load.day must be a list of numbers, such as"),
        ("rate = 20", "rate = 20\nhot_fraction = 0.5\nhot_items = 400_000_000", 4, "hot sets hold 400000000 items"),
    ],
)
def test_errors_name_file_line_and_field(tmp_path: Path, old: str, new: str, line: int | None, said: str) -> None:
    assert SMALL.count(old) == 1
    path = write(tmp_path, SMALL.replace(old, new))
    with pytest.raises(UserError) as caught:
        load_scenario(path)
    message = str(caught.value)
    assert message.startswith(f"{path}, line {line}: " if line else f"{path}: ")
    assert said in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b"name = \n", "is not valid TOML"),
        (b"name = 'a'\nname = 'b'\n", "is not valid TOML"),
        (b"slo_ms = " + b"9" * 5000, "cannot be read"),
        (b"a = " + b"[" * 100_000, "is not valid TOML"),
        (b"name = 'a'\nslo_ms = \xff\n", "line 2: not UTF-8"),
        (b"\x00\x01\x02", "is not valid TOML"),
        (b"# " + b"x" * (1 << 20), "too many for a scenario"),
        (b"load = 3\nname = 'a'\nslo_ms = 3", "line 1: load must be a table, [load]"),
        (b"name = 'a'\nslo_ms = 3\n[load.phase]\nrate = 3", "load.phase must be a list of tables, [[load.phase]]"),
        (b"name = 'a'\nslo_ms = 3\n[load]\nrate = 0", "there would be no request"),
    ],
)
def test_files_that_are_no_scenario(tmp_path: Path, content: bytes, said: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(UserError, match=r".") as caught:
        load_scenario(path)
    assert str(caught.value).startswith(str(path))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600 + len(str(path))


def test_a_name_that_is_neither_shipped_nor_a_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"burts is neither a shipped scenario \(books, burst, .*\) nor a file"):
        load_scenario("burts")
    with pytest.raises(UserError, match="is not a file"):
        load_scenario(tmp_path)


def test_byte_order_mark_and_crlf_are_accepted(tmp_path: Path) -> None:
    plain = load_scenario(write(tmp_path, SMALL))
    marked = load_scenario(write(tmp_path, b"\xef\xbb\xbf" + SMALL.replace("\n", "\r\n").encode()))
    assert plain == marked


def test_tenants_events_and_groups_are_read(tmp_path: Path) -> None:
    text = (
        SMALL
        + """
[[tenant]]
name = "paying"
slo_ms = 50
priority = 2
share = 3

[[tenant]]
name = "other"

[[event]]
at_s = 30
node = 2
action = "lose"

[hardware]
nodes = 3
kv_host_gib = 64
kv_miss = "onboard"

[[hardware.group]]
nodes = 2
profile = "h100"
pool_gib = 60
kv_host_gib = 0
"""
    )
    scenario = load_scenario(write(tmp_path, text))
    assert [(t.name, t.share, t.slo_ms, t.priority, t.weight) for t in scenario.tenant] == [
        ("paying", 3.0, 50.0, 2, 1.0),
        ("other", 1.0, None, 0, 1.0),
    ]
    assert [(e.at_s, e.node, e.action) for e in scenario.event] == [(30.0, 2, "lose")]
    groups, rest = node_kinds(scenario.hardware)
    assert (groups.profile, groups.pool_gib, groups.kv_host_gib, groups.kv_miss) == ("h100", 60.0, 0.0, "onboard")
    assert (rest.profile, rest.pool_gib, rest.kv_host_gib, rest.kv_miss) == ("a100-80g", 48.0, 64.0, "onboard")
    assert groups.nodes == rest.nodes == 1


@pytest.mark.parametrize(
    ("added", "line", "said"),
    [
        ("[hardware]\nkv_miss = 'fetch'", 20, "hardware.kv_miss = 'fetch'"),
        ("[hardware]\nrefill_share = 1.5", 20, "hardware.refill_share = 1.5"),
        ("[hardware]\npcie_gb_s = 0", 20, "hardware.pcie_gb_s = 0"),
        (
            "[hardware]\nnodes = 2\n[[hardware.group]]\nnodes = 3",
            19,
            "groups hold 3 nodes, but there are only nodes = 2",
        ),
        (
            "[hardware]\nnodes = 2\n[[hardware.group]]\nnodes = 1\npage_kib = 3",
            23,
            "unknown key hardware.group[0].page_kib",
        ),
        ("[router]\npolicy = 'best'", 20, "router.policy = 'best'"),
        ("[telemetry]\nsample = 0", 20, "telemetry.sample = 0"),
        ("[telemetry]\nloss = 1", 20, "telemetry.loss = 1"),
        ("[[tenant]]\nshare = 2", 19, "tenant[0].name is missing"),
        ("[[tenant]]\nname = 'a'\n[[tenant]]\nname = 'a'", None, "two tenants have one name: a, a"),
        ("[[tenant]]\nname = 'a'\npriority = -1", 21, "tenant[0].priority = -1"),
        ("[[event]]\nat_s = 1\nnode = 1\naction = 'lose'", None, "event[0].node = 1 must be below hardware.nodes = 1"),
        ("[[event]]\nat_s = 1\nnode = 0\naction = 'break'", 22, "event[0].action = 'break'"),
    ],
)
def test_errors_in_what_describes_a_cluster(tmp_path: Path, added: str, line: int | None, said: str) -> None:
    path = write(tmp_path, SMALL.rstrip("\n") + "\n" + added + "\n")
    with pytest.raises(UserError) as caught:
        load_scenario(path)
    message = str(caught.value)
    assert said in message
    assert message.startswith(f"{path}, line {line}: " if line else f"{path}: ")
    assert "\n" not in message


def test_a_moderate_load_is_seven_tenths_of_every_rate() -> None:
    limit, moderate = load_scenario("burst"), load_scenario("burst", "moderate")
    assert moderate.name == "burst-moderate"
    assert moderate.load.rate == pytest.approx(0.7 * limit.load.rate)
    assert moderate.load.phase[0].rate == pytest.approx(0.7 * limit.load.phase[0].rate)
    trend = load_scenario("trend", "moderate").load
    assert trend.rate_end == pytest.approx(0.7 * load_scenario("trend").load.rate_end)
    assert limit.load.phase[0].rate_end is moderate.load.phase[0].rate_end is None
