"""Workloads: the trace and its file format, the generator, readers of public logs."""

from helm_rl.workloads.generate import generate
from helm_rl.workloads.trace import Segment, Trace, TraceMeta, TracePhase

__all__ = ["Segment", "Trace", "TraceMeta", "TracePhase", "generate"]
