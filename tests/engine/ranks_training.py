"""What the rank processes of test_training.py and test_gradients.py run."""

from __future__ import annotations

from typing import Any

from pretrain.topology import World
from tests.engine.small import make_engine, run_config, train, whole_masters


def curves(world: World, cases: list[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """Loss and norm curves and final weights' checksums of several engines, one after the other."""
    results = []
    for case in cases:
        config = run_config(**case)
        engine = make_engine(config, world)
        history = train(engine, config, world, 0, steps)
        sums = {name: float(master.double().sum()) for name, master in whole_masters(engine).items()}
        engine.close()
        results.append({"case": case, "history": history, "sums": sums})
    return results
