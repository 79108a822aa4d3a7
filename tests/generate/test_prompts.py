"""A prompt is what the data side makes of the same text, for every objective and layout; and how answers are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from launch import cli
from pretrain.config.schema import (
    AnyModelConfig,
    DecoderConfig,
    GPT2Config,
    LossConfig,
    RunConfig,
    SamplesEvalConfig,
)
from pretrain.data.batch import seq_info
from pretrain.data.objectives import token_objective
from pretrain.data.special_tokens import ExtraTokens
from pretrain.data.tokenizer import Tokenizer, train
from pretrain.errors import DataError, UserError
from pretrain.generate.decode import begin_prompts
from pretrain.generate.prompts import Question, answers_by_gap, spelt_with_sentinels
from pretrain.generate.sampling import SamplingOptions
from pretrain.generate.text import Writer, generate_text
from pretrain.model.hf.directory import export_model
from pretrain.model.hf.family import ExportOptions
from pretrain.model.registry import build_model
from pretrain.sequence import IGNORED_LABEL, Batch
from pretrain.train.samples import _write
from tests.metrics.home import run_config

SENTINELS = 32
FIM = {"<|fim_prefix|>": "P", "<|fim_suffix|>": "S", "<|fim_middle|>": "M"}
MODES = {"<|mode_r|>": "R", "<|mode_s|>": "S", "<|mode_x|>": "X"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Bytes and special tokens alone, so that any cut of a text is one of its ids."""
    return train(["the cat sat"], 256 + 9 + SENTINELS, "bpe", ExtraTokens(SENTINELS, True, True))


def config_of(layout: str, **objective: Any) -> RunConfig:
    values: dict[str, Any] = run_config().model_dump()
    model = {"vocabulary_size": 256 + 9 + SENTINELS, "width": 16, "num_heads": 2, "feed_forward_width": 24}
    if layout == "decoder":
        values["model"] = {**model, "family": "decoder", "num_layers": 2, "init_std": 0.4}
    else:
        values["model"] = {**model, "family": "encoder_decoder", "num_encoder_layers": 1, "num_decoder_layers": 1}
    values["objective"] = objective
    values["batch"] = {**values["batch"], "source_length": 64 if objective["kind"] == "seq2seq" else None}
    return RunConfig.model_validate(values)


def writer_of(config: RunConfig, tokenizer: Tokenizer) -> Writer:
    return Writer(torch.nn.Identity(), config.model, tokenizer, config.objective)


def given_by_the_data(config: RunConfig, tokenizer: Tokenizer, key: int) -> list[list[int]]:
    """What the row of a text that ends and of one that goes on behind it gives of each, through the run's own path."""
    text = "The quick brown fox jumps over the lazy dog, and <|endoftext|> is text."
    first, second = (ids.tolist() for ids in tokenizer.encode_batch([text, "Pack my box with five dozen jugs."]))
    ids = np.array([*first, tokenizer.eos_id, *second, 65])
    made = token_objective(
        config, tokenizer.manifest(name="t", kind="tokens"), "t", tokenizer.special_ids, row_tokens=ids.size - 1
    )
    row = made.make(ids, np.array([len(first) + 1]), ids.size - 1, key)
    if row.encoder_ids is not None and row.encoder_lengths is not None:
        parts = np.split(row.encoder_ids, np.cumsum(row.encoder_lengths)[:-1])
        return [part.tolist() for part in parts]
    documents = np.split(row.decoder_ids, np.cumsum(row.lengths)[:-1])
    assert row.prefix_lengths is not None
    return [part[:count].tolist() for part, count in zip(documents, row.prefix_lengths.tolist(), strict=True)]


def asked(inputs: list[int], tokenizer: Tokenizer) -> Question:
    """A plain reader: the question that a person would write for these inputs."""
    names = {index: name for name, index in tokenizer.special_ids.items()}
    mode = MODES.get(names.get(inputs[0], ""))
    body = inputs[mode is not None :]
    ended = body[-1] == tokenizer.eos_id
    marked = "".join(
        "[..]" if names.get(token, "").startswith("<extra_id") else chr(token_byte(token, tokenizer))
        for token in body[: -1 if ended else None]
    )
    gap = "[..]" if "[..]" in marked else None
    return Question(marked, gap=gap, mode=mode, excerpt=gap is not None and not ended)


