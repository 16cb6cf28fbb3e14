"""The proxy of faults: each kind does to an answer what it says, and comes back as its cause."""

from __future__ import annotations

import time

import pytest

from eval.control.faults import END, EVENTS, FAULTS, Fault, beats
from eval.control.proxy import FaultProxy
from helm_rl.runtime.adapters.http import HttpAdapter
from helm_rl.runtime.counters import Cause, StaleTelemetry
from helm_rl.runtime.mapping import load_mapping
from helm_rl.runtime.meter import Meter
from helm_rl.runtime.server import HookServer
from tests.helm_rl.runtime.feeds import Serving


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.cause is not None], ids=lambda fault: fault.name)
def test_each_fault_is_refused_for_its_cause_and_the_next_answer_is_taken(fault: Fault) -> None:
    serving = Serving()
    serving.begun_s -= 100.0
    hooks = HookServer(serving)
    proxy = FaultProxy(hooks.url, iter([None, None, *[fault.name] * fault.answers, None, None]), late_s=0.6)
    adapter, meter = HttpAdapter(proxy.url, load_mapping("helm-rl"), timeout_s=0.4), Meter(50.0, 0.5)
    causes: list[Cause | None] = []
    for _ in range(4 + fault.answers):
        time.sleep(0.02)
        try:
            causes.append(meter.take(adapter.read(), time.monotonic_ns()))
        except StaleTelemetry as error:
            causes.append(error.cause)
    assert causes == [Cause.BASELINE, None, *[fault.cause] * fault.answers, None, None]
    assert proxy.injected == {fault.name: fault.answers}
    proxy.close()
    hooks.close()


def test_targets_that_fail_reach_the_server_late_or_not_at_all() -> None:
    serving = Serving()
    hooks = HookServer(serving)
    script = iter(["target_error", "target_nan", "target_late", None])
    proxy = FaultProxy(hooks.url, script, late_s=0.6)
    adapter = HttpAdapter(proxy.url, load_mapping("helm-rl"), timeout_s=0.4)
    causes = []
    for k in range(3):
        adapter.read()
        with pytest.raises(StaleTelemetry) as caught:
            adapter.apply(0.3 + 0.1 * k, k)
        causes.append(caught.value.cause)
    assert causes == [Cause.UNREACHABLE, Cause.ABSURD, Cause.LATE]
    adapter.read()
    assert adapter.apply(0.7, 9) == 0.7
    until = time.monotonic() + 5
    while len(serving.targets) < 2:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert set(serving.targets) == {(0.5, 2), (0.7, 9)}
    proxy.close()
    hooks.close()


def test_a_cycle_has_every_fault_and_event_and_quiet_between() -> None:
    script = beats(2)
    cycle = []
    while (beat := next(script)) != END:
        cycle.append(beat)
    assert cycle[:2] == [None, None]
    assert next(script) is None
    for fault in FAULTS:
        assert cycle.count(fault.name) == fault.answers
    assert [beat for beat in cycle if beat in EVENTS] == list(EVENTS)
    proxy = FaultProxy("http://127.0.0.1:1", iter([EVENTS[0], END]), 0.1)
    adapter = HttpAdapter(proxy.url, load_mapping("helm-rl"), timeout_s=2.0)
    for _ in range(2):
        with pytest.raises(StaleTelemetry):  # nobody is behind it
            adapter.read()
    assert [proxy.events.get(timeout=1), proxy.events.get(timeout=1)] == [EVENTS[0], END]
    proxy.close()
