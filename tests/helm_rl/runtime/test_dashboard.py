"""The Grafana dashboard: each of its queries asks for metrics and labels that the processes really export."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families

import helm_rl
from helm_rl.runtime.server import HookServer
from tests.helm_rl.runtime.feeds import Serving, make_bundle_at

DASHBOARD = Path(helm_rl.__file__).resolve().parent.parent / "examples" / "control" / "grafana-dashboard.json"
BY_PROMETHEUS = {"job", "instance"}  # labels that a scrape adds
AGGREGATIONS = {"sum", "max", "min", "avg", "count"}
OF_COUNTERS = {"rate", "increase"}
FUNCTIONS = AGGREGATIONS | OF_COUNTERS | {"histogram_quantile", "changes"}
TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|\[[^\]]*\]|[a-zA-Z_:][a-zA-Z0-9_:]*|[0-9.]+|=~|!~|!=|>=|<=|[-+*/(){},=<>])')


class Exported(NamedTuple):
    """A sample's name as it is exported: type of its metric, and its labels with their values."""

    kind: str
    labels: dict[str, set[str]]


class Selected(NamedTuple):
    """A metric in a query: its matchers (label, operator, value), the functions around it, and whether with a range."""

    metric: str
    matchers: list[tuple[str, str, str]]
    within: list[str]
    ranged: bool


class Query(NamedTuple):
    selected: list[Selected]
    grouped: list[str]  # labels of by (...)
    aggregates: bool


def tokens(expression: str) -> list[str]:
    found, at = [], 0
    while at < len(expression.rstrip()):
        match = TOKEN.match(expression, at)
        assert match is not None, f"cannot read {expression[at:]!r}"
        found.append(match[1])
        at = match.end()
    return found


def parse(expression: str) -> Query:
    """Read as much of PromQL as the dashboard has; anything else fails."""
    words = tokens(expression)
    query = Query([], [], any(word in AGGREGATIONS for word in words))
    open_calls: list[str] = []
    at = 0

    def following() -> str:
        return words[at] if at < len(words) else ""

    def take() -> str:
        nonlocal at
        at += 1
        return words[at - 1]

    while at < len(words):
        word = take()
        if word == "(":
            open_calls.append("")
        elif word == ")":
            open_calls.pop()
        elif not re.match("[a-zA-Z_:]", word):
            assert re.fullmatch(r"[0-9.]+|[-+*/,<>]|>=|<=", word), f"{word!r} in {expression!r}"
        elif word in FUNCTIONS:
            if following() == "by":
                take()
                assert take() == "("
                while (label := take()) != ")":
                    query.grouped.extend([label] if label != "," else [])
            assert take() == "(", f"{word} is no call in {expression!r}"
            open_calls.append(word)
        else:
            assert following() != "(", f"unknown function {word} in {expression!r}"
            matchers = []
            if following() == "{":
                take()
                while following() != "}":
                    label, operator, value = take(), take(), take()
                    assert operator in ("=", "=~", "!=", "!~")
                    matchers.append((label, operator, json.loads(value)))
                    if following() == ",":
                        take()
                take()
            ranged = following().startswith("[")
            if ranged:
                take()
            query.selected.append(Selected(word, matchers, [name for name in open_calls if name], ranged))
    assert not open_calls, f"a bracket is open in {expression!r}"
    return query


def wrong(expression: str, legend: str, exported: dict[str, Exported]) -> list[str]:
    """Return what in a query would find nothing, or something else than is meant."""
    query, found = parse(expression), []
    assert query.selected, f"{expression!r} asks for nothing"
    for metric, matchers, within, ranged in query.selected:
        if metric not in exported:
            found.append(f"nothing exports {metric}")
            continue
        kind, labels = exported[metric]
        for label, operator, value in matchers:
            if label not in labels and label not in BY_PROMETHEUS:
                found.append(f"{metric} has no label {label}")
            elif operator == "=" and value not in labels[label]:
                found.append(f"{metric} never has {label} {value}")
        found += [
            f"{metric} has no label {label}" for label in query.grouped if label not in labels.keys() | BY_PROMETHEUS
        ]
        of_counter = [name for name in within if name in OF_COUNTERS]
        if ranged != bool(of_counter or "changes" in within):
            found.append(f"{metric}: a range and a function of ranges go together")
        if bool(of_counter) != (kind in ("counter", "histogram")) and "changes" not in within:
            found.append(f"{metric} is a {kind}, within {' '.join(within) or 'nothing'}")
        if ("histogram_quantile" in within) != metric.endswith("_bucket"):
            found.append(f"{metric}: quantiles are of buckets")
        if metric.endswith("_bucket") and query.aggregates and "le" not in query.grouped:
            found.append(f"{metric}: the sum loses its edges, le")
        shown = set(re.findall(r"\{\{(\w+)\}\}", legend))
        kept = set(query.grouped) if query.aggregates else labels.keys() | BY_PROMETHEUS
        found += [f"the legend's {label} is no label of the result" for label in sorted(shown - kept)]
    return found


