"""The KV cache's host tier on a device whose streams run as late as they may: state and bytes as on the CPU backend."""

from __future__ import annotations

import numpy as np

from cache_engine import HbmPool, KvCache
from tests.cache_engine.backends.local_device import World
from tests.cache_engine.invariants import check

PAGE, TOKEN = 64, 16  # bytes: four tokens a page


def bytes_of(user: int, number: int) -> np.ndarray:
    """The page `number` of the user's history."""
    return np.random.default_rng((user, number)).integers(0, 256, PAGE).astype(np.uint8)


def test_random_use_leaves_the_same_state_and_bytes_on_both_backends(world: World) -> None:
    pools = [
        HbmPool(12, PAGE, ("kv",), min_pages=0),
        HbmPool(12, PAGE, ("kv",), min_pages=0, backend="cuda", device=world.device()),
    ]
    caches = [KvCache(pool, token_bytes=TOKEN, host_pages=9) for pool in pools]
    for pool in pools:
        pool.set_goals({"kv": 12}, 0)
        pool.migrate(12)
    rng = np.random.default_rng(1)
    page = np.empty(PAGE, np.uint8)
    compared = 0
    for i in range(600):
        user, pages, what = int(rng.integers(0, 8)), int(rng.integers(1, 7)), int(rng.integers(0, 10))
        goal = int(rng.integers(6, 13))
        answers = []
        for pool, kv in zip(pools, caches, strict=True):
            if what < 5:
                found = kv.lookup(user, 4 * pages) // 4
                answers.append(fits := kv.extend(user, 4 * pages))
                for number in range(found, pages if fits else 0):
                    destination = pool.page(int(kv.pages(user)[number]))
                    if pool.device is None:
                        destination[:] = bytes_of(user, number)
                    else:  # as a model would: on the pool's stream, which nobody waits for
                        pool.device.write(destination, bytes_of(user, number))
            elif what < 8:
                answers.append(kv.onboard(user, 4 * pages))
                for number, at in enumerate(kv.pages(user)):
                    pool.read_page(int(at), page)
                    assert (page == bytes_of(user, number)).all(), (i, user, number)
                    compared += 1
            elif what < 9:
                answers.append(kv.offload(pages))
            else:
                pool.set_goals({"kv": goal}, i + 1)
                answers.append(pool.migrate(4))
        assert answers[0] == answers[1]
        one, two = ((*kv.state, *(kv.host or ())) for kv in caches)
        assert all((a == b).all() for a, b in zip(one, two, strict=True))
    for pool, kv in zip(pools, caches, strict=True):
        check(pool, kv=kv)
        assert kv.stats().onboarded > 100
        pool.close()
    assert compared > 500
