"""Whether a checkpoint fits an engine, and what of its optimizer state is taken over. PURE.

Every rank has the same manifest and model, so all decide and raise alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pretrain.checkpoint.format import Manifest
from pretrain.engine.state import OptimizerSpec, Scalars, Stateful
from pretrain.errors import CheckpointError

_NAMES_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Fitting:
    """Optimizer state to take over: keys with a number per weight, and single numbers, by parameter group."""

    element_keys: dict[str, tuple[str, ...]] = field(default_factory=dict)
    scalars: Scalars = field(default_factory=dict)


def what_fits(manifest: Manifest, engine: Stateful) -> Fitting:
    """All of it, or an error.

    Raises:
        CheckpointError: parameters, their groups or the optimizer of the checkpoint are not the engine's.
    """
    _check_parameters(manifest, engine)
    spec, saved = engine.optimizer_spec(), manifest.optimizer
    if saved["kind"] != spec.kind:
        raise CheckpointError(
            f"optimizer={spec.kind} does not fit {manifest.name}, which was saved by {saved['kind']}. A resume goes on "
            "with the same optimizer state. Set optimizer.kind back, or start a new run from its weights "
            "(checkpoint.start_from)."
        )
    return Fitting(_element_keys(manifest, spec), _scalars(manifest, spec))


def _element_keys(manifest: Manifest, spec: OptimizerSpec) -> dict[str, tuple[str, ...]]:
    groups, kept = manifest.optimizer["groups"], {}
    for name, group in spec.groups.items():
        there = tuple(groups[name]["element_keys"]) if name in groups else ()
        lacking = [key for key in group.element_keys if key not in there]
        if there and lacking:
            raise CheckpointError(
                f"{manifest.name} lacks {', '.join(lacking)} of group {name} (it has {', '.join(there)}). A resume "
                "goes on with the same optimizer state. Set the optimizer section back, or start a new run from its "
                "weights (checkpoint.start_from)."
            )
        kept[name] = tuple(key for key in there if key in group.element_keys)
    if any(kept.values()) and not all(kept[name] for name, group in spec.groups.items() if group.element_keys):
        raise CheckpointError(
            f"{manifest.name} has optimizer state of {', '.join(name for name in kept if kept[name])} only. "
            "A checkpoint has it of all groups or of none. Use another checkpoint."
        )
    return kept


def _scalars(manifest: Manifest, spec: OptimizerSpec) -> Scalars:
    saved = {name: group["scalars"] for name, group in manifest.optimizer["groups"].items() if group["scalars"]}
    wanted = {name for name, group in spec.groups.items() if group.scalar_keys}
    if saved and set(saved) != wanted:
        raise CheckpointError(
            f"parameter groups {sorted(wanted)} do not fit {manifest.name} with {sorted(saved)}. "
            "The optimizer's step is kept by group. Use the version that saved it."
        )
    return {name: {key: float(value) for key, value in values.items()} for name, values in saved.items()}


def _check_parameters(manifest: Manifest, engine: Stateful) -> None:
    saved, wanted, groups = manifest.parameters, engine.shapes(), engine.groups()
    both = [name for name in wanted if name in saved]
    lines = [
        *listed("missing in the checkpoint", [name for name in wanted if name not in saved]),
        *listed("unexpected in the checkpoint", [name for name in saved if name not in wanted]),
        *listed(
            "of another shape", [shapes_differ(name, saved, wanted) for name in both if saved[name] != wanted[name]]
        ),
        *listed(
            "in another group",
            [
                f"{name} {manifest.groups[name]} (model: {groups[name]})"
                for name in both
                if manifest.groups[name] != groups[name] and manifest.optimizer["kind"] == engine.optimizer_spec().kind
            ],
        ),
    ]
    if lines:
        raise CheckpointError(
            f"{manifest.name} does not fit the model. Every parameter must be there with its shape. "
            "Set the model section back to what was saved, or start a new run.\n" + "\n".join(lines)
        )


def shapes_differ(name: str, saved: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]]) -> str:
    """One entry of a list of parameters whose shapes differ."""
    return f"{name} {list(saved[name])} (model: {list(wanted[name])})"


def listed(what: str, names: list[str]) -> list[str]:
    """A line with the first of the names, or none."""
    if not names:
        return []
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return [f"  {what}: {', '.join(names[:_NAMES_SHOWN])}{more}"]
