"""A whole decision in one compiled call: what is shown is checked, then all layers decide, over arrays they share."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cache_engine.jit import in_memory, inner, kernel
from helm_rl.control import burst
from helm_rl.control.base import TARGET, PolicyState, mean_action, move, normalise, within
from helm_rl.control.burst import BurstState
from helm_rl.control.protocol import FloatArray
from helm_rl.control.recovery import (
    HANDS_BACK,
    HOT_USERS,
    RULED,
    RULES,
    RecoveryState,
    decide_by_rule,
    new_recovery,
    way_back,
)
from helm_rl.control.residual_kernel import (
    OFFSET,
    AdapterState,
    NetState,
    choose_offset,
    new_adapter,
    new_net,
    own_alpha,
)
from helm_rl.observation import HIGH, LOW, SIZE

Float64Array = npt.NDArray[np.float64]

# HelmState.numbers
SAFE = 0  # the last target that was decided upon, NaN: none
N_HELM = 1

# HelmState.counts
NOT_FINITE, OUT_OF_RANGE, STALE, LATE, NO_ALPHA, NETWORK = 0, 1, 2, 3, 4, 5  # decisions, by what was wrong
DECIDED_NS = 6  # when the last decision was taken; burst.UNSET: none was
INTERVAL_NS = 7
LATE_NS = 8  # since the last decision: above it a call is late
STALE_NS = 9  # above this age an observation is stale
HANDED_BACK = 10  # whether a burst was over with the last decision
N_HELM_COUNTS = 11
_NOTHING = -1


class HelmState(NamedTuple):
    """All layers, and the observation to decide upon."""

    policy: PolicyState
    net: NetState
    adapter: AdapterState
    recovery: RecoveryState
    detector: BurstState
    observation: FloatArray
    numbers: Float64Array
    counts: npt.NDArray[np.int64]


@inner
def _fault(helm: HelmState, burst_is_on: bool, applied_alpha: float, age_ns: int) -> int:
    """Return what keeps from deciding upon what is shown, as the number of its count; -1: nothing."""
    if age_ns > helm.counts[STALE_NS]:
        return STALE
    found = _NOTHING
    for i in range(SIZE):
        if burst_is_on and i != HOT_USERS:  # the rule reads nothing else
            continue
        signal = helm.observation[i]
        if not math.isfinite(signal):
            return NOT_FINITE
        if not LOW[i] <= signal <= HIGH[i]:
            found = OUT_OF_RANGE
    needs_alpha = helm.recovery.took_over[0] or math.isnan(helm.policy.numbers[TARGET])
    if found == _NOTHING and needs_alpha and not burst_is_on and not 0.0 <= applied_alpha <= 1.0:
        return NO_ALPHA
    return found


@inner
def _last_safe(helm: HelmState, applied_alpha: float, cause: int) -> float:
    """Count a decision that was not taken; return the last safe alpha, else the applied one, else NaN."""
    helm.counts[cause] += 1
    if not math.isnan(helm.numbers[SAFE]):
        return helm.numbers[SAFE]
    return within(helm.policy, applied_alpha) if 0.0 <= applied_alpha <= 1.0 else math.nan


def _example() -> HelmState:
    """Return a state for its type: that of each array."""
    weights = np.zeros(1, np.float32)
    policy = PolicyState(
        np.zeros(1), np.zeros(1), weights, np.zeros(1, np.int64), weights, np.zeros((1, 1), np.float32), np.zeros(1)
    )
    net = new_net([np.zeros((1, 1))] * 3)
    detector = BurstState(np.zeros(1), np.zeros(1), np.zeros(1, np.int64), np.zeros(1))
    counts = np.zeros(1, np.int64)
    return HelmState(
        policy, net, new_adapter(0.0, 0.0, 1), new_recovery(0.0, 0.0, 0.0), detector, weights, np.zeros(1), counts
    )


_store, _load = in_memory(_example())


@kernel
def store(memory: npt.NDArray[np.uint8], helm: HelmState) -> None:
    """Leave a state's addresses in the memory, uint8 [MOST_BYTES], for `decide`; whoever calls it keeps the arrays."""
    _store(memory, helm)


@kernel
def decide(memory: npt.NDArray[np.uint8], applied_alpha: float, now_ns: int, age_ns: int, mode: int) -> float:
    """As `Helm.decide`, for the state that `store` left in the memory and the observation in it.

    mode: what the adapter's block is for; without an adapter that of `guard.Mode.CONTROL`.
    """
    helm = _load(memory)
    policy, adapter, recovery, counts = helm.policy, helm.adapter, helm.recovery, helm.counts
    counts[HANDED_BACK] = 0
    passed_ns = 0 if counts[DECIDED_NS] == burst.UNSET else max(now_ns - counts[DECIDED_NS], 0)
    counts[DECIDED_NS] = now_ns
    if passed_ns > counts[LATE_NS]:
        counts[LATE] += 1
        passed_ns = counts[INTERVAL_NS]
    burst_is_on = helm.detector.counts[burst.ACTIVE] > 0
    cause = _fault(helm, burst_is_on, applied_alpha, age_ns)
    if cause != _NOTHING:
        return _last_safe(helm, applied_alpha, cause)
    decides = decide_by_rule(recovery, burst_is_on, np.float64(helm.observation[HOT_USERS]), applied_alpha)
    if decides == RULES:
        target = recovery.numbers[RULED]
    else:
        if decides == HANDS_BACK:
            counts[HANDED_BACK] = 1
            policy.numbers[TARGET] = math.nan
            adapter.numbers[OFFSET] = 0.0
            adapter.taken[0] = 0
        normalise(policy, helm.observation, own_alpha(adapter, helm.observation))
        action = mean_action(policy)
        before = policy.numbers[TARGET]
        own = move(policy, action, applied_alpha - adapter.numbers[OFFSET])
        overflowed = choose_offset(policy, helm.net, adapter, before, mode)
        counts[NETWORK] += overflowed or math.isnan(action)
        target = way_back(recovery, within(policy, own + adapter.numbers[OFFSET]), passed_ns * 1e-9)
    helm.numbers[SAFE] = within(policy, target)
    return helm.numbers[SAFE]
