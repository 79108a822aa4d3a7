"""Loss by source and by denoiser, counted again from the tokens themselves."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pretrain.config.schema import UL2Objective
from pretrain.data.loader import open_loader
from pretrain.loss.fused import LossOptions, fused_linear_cross_entropy
from pretrain.loss.rows import losses_told, tell_losses
from pretrain.sequence import IGNORED_LABEL
from pretrain.topology import World
from pretrain.train.step_watch import StepWatch
from tests.data_read.corpus import BYTE_LENGTHS, EOS, run_config, write_tokenizer_file, write_tokens
from tests.data_read.test_objective_runs import _SPECIALS, OBJECTIVES


def _documents(low: int, count: int) -> list[list[int]]:
    return [[low + (number + place) % 9 for place in range(3 + number % 11)] + [EOS] for number in range(count)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources whose ids differ: those of `a` are 30 to 38, those of `b` 50 to 58."""
    root = tmp_path_factory.mktemp("sources")
    tokenizer = write_tokenizer_file(root)
    write_tokens(root / "a", _documents(30, 40), tokenizer)
    write_tokens(root / "b", _documents(50, 90), tokenizer)
    for name, low in (("a full", 30), ("b full", 50)):  # every row is one document
        write_tokens(root / name, [[low + place % 9 for place in range(15)] + [EOS] for _ in range(64)], tokenizer)
    return root


@pytest.mark.parametrize("rows_are_full", [True, False])
def test_loss_share_and_epochs_by_source_are_those_of_the_tokens(root: Path, rows_are_full: bool) -> None:
    full = " full" if rows_are_full else ""
    config = run_config(root / "tokenizer.json", {"a": (root / f"a{full}", 1.0), "b": (root / f"b{full}", 3.0)})
    rows: dict[str, int] = defaultdict(int)
    with open_loader(config, BYTE_LENGTHS, World()) as loader:
        state = loader.initial_state()
        for step in range(30):
            watch = StepWatch(config, loader, state, None)
            nats, targets = dict.fromkeys("ab", 0.0), dict.fromkeys("ab", 0)
            for batch in loader.read(step, state).batches:
                nll = torch.where(batch.labels == IGNORED_LABEL, 0.0, 0.5 + batch.decoder_ids / 7)
                with watch.forward(batch):
                    tell_losses([nll[:5], nll[5:]])
                place = 0
                for length in batch.decoder_info.lengths:
                    ids, labels = batch.decoder_ids[place : place + length], batch.labels[place : place + length]
                    text = ids[(ids >= 30) & (ids < 60)]
                    if text.numel():
                        source = "a" if int(text[0]) < 40 else "b"
                        nats[source] += float(nll[place : place + length].sum())
                        targets[source] += int((labels != IGNORED_LABEL).sum())
                    place += length
                for row in batch.decoder_ids.view(2, -1):
                    rows["a" if ((row >= 30) & (row < 40)).any() else "b"] += 1
            state = loader.next_state(state)
            table = watch.tables(state)["sources"]
            for source in ("a", "b"):
                assert table[source]["target_tokens"] == targets[source]
                assert table[source]["loss"] == (
                    pytest.approx(nats[source] / targets[source]) if targets[source] else None
                )
        order = loader.shares(state)
        for source, planned in (("a", 0.25), ("b", 0.75)):
            assert order[source]["planned_share"] == planned
            assert order[source]["share"] == pytest.approx(planned, abs=0.03)
            if rows_are_full:
                assert order[source]["share"] == rows[source] / sum(rows.values())
                assert order[source]["epochs"] == rows[source] / 64


def test_loss_by_denoiser_is_that_of_the_documents_with_its_mode(root: Path) -> None:
    config = run_config(root / "tokenizer.json", {"b": root / "b"}, **OBJECTIVES["ul2 decoder"])
    nats, targets = dict.fromkeys("RSX", 0.0), dict.fromkeys("RSX", 0)
    mode_of = {_SPECIALS[f"<|mode_{mode.lower()}|>"]: mode for mode in "RSX"}
    with open_loader(config, BYTE_LENGTHS, World(), special_ids=_SPECIALS) as loader:
        state = loader.initial_state()
        watch = StepWatch(config, loader, state, None)
        for batch in loader.read(0, state).batches:
            nll = torch.where(batch.labels == IGNORED_LABEL, 0.0, 0.5 + batch.decoder_ids / 7)
            with watch.forward(batch):
                tell_losses([nll])
            place = 0
            for length in batch.decoder_info.lengths:
                part = slice(place, place + length)
                mode = mode_of.get(int(batch.decoder_ids[place]))
                if mode is not None:
                    nats[mode] += float(nll[part].sum())
                    targets[mode] += int((batch.labels[part] != IGNORED_LABEL).sum())
                place += length
        found = watch.tables(loader.next_state(state))["objectives"]
    assert isinstance(config.objective, UL2Objective)
    assert found.keys() == config.objective.denoisers.keys()
    for mode in "RSX":
        rows = [row for name, row in found.items() if config.objective.denoisers[name].mode == mode]
        assert sum(row["target_tokens"] for row in rows) == targets[mode] > 0
        assert sum(row["target_tokens"] * (row["loss"] or 0) for row in rows) == pytest.approx(nats[mode])


def test_the_fused_loss_tells_each_target_and_their_sum_is_what_it_returns() -> None:
    generator = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(11, 6, generator=generator), torch.randn(17, 6, generator=generator)
    labels = torch.randint(0, 17, (11,), generator=generator)
    labels[[2, 10]] = IGNORED_LABEL
    heard: list[torch.Tensor] = []
    with losses_told(heard.append):
        sums = fused_linear_cross_entropy(hidden, weight, labels, LossOptions(chunk_rows=4, label_smoothing=0.1))
    fused_linear_cross_entropy(hidden, weight, labels, LossOptions())
    (nll,) = heard
    expected = torch.nn.functional.cross_entropy(
        hidden @ weight.t(), labels, reduction="none", ignore_index=IGNORED_LABEL
    )
    torch.testing.assert_close(nll, expected)
    assert float(sums.nll) == pytest.approx(float(expected.sum()), rel=1e-6)


class _HostReads(TorchDispatchMode):
    """Counts values that the host asks a tensor for: each would wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "_local_scalar_dense" in str(func)
        return func(*args, **(kwargs or {}))


def test_nothing_is_read_from_a_device_before_the_record_is_made(root: Path) -> None:
    config = run_config(root / "tokenizer.json", {"b": root / "b"})
    with open_loader(config, BYTE_LENGTHS, World()) as loader:
        state = loader.initial_state()
        batch = loader.read(0, state).batches[0]
        hidden, weight = torch.randn(batch.labels.shape[0], 8), torch.randn(100, 8, requires_grad=True)
        with _HostReads() as reads:
            watch = StepWatch(config, loader, state, None)
            with watch.forward(batch):
                sums = fused_linear_cross_entropy(hidden, weight, batch.labels, LossOptions(chunk_rows=8))
            sums.objective.backward()
            watch.after_step()
            assert reads.count == 0
            float(sums.nll)
            assert reads.count == 1  # it does count
        table = watch.tables(loader.next_state(state))["sources"]
    assert table["b"]["loss"] == pytest.approx(float(sums.nll) / batch.target_tokens, rel=1e-5)