def token_byte(token: int, tokenizer: Tokenizer) -> int:
    (byte,) = tokenizer.decode([token]).encode()
    return byte


@pytest.mark.parametrize("layout", ["decoder", "encoder_decoder"])
@pytest.mark.parametrize(
    "objective",
    [
        {"kind": "prefix_lm"},
        {"kind": "span_corruption"},
        {"kind": "ul2"},
        {"kind": "span_corruption", "noise_density": 0.5, "mean_span_tokens": 2},
    ],
    ids=["prefix_lm", "span_corruption", "ul2", "many spans"],
)
def test_what_is_fed_is_what_the_data_side_gives_of_the_same_text(
    layout: str, objective: dict[str, Any], tokenizer: Tokenizer
) -> None:
    config = config_of(layout, **objective)
    writer = writer_of(config, tokenizer)
    seen = set()
    for key in range(40):
        for inputs in given_by_the_data(config, tokenizer, key):
            question = asked(inputs, tokenizer)
            assert list(writer.prompt(question).ids) == inputs
            seen.add((question.mode, question.gap is not None, question.excerpt))
    if objective["kind"] == "ul2":  # S gives no end, whether the document ends or not
        assert seen == {*((mode, True, cut) for mode in "RX" for cut in (True, False)), ("S", False, False)}
    elif objective["kind"] == "span_corruption":
        assert seen == {(None, True, True), (None, True, False)}
    else:
        assert seen == {(None, False, False)}


@pytest.mark.parametrize("spm_rate", [0.0, 1.0])
def test_a_middle_is_asked_for_in_the_form_that_was_trained(spm_rate: float, tokenizer: Tokenizer) -> None:
    config = config_of("decoder", kind="fill_in_the_middle", rate=1.0, spm_rate=spm_rate, min_document_tokens=4)
    writer, names = writer_of(config, tokenizer), {index: name for name, index in tokenizer.special_ids.items()}
    text = "The quick brown <|fim_middle|> jumps."
    body = tokenizer.encode_batch([text])[0].tolist()
    ids = np.array([*body, tokenizer.eos_id, 65])
    manifest = tokenizer.manifest(name="t", kind="tokens")
    made = token_objective(config, manifest, "t", tokenizer.special_ids, row_tokens=ids.size - 1)
    lengths = set()
    for key in range(30):
        document = made.make(ids, np.array([len(body) + 1]), ids.size - 1, key).decoder_ids.tolist()
        parts: dict[str, str] = {"P": "", "S": "", "M": ""}
        current = ""
        for token in document[:-1]:
            current = FIM.get(names.get(token, ""), current)
            parts[current] += "" if token in names else chr(token_byte(token, tokenizer))
        if spm_rate:  # prefix and middle stand behind the same marker: any cut of them is a question
            parts["P"], parts["M"] = parts["M"][:key], parts["M"][key:]
        prompt = writer.prompt(Question(parts["P"], suffix=parts["S"])).ids
        assert list(prompt) == document[: len(prompt)]
        assert tokenizer.decode(document[len(prompt) : -1]) == parts["M"]
        assert parts["P"] + parts["M"] + parts["S"] == text
        lengths.add(len(parts["S"]))
    assert len(lengths) > 10


