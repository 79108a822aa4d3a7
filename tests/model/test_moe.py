"""Mixtures of experts: the block against a loop over tokens, its losses against transformers', experts on two ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from pretrain.checkpoint import restore, save
from pretrain.config import config_from_dict
from pretrain.config.schema import LossConfig, RunConfig
from pretrain.engine.distributed import all_reduce_sums
from pretrain.engine.engine import Engine
from pretrain.engine.zero import sharing_ranks
from pretrain.errors import ConfigError
from pretrain.model.experts import Experts, SparseMLP, router_losses
from pretrain.model.flops import parameter_counts
from pretrain.model.hf.directory import import_config, plan_export
from pretrain.model.hf.family import ExportOptions
from pretrain.model.init import Normal, initialise
from pretrain.model.registry import build_model
from pretrain.optim.groups import parameter_groups
from pretrain.sequence import Batch, SeqInfo
from pretrain.store import open_store
from pretrain.topology import World
from pretrain.train.layer_watch import LayerWatch
from tests.config.base import values
from tests.model.small import empty_batch_for, lm_batch, make_batch, moe_config, random_ids
from tests.ranks import run_ranks

WIDTH, HIDDEN, EXPERTS, CHOSEN = 8, 6, 5, 2


def block(*, normalised: bool) -> SparseMLP:
    mlp = SparseMLP(WIDTH, HIDDEN, EXPERTS, CHOSEN, Normal(0.5), Normal(0.5), normalised=normalised)
    initialise(mlp, 3)
    return mlp.double()


def by_hand(mlp: SparseMLP, x_TD: torch.Tensor, *, normalised: bool) -> torch.Tensor:
    """Token by token, expert by expert."""
    gate_up, down = mlp.experts.gate_up.view(EXPERTS, 2, HIDDEN, WIDTH), mlp.experts.down.view(EXPERTS, WIDTH, HIDDEN)
    rows = []
    for x in x_TD:
        probability = torch.softmax(mlp.router.weight @ x, 0)
        best = sorted(range(EXPERTS), key=lambda e: -float(probability.detach()[e]))[:CHOSEN]
        total = sum(probability[e] for e in best) if normalised else 1.0
        outs = [down[e] @ (functional.silu(gate_up[e, 0] @ x) * (gate_up[e, 1] @ x)) for e in best]
        rows.append(sum(probability[e] / total * out for e, out in zip(best, outs, strict=True)))
    return torch.stack(rows)


@pytest.mark.parametrize("normalised", [True, False])
def test_the_block_equals_a_loop_over_tokens_and_drops_none(normalised: bool) -> None:
    mlp, twin = block(normalised=normalised), block(normalised=normalised)
    x = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[:25] = x[0] + 0.01 * x[:25]  # most tokens want the same experts: no capacity holds them back
    mine, theirs = (x.clone().requires_grad_() for _ in range(2))
    out, _ = mlp(mine, SeqInfo.from_lengths([30, 10]))
    right = by_hand(twin, theirs, normalised=normalised)
    torch.testing.assert_close(out, right)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (out * weight).sum().backward()
    (right * weight).sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad)
    for name, parameter in mlp.named_parameters():
        torch.testing.assert_close(parameter.grad, dict(twin.named_parameters())[name].grad)


def test_padding_passes_no_expert_and_counts_in_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    mlp = block(normalised=True)
    x = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    seen: list[int] = []
    plain = Experts.forward
    monkeypatch.setattr(
        Experts, "forward", lambda self, rows, counts: seen.append(len(rows)) or plain(self, rows, counts)
    )
    padded, losses = mlp(x, SeqInfo.from_lengths([4, 3, 5], padding=True))
    alone, own_losses = mlp(x[:7], SeqInfo.from_lengths([4, 3]))
    assert seen == [7 * CHOSEN, 7 * CHOSEN]
    assert torch.equal(padded[:7], alone)
    assert padded[7:].eq(0).all()
    assert torch.equal(losses, own_losses)
    nothing, zeros = mlp(x, SeqInfo.from_lengths([12], padding=True))
    (nothing.sum() + zeros.sum()).backward()
    assert nothing.eq(0).all()
    assert zeros.eq(0).all()
    assert all(parameter.grad is not None and parameter.grad.eq(0).all() for parameter in mlp.parameters())


def test_the_router_losses_are_those_of_transformers_and_of_the_definition() -> None:
    logits = torch.randn(50, EXPERTS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    probability = torch.softmax(logits, -1)
    counts = probability.topk(CHOSEN).indices.flatten().bincount(minlength=EXPERTS)
    balance, z = router_losses(logits, probability, counts)
    assert float(balance) == pytest.approx(float(load_balancing_loss_func((logits,), EXPERTS, CHOSEN)), rel=1e-6)
    assert float(z) == pytest.approx(sum(float(torch.logsumexp(row, 0)) ** 2 for row in logits) / 50)
    even = torch.zeros(EXPERTS, EXPERTS)
    uniform = router_losses(even, torch.softmax(even, -1), torch.full((EXPERTS,), CHOSEN))
    assert float(uniform[0]) == pytest.approx(CHOSEN)


@torch.no_grad()
def test_the_objective_weighs_the_router_losses_by_targets_and_is_blind_to_padding() -> None:
    config = moe_config(balance_loss=0.5, router_z_loss=0.25)
    model = build_model(config, LossConfig(), seed=3)
    batch = lm_batch((9, 4))
    objective, nll, _ = model(batch)
    balance, z = model.router_losses(batch)
    assert float(balance) > 0
    assert float(objective) == pytest.approx(float(nll + batch.target_tokens * (0.5 * balance + 0.25 * z)), rel=1e-6)
    ids = torch.cat([batch.decoder_ids, random_ids(20, 5)])
    labels = torch.cat([batch.labels, torch.full((20,), -100)])
    tailed = make_batch(ids, (9, 4, 20), labels)
    tailed = copy.copy(tailed)
    object.__setattr__(tailed, "decoder_info", SeqInfo.from_lengths([9, 4, 20], padding=True))
    assert float(model(tailed).objective) == pytest.approx(float(objective), rel=1e-6)


# ------------------------------------------------------------------------------------ experts on ranks

MICRO_BATCHES, SAVED, STEPS, RATE = 3, 1, 3, 1.0  # three on two ranks: the last round has an empty one


def run_config(stage: int, sharing: int, precision: str = "fp32") -> RunConfig:
    model = moe_config(dropout=0.1, balance_loss=0.05, router_z_loss=0.01, init_std=0.05)
    return RunConfig.model_validate(
        {
            "name": "small", "seed": 3, "tokenizer": "none", "data": {"sources": {"none": {"path": "none"}}},
            "model": model.model_dump(),
            "batch": {"global_batch_size": MICRO_BATCHES, "micro_batch_size": 1, "sequence_length": 32},
            # Not Adam, which would hide a wrong scale of the experts' gradients.
            "optimizer": {"kind": "sgd", "learning_rate": RATE, "momentum": 0.9, "gradient_clipping": 0.5},
            "schedule": {"kind": "constant", "total_steps": STEPS}, "checkpoint": {"every_steps": SAVED},
            "engine": {
                "zero_stage": stage, "precision": precision, "expert_parallel_size": sharing,
                "activation_checkpointing": stage == 2,
            },
        }
    )  # fmt: skip


def batches_of(step: int) -> list[Batch]:
    return [lm_batch((9, 1, 20, 13), seed=10 * step + j) for j in range(MICRO_BATCHES)]


def train(engine: Engine, world: World, steps: range) -> list[float]:
    """Mean objectives of the steps; a collective."""
    objectives = []
    for step in steps:
        batches = batches_of(step)
        targets = sum(batch.target_tokens for batch in batches)
        mine = batches[world.rank :: world.size]
        mine += [empty_batch_for(moe_config())] * (engine.accumulation_steps - len(mine))
        total = sum(float(engine.micro_step(batch, global_target_tokens=targets).objective) for batch in mine)
        assert engine.step(RATE).applied
        objectives.append(all_reduce_sums([total])[0] / targets)
    return objectives


def start(config: RunConfig, world: World, folder: str | None = None, seed: int = 3) -> Engine:
    model = build_model(
        config.model, config.loss, seed=seed, activation_checkpointing=config.engine.activation_checkpointing
    )
    engine = Engine(model, config, world, torch.device("cpu"))
    if folder is not None:
        all_reduce_sums([0])  # the manifest is published when rank 0's save has ended
        assert restore(open_store(folder), engine, world) is not None
    return engine


def write(engine: Engine, folder: str, step: int, world: World) -> None:
    store = open_store(folder)
    save(store, engine, step=step, attempt=1, training_state={}, world=world, guard=lambda: None).wait()


def state_of(engine: Engine) -> dict[str, torch.Tensor]:
    return {
        f"{part.name} {key} {part.start}": x.clone() for part in engine.fragments() for key, x in part.tensors.items()
    }


def on_two_ranks(world: World, folder: str) -> dict[str, Any]:
    """Shared experts from the start, restored, and moved to whole experts and back. In every rank."""
    results: dict[str, Any] = {}
    for stage, precision in ((1, "bf16"), (2, "fp32")):
        place = f"{folder}/{stage}-{precision}"
        shared, whole = run_config(stage, 2, precision), run_config(stage, 1, precision)
        engine = start(shared, world)
        held = {name: tuple(p.shape) for name, p in engine.module.named_parameters() if "experts" in name}
        objectives = train(engine, world, range(SAVED))
        write(engine, place, SAVED, world)
        objectives += train(engine, world, range(SAVED, STEPS))
        untouched = state_of(engine)
        assert restore(open_store(place), engine, world) is not None  # making an engine is most of this test's time
        again = train(engine, world, range(SAVED, STEPS))
        same = state_of(engine)
        engine.close()
        engine = start(whole, world, place, seed=99)
        apart = train(engine, world, range(SAVED, SAVED + 1))
        write(engine, f"{place}-whole", SAVED + 1, world)
        engine.close()
        engine = start(shared, world, f"{place}-whole", seed=99)
        back = train(engine, world, range(SAVED + 1, STEPS))
        engine.close()
        results[f"{stage} {precision}"] = {
            "held": sorted(set(held.values())), "objectives": objectives, "again": again, "moved": apart + back,
            "equal": untouched.keys() == same.keys() and all(torch.equal(untouched[k], same[k]) for k in same),
        }  # fmt: skip
    return results


def on_one_rank(world: World, folder: str) -> dict[str, Any]:
    """What two ranks saved with shared experts, trained on by one that holds them all; a step more with a watch."""
    engine = start(run_config(2, 2), world, f"{folder}/2-fp32", seed=99)
    objectives = train(engine, world, range(SAVED, STEPS))
    watch = LayerWatch(engine, attention=True)
    for batch in batches_of(STEPS):
        with watch.forward(batch):
            engine.micro_step(batch, global_target_tokens=100)
    engine.step(RATE)
    watch.after_step()
    tables = watch.tables()
    engine.close()
    return {"objectives": objectives, "layers": tables["layers"], "attention": tables["attention"]}


def plain_objectives() -> list[float]:
    """One process, whole batch, torch's own clipping and SGD."""
    config = run_config(1, 1)
    model = build_model(config.model, config.loss, seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    objectives = []
    for step in range(STEPS):
        batches = batches_of(step)
        mean = sum(model(batch).objective for batch in batches) / sum(batch.target_tokens for batch in batches)
        optimizer.zero_grad()
        mean.backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5) > 0.5
        optimizer.step()
        objectives.append(mean.item())
    return objectives


