"""What was trained, opened for use: a run, one of its checkpoints, the mean of several, or an exported directory.

Takes the words of a command → a model in fp32 on the CPU, its tokenizer, and what is known of its training.
`TARGET` is a run's name or path, RUN:CHECKPOINT, a checkpoint's directory, or a directory with config.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter
from torch import nn

from launch.export import OBJECTIVE_FILE
from pretrain.checkpoint import newest_checkpoint, read_weights
from pretrain.checkpoint.average import average_weights, last_checkpoints
from pretrain.config import RunConfig
from pretrain.config.objectives import AnyObjective, ObjectiveConfig
from pretrain.config.schema import AnyModelConfig, LossConfig
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError
from pretrain.generate.load import load_weights
from pretrain.generate.text import Writer
from pretrain.model.hf.directory import import_model
from pretrain.rundir import RunDirectory
from pretrain.store import NotFoundError


@dataclass(frozen=True, slots=True)
class Trained:
    """A model and where it comes from.

    Attributes:
        where: path or URL, for people.
        run: the run's config; None for an exported directory.
        objective: that it was trained by; None where nobody knows (models of others).
        checkpoints: whose weights (or whose mean) these are; empty for an exported directory.
    """

    model: nn.Module
    config: AnyModelConfig
    tokenizer: Tokenizer
    where: str
    run: RunConfig | None = None
    objective: AnyObjective | None = None
    checkpoints: tuple[str, ...] = ()

    @property
    def checkpoint(self) -> str | None:
        """The newest of the checkpoints; None for an exported directory."""
        return self.checkpoints[0] if self.checkpoints else None

    @property
    def writer(self) -> Writer:
        """How it is asked for text, which depends on how it was trained."""
        return Writer(self.model, self.config, self.tokenizer, self.objective)


def open_trained(target: str, *, checkpoint: str | None = None, average: int | None = None) -> Trained:
    """Opens a target; see the module.

    Raises:
        UserError: there is no such target, or it does not fit the other arguments.
        CheckpointError: a checkpoint is absent or damaged.
    """
    if Path(target, "config.json").is_file():
        return _open_export(Path(target), named=checkpoint is not None or average is not None)
    run, named = _split(target)
    if not named and Path(target).is_dir() and any(Path(target).glob("*.safetensors")):
        raise UserError(
            f"{target} has weights and no config.json. An exported model has both. Export it again, or name a run."
        )
    if named and (checkpoint is not None or average is not None):
        raise UserError(
            f"{target} names a checkpoint, and so does an option. One is used. Leave out --checkpoint and --average."
        )
    directory = RunDirectory.locate(run)
    store = directory.checkpoints
    if average is not None:
        return open_checkpoints(directory, directory.config(), last_checkpoints(store, average))
    return open_checkpoints(directory, directory.config(), [named or checkpoint or newest_checkpoint(store)])


def open_checkpoints(directory: RunDirectory, config: RunConfig, names: Sequence[str]) -> Trained:
    """A checkpoint of a run, or the mean of several.

    Args:
        names: newest first.

    Raises:
        CheckpointError: one is absent, damaged or of another model.
    """
    store = directory.checkpoints
    weights = read_weights(store, names[0]) if len(names) == 1 else average_weights(store, names)
    where = f"{directory.url}/checkpoints/{names[0]}"
    model = load_weights(config.model, config.loss, weights, where, seed=config.seed)
    tokenizer = tokenizer_of(directory, config)
    return Trained(model, config.model, tokenizer, where, config, config.objective, tuple(names))


def _split(target: str) -> tuple[str, str | None]:
    """The run and the checkpoint that a target names."""
    head, colon, tail = target.rpartition(":")
    if colon and tail.startswith("step-"):
        return head, tail
    run, _, name = target.rstrip("/").rpartition("/checkpoints/")  # a path or a URL
    return (run, name) if run and name.startswith("step-") and "/" not in name else (target, None)


def _open_export(directory: Path, *, named: bool) -> Trained:
    if named:
        raise UserError(
            f"{directory} is an exported model and has no checkpoints. --checkpoint and --average are for runs. "
            "Leave them out."
        )
    config, weights = import_model(directory)
    model = load_weights(config, LossConfig(), weights, str(directory), seed=0)
    return Trained(model, config, Tokenizer.load(directory), str(directory), objective=_exported_objective(directory))


def _exported_objective(directory: Path) -> AnyObjective | None:
    """What `pretrain checkpoint export` says of the training; None beside models of others.

    Raises:
        UserError: the file is damaged.
    """
    file = directory / OBJECTIVE_FILE
    if not file.is_file():
        return None
    try:
        objective: AnyObjective = TypeAdapter(ObjectiveConfig).validate_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{file} says no objective: {error}. It tells how the model is asked. Export it again, or remove the file."
        ) from None
    return objective


def tokenizer_of(directory: RunDirectory, config: RunConfig) -> Tokenizer:
    """The run's own copy; the config's path for runs that have not made one yet."""
    try:
        return Tokenizer(directory.store.get("tokenizer.json"), f"{directory.url}/tokenizer.json")
    except NotFoundError:
        return Tokenizer.load(config.tokenizer)
