"""The control of a serving system while it serves: the loop, and the adapters through which it sees one."""

from helm_rl.runtime.counters import Adapter, Cause, Counters, Latencies, StaleTelemetry
from helm_rl.runtime.loop import ControlLoop, Status, Step
from helm_rl.runtime.steering import Steering, steering_of

__all__ = [
    "Adapter",
    "Cause",
    "ControlLoop",
    "Counters",
    "Latencies",
    "StaleTelemetry",
    "Status",
    "Steering",
    "Step",
    "steering_of",
]
