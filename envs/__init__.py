"""Gymnasium environments and the serving model behind them; importing it registers them.

`helm_rl/HelmNode-v0` is a node on the model clock, `helm_rl/HelmCluster-v0` several behind a router, and
`helm_rl/HelmLive-v0` the live cache engine on the wall clock.
"""

import gymnasium

if "helm_rl/HelmNode-v0" not in gymnasium.registry:
    gymnasium.register(id="helm_rl/HelmNode-v0", entry_point="envs.node_env:HelmNodeEnv")
if "helm_rl/HelmCluster-v0" not in gymnasium.registry:
    gymnasium.register(id="helm_rl/HelmCluster-v0", entry_point="envs.cluster_env:HelmClusterEnv")
if "helm_rl/HelmLive-v0" not in gymnasium.registry:
    gymnasium.register(id="helm_rl/HelmLive-v0", entry_point="envs.live_env:HelmLiveEnv", nondeterministic=True)