def scrape(url: str) -> dict[str, Exported]:
    with urllib.request.urlopen(url, timeout=10) as answer:
        text = answer.read().decode()
    found: dict[str, Exported] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = found.setdefault(sample.name, Exported(family.type, {})).labels
            for name, value in sample.labels.items():
                labels.setdefault(name, set()).add(value)
    return found


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Exported]]:
    """What a control process and the server that it drives export, once it has decided."""
    server = HookServer(Serving())
    bundle = tmp_path_factory.mktemp("bundles") / "bundle"
    make_bundle_at(bundle, 0.2)
    command = [sys.executable, "-m", "helm_rl.cli", "control", str(bundle), "--url", server.url, "--slo-ms", "50"]
    process = subprocess.Popen([*command, "--listen", "127.0.0.1:0"], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        url = next(said["metrics"] for line in process.stderr if (said := json.loads(line))["event"] == "start")
        end_s = time.monotonic() + 60
        found: dict[str, Exported] = {}
        while "helm_rl_p99_ms" not in found:  # from the first decision on
            assert time.monotonic() < end_s, "it has never decided"
            found = scrape(url)
            time.sleep(0.05)
        yield found | scrape(f"{server.url}/metrics")
    finally:
        process.kill()
        process.communicate()
        server.close()


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    document = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    assert isinstance(document, dict)
    return document


def queries(dashboard: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return (panel, expression, legend) of all panels and annotations."""
    of_panels = [
        (panel["title"], target["expr"], target["legendFormat"])
        for panel in dashboard["panels"]
        for target in panel.get("targets", [])
    ]
    of_annotations = [(each["name"], each["expr"], "") for each in dashboard["annotations"]["list"]]
    return of_panels + of_annotations


def test_every_query_asks_for_what_is_exported(dashboard: dict[str, Any], exported: dict[str, Exported]) -> None:
    asked = queries(dashboard)
    assert len(asked) > 30
    assert {
        f"{panel}: {what}" for panel, expression, legend in asked for what in wrong(expression, legend, exported)
    } == set()


def test_the_variables_are_filled_from_what_is_exported(
    dashboard: dict[str, Any], exported: dict[str, Exported]
) -> None:
    variables = {each["name"]: each for each in dashboard["templating"]["list"]}
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    for name, variable in variables.items():
        if name == "datasource":
            continue
        match = re.fullmatch(r"label_values\((\w+)(\{.*\})?, (\w+)\)", variable["query"]["query"])
        assert match is not None, variable
        assert match[1] in exported
        assert match[3] in BY_PROMETHEUS
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard["panels"] + dashboard["annotations"]["list"])))
    assert used - {"__rate_interval", "__range"} == variables.keys()


def test_all_data_come_from_the_data_source_that_is_chosen(dashboard: dict[str, Any]) -> None:
    sources = [panel["datasource"] for panel in dashboard["panels"] if panel["type"] != "row"]
    sources += [target["datasource"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    assert {json.dumps(source, sort_keys=True) for source in sources} == {
        '{"type": "prometheus", "uid": "${datasource}"}'
    }
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)


def test_no_two_panels_lie_over_each_other(dashboard: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_what_a_control_process_exports_is_shown(dashboard: dict[str, Any], exported: dict[str, Exported]) -> None:
    """All of it but when its metrics were made, which Prometheus has no use for."""
    shown = {each.metric for _, expression, _ in queries(dashboard) for each in parse(expression).selected}
    own = {name for name in exported if name.startswith("helm_rl_") and not name.startswith("helm_rl_engine_")}
    assert {name for name in own if not name.endswith("_created")} - shown == set()


@pytest.mark.parametrize(
    ("expression", "legend", "what"),
    [
        ("rate(helm_rl_intervals[5m])", "", "nothing exports helm_rl_intervals"),
        ("helm_rl_intervals_total", "", "helm_rl_intervals_total is a counter, within nothing"),
        ("rate(helm_rl_alpha_asked[5m])", "", "helm_rl_alpha_asked is a gauge, within rate"),
        ('increase(helm_rl_fallbacks_total{reason="late"}[5m])', "", "helm_rl_fallbacks_total has no label reason"),
        ('increase(helm_rl_fallbacks_total{cause="lated"}[5m])', "", "helm_rl_fallbacks_total never has cause lated"),
        ("sum by (why) (rate(helm_rl_fallbacks_total[5m]))", "", "helm_rl_fallbacks_total has no label why"),
        ("sum(rate(helm_rl_fallbacks_total[5m]))", "{{cause}}", "the legend's cause is no label of the result"),
        (
            "histogram_quantile(0.9, sum by (instance) (rate(helm_rl_decision_seconds_bucket[5m])))",
            "",
            "helm_rl_decision_seconds_bucket: the sum loses its edges, le",
        ),
        (
            "histogram_quantile(0.9, rate(helm_rl_decision_seconds_count[5m]))",
            "",
            "helm_rl_decision_seconds_count: quantiles are of buckets",
        ),
        ("rate(helm_rl_intervals_total)", "", "helm_rl_intervals_total: a range and a function of ranges go together"),
    ],
)
def test_what_would_be_wrong_is_found(expression: str, legend: str, what: str, exported: dict[str, Exported]) -> None:
    assert wrong(expression, legend, exported) == [what]
