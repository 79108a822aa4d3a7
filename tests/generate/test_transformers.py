"""Greedy text, beams and sampling distributions of every family that writes, against transformers, same weights."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from pretrain.config.schema import AnyModelConfig, DecoderConfig, EncoderDecoderConfig, GPT2Config, LossConfig, T5Config
from pretrain.generate.beam import BeamOptions, beam_search
from pretrain.generate.decode import Begun, StopRule, begin_prompts, begin_sources, continue_each
from pretrain.generate.sampling import SamplingOptions, distribution
from pretrain.model.hf.directory import export_model
from pretrain.model.hf.family import ExportOptions
from pretrain.model.registry import build_model

EOS, PAD, START, MAX_TOKENS = 3, 0, 1, 24
KNOWN = 12  # ids that the search over everything may use
_SIZES: dict[str, Any] = {"vocabulary_size": 30, "width": 32, "num_heads": 4, "feed_forward_width": 48}
_PAIRED = {**_SIZES, "num_encoder_layers": 2, "num_decoder_layers": 2}
CONFIGS: dict[str, AnyModelConfig] = {
    "decoder": DecoderConfig(**_SIZES, num_kv_heads=2, num_layers=2, init_std=0.5),
    "qwen3": DecoderConfig(**_SIZES, num_kv_heads=2, num_layers=2, qk_norm=True, init_std=0.5, tied_embeddings=False),
    "gpt2": GPT2Config(**_SIZES, num_layers=2, max_length=64, init_std=0.5),
    "encoder_decoder": EncoderDecoderConfig(**_PAIRED, norm_eps=1e-5),
    "t5": T5Config(**_PAIRED, tied_embeddings=False),
    "t5 v1.0": T5Config(**_PAIRED, feed_forward="relu"),
}
TEXTS = [[7, 4, 11, 12, 9], [5], [20, 21, 22, 23, 24, 25, 26, 27, 28], [13, 8, 6], [9, 9, 4]]


@cache
def ours(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = build_model(CONFIGS[name], LossConfig(), seed=5)
    if name in ("encoder_decoder", "t5", "t5 v1.0"):  # as they begin, they say the same whatever they read
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(2.0)
    return model.eval()


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = {}
    for name, config in CONFIGS.items():
        directory = tmp_path_factory.mktemp("hf") / "model"
        options = ExportOptions(64, eos_id=EOS, pad_id=PAD, start_id=START)
        export_model(dict(ours(name).named_parameters()), config, directory, options)
        kind = transformers.AutoModelForCausalLM if config.layout == "decoder" else transformers.AutoModelForSeq2SeqLM
        found[name] = kind.from_pretrained(directory).eval()
    return found


def begun(name: str, texts: list[list[int]]) -> Begun:
    if CONFIGS[name].layout == "decoder":
        return begin_prompts(ours(name), texts, MAX_TOKENS)
    return begin_sources(ours(name), texts, START, MAX_TOKENS)


def reference(model: Any, name: str, text: list[int], **options: Any) -> list[int]:
    """What transformers writes for one text, alone, so that no padding is involved; without its end."""
    ids = torch.tensor([text])
    kept = {"pad_token_id": PAD, "eos_token_id": EOS, "max_new_tokens": MAX_TOKENS, "do_sample": False, **options}
    config = transformers.GenerationConfig(decoder_start_token_id=START, **kept)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[0].tolist()
    new = out[len(text) :] if CONFIGS[name].layout == "decoder" else out[1:]
    return new[: new.index(EOS)] if EOS in new else new


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_text_is_theirs_token_by_token_whatever_is_decoded_beside_it(name: str, theirs: dict[str, Any]) -> None:
    stop = StopRule(MAX_TOKENS, EOS)
    together = continue_each(begun(name, TEXTS), SamplingOptions(), stop)
    assert together == [reference(theirs[name], name, text) for text in TEXTS]
    assert [continue_each(begun(name, [text]), SamplingOptions(), stop)[0] for text in TEXTS] == together
    assert len({tuple(ids) for ids in together}) > 2  # they read what they were given


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("num_beams", "alpha"), [(2, 1.0), (4, 0.6), (3, 0.0)])
def test_beams_are_theirs_token_by_token(name: str, num_beams: int, alpha: float, theirs: dict[str, Any]) -> None:
    options = BeamOptions(num_beams, alpha, "transformers")
    found = beam_search(begun(name, TEXTS), options, StopRule(MAX_TOKENS, EOS))
    for text, beams in zip(TEXTS, found, strict=True):
        best = reference(theirs[name], name, text, num_beams=num_beams, length_penalty=alpha)
        assert list(beams[0].ids) == best
        assert [beam.score for beam in beams] == sorted((beam.score for beam in beams), reverse=True)


def test_more_beams_and_their_scores_are_theirs(theirs: dict[str, Any]) -> None:
    name, text = "encoder_decoder", TEXTS[0]
    config = transformers.GenerationConfig(
        decoder_start_token_id=START, pad_token_id=PAD, eos_token_id=EOS, max_new_tokens=MAX_TOKENS, num_beams=4,
        num_return_sequences=4, length_penalty=0.6, output_scores=True, return_dict_in_generate=True, do_sample=False,
    )  # fmt: skip
    out = theirs[name].generate(torch.tensor([text]), generation_config=config)
    (beams,) = beam_search(begun(name, [text]), BeamOptions(4, 0.6, "transformers"), StopRule(MAX_TOKENS, EOS))
    assert [beam.score for beam in beams] == pytest.approx(out.sequences_scores.tolist(), rel=1e-4)


@pytest.mark.parametrize("options", [{"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.6}, {"top_k": 8, "top_p": 0.8}])
@pytest.mark.parametrize("name", ["decoder", "t5"])
def test_the_distribution_that_is_sampled_from_is_theirs(name: str, options: Any, theirs: dict[str, Any]) -> None:
    state = begun(name, TEXTS)
    sampling = SamplingOptions(**{"temperature": 1.0, **options})
    processors = transformers.LogitsProcessorList([transformers.TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        processors.append(transformers.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(transformers.TopPLogitsWarper(sampling.top_p))
    for text, mine in zip(TEXTS, state.logits, strict=True):
        ids = torch.tensor([text])
        with torch.no_grad():
            given = {} if name == "decoder" else {"decoder_input_ids": torch.tensor([[START]])}
            logits = theirs[name](input_ids=ids, **given).logits[:, -1]
        expected = processors(ids, logits).softmax(-1)[0]
        torch.testing.assert_close(distribution(mine, sampling).float(), expected, atol=1e-5, rtol=1e-4)


def exhaustive(options: BeamOptions, text_logits: Any, depth: int) -> tuple[float, tuple[int, ...]]:
    """The best of all continuations that end, or run into the limit, by full enumeration."""
    best = (float("-inf"), ())
    stack: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    while stack:
        ids, total = stack.pop()
        scores = torch.log_softmax(text_logits(ids), -1).tolist()[:KNOWN]
        for token, score in enumerate(scores):
            ended = token == EOS
            grown = (*ids, token)
            if ended or len(grown) == depth:
                best = max(best, (options.score(total + score, len(grown)), ids if ended else grown))
            else:
                stack.append((grown, total + score))
    return best


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
def test_the_papers_rule_finds_the_best_continuation_that_there_is(alpha: float) -> None:
    depth = 3
    text, options = TEXTS[3], BeamOptions(200, alpha, "paper")  # so many beams that nothing is lost

    def logits_after(ids: tuple[int, ...]) -> torch.Tensor:
        state = begin_sources(ours("encoder_decoder"), [text], START, depth)
        for token in ids:
            state.feed([token])
        return state.logits[0]

    (beams,) = beam_search(begun("encoder_decoder", [text]), options, StopRule(depth, EOS, vocabulary_size=KNOWN))
    score, ids = exhaustive(options, cache(logits_after), depth)
    assert beams[0].ids == ids
    assert beams[0].score == pytest.approx(score, rel=1e-5)
    assert options.score(-3.0, 7) == pytest.approx(-3.0 / 2**alpha)  # (5 + 7) / 6


def test_a_sentence_alone_and_among_others_has_the_same_beams() -> None:
    for name in ("decoder", "encoder_decoder"):
        options, stop = BeamOptions(4, 0.6), StopRule(MAX_TOKENS, EOS, banned_ids=(PAD, START), vocabulary_size=28)
        together = beam_search(begun(name, TEXTS), options, stop)
        for text, beams in zip(TEXTS, together, strict=True):
            (alone,) = beam_search(begun(name, [text]), options, stop)
            assert [beam.ids for beam in alone] == [beam.ids for beam in beams]
            assert not {PAD, START, 28, 29, EOS} & {token for beam in beams for token in beam.ids}
            assert len(beams) == 4
