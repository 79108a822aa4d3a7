"""Translations of held-out pairs inside a run, with their scores: they never disturb the training.

takes → engine, config, pairs; gives → scores and samples. Each rank translates its share with a copy of the
weights in a model of its own, so that neither the engine nor any global random state is touched, at every
ZeRO stage; the texts are gathered, so that the scores are those of all pairs whatever the ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict

from pretrain.config.schema import RunConfig
from pretrain.data.tokenizer import Tokenizer
from pretrain.engine.distributed import gather_texts
from pretrain.engine.engine import Engine
from pretrain.generate.beam import BeamOptions
from pretrain.generate.scores import TranslationScores, translation_scores
from pretrain.generate.text import Writer
from pretrain.generate.translations import Pair, Sample, read_pairs, translate
from pretrain.topology import World
from pretrain.train.model_copy import copy_of_model

_PAIRS_AT_ONCE = 16


def held_out_pairs(config: RunConfig) -> list[Pair]:
    """The pairs of `eval.translation`; none where it is not set.

    Raises:
        UserError: their file is missing or damaged, or sacrebleu is not installed.
    """
    wanted = config.eval.translation
    if wanted is None:
        return []
    pairs = read_pairs(
        wanted.pairs, source_field=wanted.source_field, target_field=wanted.target_field, limit=wanted.max_pairs
    )
    translation_scores(["a"], ["a"])  # sacrebleu is there, or the run ends now and not at the first evaluation
    return pairs


def translate_held_out(
    engine: Engine,
    config: RunConfig,
    tokenizer: Tokenizer,
    pairs: Sequence[Pair],
    world: World,
    beat: Callable[[], None],
    alive: Callable[[], None],
    asked_to_end: Callable[[], bool],
) -> tuple[TranslationScores, list[Sample]] | None:
    """Scores and translations of all pairs in their order, on every rank. A collective.

    Args:
        beat: called before the ranks wait for each other.
        alive: called for each weight that is copied and each token: what is slow is no hang.
        asked_to_end: whether any rank was; a collective. Then the result is None.
    """
    wanted = config.eval.translation
    assert wanted is not None
    beat()
    model = copy_of_model(engine, config, alive)
    assert model is not None  # it is wanted on every rank
    writer = Writer(model, config.model, tokenizer, config.objective)
    beams = None if wanted.num_beams == 1 else BeamOptions(wanted.num_beams, wanted.length_penalty)
    mine = pairs[world.rank :: world.size]
    samples: list[Sample] = []
    for first in range(0, -(-len(pairs) // world.size), _PAIRS_AT_ONCE):  # equally often on every rank
        beat()
        if asked_to_end():
            return None
        some = mine[first : first + _PAIRS_AT_ONCE]
        samples += translate(writer, some, max_tokens=wanted.max_tokens, beams=beams, alive=alive) if some else []
    beat()  # who has fewer or shorter texts waits here
    gathered = [json.loads(text) for text in gather_texts(json.dumps([asdict(sample) for sample in samples]))]
    shares = [[Sample(**body) for body in share] for share in gathered]
    all_samples = [shares[number % world.size][number // world.size] for number in range(len(pairs))]
    scores = translation_scores([s.hypothesis for s in all_samples], [s.reference for s in all_samples])
    return scores, all_samples
