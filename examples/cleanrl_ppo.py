"""PPO in CleanRL's manner, of one's own: the environment through `gym.make`, nothing else of helm-rl.

python cleanrl_ppo.py --scenario burst --total-timesteps 50000
"""

import time
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import nn
from torch.distributions.normal import Normal


@dataclass
class Args:
    env_id: str = "envs:helm_rl/HelmNode-v0"
    scenario: str = "steady"
    episode_s: float = 60.0
    seed: int = 1
    total_timesteps: int = 20_000
    learning_rate: float = 3e-3
    num_envs: int = 4
    num_steps: int = 128
    gamma: float = 0.98
    gae_lambda: float = 0.95
    num_minibatches: int = 4
    update_epochs: int = 8
    clip_coef: float = 0.2
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5


def make_env(args):
    def thunk():
        env = gym.make(args.env_id, scenario=args.scenario, episode_s=args.episode_s)
        env = gym.wrappers.RecordEpisodeStatistics(env)
        return gym.wrappers.ClipAction(env)

    return thunk


def layer_init(layer, std=2**0.5):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, 0.0)
    return layer


def mlp(inputs, outputs, std):
    hidden = layer_init(nn.Linear(inputs, 64)), nn.Tanh(), layer_init(nn.Linear(64, 64)), nn.Tanh()
    return nn.Sequential(*hidden, layer_init(nn.Linear(64, outputs), std=std))


class Agent(nn.Module):
    def __init__(self, envs):
        super().__init__()
        inputs, outputs = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
        self.critic = mlp(inputs, 1, 1.0)
        self.actor_mean = mlp(inputs, outputs, 0.01)
        self.actor_logstd = nn.Parameter(torch.full((1, outputs), -0.5))

    def distribution(self, obs):
        return Normal(self.actor_mean(obs), self.actor_logstd.exp())


def main(args):
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    # Reset within the step that ends an episode: gymnasium's default would count each reset as a transition.
    envs = SyncVectorEnv([make_env(args)] * args.num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
    agent = Agent(envs)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)

    shape = (args.num_steps, args.num_envs)
    obs = torch.zeros(shape + envs.single_observation_space.shape)
    actions = torch.zeros(shape + envs.single_action_space.shape)
    logprobs, rewards, dones, values = (torch.zeros(shape) for _ in range(4))

    started = time.perf_counter()
    next_obs = torch.as_tensor(envs.reset(seed=args.seed)[0])
    for iteration in range(1, args.total_timesteps // (args.num_envs * args.num_steps) + 1):
        returns = []
        for step in range(args.num_steps):
            obs[step] = next_obs
            with torch.no_grad():
                distribution = agent.distribution(next_obs)
                actions[step] = distribution.sample()
                logprobs[step] = distribution.log_prob(actions[step]).sum(1)
                values[step] = agent.critic(next_obs).flatten()
            next_obs, reward, terminated, truncated, infos = envs.step(actions[step].numpy())
            next_obs, rewards[step] = torch.as_tensor(next_obs), torch.as_tensor(reward)
            dones[step] = torch.as_tensor(terminated | truncated)
            if "final_info" in infos:
                returns += infos["final_info"]["episode"]["r"][dones[step].bool().numpy()].tolist()
                for i in np.flatnonzero(truncated):  # cut, not over: it would have gone on
                    with torch.no_grad():
                        rewards[step, i] += args.gamma * agent.critic(torch.as_tensor(infos["final_obs"][i])).item()

        with torch.no_grad():
            advantages, last, next_value = torch.zeros(shape), 0.0, agent.critic(next_obs).flatten()
            for t in reversed(range(args.num_steps)):
                going_on = args.gamma * (1.0 - dones[t])
                last = rewards[t] + going_on * next_value - values[t] + going_on * args.gae_lambda * last
                advantages[t], next_value = last, values[t]
        targets = advantages + values

        b_obs, b_actions, b_logprobs = obs.flatten(0, 1), actions.flatten(0, 1), logprobs.flatten()
        b_advantages, b_targets = advantages.flatten(), targets.flatten()
        for _ in range(args.update_epochs):
            for mb in torch.randperm(len(b_obs)).chunk(args.num_minibatches):
                distribution = agent.distribution(b_obs[mb])
                ratio = (distribution.log_prob(b_actions[mb]).sum(1) - b_logprobs[mb]).exp()
                mb_advantages = (b_advantages[mb] - b_advantages[mb].mean()) / (b_advantages[mb].std() + 1e-8)
                clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
                policy_loss = -torch.min(mb_advantages * ratio, mb_advantages * clipped).mean()
                value_loss = 0.5 * (agent.critic(b_obs[mb]).flatten() - b_targets[mb]).square().mean()
                optimizer.zero_grad()
                (policy_loss + args.vf_coef * value_loss).backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()

        steps = iteration * args.num_envs * args.num_steps
        sps = steps / (time.perf_counter() - started)
        episodic = f"{np.mean(returns):.3f}" if returns else "no episode ended"
        print(f"steps {steps}, episodic return {episodic}, {sps:.0f} steps/s", flush=True)
    envs.close()
    return agent


if __name__ == "__main__":
    main(tyro.cli(Args))
