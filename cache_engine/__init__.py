"""One HBM pool and the caches that share it; needs no other folder of the project."""

from cache_engine.backends.device import CudaUnavailableError
from cache_engine.embedding import EmbeddingCache, EmbeddingLease, EmbeddingLookup
from cache_engine.ghost import EmbeddingGhost, Gain, KvGhost
from cache_engine.kv import KvCache, KvLease
from cache_engine.pool import HbmPool, Migration, PoolClosedError, PoolStats, TargetStatus
from cache_engine.stats import EmbeddingStats, KvStats

__all__ = [
    "CudaUnavailableError",
    "EmbeddingCache",
    "EmbeddingGhost",
    "EmbeddingLease",
    "EmbeddingLookup",
    "EmbeddingStats",
    "Gain",
    "HbmPool",
    "KvCache",
    "KvGhost",
    "KvLease",
    "KvStats",
    "Migration",
    "PoolClosedError",
    "PoolStats",
    "TargetStatus",
]
