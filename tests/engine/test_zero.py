"""The DeepSpeed dict: its arithmetic, and every key known to DeepSpeed itself."""

from __future__ import annotations

from typing import Any

import pytest

from pretrain.engine.zero import accumulation_steps, deepspeed_config
from tests.engine.small import run_config


@pytest.mark.parametrize(
    ("ranks", "steps", "train_batch_size"), [(1, 4, 4), (2, 2, 4), (3, 2, 6), (4, 1, 4), (5, 1, 5)]
)
def test_batch_sizes_count_the_empty_micro_batches(ranks: int, steps: int, train_batch_size: int) -> None:
    config = run_config(2)
    assert accumulation_steps(config.batch, ranks) == steps
    settings = deepspeed_config(config.engine, config.batch, config.optimizer, ranks)
    assert settings["train_batch_size"] == train_batch_size
    assert settings["gradient_accumulation_steps"] == steps


MUON = {"kind": "muon", "learning_rate": 0.02, "adam_learning_rate": 0.01}


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(
    ("precision", "more"),
    [
        ("fp32", {}),
        ("bf16", {}),
        ("bf16", {"offload_optimizer": "cpu"}),
        ("bf16", {"state_precision": "bf16"}),
        ("bf16", {"optimizer": MUON}),
    ],
    ids=["fp32", "bf16", "offload", "bf16 states", "muon"],
)
def test_every_key_is_one_that_deepspeed_knows(stage: int, precision: str, more: dict[str, Any]) -> None:
    from deepspeed.runtime import constants
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    if more and not stage:
        with pytest.raises(ValueError, match="zero_stage=0"):
            run_config(stage, precision, **more)
        return
    config = run_config(stage, precision, allgather_bucket_elements=1001, **more)
    settings = deepspeed_config(config.engine, config.batch, config.optimizer, 2)
    known = {value for value in vars(constants).values() if isinstance(value, str)} | {"bf16", "zero_optimization"}
    assert set(settings) <= known
    assert "gradient_cliping" not in known  # the check can fail
    zero = settings["zero_optimization"]
    fields = DeepSpeedZeroConfig.model_fields
    assert set(zero) <= set(fields) | {field.alias for field in fields.values()}
    assert set(settings["bf16"]) <= set(DeepSpeedBF16Config.model_fields)
    DeepSpeedZeroConfig(**zero)
    if stage:
        assert zero["allgather_bucket_size"] == 1002


def test_clipping_is_deepspeeds_except_where_it_hides_the_norm() -> None:
    clipping = {}
    for stage, precision in [(0, "fp32"), (0, "bf16"), (2, "fp32")]:
        config = run_config(stage, precision)
        settings = deepspeed_config(config.engine, config.batch, config.optimizer, 1)
        clipping[stage, precision] = settings["gradient_clipping"]
    assert clipping == {(0, "fp32"): 0.0, (0, "bf16"): 0.5, (2, "fp32"): 0.5}
