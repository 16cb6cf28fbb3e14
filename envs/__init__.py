"""Gymnasium environments and the serving model behind them; importing it registers `helm_rl/HelmNode-v0`."""

import gymnasium

if "helm_rl/HelmNode-v0" not in gymnasium.registry:
    gymnasium.register(id="helm_rl/HelmNode-v0", entry_point="envs.node_env:HelmNodeEnv")
