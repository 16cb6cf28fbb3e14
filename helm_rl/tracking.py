"""Weights and Biases, for those who ask for it: a run of theirs, and bundles as its artefacts.

The package is imported inside the functions, so that nothing of it is loaded unasked. With WANDB_MODE=offline all of it
works without an account and without a network; `wandb sync` uploads later.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from typing import Any

from helm_rl.checkpoint import CARD_FILE, CONFIG_FILE, POLICY_FILE, Bundle
from helm_rl.errors import UserError

PROJECT = "helm-rl"
"""Project at Weights and Biases, where none is named."""


def check_installed() -> None:
    """Raise UserError unless the package is there; for before the work."""
    if importlib.util.find_spec("wandb") is None:
        raise UserError("--track needs the package wandb; pip install 'helm-rl[track]'")


def start(
    *,
    project: str = PROJECT,
    entity: str | None = None,
    run_id: str | None = None,
    name: str | None = None,
    config: Mapping[str, Any] | None = None,
    tensorboard: bool = False,
) -> Any:
    """Start a run, or go on with the one of `run_id`, and return it.

    Its files lie in ./wandb, or where WANDB_DIR says. They must not lie in the folder that TensorBoard's events are
    written to: there it would find the links that it makes to them, and follow those instead.

    tensorboard: take along what a SummaryWriter writes that is made after this.

    Raises:
        UserError: It did not start.
    """
    import wandb

    try:
        return wandb.init(
            project=project,
            entity=entity,
            id=run_id,
            resume="allow",
            sync_tensorboard=tensorboard,
            config=None if config is None else dict(config),
            name=name,
        )
    except wandb.errors.Error as error:
        raise UserError(
            f"--track: Weights and Biases did not start: {error}; WANDB_MODE=offline needs no account"
        ) from None


def log_bundle(run: Any, bundle: Bundle, name: str) -> None:
    """Log a bundle's folder as an artefact of type "model", a version of `name`, with what is in it as metadata.

    It is copied aside at once, so the folder may go away afterwards.
    """
    import wandb

    config = bundle.config
    validation = config.training.validation
    card = (bundle.path / CARD_FILE).read_text(encoding="utf-8", errors="replace")
    artefact = wandb.Artifact(
        re.sub(r"[^A-Za-z0-9._-]", "-", name)[:128],
        type="model",
        description=card.partition("\n")[0].removeprefix("# "),
        metadata={
            "policy_sha256": config.files[POLICY_FILE],
            "layers": list(bundle.layers),
            "observation_schema": config.observation.schema_hash,
            "scenarios": {source.name: source.sha256 for source in config.environment.scenarios},
            "interval_s": list(config.bounds.interval_s),
            "seed": config.training.seed,
            "steps": config.training.steps,
            "validation_p99_regret": None if validation.best is None else validation.regrets[validation.best],
            "commands": config.training.commands,
            "helm_rl_version": config.training.helm_rl_version,
        },
    )
    for file in (CARD_FILE, CONFIG_FILE, *config.files):
        artefact.add_file(str(bundle.path / file))
    run.log_artifact(artefact)
