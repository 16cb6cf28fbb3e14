"""A scenario whose network is computed in a millisecond."""

from __future__ import annotations

SMALL = """
name = "small"
slo_ms = 500
seconds = 20
warm_s = 1
[model]
profile = "hstu-3"
layers = 2
d_model = 32
heads = 2
kv_heads = 2
head_dim = 16
value_bytes = 4
features_per_token = 2
row_bytes = 32
candidates = 16
[hardware]
profile = "cpu-thread"
link_gb_s = 0.01
pool_gib = 0.03125
page_kib = 32
refill_share = 0
[control]
interval_s = 0.5
[load]
rate = 100
users = 500
items = 100000
history_mean = 100
history_max = 256
"""
