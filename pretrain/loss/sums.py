"""What a micro-batch's forward pass gives: sums over its targets, never means."""

from __future__ import annotations

from typing import NamedTuple

import torch


class LossSums(NamedTuple):
    """Sums over the targets of one micro-batch, fp32 scalars on the model's device.

    Attributes:
        objective: what is minimised (smoothed negative log-likelihood plus weighted z-loss); carries
            the gradient.
        nll: plain negative log-likelihood in nats, detached.
        z_loss: sum of logsumexp^2, unweighted, detached.
    """

    objective: torch.Tensor
    nll: torch.Tensor
    z_loss: torch.Tensor
