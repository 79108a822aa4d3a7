"""Beginning a run from another one's checkpoint: all of its weights or some, with its optimizer state or a fresh one.

takes -> the other run's store, a checkpoint's name, what to take; gives -> what was taken and what was left as
initialised. Nothing is taken silently: every pattern must match, every matched parameter must be there with its
shape, and the bytes are checked before they are used. A collective; all ranks raise alike. Source: own.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from pretrain.checkpoint.files import only_in
from pretrain.checkpoint.fitting import Fitting, listed, shapes_differ, what_fits
from pretrain.checkpoint.format import Manifest
from pretrain.checkpoint.holds import reading
from pretrain.checkpoint.restore import fill_engine, shared_choice, shared_manifest
from pretrain.engine.state import Stateful
from pretrain.errors import CheckpointError, UserError
from pretrain.store import Store
from pretrain.topology import World


@dataclass(frozen=True, slots=True)
class Selection:
    """What is taken over.

    Attributes:
        only: patterns (*, ?, [..]) of names of parameters.
        leave_out: patterns of those that are not, of the ones that match `only`.
        with_optimizer: take the optimizer's state too; then everything must be taken.
    """

    only: tuple[str, ...] = ("*",)
    leave_out: tuple[str, ...] = ()
    with_optimizer: bool = False

    def of(self, names: list[str]) -> list[str]:
        """The selected names. Raises UserError when a pattern matches none of them."""
        for pattern in (*self.only, *self.leave_out):
            if not any(fnmatchcase(name, pattern) for name in names):
                raise UserError(
                    f"checkpoint.start_from: pattern {pattern} matches no parameter of this model. Each must match. "
                    f"Names look like {', '.join(names[:4])}. Correct it or remove it."
                )
        wanted = [name for name in names if any(fnmatchcase(name, pattern) for pattern in self.only)]
        return [name for name in wanted if not any(fnmatchcase(name, pattern) for pattern in self.leave_out)]


@dataclass(frozen=True, slots=True)
class Started:
    """What an engine took over.

    Attributes:
        taken: names of parameters and buffers.
        left: names of those that keep their initial values.
        notes: what else a person should know.
    """

    name: str
    step: int
    taken: list[str]
    left: list[str]
    notes: list[str] = field(default_factory=list)


def start_from(store: Store, name: str, engine: Stateful, world: World, selection: Selection) -> Started:
    """Takes the selected state of a checkpoint over. A collective.

    Raises:
        UserError: a pattern matches nothing, or the optimizer's state is wanted of a part only.
        CheckpointError: the checkpoint is absent, damaged, or does not fit what was selected.
    """
    names = list(engine.shapes())
    taken = selection.of(names)
    left = [entry for entry in names if entry not in set(taken)]
    if selection.with_optimizer and left:
        raise UserError(
            f"checkpoint.start_from.optimizer=keep with {len(left)} parameters left out. The optimizer counts its "
            "steps for all parameters of a group. Set checkpoint.start_from.optimizer=fresh, or take all."
        )
    (chosen,), _ = shared_choice(store, world, name)
    with reading(store, chosen, "start of another run") if world.is_main else nullcontext():
        manifest, problem = shared_manifest(store, world, chosen)
        if manifest is None:
            raise CheckpointError(f"checkpoint={name} in {store.url} cannot be used: {problem}. Name another one.")
        fitting = what_fits(manifest, engine) if selection.with_optimizer else Fitting()
        _check(manifest, engine, taken)
        outcome = fill_engine(only_in(store.child(chosen)), engine, world, manifest, fitting, only=set(taken))
    if outcome.problem:
        raise CheckpointError(f"checkpoint={name} in {store.url} cannot be used: {outcome.problem}. Name another one.")
    return Started(name, manifest.step, taken, left, outcome.notes)


def _check(manifest: Manifest, engine: Stateful, taken: list[str]) -> None:
    saved, wanted = manifest.parameters, engine.shapes()
    lines = [
        *listed("missing in the checkpoint", [name for name in taken if name not in saved]),
        *listed(
            "of another shape",
            [shapes_differ(name, saved, wanted) for name in taken if name in saved and saved[name] != wanted[name]],
        ),
    ]
    if lines:
        raise CheckpointError(
            f"{manifest.name} does not fit what checkpoint.start_from selects. Every selected parameter must be there "
            "with its shape. Name others in only, or these in leave_out.\n" + "\n".join(lines)
        )
