"""Mappings of signals to metrics: the shipped ones, and what is said of a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest

from helm_rl.errors import UserError
from helm_rl.runtime.mapping import SIGNALS, load_mapping, mapping_names

GOOD = 'name = "mine"\nalpha0 = 0.5\n[signals]\narrivals = "requests_total"\n'


def test_the_shipped_mappings_load_and_ours_has_every_signal() -> None:
    assert mapping_names() == ["helm-rl", "triton", "vllm"]
    assert tuple(sorted(load_mapping("helm-rl").signals)) == tuple(sorted(SIGNALS))
    assert load_mapping("vllm").signals["latency"].scale == 1000
    assert load_mapping("triton").signals["p99_ms"].labels == {"quantile": "0.99"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GOOD + 'arivals = "x"\n', "line 5: signals.arivals: no such signal; did you mean arrivals?"),
        (GOOD + "queue = { value = -1 }\n", "line 5: signals.queue.value: input should be greater than or equal to 0"),
        (
            GOOD + 'queue = { metric = "a", value = 1 }\n',
            "line 5: signals.queue: it must have either a metric or a value",
        ),
        (GOOD + "queue = { value = 1, scale = 2 }\n", "line 5: signals.queue: a constant value is never optional"),
        (GOOD + 'queue = { metric = "a b" }\n', "line 5: signals.queue.metric: string should match pattern"),
        (GOOD + 'queue = { metric = "a", label = {} }\n', "line 5: signals.queue.label: extra inputs"),
        (
            GOOD + 'queue = { metric = "a", labels = { x = 1 } }\n',
            "signals.queue.labels.x: input should be a valid string",
        ),
        (GOOD + "latency = { value = 1 }\n", "latency must be the metric of a histogram"),
        (GOOD + "rows = { value = 1 }\n", "rows must be a metric: a counter that stands still"),
        (GOOD + "queue_bound = { value = 0 }\n", "queue_bound cannot be 0: every reading would be void"),
        (
            GOOD.replace("alpha0 = 0.5", "") + "alpha = { value = 7 }\n",
            "alpha cannot be 7: every reading would be void",
        ),
        (GOOD + "queue = 7\n", "line 5: signals.queue: input should be a valid dictionary"),
        ('name = "mine"\nalpha0 = 0.5\n[signals]\nqueue = "q"\n', "the signal arrivals is missing"),
        ('name = "mine"\n[signals]\narrivals = "q"\n', "without the signal alpha there must be an alpha0"),
        (
            'name = "mine"\nalpha0 = 2\n[signals]\narrivals = "q"\n',
            "line 2: alpha0: input should be less than or equal",
        ),
        ('name = "mine"\nalpha0 = 0.5\n', "signals: field required"),
        ("name = [", "is not valid TOML"),
        ("", "is empty; a mapping is a TOML file with at least name and [signals]"),
    ],
)
def test_a_wrong_mapping_is_told_in_a_sentence(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(UserError) as caught:
        load_mapping(tmp_path / "mine.toml")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_good_one_of_ones_own_loads(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        GOOD + 'latency = { metric = "took_seconds", scale = 1e3, labels = { path = "/" } }\n'
    )
    mapping = load_mapping(tmp_path / "mine.toml")
    assert mapping.signals["latency"].labels == {"path": "/"}
    with pytest.raises(UserError, match=r"neither a shipped mapping \(helm-rl, triton, vllm\) nor a file"):
        load_mapping("vlmm")
