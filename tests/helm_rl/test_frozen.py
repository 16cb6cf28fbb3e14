"""What a bundle decides is what ONNX, C and torch decide, on every observation."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from helm_rl.c_header import header
from helm_rl.checkpoint import Bundle, load_bundle
from helm_rl.control.helm import Helm
from helm_rl.export import export
from helm_rl.frozen import START, Frozen, acting, begin, decide_by_bundle, freeze
from helm_rl.observation import LOW, SIZE
from helm_rl.onnx_file import OnnxDecision, most_error, onnx_bytes, parse_onnx
from tests.helm_rl.policies import BOUNDS, make_adapting_bundle, make_bundle, network

pytest.importorskip("onnx")

ROOT = Path(__file__).resolve().parents[2]
COMPILERS = [
    ("gcc", ["-std=c99", "-xc"]),
    ("g++", ["-std=c++11", "-xc++"]),
]
WARNINGS = ["-O2", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
NET = network(3)
"""Its actions reach beyond both ends of [-1, 1] on observations of the schema's range."""


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    folder = tmp_path_factory.mktemp("bundles")
    make_bundle(folder / "base", NET)
    make_adapting_bundle(folder / "adapting", NET)
    return {name: load_bundle(folder / name) for name in ("base", "adapting")}


class Compiled:
    """`helm_decide` of a header, compiled."""

    def __init__(self, frozen: Frozen, folder: Path, compiler: str = "gcc", language: list[str] | None = None) -> None:
        (folder / "helm.h").write_text(header(frozen))
        extern = 'extern "C"' if compiler == "g++" else "extern"
        (folder / "helm.c").write_text(
            f'#include "helm.h"\n{extern} void start(double *s);\n'
            f"{extern} double decide(const float *o, double a, double *s);\n"
            "void start(double *s) { helm_start(s); }\n"
            "double decide(const float *o, double a, double *s) { return helm_decide(o, a, s); }\n"
        )
        language = ["-std=c99", "-xc"] if language is None else language
        command = [compiler, *language, *WARNINGS, "-shared", "-fPIC", "helm.c", "-o", "helm.so", "-lm"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        self._library = ctypes.CDLL(str(folder / "helm.so"))
        self._library.decide.restype = ctypes.c_double
        self._state = (ctypes.c_double * 2)()

    def start(self) -> None:
        self._library.start(self._state)

    def decide(self, observation: np.ndarray[Any, Any], applied_alpha: float) -> float:
        at = np.ascontiguousarray(observation).ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        return float(self._library.decide(at, ctypes.c_double(applied_alpha), self._state))


def needs(compiler: str) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")


@pytest.fixture(scope="module")
def compiled(bundles: dict[str, Bundle], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Compiled]:
    needs("gcc")
    return {name: Compiled(freeze(bundle), tmp_path_factory.mktemp(name)) for name, bundle in bundles.items()}


@pytest.fixture(scope="module")
def as_onnx(bundles: dict[str, Bundle]) -> dict[str, OnnxDecision]:
    return {name: parse_onnx(onnx_bytes(freeze(bundle)), name) for name, bundle in bundles.items()}


def helm(bundle: Bundle) -> Helm:
    found = acting(bundle, None)
    begin(found)
    return found


# Parity

anything = st.floats(width=32, allow_nan=True, allow_infinity=True)
within = st.floats(-1.0, 1.0, width=32)
shares = st.floats(0.0, 1.0)


@st.composite
def decisions(draw: st.DrawFn) -> list[tuple[np.ndarray[Any, Any], float]]:
    """Observations and applied alphas in a row: most within the schema's range, and some that are anything."""
    drawn = []
    for _ in range(draw(st.integers(1, 6))):
        x = draw(arrays(np.float32, SIZE, elements=within))
        x = np.where(LOW < 0, x, np.abs(x))
        for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
            x[draw(st.integers(0, SIZE - 1))] = draw(anything)
        drawn.append((x.astype(np.float32), draw(st.one_of(shares, shares, st.floats()))))
    return drawn


@pytest.mark.parametrize("name", ["base", "adapting"])
@settings(max_examples=100, deadline=None)
@given(drawn=decisions())
def test_onnx_and_c_decide_as_the_bundle(
    name: str,
    bundles: dict[str, Bundle],
    as_onnx: dict[str, OnnxDecision],
    compiled: dict[str, Compiled],
    drawn: list[tuple[np.ndarray[Any, Any], float]],
) -> None:
    ours = helm(bundles[name])
    compiled[name].start()
    state = np.array([START])
    for observation, applied in drawn:
        expected = ours.decide(observation, applied, 0)
        alpha, state = as_onnx[name].decide(observation[np.newaxis], np.array([applied]), state)
        for found in (float(alpha[0]), compiled[name].decide(observation, applied)):
            assert found == pytest.approx(expected, rel=0, abs=1e-6, nan_ok=True)
        assert np.isnan(expected) or BOUNDS.alpha_min <= expected <= BOUNDS.alpha_max


@settings(max_examples=100, deadline=None)
@given(
    observation=arrays(np.float32, SIZE, elements=within).map(lambda x: np.where(LOW < 0, x, np.abs(x))),
    applied=shares,
)
def test_torch_decides_the_same(
    bundles: dict[str, Bundle],
    as_onnx: dict[str, OnnxDecision],
    compiled: dict[str, Compiled],
    observation: np.ndarray[Any, Any],
    applied: float,
) -> None:
    with torch.no_grad():
        action = float(NET(torch.from_numpy(observation))[0])
    step = BOUNDS.rate_per_s * BOUNDS.interval_s[0]
    expected = min(max(applied + min(max(action, -1.0), 1.0) * step, BOUNDS.alpha_min), BOUNDS.alpha_max)
    alpha, _ = as_onnx["base"].decide(observation[np.newaxis], np.array([applied]), np.array([START]))
    compiled["base"].start()
    got = [
        float(alpha[0]),
        compiled["base"].decide(observation, applied),
        helm(bundles["base"]).decide(observation, applied, 0),
    ]
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "runtime"),
    [("base", "onnxruntime"), ("adapting", "onnxruntime"), ("adapting", "reference evaluator")],
)
def test_ten_thousand_raw_observations(
    name: str, runtime: str, bundles: dict[str, Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    if runtime == "onnxruntime":
        pytest.importorskip("onnxruntime")
    else:
        monkeypatch.setitem(sys.modules, "onnxruntime", None)
    written = parse_onnx(onnx_bytes(freeze(bundles[name])), name)
    assert runtime in written.runtime
    ours = decide_by_bundle(bundles[name], None, 10, 1_000, seed=7)
    assert most_error(written, ours) <= 1e-6
    moved = np.diff(ours.alpha, axis=0)
    assert np.nanmax(moved) > 0.02  # the actions, and with them the test, are not near zero
    assert np.nanmin(moved) < -0.02
    ours.alpha[3, 5] += 1e-3
    assert most_error(written, ours) == pytest.approx(1e-3, abs=1e-6)
    ours.alpha[3, 5] = np.nan
    assert most_error(written, ours) == np.inf


@pytest.mark.parametrize("name", ["limit", "pace"])
def test_limit_and_pace_bind(name: str, bundles: dict[str, Bundle], tmp_path: Path) -> None:
    """What lacks one of them decides otherwise, so that a writer of either kind that forgot it would be found."""
    needs("gcc")
    frozen = freeze(bundles["adapting"])
    assert (frozen.bound, frozen.limit, frozen.pace) == pytest.approx((0.15, 0.05, 0.02))
    loose = dataclasses.replace(frozen, **{name: 0.5})
    ours = decide_by_bundle(bundles["adapting"], None, 10, 100)
    assert most_error(parse_onnx(onnx_bytes(loose), name), ours) > 0.005
    found, off = Compiled(loose, tmp_path), 0.0
    for k in range(20):
        found.start()
        for observation, applied, alpha in zip(
            ours.observation[:, k], ours.applied_alpha[:, k], ours.alpha[:, k], strict=True
        ):
            off = max(off, abs(found.decide(observation, float(applied)) - alpha))
    assert off > 0.005


def test_the_offset_is_in_it_where_the_adapter_may_act(bundles: dict[str, Bundle], tmp_path: Path) -> None:
    frozen = freeze(bundles["adapting"])
    assert [weight.shape for weight, _ in frozen.residual] == [(16, 18), (16, 16), (1, 16)]
    ours = decide_by_bundle(bundles["adapting"], None, 10, 20)
    without = decide_by_bundle(bundles["base"], None, 10, 20)
    off = np.abs(ours.alpha - without.alpha)
    assert 0.005 < np.nanmean(off) <= np.nanmax(off) < 0.2
    path = make_adapting_bundle(tmp_path / "b", NET)
    learnt = path.with_suffix(".json")
    document = json.loads(learnt.read_text())
    doubted = {"claimed": [0.0] * 20}  # and the observation tells otherwise
    resting = {"left": 100, "tripped": 1}  # after harm
    for name, seen in (("doubted", doubted), ("resting", resting)):
        learnt.write_text(json.dumps(document | {"guard": document["guard"] | seen}))
        export(tmp_path / "b-plain", tmp_path / name, residual=learnt)
        kept_still = load_bundle(tmp_path / name)
        assert freeze(kept_still).residual == ()
        np.testing.assert_array_equal(decide_by_bundle(kept_still, None, 10, 20).alpha, without.alpha)


@pytest.mark.parametrize(("compiler", "language"), COMPILERS)
@pytest.mark.parametrize("name", ["base", "adapting"])
def test_the_header_compiles_without_a_warning(
    name: str, compiler: str, language: list[str], bundles: dict[str, Bundle], tmp_path: Path
) -> None:
    needs(compiler)
    found = Compiled(freeze(bundles[name]), tmp_path, compiler, language)
    ours = decide_by_bundle(bundles[name], None, 20, 3)
    for k in range(3):
        found.start()
        got = [found.decide(ours.observation[step, k], ours.applied_alpha[step, k]) for step in range(20)]
        np.testing.assert_allclose(got, ours.alpha[:, k], rtol=0, atol=1e-6)


@pytest.mark.parametrize("option", ["-ffast-math", "-Ofast", "-ffinite-math-only"])
def test_the_header_refuses_a_compiler_that_knows_no_nan(
    option: str, bundles: dict[str, Bundle], tmp_path: Path
) -> None:
    needs("gcc")
    (tmp_path / "helm.h").write_text(header(freeze(bundles["base"])))
    command = ["gcc", option, "-fsyntax-only", "-xc", "helm.h"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert "take NaN for a number" in done.stderr


# The README


def test_the_readmes_example_runs(bundles: dict[str, Bundle], tmp_path: Path) -> None:
    needs("gcc")
    (example,) = re.findall(r"```c\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "helm.h").write_text(header(freeze(bundles["base"])))
    (tmp_path / "main.c").write_text(example)
    command = ["gcc", "-std=c99", *WARNINGS, "main.c", "-o", "main", "-lm"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed = subprocess.run([tmp_path / "main"], capture_output=True, text=True, check=True).stdout
    ours = helm(bundles["base"])
    assert float(printed) == pytest.approx(ours.decide(np.zeros(SIZE, np.float32), 0.5, 0), abs=1e-4)
