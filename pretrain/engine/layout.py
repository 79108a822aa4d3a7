"""Where DeepSpeed keeps the masters and the optimizer's state, for each ZeRO stage and precision.

takes -> an initialised DeepSpeed engine; gives -> `Slot`s: which range of which parameter lies where
in which flat fp32 tensor ("holder") of this rank. Optimizer state is found under the holder; its
per-element keys have the holder's layout. The only file that knows DeepSpeed's private attributes
(0.19.8): a change there breaks here, and the bitwise tests say so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Slot:
    """A range of one parameter inside a holder.

    Attributes:
        start: first element within the parameter.
        offset: first element within the holder (flattened).
        length: elements.
        group: index of the optimizer's parameter group.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    holder: torch.Tensor
    offset: int
    length: int
    group: int

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


def find_slots(engine: Any) -> list[Slot]:
    """Every slot of this rank, in the model's order of parameters. Whole parameters at stage 0."""
    slots = {0: _stage_0, 1: _stage_1_2, 2: _stage_1_2, 3: _stage_3}[int(engine.zero_optimization_stage())](engine)
    order = {name: index for index, (name, _) in enumerate(engine.module.named_parameters())}
    return sorted(slots, key=lambda slot: order[slot.name])


def find_holders(engine: Any) -> list[tuple[torch.Tensor, int]]:
    """All holders of this rank with their group, those without a slot (only padding) included."""
    stage = int(engine.zero_optimization_stage())
    optimizer = engine.optimizer
    if stage == 3:
        return [
            (flat, optimizer.sub_group_to_group_id[index])
            for index, flat in enumerate(optimizer.fp32_partitioned_groups_flat)
        ]
    if stage:
        return [(flat, index) for index, flat in enumerate(optimizer.single_partition_of_fp32_groups)]
    return [(slot.holder, slot.group) for slot in _stage_0(engine)]


def publish_masters(engine: Any) -> None:
    """Makes the weights that the model computes with follow masters that were written. A collective."""
    stage = int(engine.zero_optimization_stage())
    optimizer = engine.optimizer
    if stage == 3:
        for index, flat in enumerate(optimizer.fp32_partitioned_groups_flat):
            optimizer.fp16_partitioned_groups_flat[index].data.copy_(flat.data)
            optimizer._unflatten_partitioned_parameters(index)
        optimizer.checkpoint_event_epilogue()  # gathers the persistent parameters again
    elif stage:
        optimizer.update_lp_params()
    elif engine.bfloat16_enabled():
        for weights, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for weight, master in zip(weights, masters, strict=True):
                weight.data.copy_(master.data)


def release_weights(engine: Any) -> None:
    """Before masters are written: stage 3 drops gathered copies, which would hide the new values."""
    if int(engine.zero_optimization_stage()) == 3:
        engine.optimizer.checkpoint_event_prologue()


def _names(engine: Any) -> dict[torch.Tensor, str]:
    return {parameter: name for name, parameter in engine.module.named_parameters()}


def _stage_0(engine: Any) -> Iterator[Slot]:
    names = _names(engine)
    if engine.bfloat16_enabled():
        pairs = zip(engine.optimizer.fp16_groups, engine.optimizer.fp32_groups, strict=True)
    else:
        groups = [group["params"] for group in engine.basic_optimizer.param_groups]
        pairs = zip(groups, groups, strict=True)
    for group, (weights, masters) in enumerate(pairs):
        for weight, master in zip(weights, masters, strict=True):
            yield Slot(names[weight], tuple(weight.shape), 0, master, 0, weight.numel(), group)


def _stage_1_2(engine: Any) -> Iterator[Slot]:
    names, optimizer = _names(engine), engine.optimizer
    for group, flat in enumerate(optimizer.single_partition_of_fp32_groups):
        for weight in optimizer.bit16_groups[group]:
            mapping = weight._hp_mapping
            if mapping is None:  # another rank's partition
                continue
            inside, where = mapping.lp_fragment_address, mapping.hp_fragment_address
            yield Slot(names[weight], tuple(weight.shape), inside.start, flat, where.start, where.numel, group)


def _stage_3(engine: Any) -> Iterator[Slot]:
    names, optimizer = _names(engine), engine.optimizer
    for weight, name in names.items():
        sub_group, offset, count = optimizer.grad_position[optimizer.get_param_id(weight)]
        start = optimizer._get_param_partition_rank(weight) * count
        length = max(0, min(count, weight.ds_numel - start))  # the last rank's end is padding
        if length:
            flat = optimizer.fp32_partitioned_groups_flat[sub_group]
            group = optimizer.sub_group_to_group_id[sub_group]
            yield Slot(name, tuple(weight.ds_shape), start, flat, int(offset), length, group)
