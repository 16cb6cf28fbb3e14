"""What the caches count; every figure covers the time since it was last read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EmbeddingStats:
    """Rows, by occurrence in the batches unless said otherwise; requested = hits + misses."""

    requested: int
    hits: int
    misses: int
    fetched: int  # unique misses: rows that crossed the link
    bypassed: int  # misses that found no slot
    evicted: int
    link_bytes: int  # (fetched + refilled) x row bytes
    refilled: int = 0  # rows copied in the background


@dataclass(frozen=True)
class KvStats:
    """Tokens where not said otherwise; requested = hits + misses."""

    lookups: int
    requested: int
    hits: int
    misses: int
    extended: int  # pages filled
    evicted: int  # pages
    refused: int  # extensions refused
    stale: int  # users dropped for a new epoch
    host_hits: int = 0  # misses that the host had when they were looked up
    offloaded: int = 0  # pages copied to the host, of those evicted
    onboarded: int = 0  # pages copied back
    given_up: int = 0  # pages that the full host gave up for others