def test_plain_texts_of_every_objective(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_batch(["a <gap> b"])[0].tolist()
    for layout, kind, end in (
        ("decoder", "causal_lm", []),
        ("decoder", "fill_in_the_middle", []),
        ("decoder", "prefix_lm", []),
        ("encoder_decoder", "prefix_lm", []),
        ("encoder_decoder", "seq2seq", [tokenizer.eos_id]),
    ):
        config = config_of(layout, kind=kind)
        assert list(writer_of(config, tokenizer).prompt("a <gap> b").ids) == [*ids, *end]
        assert list(Writer(torch.nn.Identity(), config.model, tokenizer).prompt("a <gap> b").ids) == [
            *ids,
            *([tokenizer.eos_id] if layout == "encoder_decoder" else []),
        ]
    ended, _ = tokenizer.encode_ended(["a <gap> b"])  # as the build stores sources of pairs
    assert ended.tolist() == [*ids, tokenizer.eos_id]


def test_only_decoders_that_were_trained_so_see_their_prompt_in_both_directions(tokenizer: Tokenizer) -> None:
    for layout, objective, expected in (
        ("decoder", {"kind": "prefix_lm"}, True),
        ("decoder", {"kind": "prefix_lm", "bidirectional_prefix": False}, False),
        ("decoder", {"kind": "ul2"}, True),
        ("decoder", {"kind": "fill_in_the_middle"}, False),
        ("encoder_decoder", {"kind": "prefix_lm"}, False),
    ):
        assert writer_of(config_of(layout, **objective), tokenizer).bidirectional == expected


def test_the_mode_is_the_one_that_fits_the_question(tokenizer: Tokenizer) -> None:
    names = {index: MODES[name] for name, index in tokenizer.special_ids.items() if name in MODES}

    def mode(question: Question, *modes: str) -> str:
        denoisers = {
            name: {"mode": name, "noise_density": 0.3, "mean_span_tokens": None if name == "S" else 3} for name in modes
        }
        config = config_of("decoder", kind="ul2", denoisers=denoisers)
        return names[writer_of(config, tokenizer).prompt(question).ids[0]]

    assert mode(Question("a_b", gap="_"), "R", "S", "X") == "R"
    assert mode(Question("a_b", gap="_"), "S", "X") == "X"
    assert mode(Question("a_b", gap="_", mode="X"), "R", "S", "X") == "X"
    assert mode(Question("a_b"), "R", "S", "X") == "S"
    with pytest.raises(UserError, match=r"without gaps needs mode S, and .* have R, X\. .* Mark gaps with --gap"):
        mode(Question("a_b"), "R", "X")
    with pytest.raises(UserError, match=r"with gaps needs mode R or X, and .* have S\. .* Leave --gap out"):
        mode(Question("a_b", gap="_"), "S")
    with pytest.raises(UserError, match=r"--mode=X is none of this run's objective.denoisers \(R, S\)"):
        mode(Question("a_b", gap="_", mode="X"), "R", "S")


SPANS = ("decoder", {"kind": "span_corruption"})
UL2 = ("encoder_decoder", {"kind": "ul2"})
CAUSAL = ("decoder", {"kind": "causal_lm"})
MIDDLE = ("decoder", {"kind": "fill_in_the_middle"})
WRONG = [
    (CAUSAL, Question("a", suffix="b"), "--suffix does not fit .*objective.kind=causal_lm.* Leave --suffix out"),
    (UL2, Question("a", suffix="b"), "--suffix does not fit model.family=encoder_decoder .*kind=ul2"),
    (CAUSAL, Question("a_", gap="_"), "--gap=_ does not fit .*span_corruption or ul2. Leave --gap out"),
    (MIDDLE, Question("a_", gap="_"), "One gap is asked for with --suffix"),
    (SPANS, Question("a_", gap="_", mode="R"), "--mode=R does not fit .*kind=span_corruption. .*Leave --mode out"),
    (CAUSAL, Question("a", excerpt=True), "--excerpt has no effect without --gap"),
    (SPANS, Question("a"), "--gap is not given. .* Give for example --gap '<gap>'"),
    (SPANS, Question("a", gap=""), "--gap= marks nothing"),
    (SPANS, Question("a b", gap="_"), "--gap=_ does not occur in the text"),
    (SPANS, Question("a__b", gap="_"), "two gaps touch each other"),
    (SPANS, Question("_", gap="_"), "nothing but a gap"),
    (SPANS, Question("a_" * 33, gap="_"), "33 gaps, and the tokenizer has 32 sentinels. .* Ask about fewer"),
    (UL2, Question("a", mode="R"), "--mode=R does not fit a text without --gap. .* ask with --mode=S"),
    (UL2, Question("a_", gap="_", mode="S"), "--mode=S does not fit a text with --gap. .* ask with --mode=R"),
    (UL2, Question(""), "the source is empty"),
    (("decoder", {"kind": "fill_in_the_middle", "rate": 0.0}), Question("a", suffix="b"), "objective.rate=0"),
]


@pytest.mark.parametrize(("trained", "question", "message"), WRONG, ids=[message[:40] for *_, message in WRONG])
def test_a_question_that_does_not_fit_the_training_is_refused(
    trained: tuple[str, dict[str, Any]], question: Question, message: str, tokenizer: Tokenizer
) -> None:
    writer = writer_of(config_of(trained[0], **trained[1]), tokenizer)
    with pytest.raises(UserError, match=message):
        writer.prompt(question)


def test_of_a_model_whose_training_nobody_knows_its_tokenizer_decides(tokenizer: Tokenizer) -> None:
    plain = train(["the cat sat"], 259, "bpe")
    decoder = config_of("decoder", kind="causal_lm").model
    pairs = config_of("encoder_decoder", kind="seq2seq").model

    def prompt(config: AnyModelConfig, of: Tokenizer, question: Question) -> list[int]:
        return list(Writer(torch.nn.Identity(), config, of).prompt(question).ids)

    marks = tokenizer.special_ids
    assert prompt(decoder, tokenizer, Question("", suffix=""))[0] == marks["<|fim_prefix|>"]
    assert marks["<extra_id_0>"] in prompt(pairs, tokenizer, Question("a_b", gap="_"))
    with pytest.raises(DataError, match="no special token"):
        prompt(decoder, plain, Question("a", suffix="b"))
    with pytest.raises(UserError, match="the tokenizer has 0 sentinels"):
        prompt(pairs, plain, Question("a_b", gap="_"))
    with pytest.raises(UserError, match=r"--gap=_ does not fit model\.family=decoder"):
        prompt(decoder, tokenizer, Question("a_b", gap="_"))


def test_an_answer_is_read_by_its_sentinels(tokenizer: Tokenizer) -> None:
    special = tokenizer.special_ids
    s0, s1, s2, s3 = (special[f"<extra_id_{n}>"] for n in range(4))
    one, two, rest = (ids.tolist() for ids in tokenizer.encode_batch([" cat", "é", "rest"]))
    assert answers_by_gap([s0, *one, s1, *two], (s0, s1), tokenizer) == (" cat", "é")
    assert answers_by_gap([s1, *two, s0, *one, s2, *rest], (s0, s1), tokenizer) == (" cat", "é")  # as T5 ends answers
    assert answers_by_gap([*rest, s1, s2, *one], (s0, s1, s2, s3), tokenizer) == (None, "", " cat", None)
    assert (
        spelt_with_sentinels([*rest, s1, s2, *one, tokenizer.eos_id], tokenizer) == "rest<extra_id_1><extra_id_2> cat"
    )


@pytest.mark.parametrize("family", ["decoder", "gpt2"])
def test_cached_logits_behind_a_prompt_seen_in_both_directions_are_those_of_one_full_pass(family: str) -> None:
    sizes = {"vocabulary_size": 50, "width": 32, "num_heads": 4, "feed_forward_width": 48, "num_layers": 2}
    config: DecoderConfig | GPT2Config = (
        DecoderConfig(**sizes, num_kv_heads=2, init_std=0.3)
        if family == "decoder"
        else GPT2Config(**sizes, max_length=32, init_std=0.3)
    )
    model = build_model(config, LossConfig(), seed=11, activation_checkpointing=False).double().eval()
    prompts, answers = [[7, 3, 44, 12, 9], [5, 17], [1]], [[30, 22, 8], [49, 0, 2], [11, 12, 13]]

    def full(ids: list[int], prefix: int) -> torch.Tensor:
        info = seq_info(np.array([len(ids)]), prefixes=np.array([prefix]))
        labels = torch.full((len(ids),), IGNORED_LABEL)
        with torch.no_grad():
            found: torch.Tensor = model.logits(Batch(0, torch.tensor(ids), info, labels, None, None, 0, 0, 0, 0))
        return found

    expected = [full([*a, *b], len(a))[len(a) - 1 :] for a, b in zip(prompts, answers, strict=True)]
    causal = full([*prompts[0], *answers[0]], 0)[len(prompts[0]) - 1 :]
    assert (causal - expected[0]).abs().max() > 1e-3  # the direction matters at all
    begun = begin_prompts(model, prompts, 4, bidirectional=True)
    for place in range(4):
        wanted = torch.stack([one[place] for one in expected]).float()
        torch.testing.assert_close(begun.logits, wanted, rtol=1e-6, atol=1e-6)
        if place < 3:
            begun.feed([one[place] for one in answers])


def test_a_sample_of_a_run_has_its_gaps_marked(tokenizer: Tokenizer) -> None:
    config = config_of("encoder_decoder", kind="ul2")
    model = build_model(config.model, config.loss, seed=5, activation_checkpointing=False).eval()
    writer = Writer(model, config.model, tokenizer, config.objective)

    def sample(prompt: str, **wanted: Any) -> dict[str, Any]:
        samples = SamplesEvalConfig(prompts=[prompt], every_steps=1, max_tokens=9, temperature=0.0, **wanted)
        told: dict[str, Any] = json.loads(_write(writer, samples, prompt, lambda: None, seed=0))
        return told

    written = generate_text(writer, Question("a_b_", gap="_"), sampling=SamplingOptions(), max_tokens=9)
    assert sample("a_b_", gap="_") == {"prompt": "a_b_", "text": written.text, "gaps": list(written.gaps)}
    assert len(written.gaps) == 2
    continued = generate_text(writer, "a_b_", sampling=SamplingOptions(), max_tokens=9)
    assert sample("a_b_") == {"prompt": "a_b_", "text": continued.text}
    assert "--gap=_ does not occur" in sample("ab", gap="_")["error"]


def test_the_command_asks_an_exported_model_by_its_objective(
    tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Greedy answers are those of full passes over prompts written by hand."""
    config = config_of("decoder", kind="span_corruption")
    model = build_model(config.model, config.loss, seed=5, activation_checkpointing=False).eval()
    options = ExportOptions(64, torch.float32, eos_id=tokenizer.eos_id, pad_id=tokenizer.pad_id, start_id=None)
    export_model(dict(model.named_parameters()), config.model, tmp_path / "hf", options)
    tokenizer.save(tmp_path / "hf" / "tokenizer.json")
    (tmp_path / "hf" / "objective.json").write_text('{"kind": "span_corruption"}')
    special = tokenizer.special_ids
    before, between, behind = (ids.tolist() for ids in tokenizer.encode_batch(["The", " sat on", "."]))
    prompt = [*before, special["<extra_id_0>"], *between, special["<extra_id_1>"], *behind, tokenizer.eos_id]
    ids = list(prompt)
    for _ in range(12):
        info = seq_info(np.array([len(ids)]), prefixes=np.array([len(prompt)]))
        labels = torch.full((len(ids),), IGNORED_LABEL)
        with torch.no_grad():
            scores = model.logits(Batch(0, torch.tensor(ids), info, labels, None, None, 0, 0, 0, 0))[-1]
        scores[[tokenizer.pad_id, tokenizer.start_id]] = -torch.inf
        ids.append(int(scores.argmax()))
        if ids[-1] == tokenizer.eos_id:
            ids.pop()
            break
    answer = ids[len(prompt) :]
    words = ["generate", str(tmp_path / "hf"), "--prompt", "The_ sat on_.", "--max-tokens", "12"]
    assert cli.main([*words, "--gap", "_", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    gaps = answers_by_gap(answer, (special["<extra_id_0>"], special["<extra_id_1>"]), tokenizer)
    assert (told["tokens"], told["text"]) == (len(answer), spelt_with_sentinels(answer, tokenizer))
    assert told["gaps"] == list(gaps)
    filled = f"The{'_' if gaps[0] is None else gaps[0]} sat on{'_' if gaps[1] is None else gaps[1]}."
    assert told["filled"] == filled
    assert cli.main([*words, "--gap", "_"]) == 0
    shown = [f"gap {n}: {'(left out)' if gap is None else repr(gap)}" for n, gap in enumerate(gaps, 1)]
    assert capsys.readouterr().out == "\n".join([filled, *shown]) + "\n"
    assert cli.main(words) == 2
    assert "--gap is not given" in capsys.readouterr().err
    (tmp_path / "hf" / "objective.json").write_text('{"kind": "spam"}')
    assert cli.main([*words, "--gap", "_"]) == 2
    assert "objective.json says no objective" in capsys.readouterr().err
