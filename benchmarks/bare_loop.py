"""The plain training loop that ours is measured against, written without a line of `pretrain`.

What a person writes in an afternoon: a pre-norm decoder of `nn.Linear`s in fp32, batches of [B, S],
causal SDPA, `F.cross_entropy`, bf16 autocast where the machine has it, fused AdamW, clipping, gradient
accumulation; over several ranks `DistributedDataParallel`.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of the decoder that both sides train."""

    vocabulary_size: int = 8192
    width: int = 384
    num_layers: int = 8
    num_heads: int = 6
    num_kv_heads: int = 6
    feed_forward_width: int = 1024
    tied: bool = True


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, head = shape, shape.width // shape.num_heads
        self.head = head
        self.norm_attention, self.norm_mlp = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.q = nn.Linear(shape.width, shape.num_heads * head, bias=False)
        self.kv = nn.Linear(shape.width, 2 * shape.num_kv_heads * head, bias=False)
        self.o = nn.Linear(shape.num_heads * head, shape.width, bias=False)
        self.gate_up = nn.Linear(shape.width, 2 * shape.feed_forward_width, bias=False)
        self.down = nn.Linear(shape.feed_forward_width, shape.width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        normed = self.norm_attention(x)
        q = self.q(normed).view(batch, length, -1, self.head)
        k, v = self.kv(normed).view(batch, length, 2, -1, self.head).unbind(2)
        q, k, v = _rotate(q.transpose(1, 2), cos, sin), _rotate(k.transpose(1, 2), cos, sin), v.transpose(1, 2)
        grouped = self.shape.num_kv_heads != self.shape.num_heads
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, length, -1))
        gate, up = self.gate_up(self.norm_mlp(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary_size, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary_size, bias=False)
        if shape.tied:
            self.head.weight = self.embedding.weight
        self.head_width = shape.width // shape.num_heads
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(ids.shape[1], dtype=torch.float32)
        frequencies = 10000 ** (-torch.arange(0, self.head_width, 2, dtype=torch.float32) / self.head_width)
        angles = positions[:, None] * frequencies
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin())
        return self.head(self.norm(x))


class BareLoop:
    """Model and optimizer with one method, `step`."""

    def __init__(
        self, shape: Shape, *, learning_rate: float = 1e-3, autocast: bool = True, distributed: bool = False
    ) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = Decoder(shape)
        self.autocast = autocast
        if distributed:
            self.model = nn.parallel.DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )

    def step(self, microbatches: list[tuple[torch.Tensor, torch.Tensor]], learning_rate: float | None = None) -> float:
        """One optimizer step over (ids, labels) pairs of [B, S]; gives the mean loss in nats."""
        total = 0.0
        for number, (ids, labels) in enumerate(microbatches, 1):
            wait = number < len(microbatches) and isinstance(self.model, nn.parallel.DistributedDataParallel)
            with self.model.no_sync() if wait else contextlib.nullcontext():
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast):
                    logits = self.model(ids)
                loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()) / len(microbatches)
                loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate or group["lr"]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total
