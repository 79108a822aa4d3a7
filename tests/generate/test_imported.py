"""Text of models that transformers made and saved: imported, they write here what they write there."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from pretrain.config.schema import LossConfig
from pretrain.generate.beam import BeamOptions, beam_search
from pretrain.generate.decode import StopRule, begin_prompts, continue_each
from pretrain.generate.load import load_weights
from pretrain.generate.sampling import SamplingOptions, distribution
from pretrain.model.hf.directory import import_model
from tests.model.test_hf_families import THEIRS

EOS, PAD, MAX_TOKENS = 3, 0, 20
FAMILIES = ["gpt2", "gemma-2", "gemma-3", "mixtral", "qwen3-moe"]
TEXTS = [[7, 4, 11, 12, 9], [5], [20, 21, 22, 23, 24, 25, 26, 27, 28], [13, 8, 6]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("theirs")


@cache
def both(family: str, folder: Path) -> tuple[Any, nn.Module]:
    """Theirs, and ours from what theirs saved."""
    torch.manual_seed(3)
    theirs = THEIRS[family]().eval()
    theirs.save_pretrained(folder / family)
    config, weights = import_model(folder / family)
    return theirs, load_weights(config, LossConfig(), weights, family, seed=0)


def reference(model: Any, text: list[int], **options: Any) -> list[int]:
    """What transformers writes for one text, without its end."""
    ids = torch.tensor([text])
    config = transformers.GenerationConfig(
        pad_token_id=PAD, eos_token_id=EOS, max_new_tokens=MAX_TOKENS, do_sample=False, **options
    )
    new = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[0].tolist()[len(text) :]
    return new[: new.index(EOS)] if EOS in new else new


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_and_beams_of_an_imported_model_are_theirs(family: str, saved: Path) -> None:
    theirs, ours = both(family, saved)
    stop = StopRule(MAX_TOKENS, EOS)
    greedy = continue_each(begin_prompts(ours, TEXTS, MAX_TOKENS), SamplingOptions(), stop)
    assert greedy == [reference(theirs, text) for text in TEXTS]
    assert len({tuple(ids) for ids in greedy}) > 2  # they read what they were given
    found = beam_search(begin_prompts(ours, TEXTS, MAX_TOKENS), BeamOptions(3, 0.6, "transformers"), stop)
    best = [reference(theirs, text, num_beams=3, length_penalty=0.6) for text in TEXTS]
    assert [list(beams[0].ids) for beams in found] == best
    assert best != greedy  # the search finds other texts


@pytest.mark.parametrize("family", ["gemma-3", "mixtral"])
@pytest.mark.parametrize(
    "filters", [{"top_k": 7}, {"top_p": 0.7}, {"top_k": 9, "top_p": 0.8}, {"top_k": 40, "top_p": 0.5}]
)
@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_filters_and_temperature_together_are_theirs_at_later_positions(
    family: str, filters: dict[str, Any], temperature: float, saved: Path
) -> None:
    theirs, ours = both(family, saved)
    sampling = SamplingOptions(temperature=temperature, **filters)
    processors = transformers.LogitsProcessorList([transformers.TemperatureLogitsWarper(temperature)])
    if sampling.top_k is not None:
        processors.append(transformers.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(transformers.TopPLogitsWarper(sampling.top_p))
    written = [list(text) for text in TEXTS]
    state = begin_prompts(ours, written, MAX_TOKENS)
    for position in range(6):
        for ids, mine in zip(written, state.logits, strict=True):
            with torch.no_grad():
                logits = theirs(torch.tensor([ids])).logits[:, -1]
            expected = processors(torch.tensor([ids]), logits).softmax(-1)[0]
            found = distribution(mine, sampling)
            torch.testing.assert_close(found.float(), expected, atol=1e-5, rtol=1e-3)
            ids.append((17 * position + 5 * len(ids)) % 101)  # not what it would say: any text must do
        state.feed([ids[-1] for ids in written])
