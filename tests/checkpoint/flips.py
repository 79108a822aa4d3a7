"""Flips bits at random places of all files of a checkpoint: each must be found before a weight is used.

`python -m tests.checkpoint.flips --flips 1000` is the whole; the suite runs a short form. Several pieces a file.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pretrain.checkpoint import restore, save, verify_checkpoint
from pretrain.checkpoint.holds import SET_ASIDE_FILE
from pretrain.engine.state import MASTER, Fragment, GroupSpec, OptimizerSpec, Scalars
from pretrain.errors import CheckpointError
from pretrain.store import open_store
from pretrain.topology import World

SHAPES = {"embedding": (1500, 1000), "layers.0.weight": (600, 700), "norm": (1000,)}


class Plain:
    """A whole model on one rank; `used` says whether a restore came to its end.

    Args:
        rows: so many times as large.
        shapes: of the parameters, by name.
    """

    def __init__(self, seed: int, rows: int = 1, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._shapes = {name: (rows * shape[0], *shape[1:]) for name, shape in shapes.items()}
        self.state = {
            name: {key: torch.randn(torch.Size(shape).numel(), generator=generator) for key in (MASTER, "exp_avg")}
            for name, shape in self._shapes.items()
        }
        self.used = False

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self._shapes)

    def groups(self) -> dict[str, str]:
        return dict.fromkeys(self._shapes, "decay")

    def optimizer_spec(self) -> OptimizerSpec:
        return OptimizerSpec("Fake", {"decay": GroupSpec(("exp_avg",), ("step",))})

    def fragments(self) -> list[Fragment]:
        return [Fragment(name, self._shapes[name], 0, tensors) for name, tensors in self.state.items()]

    def optimizer_scalars(self) -> Scalars:
        return {"decay": {"step": 2.0}}

    def hyperparameters(self) -> dict[str, dict[str, Any]]:
        return {"decay": {"lr": 0.5}}

    def begin_restore(self, element_keys: Mapping[str, tuple[str, ...]], scalars: Scalars) -> list[Fragment]:
        return self.fragments()

    def end_restore(self) -> None:
        self.used = True


def campaign(folder: Path, flips: int, seed: int) -> Counter[str]:
    """What became of the flips, by kind of file.

    Raises:
        AssertionError: a flip was not found.
    """
    store, source = open_store(folder), Plain(1)
    handle = save(store, source, step=1, attempt=1, training_state={}, world=World(), guard=lambda: None)
    handle.wait()
    files = sorted(path for path in (folder / handle.name).iterdir() if path.is_file())
    draw, found, reader = random.Random(seed), Counter[str](), Plain(2)
    for _ in range(flips):
        path = draw.choice(files) if draw.random() < 0.3 else max(files, key=lambda file: file.stat().st_size)
        position, bit = draw.randrange(path.stat().st_size), 1 << draw.randrange(8)
        _flip(path, position, bit)
        where = f"bit {bit} at {position} of {path.name}"
        assert verify_checkpoint(store, handle.name), f"verify did not find {where}"
        try:
            restore(store, reader, World())
            assert path.name == "rank-00000.json", f"restore did not find {where}"  # nobody reads a sidecar any more
            same = all(torch.equal(reader.state[n][k], source.state[n][k]) for n in SHAPES for k in (MASTER, "exp_avg"))
            assert same, f"restore took something else after {where}"
            reader.used = False
            found["sidecar: found by verify, harmless"] += 1
        except CheckpointError:
            found[f"{path.name}: refused"] += 1
        assert not reader.used, f"weights were used after {where}"
        _flip(path, position, bit)
        store.delete(f"{handle.name}/{SET_ASIDE_FILE}")
    restore(store, reader, World())
    assert reader.used
    return found


def _flip(path: Path, position: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        (old,) = file.read(1)
        file.seek(position)
        file.write(bytes([old ^ bit]))


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.checkpoint.flips")
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        found = campaign(Path(folder), args.flips, args.seed)
    print(f"{sum(found.values())} of {args.flips} flips found in {time.monotonic() - started:.0f} s (seed {args.seed})")
    for kind, count in sorted(found.items()):
        print(f"  {count:5}  {kind}")


if __name__ == "__main__":
    main()
