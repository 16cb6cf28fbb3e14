"""To which side memory is worth more: what a page would save, weighted by how near that resource is to its limit."""

from __future__ import annotations

import math
from typing import Protocol

PRESSURE = 3.0
"""Exponent of the weight. Mean waiting at one resource has 2 (Pollaczek and Khinchine: 1 / (1 - u)^2 is how fast it
rises with the busy share u), its higher moments, which the tail of latency is made of, more. On training draws of
`trend`, on hardware and links of five kinds, the alpha at which both sides weigh the same was nearest to the best
static with 3."""
_MOST_BUSY = 0.98


class Measured(Protocol):
    """What serving took, and what pages are worth: `WindowStats`, or sums of them with the margins weighted alike."""

    @property
    def length_ns(self) -> int:
        """Time that was measured."""

    @property
    def link_busy_ns(self) -> int:
        """Of it, with the link busy."""

    @property
    def compute_busy_ns(self) -> int:
        """Of it, with the accelerator busy."""

    @property
    def emb_margin_ms(self) -> float:
        """Saved per request by 1 % more of the pool as rows."""

    @property
    def kv_margin_ms(self) -> float:
        """The same as keys and values."""

    @property
    def kv_margin_link_ms(self) -> float:
        """Of that, the link's part."""


def lean(measured: Measured) -> float:
    """Return which side a page is worth more to, from -1 (keys and values) to 1 (rows); 0 where neither saves anything.

    A page of rows saves time of the link, one of keys and values saves prefill; rows of histories that are read again
    mostly lie in the pool still, and count for nothing.
    """
    length_ns = max(measured.length_ns, 1)
    link, compute = (
        (1.0 - min(busy_ns / length_ns, _MOST_BUSY)) ** -PRESSURE
        for busy_ns in (measured.link_busy_ns, measured.compute_busy_ns)
    )
    rows, history = link * measured.emb_margin_ms, compute * (measured.kv_margin_ms - measured.kv_margin_link_ms)
    worth = abs(rows) + abs(history)
    return (rows - history) / worth if 0.0 < worth < math.inf else 0.0
