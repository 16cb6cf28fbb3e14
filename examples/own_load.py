"""Describe a load of one's own, draw it, and serve it at a few static splits."""

from envs.serving.replay import replay
from helm_rl.control.static import StaticAlpha
from helm_rl.metrics import p99_ms
from helm_rl.scenario import Scenario
from helm_rl.workloads.generate import generate

scenario = Scenario.model_validate(
    {
        "name": "evening",
        "slo_ms": 100,
        "seconds": 60,
        "model": {"profile": "decoder-0.2b"},
        "hardware": {"profile": "a100-80g", "link": "remote-ps", "pool_gib": 48},
        "load": {"rate": 100, "requests_per_visit": 8, "think_s": 5, "history_mean": 1500},
    }
)
trace = generate(scenario, seed=1)
for alpha in (0.2, 0.5, 0.8):
    served = replay(scenario, trace, StaticAlpha(alpha), alpha0=alpha)
    print(f"alpha {alpha}: P99 {p99_ms(served.latency_ms[served.measured]):.1f} ms")
