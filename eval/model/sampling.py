"""What the node's sample of rows and its charge of expected bytes cost in accuracy, against a run without either.

The reference below serves the same requests with every row of every history in a cache of all slots, and charges each
request what it missed itself. It has its own queue, a link and batches, written anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from cache_engine.backends.cpu import embedding, kv, pool
from envs.serving.node import EMB, KV, MAX_SAMPLED_SLOTS, NodeSim, largest_partition, page_layout
from envs.serving.rows import build_rows, candidate_rows, history_rows
from eval.model.queues import LITTLE_GOAL, little_error
from helm_rl.errors import UserError
from helm_rl.figures import Figure
from helm_rl.metrics import WindowStats, p99_ms
from helm_rl.profiles.hardware import resolve_hardware
from helm_rl.profiles.model import resolve_model
from helm_rl.scenario import Scenario
from helm_rl.workloads.generate import generate
from helm_rl.workloads.trace import Trace

Advance = Callable[[str], None]
FloatArray = npt.NDArray[np.floating]

SLOTS = tuple(1 << e for e in (15, 16, 17, 18, 19))
LOADS = ("moderate", "limit", "saturated")
HIT_GOAL = 0.01
P99_GOAL = 0.03
# The most popular rows, each read by nearly every request: never the oldest in a cache, so they need not be looked up.
HEAD = 1024
BYTES_PER_SLOT = 32  # of the reference, index included
_ALPHA = 0.5
_FILL = 1 << 20  # rows a batch
_STEP_NS = 2_000_000  # between instants at which Little's law counts
_STEP_REQUESTS = 500  # between two notes of progress


@dataclass(frozen=True)
class Part:
    """A stretch of a regime, [start_ns, end_ns), over which it is compared."""

    name: str
    start_ns: int
    end_ns: int

    def holds(self, trace: Trace) -> npt.NDArray[np.bool_]:
        """Return which requests arrive in it, [n]."""
        return (trace.arrival_ns >= self.start_ns) & (trace.arrival_ns < self.end_ns)


@dataclass(frozen=True)
class Regime:
    """One load."""

    name: str
    scenario: Scenario
    parts: tuple[Part, ...]  # in order; the last one, of the regime's name, is the load when it has settled


@dataclass(frozen=True)
class Charges:
    """What each request of a trace found and what it is charged; [n] each."""

    history_tokens: FloatArray
    history_tokens_hit: FloatArray
    rows: FloatArray
    rows_hit: FloatArray
    link_bytes: FloatArray
    work_ms: FloatArray  # of the accelerator, alone in a batch and without what a batch costs


@dataclass(frozen=True)
class Outcome:
    """What came of a part."""

    kv_hit_rate: float
    emb_hit_rate: float
    link_ns: float
    p99_ms: float


def regimes(scenario: Scenario, seconds: float) -> list[Regime]:
    """Return the base load alone (cold) and the first phase's users alone (hot), as `helm-rl bench env` has them.

    Cold, `seconds` are compared, after the scenario's warm-up. Hot, they are the phase's from one ramp after it is up
    until it goes down, when the queue of its coming up is gone; what comes before is compared apart, the onset. A
    thousandth of the base stays, for a base load there must be. However long the queue, no request is shed.

    Raises:
        UserError: the scenario has no phase, or no base load.
    """
    if not scenario.load.phase or scenario.load.rate == 0:
        raise UserError(f"scenario {scenario.name} needs a base load and a phase, for a cold and a hot regime")
    fields = scenario.model_dump()
    fields["hardware"]["queue_bound"] = 1_000_000
    load, phase = fields["load"], scenario.load.phase[0]
    length_ns, ramp_ns = round(seconds * 1e9), round(phase.ramp_s * 1e9)
    cold = fields | {"seconds": seconds, "load": load | {"phase": ()}}
    whole = phase.model_dump() | {"start_s": 0.0, "seconds": seconds + 3 * phase.ramp_s}
    few = {"rate": load["rate"] / 1000, "rate_end": None, "phase": (whole,)}
    hot = fields | {"seconds": whole["seconds"], "load": load | few}
    onset = (Part("onset", 0, 2 * ramp_ns),) if ramp_ns else ()
    return [
        Regime("cold", Scenario.model_validate(cold), (Part("cold", 0, length_ns),)),
        Regime("hot", Scenario.model_validate(hot), (*onset, Part("hot", 2 * ramp_ns, 2 * ramp_ns + length_ns))),
    ]


def needed_bytes(scenario: Scenario) -> int:
    """Return the memory that the reference takes."""
    pages, _, rows_per_page = page_layout(scenario.hardware, resolve_model(scenario.model))
    return pages * rows_per_page * BYTES_PER_SLOT


def serve_unsampled(scenario: Scenario, trace: Trace, alpha: float, advance: Advance) -> Charges:
    """Serve a trace with every row looked up but the HEAD most popular; the caches start as a node's do.

    A batch of lookups is a request's; a row that it misses twice is two misses and one fetch. No request is shed.
    """
    model, hardware = resolve_model(scenario.model), resolve_hardware(scenario.hardware)
    pages, page_tokens, rows_per_page = page_layout(scenario.hardware, model)
    law = build_rows(
        trace,
        features=model.features_per_token,
        candidates=model.candidates,
        page_tokens=page_tokens,
        rate=1.0,
        head=HEAD,
        zipf=scenario.load.zipf_items,
        items=scenario.load.items,
    )
    memory = pool.new_pool_state(pages, 2)
    memory.goal[EMB] = round(alpha * pages)
    memory.goal[KV] = pages - memory.goal[EMB]
    policy = embedding.POLICIES[scenario.hardware.emb_policy]
    most = largest_partition(scenario, pages)  # of an index as large as a node's
    rows = embedding.new_embedding_state(pages, rows_per_page, most, EMB, policy)
    users = kv.new_kv_state(pages, page_tokens, KV)
    embedding.accept_pages(rows, memory, pages)
    kv.accept_pages(users, memory, pages)
    room = max(law.max_rows, _FILL)
    scratch = embedding.new_embedding_scratch(room)
    keys, tables = np.zeros(room, np.int64), np.zeros(room, np.int16)
    popular = min(law.strata, int(memory.goal[EMB]) * rows_per_page)
    for last in range(popular, 0, -_FILL):  # the most popular last
        some = np.arange(last - 1, max(0, last - _FILL) - 1, -1)
        embedding.lookup(rows, memory, scratch, tables, some, some.size)

    n = len(trace)
    prefix, missed, fetched = (np.zeros(n) for _ in range(3))
    columns = (trace.user, trace.phase, trace.history_tokens, trace.new_tokens)
    for i, (user, phase, history, new) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        if i % _STEP_REQUESTS == 0:
            advance(f"unsampled, {i:,} of {n:,} requests")
        prefix[i] = found = kv.lookup(users, user, 0, history - new)
        drawn = sum(history_rows(law.state, keys, 0, i, user, phase, found, history))
        for part in (0, 1):
            drawn = candidate_rows(law.state, keys, drawn, i, phase, model.candidates, part)
        fetched[i] = embedding.lookup(rows, memory, scratch, tables, keys, drawn)
        missed[i] = np.count_nonzero(scratch.miss[:drawn] >= 0)
        kv.extend(users, memory, user, 0, history)
    history_tokens = trace.history_tokens.astype(np.float64)
    computed = history_tokens - prefix
    read = (computed + model.candidates) * model.features_per_token
    pairs = computed * (prefix + 0.5 * computed) + model.candidates * history_tokens
    return Charges(
        history_tokens=history_tokens,
        history_tokens_hit=prefix,
        rows=read,
        rows_hit=read - missed,
        link_bytes=fetched * model.row_bytes,
        work_ms=1e-6
        * (
            hardware.prefill_ns(model.flops_per_token, 0.0) * (computed + model.candidates)
            + hardware.prefill_ns(0.0, model.flops_per_pair) * pairs
        ),
    )


def latencies_ms(
    arrival_ms: FloatArray, link_ms: FloatArray, work_ms: FloatArray, batch_ms: float, request_ms: float, most: int
) -> FloatArray:
    """Return latencies behind a link, first come first served, and an accelerator that takes all who are ready.

    Args:
        arrival_ms: [n] in order.
        link_ms: [n] transfer of each.
        work_ms: [n] computation of each.
        batch_ms: fixed, of a batch.
        request_ms: fixed, of a request, outside the queues.
        most: requests of a batch.
    """
    n = arrival_ms.size
    sent = np.cumsum(link_ms)
    # Through the link are all from whoever last found it idle on, one after the other.
    ready = sent + np.maximum.accumulate(arrival_ms - (sent - link_ms))
    end = np.zeros(n)
    first, free = 0, -np.inf
    while first < n:
        start = max(free, ready[first])
        last = min(int(np.searchsorted(ready, start, side="right")), first + most)
        free = start + batch_ms + float(work_ms[first:last].sum())
        end[first:last] = free
        first = last
    return end - arrival_ms + request_ms


def measure_sampling(
    scenario: Scenario, seconds: float, seeds: int, slots: tuple[int, ...], advance: Advance
) -> tuple[dict[str, Figure], str]:
    """Compare nodes with the reference at alpha .5 in both regimes; return figures, and which slots reach the goals.

    Every seed is another draw of arrivals; an error is the largest over seeds. Loads are those of `linked_loads`; the
    goals hold for moderate and limit. How much the reference's own P99 gains by 1 % more bytes is a figure too: near
    the limit a queue makes much of little.

    Args:
        scenario: whose base load and first phase are served.
        seconds: of each regime that are compared.
        seeds: draws, from 1 on.
        slots: sampled slots to try, in ascending order; the node's own number has the goals.
        advance: called with what is done next.
    """
    figures: dict[str, Figure] = {}
    errors: dict[tuple[int, str], float] = {}
    little = 0.0

    def note_error(size: int, name: str, error: float) -> None:
        errors[size, name] = max(errors.get((size, name), 0.0), abs(error))

    for regime in regimes(scenario, seconds):
        for seed in range(1, seeds + 1):
            where = f"{regime.name}, seed {seed}"
            trace = generate(regime.scenario, seed)
            charges = serve_unsampled(regime.scenario, trace, _ALPHA, lambda text, at=where: advance(f"{at}: {text}"))  # type: ignore[misc]
            for load, linked in linked_loads(regime, trace, charges).items():
                exact = reference_outcomes(linked, trace, charges, regime.parts)
                settled = regime.parts[-1]
                share = exact[-1].link_ns / (settled.end_ns - settled.start_ns)
                figures[f"model.sampling.{regime.name}.{load}.{seed}.p99_ms"] = Figure(exact[-1].p99_ms, "ms", "lower")
                figures[f"model.sampling.{regime.name}.{load}.{seed}.link_busy"] = Figure(share, "", "lower")
                more = replace(charges, link_bytes=charges.link_bytes * 1.01)
                gain = reference_outcomes(linked, trace, more, (settled,))[0].p99_ms / exact[-1].p99_ms - 1.0
                figures[f"model.sampling.{regime.name}.{load}.{seed}.p99_gain_per_percent"] = Figure(gain, "", "lower")
                for size in slots:
                    advance(f"{where}: {load}, {size:,} sampled slots")
                    found, error = node_outcomes(linked, trace, regime.parts, size, count=size == MAX_SAMPLED_SLOTS)
                    little = max(little, error)
                    for part, ours, theirs in zip(regime.parts, found, exact, strict=True):
                        note_error(size, f"kv_hit_error.{part.name}", ours.kv_hit_rate - theirs.kv_hit_rate)
                        note_error(size, f"emb_hit_error.{part.name}", ours.emb_hit_rate - theirs.emb_hit_rate)
                        note_error(size, f"link_error.{part.name}", ours.link_ns / theirs.link_ns - 1.0)
                        note_error(size, f"p99_error.{part.name}.{load}", ours.p99_ms / theirs.p99_ms - 1.0)
    goals = {f"{kind}_hit_error.{name}": HIT_GOAL for kind in ("kv", "emb") for name in ("cold", "hot")}
    goals |= {f"p99_error.{name}.{load}": P99_GOAL for name in ("cold", "hot") for load in ("moderate", "limit")}
    for (size, name), error in errors.items():
        if size == MAX_SAMPLED_SLOTS:
            figures[f"model.sampling.{name}"] = Figure(error, "", "lower", goals.get(name))
        else:
            figures[f"model.sampling.{name}.{size}"] = Figure(error, "", "lower")
    figures["model.little_error.sampling"] = Figure(little, "", "lower", LITTLE_GOAL)
    return figures, _verdict(slots, errors, goals)


def linked_loads(regime: Regime, trace: Trace, charges: Charges) -> dict[str, Scenario]:
    """Return the regime's scenario with the link of each of LOADS.

    limit: the slowest with which the reference's P99, once settled, is within the SLO (to .1 %); moderate: one 1.5
    times as fast; saturated: the reference's bytes take .9 of the link's time, wherever its P99 is.
    """
    settled = regime.parts[-1:]

    def with_link(gb_s: float) -> Scenario:
        hardware = regime.scenario.hardware.model_copy(update={"link_gb_s": gb_s})
        return regime.scenario.model_copy(update={"hardware": hardware})

    asked = float(charges.link_bytes[settled[0].holds(trace)].sum())
    full = asked / (settled[0].end_ns - settled[0].start_ns)
    slow, fast = full / 10.0, full * 100.0
    while fast / slow > 1.001:
        middle = (slow * fast) ** 0.5
        (outcome,) = reference_outcomes(with_link(middle), trace, charges, settled)
        slow, fast = (slow, middle) if outcome.p99_ms <= regime.scenario.slo_ms else (middle, fast)
    return dict(zip(LOADS, map(with_link, (1.5 * fast, fast, full / 0.9)), strict=True))


def reference_outcomes(scenario: Scenario, trace: Trace, charges: Charges, parts: Iterable[Part]) -> list[Outcome]:
    """Queue the reference's requests on the scenario's link and accelerator; return what came of each part."""
    hardware = resolve_hardware(scenario.hardware)
    assert scenario.hardware.link_gb_s is not None
    link_ms = charges.link_bytes / scenario.hardware.link_gb_s * 1e-6
    latency_ms = latencies_ms(
        trace.arrival_ns * 1e-6,
        link_ms,
        charges.work_ms,
        hardware.batch_ms,
        hardware.request_ms,
        scenario.hardware.max_batch,
    )
    outcomes = []
    for part in parts:
        inside = part.holds(trace)
        outcomes.append(
            Outcome(
                kv_hit_rate=float(charges.history_tokens_hit[inside].sum() / charges.history_tokens[inside].sum()),
                emb_hit_rate=float(charges.rows_hit[inside].sum() / charges.rows[inside].sum()),
                link_ns=float(link_ms[inside].sum()) * 1e6,
                p99_ms=p99_ms(latency_ms[inside]),
            )
        )
    return outcomes


def node_outcomes(
    scenario: Scenario, trace: Trace, parts: tuple[Part, ...], slots: int, count: bool
) -> tuple[list[Outcome], float]:
    """Serve by a node of so many sampled slots; return what came of each part, and the error of Little's law.

    That is over the last part, where who is there is counted at many instants; 0 unless `count`.
    """
    node = NodeSim(scenario, trace, _ALPHA, max_sampled_slots=slots)
    served = []
    there = 0  # requests that have come and not gone

    def run(until_ns: int) -> WindowStats:
        nonlocal there
        window = node.run(until_ns)
        there += window.arrivals - window.completed
        return window

    for part in parts:
        if node.now_ns < part.start_ns:
            run(part.start_ns)
        steps = max(1, (part.end_ns - part.start_ns) // _STEP_NS) if count else 1
        present = 0
        windows = []
        for step in range(1, steps + 1):
            windows.append(run(part.start_ns + step * (part.end_ns - part.start_ns) // steps))
            present += there
        served.append(windows)
        counted = present / steps
    node.drain()
    error = 0.0
    if count:
        last = parts[-1]
        error = little_error(
            counted,
            (trace.arrival_ns - last.start_ns) * 1e-6,
            node.latency_ms.astype(np.float64) - resolve_hardware(scenario.hardware).request_ms,
            (last.end_ns - last.start_ns) * 1e-6,
        )
    outcomes = [
        Outcome(
            kv_hit_rate=sum(w.history_tokens_hit for w in windows) / sum(w.history_tokens for w in windows),
            emb_hit_rate=sum(w.rows_hit for w in windows) / sum(w.rows for w in windows),
            link_ns=float(sum(w.link_busy_ns for w in windows)),
            p99_ms=p99_ms(node.latency_ms[part.holds(trace)]),
        )
        for part, windows in zip(parts, served, strict=True)
    ]
    return outcomes, error


def _verdict(slots: tuple[int, ...], errors: dict[tuple[int, str], float], goals: dict[str, float]) -> str:
    """Return a sentence: which numbers of sampled slots reach all goals, and what the others miss."""
    missed = {size: [name for name, goal in goals.items() if errors[size, name] > goal] for size in slots}
    good = [f"{size:,}" for size in slots if not missed[size]]
    text = f"All goals are reached with {', '.join(good) if good else 'none of these'} sampled slots a node"
    for size in slots:
        if missed[size]:
            text += f"; {size:,} misses {', '.join(missed[size])}"
    return text + "."
