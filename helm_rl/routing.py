"""Which node of a cluster serves a request: HELM's score, and the routers that it is held against.

HELM (arXiv 2605.04450) scores each node by what of the request's history it holds (`kv`), by what of the request's rows
it holds (`emb`) and by how idle it is, and adds a little for the user's own node, so that a user without a history goes
where his next request will be sought. The weights are the costs of what would be missing, in proportion. The best node
serves, unless it is loaded beyond a limit: then the least loaded one does.

The others: `kv-aware` leaves rows and own node out; `least-loaded` looks at the load alone; `two-choices` at that of
two nodes drawn at random (Mitzenmacher, IEEE TPDS 2001); `user-hash` sends a user to his own node whatever its load, by
rendezvous hashing (Thaler and Ravishankar, IEEE/ACM ToN 1998), so the loss of a node moves its users alone;
`round-robin` and `random` look at nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cache_engine.hashing import mix2, reduce_range
from cache_engine.jit import kernel
from helm_rl.profiles.hardware import HardwareProfile, link_gb_s
from helm_rl.profiles.model import ModelProfile
from helm_rl.scenario import HardwareSection, RouterSection

HELM, KV_AWARE, LEAST_LOADED, TWO_CHOICES, USER_HASH, ROUND_ROBIN, RANDOM = range(7)
ROUTERS = {
    "helm": HELM,
    "kv-aware": KV_AWARE,
    "least-loaded": LEAST_LOADED,
    "two-choices": TWO_CHOICES,
    "user-hash": USER_HASH,
    "round-robin": ROUND_ROBIN,
    "random": RANDOM,
}
NOWHERE = -1

# RouterState.params
W_KV = 0
W_EMB = 1
W_LOAD = 2
AFFINITY = 3
LOAD_LIMIT = 4
N_PARAMS = 5

_OWN = np.uint64(0x0A11)
_TICKET = np.uint64(0x71C7)


class RouterState(NamedTuple):
    """A router over N nodes. The caller writes what is known of them before it asks `choose`."""

    policy: npt.NDArray[np.int64]  # [1]
    params: npt.NDArray[np.float64]
    up: npt.NDArray[np.bool_]  # [N] the node can serve
    kv: npt.NDArray[np.float64]  # [N] share of the request's history that the node holds, 0..1
    emb: npt.NDArray[np.float64]  # [N] share of the request's rows that it holds, 0..1
    load: npt.NDArray[np.float64]  # [N] how long the request would wait there, over the SLO


def new_router(section: RouterSection, nodes: int, weights: tuple[float, float, float]) -> RouterState:
    """Return a router over idle nodes. weights: of kv, emb and load; only their proportions matter."""
    total = sum(weights)
    params = np.zeros(N_PARAMS)
    params[: W_LOAD + 1] = np.array(weights) / total
    params[AFFINITY] = section.affinity
    params[LOAD_LIMIT] = section.load_limit
    return RouterState(
        np.array([ROUTERS[section.policy]]),
        params,
        np.ones(nodes, np.bool_),
        np.zeros(nodes),
        np.zeros(nodes),
        np.zeros(nodes),
    )


def miss_costs_ms(
    model: ModelProfile,
    profile: HardwareProfile,
    hardware: HardwareSection,
    history_tokens: float,
    miss_rate: float,
    slo_ms: float,
) -> tuple[float, float, float]:
    """Return what a request loses, in ms, where nothing of its history is held, none of its rows, or an SLO is waited.

    history_tokens: the mean; miss_rate: of rows, where a node holds what nodes usually hold.
    """
    row_ms = model.row_bytes / link_gb_s(hardware) * 1e-6
    token_ms = profile.prefill_ns(model.flops_per_token, 0.0) * 1e-6
    kv_ms = history_tokens * (token_ms + model.features_per_token * miss_rate * row_ms)
    kv_ms += profile.prefill_ns(0.0, model.flops_per_pair) * 1e-6 * 0.5 * history_tokens**2
    emb_ms = (history_tokens + model.candidates) * model.features_per_token * row_ms
    return kv_ms, emb_ms, slo_ms


@kernel
def own_node(router: RouterState, user: int) -> int:
    """Return the user's own node: of those that are up, the one with the highest hash of (user, node)."""
    best = NOWHERE
    highest = np.uint64(0)
    for k in range(router.up.size):
        if router.up[k]:
            bits = mix2(np.uint64(user) ^ _OWN, np.uint64(k))
            if best == NOWHERE or bits > highest:
                best = k
                highest = bits
    return best


@kernel
def choose(router: RouterState, user: int, ticket: int) -> int:
    """Return the node for a request of `user`, NOWHERE if none is up. ticket: the request's number, for chance."""
    policy = router.policy[0]
    nodes = router.up.size
    if policy == USER_HASH:
        return own_node(router, user)
    if policy == ROUND_ROBIN:
        return _first_up(router, ticket % nodes)
    seed = mix2(np.uint64(ticket), _TICKET)
    start = reduce_range(seed, nodes)
    if policy == RANDOM:
        return _random_up(router, seed)
    if policy == TWO_CHOICES:
        one = _random_up(router, seed)
        other = _random_up(router, mix2(seed, _TICKET))
        return other if one != NOWHERE and router.load[other] < router.load[one] else one
    if policy == LEAST_LOADED:
        return _least_loaded(router, start)
    params = router.params
    own = own_node(router, user) if policy == HELM else NOWHERE
    w_emb = params[W_EMB] if policy == HELM else 0.0
    best = NOWHERE
    highest = 0.0
    for j in range(nodes):
        k = int(start + j if start + j < nodes else start + j - nodes)
        if not router.up[k]:
            continue
        score = params[W_KV] * router.kv[k] + w_emb * router.emb[k] - params[W_LOAD] * router.load[k]
        if k == own:
            score += params[AFFINITY]
        if best == NOWHERE or score > highest:
            best = k
            highest = score
    if best != NOWHERE and router.load[best] > params[LOAD_LIMIT]:
        return _least_loaded(router, start)
    return best


@kernel
def _least_loaded(router: RouterState, start: int) -> int:
    """Return the least loaded node, of several the first from `start` on."""
    nodes = router.up.size
    best = NOWHERE
    for j in range(nodes):
        k = int(start + j if start + j < nodes else start + j - nodes)
        if router.up[k] and (best == NOWHERE or router.load[k] < router.load[best]):
            best = k
    return best


@kernel
def _first_up(router: RouterState, start: int) -> int:
    nodes = router.up.size
    for j in range(nodes):
        k = (start + j) % nodes
        if router.up[k]:
            return k
    return NOWHERE


@kernel
def _random_up(router: RouterState, seed: np.uint64) -> int:
    """Return a node that is up, each equally likely."""
    count = 0
    for k in range(router.up.size):
        count += router.up[k]
    if count == 0:
        return NOWHERE
    at = int(reduce_range(seed, count))
    for k in range(router.up.size):
        if router.up[k]:
            if at == 0:
                return k
            at -= 1
    return NOWHERE
