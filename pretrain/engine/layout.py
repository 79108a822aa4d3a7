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

from pretrain.engine.state import MASTER, Fragment
from pretrain.errors import PretrainError

MOMENTUM = "momentum_buffer"


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


def fixed_fragments(engine: Any, buffers: tuple[str, ...]) -> tuple[list[Fragment], list[Fragment]]:
    """What no optimizer moves: (ranges that only this rank holds, what every rank holds whole)."""
    own, replicated = [], []
    for name, weight in engine.module.named_parameters():
        if weight.requires_grad:
            continue
        partition = getattr(weight, "ds_tensor", None)
        if partition is None:
            replicated.append(Fragment(name, tuple(weight.shape), 0, {MASTER: _flat(name, weight)}))
            continue
        start = engine.optimizer._get_param_partition_rank(weight) * partition.ds_numel
        length = max(0, min(partition.ds_numel, weight.ds_numel - start))
        if length:
            own.append(Fragment(name, tuple(weight.ds_shape), start, {MASTER: partition.data.view(-1)[:length]}))
    held = dict(engine.module.named_buffers())
    replicated += [Fragment(name, tuple(held[name].shape), 0, {MASTER: _flat(name, held[name])}) for name in buffers]
    return own, replicated


def _flat(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_contiguous():
        raise PretrainError(f"{name} is not contiguous in memory. Its state is read and written in place. Make it so.")
    return tensor.detach().view(-1)


def whole_momenta(engine: Any) -> dict[str, tuple[torch.Tensor, int]]:
    """Where Muon's momentum lies at stages 1 and 2 without offload: (tensor, first element) by parameter.

    There it is no partition like the masters, but the whole of each parameter that a rank owns any part of.
    """
    optimizer, found = engine.optimizer, {}
    for group, flat in enumerate(optimizer.single_partition_of_fp32_groups):
        buffer, position = engine.basic_optimizer.state.get(flat, {}).get(MOMENTUM), 0
        for weight in optimizer.params_in_partition[group]:
            if buffer is not None:
                found[weight] = (buffer, position)
            position += weight.numel()
    return {name: found[weight] for weight, name in _names(engine).items() if weight in found}


def has_whole_momenta(engine: Any, group: dict[str, Any]) -> bool:
    """Whether `whole_momenta` says where the momentum of a parameter group is."""
    staged = int(engine.zero_optimization_stage()) in (1, 2) and not engine.optimizer.cpu_offload
    return bool(group.get("use_muon")) and staged


def fresh_state(engine: Any, holder: torch.Tensor, group: int, key: str) -> torch.Tensor:
    """Zeros of the size, type and place that the optimizer would give a per-element state of a holder."""
    settings, optimizer = engine.basic_optimizer.param_groups[group], engine.optimizer
    if has_whole_momenta(engine, settings):
        count = sum(weight.numel() for weight in optimizer.params_in_partition[group])
        return torch.zeros(count, dtype=torch.float32, device=optimizer.device)
    if settings.get("use_muon") and int(engine.zero_optimization_stage()) == 3:
        return torch.zeros(holder.numel(), dtype=optimizer.communication_data_type, device=optimizer.device)
    return torch.zeros_like(holder, requires_grad=False)


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
        if not weight.requires_grad:
            continue
        sub_group, offset, count = optimizer.grad_position[optimizer.get_param_id(weight)]
        start = optimizer._get_param_partition_rank(weight) * count
        length = max(0, min(count, weight.ds_numel - start))  # the last rank's end is padding
        if length:
            flat = optimizer.fp32_partitioned_groups_flat[sub_group]
            group = optimizer.sub_group_to_group_id[sub_group]
            yield Slot(name, tuple(weight.ds_shape), start, flat, int(offset), length, group)
