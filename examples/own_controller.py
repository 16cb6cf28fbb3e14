"""A controller of one's own: `helm-rl eval p99 --controller own_controller:HotUsers` in this folder measures it."""

from helm_rl.observation import OBSERVATION_NAMES

HOT = OBSERVATION_NAMES.index("hot_user_ratio")


class HotUsers:
    """Gives keys and values more of the memory the more of the users have been there within the last minute."""

    def reset(self, seed):
        self.target = None

    def decide(self, observation, applied_alpha, now_ns):
        goal = 0.8 - 0.6 * float(observation[HOT])
        before = applied_alpha if self.target is None else self.target
        self.target = min(max(goal, before - 0.02), before + 0.02)  # late and gradual: what moves at once is cold
        return self.target

    def tick(self, arrivals, p99_ms, now_ns):
        return False

    def feedback(self, window):
        pass
