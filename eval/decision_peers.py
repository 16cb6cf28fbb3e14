"""The whole controller, and its network in torch, onnxruntime and NumPy: calls that decide, to be timed."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np

SHOWN = 64
"""Observations that are decided upon in turn."""

HELM = "helm"
PEERS = {
    "torch": "torch, eager: normaliser and network",
    "onnxruntime": "onnxruntime, session.run: normaliser and network",
    "onnxruntime_bound": "onnxruntime, io binding: normaliser and network",
    "onnxruntime_export": "onnxruntime, session.run: what helm-rl export --onnx writes",
    "onnxruntime_export_bound": "onnxruntime, io binding: the same",
    "numpy": "NumPy: normaliser and network",
}
ABOUT = {
    HELM: "helm-rl: checks, normaliser, network, offset, recovery, bounds",
    "feedback": "helm-rl, learning from a window before each decision",
    **PEERS,
    "kernel": "helm-rl, the compiled call alone",
    "empty_call": "a compiled call that does nothing",
    "clock": "nothing: the clock's own time, which is in all of them",
}
"""What is timed, by the names in figures."""

Call = Callable[[int], float]


class Contest:
    """One policy of the usual size with all layers, drawn from a seed, and the same in the peers' forms.

    multiply_adds: of the base network.
    """

    def __init__(self) -> None:
        import torch

        from helm_rl.checkpoint import BoundsSection, NetworkSection
        from helm_rl.control.policy_net import CLIP, EPSILON, HIDDEN, ActorCritic
        from helm_rl.observation import HIGH, LOW, SIZE

        rng = np.random.default_rng(1)
        self.observations = list(rng.uniform(LOW, HIGH, (SHOWN, SIZE)).astype(np.float32))
        self.net = ActorCritic(SIZE, 1, generator=torch.Generator().manual_seed(1))
        self.net.normaliser.update(torch.from_numpy(np.stack(self.observations)))
        with torch.no_grad():
            self.net.get_parameter("actor.4.weight").mul_(60.0)
        self.net.eval()
        state = {name: value.numpy() for name, value in self.net.state_dict().items()}
        self.tensors = {name: value for name, value in state.items() if name.startswith(("normaliser.", "actor."))}
        self.network = NetworkSection(hidden=HIDDEN, action_size=1, observation_clip=CLIP, epsilon=EPSILON)
        self.bounds = BoundsSection(alpha_min=0.1, alpha_max=0.9, rate_per_s=0.06, interval_s=(1.0,))
        self.layers = [
            (self.tensors[f"actor.{2 * i}.weight"], self.tensors[f"actor.{2 * i}.bias"]) for i in range(len(HIDDEN) + 1)
        ]
        self.std = np.sqrt(self.tensors["normaliser.var"] + EPSILON)
        self.multiply_adds = sum(weight.size for weight, _ in self.layers)
        self.helm, self.twin = self._helm(), self._helm()

    def _helm(self, acts: bool = True) -> Any:
        from helm_rl.control.base import BasePolicy
        from helm_rl.control.guard import Guard, Mode
        from helm_rl.control.helm import Helm
        from helm_rl.control.recovery import Recovery, RecoveryRule
        from helm_rl.control.residual import Residual

        base = BasePolicy(self.tensors, self.network, self.bounds)
        adapter = Residual(base)
        helm = Helm(base, adapter, Recovery(adapter, RecoveryRule(0.6, 0.2)))
        if acts:
            adapter.net.weights[2][...] = np.random.default_rng(2).normal(0.0, 0.3, adapter.net.weights[2].shape)
            assert isinstance(adapter.guard, Guard)
            adapter.guard.mode = Mode.ACT
        return helm

    def calls(self, left_out: list[str]) -> dict[str, Call]:
        """Return what decides upon the observation of a number, by name; a sentence goes to `left_out` for each peer
        that is not installed."""
        calls = {
            HELM: self._whole(self.helm),
            "feedback": self._learning(self._helm(acts=False)),
            "torch": self._torch(),
            "numpy": self._numpy(),
            **self._compiled(),
        }
        missing = [name for name in ("onnxruntime", "onnx") if find_spec(name) is None]
        if missing:
            left_out.append(
                f"{' and '.join(missing)} not installed, so onnxruntime is left out; pip install 'helm-rl[bench,onnx]' "
                "brings it"
            )
        else:
            calls |= self._onnxruntime()
        return {name: calls[name] for name in ABOUT if name in calls}

    def check(self, calls: dict[str, Call]) -> None:
        """Raise ValueError unless all peers say what the base policy and the whole controller say."""
        twin = self._helm()
        for i, observation in enumerate(self.observations):
            action = float(self.helm.base.action(observation)[0])
            decided = twin.decide(observation, 0.5, i)
            for name in PEERS.keys() & calls.keys():
                expected = decided if "export" in name else action
                if not abs(calls[name](i) - expected) <= 1e-5:
                    raise ValueError(f"{name} decides {calls[name](i)} upon observation {i}, helm-rl {expected}")

    def _whole(self, helm: Any) -> Call:
        observations, decide = self.observations, helm.decide
        return lambda i: decide(observations[i], 0.5, 0)

    def _learning(self, helm: Any) -> Call:
        from helm_rl.metrics import WindowStats
        from helm_rl.observation import OBSERVATION_NAMES

        fields: dict[str, Any] = dict.fromkeys(WindowStats.__dataclass_fields__, 0) | {"end_ns": 10**9, "pages": 1}
        fields |= {"arrivals": 100, "completed": 100, "history_tokens": 150_000, "alpha": 0.5, "emb_margin_ms": 1.0}
        observations, decide, feedback = self.observations, helm.decide, helm.feedback
        p99_ms = [50.0 * float(one[OBSERVATION_NAMES.index("p99_over_slo")]) for one in observations]
        windows = [WindowStats(**fields | {"p99_ms": each}) for each in p99_ms]

        def call(i: int) -> float:
            feedback(windows[i])
            return decide(observations[i], 0.5, 0)

        return call

    def _compiled(self) -> dict[str, Call]:
        from eval.timed_kernels import nothing
        from helm_rl.control import kernel
        from helm_rl.control.guard import Mode

        acts = Mode.ACT.value
        memory = self.twin._memory  # addresses of its arrays: it must live on
        return {
            "kernel": lambda i: kernel.decide(memory, 0.5, 0, 0, acts),
            "empty_call": lambda i: nothing(memory, 0.5, 0, 0, acts),
            "clock": lambda i: 0.5,
        }

    def _torch(self) -> Call:
        import torch

        tensors = [torch.from_numpy(one) for one in self.observations]
        net, no_gradients = self.net, torch.inference_mode

        def call(i: int) -> float:
            with no_gradients():
                return net(tensors[i]).item()

        return call

    def _numpy(self) -> Call:
        mean, std, clip = self.tensors["normaliser.mean"], self.std, self.network.observation_clip
        layers = [(np.ascontiguousarray(weight.T), bias) for weight, bias in self.layers]
        (last, bias), hidden, observations = layers[-1], layers[:-1], self.observations

        def call(i: int) -> float:
            x = ((observations[i] - mean) / std).clip(-clip, clip).astype(np.float32)
            for weight, shift in hidden:
                x = np.tanh(x @ weight + shift)
            return float((x @ last + bias)[0])

        return call

    def _onnxruntime(self) -> dict[str, Call]:
        from helm_rl.frozen import START, Frozen, offset_of
        from helm_rl.onnx_file import onnx_bytes

        bounds = self.bounds
        residual, bound, limit, pace = offset_of(self.helm.adapter)
        frozen = Frozen(
            mean=self.tensors["normaliser.mean"],
            std=self.std,
            clip=self.network.observation_clip,
            base=tuple(self.layers),
            residual=residual,
            bound=bound,
            limit=limit,
            pace=pace,
            step=self.helm.base.step,
            alpha_min=bounds.alpha_min,
            alpha_max=bounds.alpha_max,
            rate_per_s=bounds.rate_per_s,
            interval_s=bounds.interval_s[0],
            policy_sha256="",
        )
        network = _session(network_onnx(frozen))
        whole = onnx_bytes(frozen)
        rows = [one[np.newaxis] for one in self.observations]
        fed = [{"observation": row} for row in rows]
        applied = np.array([[0.5]])
        state = [np.array([START])]
        run = _session(whole)

        def run_whole(i: int) -> float:
            alpha, state[0] = run.run(None, {"observation": rows[i], "applied_alpha": applied, "state": state[0]})
            return float(alpha[0, 0])

        network_in, network_out = np.zeros((1, 17), np.float32), np.zeros((1, 1), np.float32)
        bound_network = _bound(network, {"observation": network_in}, {"action": network_out})
        whole_in = {"observation": network_in.copy(), "applied_alpha": applied, "state": np.array([START])}
        whole_out = {"alpha": np.zeros((1, 1)), "next_state": np.zeros((1, 2))}
        bound_whole = _bound(_session(whole), whole_in, whole_out)

        def run_bound(i: int) -> float:
            network_in[...] = rows[i]
            bound_network()
            return float(network_out[0, 0])

        def run_whole_bound(i: int) -> float:
            whole_in["observation"][...] = rows[i]
            bound_whole()
            whole_in["state"][...] = whole_out["next_state"]
            return float(whole_out["alpha"][0, 0])

        return {
            "onnxruntime": lambda i: float(network.run(None, fed[i])[0][0, 0]),
            "onnxruntime_bound": run_bound,
            "onnxruntime_export": run_whole,
            "onnxruntime_export_bound": run_whole_bound,
        }


def network_onnx(frozen: Any) -> bytes:
    """Return normaliser and network alone as an ONNX model: what onnxruntime can do with the least work."""
    from onnx import TensorProto, helper, numpy_helper

    named = {"mean": frozen.mean, "std": frozen.std, "low": np.float32(-frozen.clip), "high": np.float32(frozen.clip)}
    nodes = [
        helper.make_node("Cast", ["observation"], ["wide"], to=TensorProto.DOUBLE),
        helper.make_node("Sub", ["wide", "mean"], ["centred"]),
        helper.make_node("Div", ["centred", "std"], ["scaled"]),
        helper.make_node("Cast", ["scaled"], ["narrow"], to=TensorProto.FLOAT),
        helper.make_node("Clip", ["narrow", "low", "high"], ["x0"]),
    ]
    last = len(frozen.base) - 1
    for i, (weight, bias) in enumerate(frozen.base):
        named |= {f"weight{i}": weight, f"bias{i}": bias}
        out = "action" if i == last else f"sum{i}"
        nodes.append(helper.make_node("Gemm", [f"x{i}", f"weight{i}", f"bias{i}"], [out], transB=1))
        if i < last:
            nodes.append(helper.make_node("Tanh", [out], [f"x{i + 1}"]))
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info("observation", TensorProto.FLOAT, [1, frozen.mean.size])],
        [helper.make_tensor_value_info("action", TensorProto.FLOAT, [1, 1])],
        [numpy_helper.from_array(np.asarray(value, order="C"), name) for name, value in named.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    content: bytes = model.SerializeToString()
    return content


def _session(model: bytes) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _bound(session: Any, inputs: dict[str, Any], outputs: dict[str, Any]) -> Callable[[], None]:
    """Return what runs a session from and to these arrays, which stay where they are."""
    binding = session.io_binding()
    for bind, arrays in ((binding.bind_input, inputs), (binding.bind_output, outputs)):
        for name, array in arrays.items():
            bind(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
    run = session.run_with_iobinding
    return lambda: run(binding)
