"""What the model writes for chosen prompts inside a run, and the attention maps of the first: for people to look at.

takes → engine, config; gives → a line of JSON per prompt, and a picture. Rank 0 writes with a copy of the weights in a
model of its own, so that neither the engine nor any global random state is touched, at every ZeRO stage; the others
wait for it prompt by prompt. What cannot be written (a diverged model) is said in the prompt's place: a sample never
ends a run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from pretrain.config.schema import RunConfig, SamplesEvalConfig
from pretrain.data.tokenizer import Tokenizer
from pretrain.engine.engine import Engine
from pretrain.errors import PretrainError
from pretrain.generate.attention import inspect_attention
from pretrain.generate.attention_picture import draw_inspection, last_layers
from pretrain.generate.prompts import Question
from pretrain.generate.sampling import SamplingOptions
from pretrain.generate.text import Writer, answer_of, stream_ids
from pretrain.topology import World
from pretrain.train.model_copy import copy_of_model


@dataclass(frozen=True, slots=True)
class Samples:
    """What rank 0 has; elsewhere nothing.

    Attributes:
        lines: one JSON object per prompt: `prompt` and `text` (and `gaps`), or `prompt` and `error`.
        maps: a PNG of the first prompt's attention, if wanted.
    """

    lines: str = ""
    maps: bytes | None = None


def write_samples(
    engine: Engine,
    config: RunConfig,
    tokenizer: Tokenizer,
    world: World,
    step: int,
    beat: Callable[[], None],
    alive: Callable[[], None],
    asked_to_end: Callable[[], bool],
) -> Samples | None:
    """Texts for all prompts of `eval.samples`. A collective.

    Args:
        step: of the weights, for the picture's title.
        beat: called before the copy and each prompt, on all ranks.
        alive: called for each weight that is copied and each token, on rank 0: a slow text is no hang.
        asked_to_end: whether any rank was; a collective. Then the result is None.
    """
    wanted = config.eval.samples
    assert wanted is not None
    beat()
    model = copy_of_model(engine, config, alive, wanted=world.is_main)
    writer = None if model is None else Writer(model, config.model, tokenizer, config.objective)
    lines: list[str] = []
    for number, prompt in enumerate(wanted.prompts):
        beat()
        if asked_to_end():
            return None
        if writer is not None:
            lines.append(_write(writer, wanted, prompt, alive, seed=config.seed + number))
    alive()
    maps = _draw(writer, config, step) if writer is not None and wanted.attention_maps else None
    return Samples("".join(lines), maps)


def _write(writer: Writer, wanted: SamplesEvalConfig, prompt: str, alive: Callable[[], None], *, seed: int) -> str:
    sampling = SamplingOptions(wanted.temperature, None, wanted.top_p, seed)
    ids: list[int] = []
    body: dict[str, object]
    try:
        question = Question(prompt, gap=wanted.gap)
        for token in stream_ids(writer, question, sampling=sampling, max_tokens=wanted.max_tokens):
            alive()
            ids.append(token)
        answer = answer_of(writer, writer.prompt(question), ids, ended=len(ids) < wanted.max_tokens)
        body = {"text": answer.text, **({"gaps": answer.gaps} if answer.gaps else {})}
    except PretrainError as error:
        body = {"error": str(error)}
    return json.dumps({"prompt": prompt, **body}, ensure_ascii=False) + "\n"


def _draw(writer: Writer, config: RunConfig, step: int) -> bytes | None:
    assert config.eval.samples is not None
    prompt = config.eval.samples.prompts[0]
    try:
        found = inspect_attention(writer, Question(prompt, gap=config.eval.samples.gap))
        return draw_inspection(f"{config.name}, step {step}", found, last_layers(found))
    except PretrainError:
        return None  # the prompt's sample says why
