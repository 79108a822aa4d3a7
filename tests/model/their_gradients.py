"""Gradients of a model of transformers under our names: saved in the place of its weights and imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from pretrain.model.hf.directory import import_model


def their_gradients(theirs: Any, folder: Path) -> dict[str, torch.Tensor]:
    """After its backward pass; its weights are gone afterwards. An import only renames and joins tensors."""
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    theirs.save_pretrained(folder)
    return import_model(folder)[1]


def assert_gradients_equal(ours: nn.Module, theirs: Any, folder: Path, *, unread_id: int | None = None) -> None:
    """Of every parameter; each is of weight.

    Args:
        unread_id: they give this id's row no gradient from the lookup.
    """
    right = their_gradients(theirs, folder)
    found = {name: parameter.grad for name, parameter in ours.named_parameters()}
    assert found.keys() == right.keys()
    for name, gradient in found.items():
        assert gradient is not None, name
        if unread_id is not None and name.endswith(("embedding.weight", "table.weight")):
            gradient[unread_id] = right[name][unread_id] = 0
        largest = float(right[name].abs().max())
        assert largest > 1e-4, name  # else agreement would mean nothing
        torch.testing.assert_close(gradient, right[name], atol=1e-4 * largest, rtol=1e-3, msg=name)