@pytest.mark.timeout(700)
def test_experts_shared_by_two_ranks_train_as_a_plain_loop_and_go_on_bit_for_bit_and_at_any_sharing(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = str(tmp_path_factory.mktemp("experts"))
    plain = plain_objectives()
    for rank in run_ranks(on_two_ranks, ranks=2, arguments={"folder": folder}, timeout_s=400):
        for name, found in rank.value.items():
            assert found["held"] == [[2 * 32, 24], [2 * 2 * 24, 32]], name  # two of four experts
            assert found["equal"], name
            assert found["again"] == found["objectives"][SAVED:], name
            bound = 1e-5 if "fp32" in name else 1e-2
            assert found["moved"] == pytest.approx(found["objectives"][SAVED:], rel=bound), name
            assert found["objectives"] == pytest.approx(plain, rel=bound), name
            assert found["objectives"][-1] != found["objectives"][0]
    (alone,) = run_ranks(on_one_rank, ranks=1, arguments={"folder": folder}, timeout_s=200)
    assert alone.value["objectives"] == pytest.approx(plain[SAVED:], rel=1e-5)
    for layer in ("layers.0", "layers.1"):
        assert alone.value["layers"][layer]["activation_rms"] > 0
        assert alone.value["layers"][layer]["update_norm"] > 0
    assert {"decoder.0", "decoder.1"} <= alone.value["attention"].keys()


@pytest.mark.parametrize(
    ("body", "published"),
    [
        (
            {"model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
             "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8},
            46_702_792_704,  # Mixtral 8x7B
        ),
        (
            {"model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "moe_intermediate_size": 768,
             "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
             "num_experts": 128, "num_experts_per_tok": 8},
            30_532_122_624,  # Qwen3-30B-A3B
        ),
    ],
)  # fmt: skip
def test_a_published_mixture_has_its_parameters_under_the_names_of_its_files(
    body: dict[str, Any], published: int
) -> None:
    config = import_config(body)
    with torch.device("meta"):
        model = build_model(config, LossConfig(), seed=0, initial=False)
    ours = dict(model.named_parameters())
    assert sum(parameter.numel() for parameter in ours.values()) == parameter_counts(config).total == published
    shapes = {name: tuple(parameter.shape) for name, parameter in ours.items()}
    _, entries = plan_export(ours, shapes, config, ExportOptions(512))
    written = {entry.name: entry.shape for entry in entries}
    last, hidden, width = body["num_hidden_layers"] - 1, config.feed_forward_width, config.width
    block = f"model.layers.{last}." + ("block_sparse_moe" if body["model_type"] == "mixtral" else "mlp")
    expert = f"{block}.experts.{config.num_experts - 1}"
    gate, up, down = ("w1", "w3", "w2") if "mixtral" in body["model_type"] else ("gate_proj", "up_proj", "down_proj")
    assert written[f"{block}.gate.weight"] == (config.num_experts, width)
    assert written[f"{expert}.{gate}.weight"] == written[f"{expert}.{up}.weight"] == (hidden, width)
    assert written[f"{expert}.{down}.weight"] == (width, hidden)


def test_experts_are_a_group_of_their_own_that_decays() -> None:
    model = build_model(moe_config(), LossConfig(), seed=0)
    groups = {group["name"]: group for group in parameter_groups(model, 0.1)}
    assert [(name, group["weight_decay"]) for name, group in groups.items()] == [
        ("decay", 0.1), ("experts", 0.1), ("no_decay", 0.0)
    ]  # fmt: skip
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    assert all(".experts." in named[id(parameter)] for parameter in groups["experts"]["params"])
    assert not any(".experts." in named[id(parameter)] for parameter in groups["decay"]["params"])


def test_the_ranks_that_share_are_what_the_number_of_ranks_allows() -> None:
    engine = run_config(2, 4).engine
    assert [sharing_ranks(engine, ranks) for ranks in (1, 2, 3, 4, 6, 8)] == [1, 2, 1, 4, 2, 4]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"experts_per_token": 9}}, "model.experts_per_token=9 is above model.num_experts=4"),
        ({"engine": {"expert_parallel_size": 3}}, "engine.expert_parallel_size=3 does not fit model.num_experts=4"),
        (
            {"engine": {"expert_parallel_size": 2, "zero_stage": 3}},
            "engine.expert_parallel_size=2 with engine.zero_stage=3",
        ),
    ],
)
def test_what_experts_cannot_do_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    content = values()
    content["model"] = moe_config().model_dump() | changes.get("model", {})
    content["engine"] = {"zero_stage": 2} | changes.get("engine", {})
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        config_from_dict(content)
