"""What is fed to a model for a question: the form in which its objective trained it. PURE.

Takes a `Question` (a text to go on from, one with gaps, or two texts around a gap) and how the model was trained →
a `Prompt`: the ids that the data side makes of such a document up to where the answer begins. And back: what was
written into each gap.
  causal_lm, prefix_lm        the text            seq2seq   the text and the end id
  fill_in_the_middle          the text; with a suffix as <prefix> P <suffix> S <middle>
  span_corruption, ul2 R, X   (the mode,) the text with a sentinel for each gap, the end id if the document ends there
  ul2 S                       the mode, the text
Text is only ever text: what spells a special token in a question is no special token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from pretrain.config.objectives import (
    AnyObjective,
    FillInTheMiddleObjective,
    SpanCorruptionObjective,
    UL2Objective,
)
from pretrain.config.schema import AnyModelConfig
from pretrain.data.special_tokens import SENTINEL_NAME, all_sentinels, fim_markers, mode_id
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked.

    Attributes:
        text: to continue, to translate, or what stands before the gap of `suffix`.
        suffix: what stands behind the gap (fill_in_the_middle).
        gap: text that marks a gap wherever it stands in `text` (span_corruption, ul2).
        mode: R, S or X (ul2); None means S without `gap` and R with it, or X where only that was trained.
        excerpt: a text with gaps is part of a longer document, which goes on behind it.
    """

    text: str
    suffix: str | None = None
    gap: str | None = None
    mode: str | None = None
    excerpt: bool = False


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is fed.

    Attributes:
        sentinels: ids that stand for the gaps, in their order; empty where nothing was marked.
    """

    ids: tuple[int, ...]
    sentinels: tuple[int, ...] = ()


def make_prompt(
    question: Question, tokenizer: Tokenizer, config: AnyModelConfig, objective: AnyObjective | None
) -> Prompt:
    """The prompt of a question.

    Args:
        objective: that the model was trained by; None where nobody knows (models of others): then a decoder continues
            and an encoder-decoder reads sources that end, and gaps are asked for if the tokenizer has ids for them.

    Raises:
        UserError: the family writes nothing, the text is empty, or the question does not fit the objective.
        DataError: the tokenizer lacks ids that the question needs.
    """
    if config.layout == "encoder":
        raise UserError(
            f"model.family={config.family} writes no text. An encoder sees both sides of a gap and continues "
            "nothing. Generate from a run of a decoder or an encoder-decoder."
        )
    _check_options(question, config, objective)
    if question.suffix is not None:
        return Prompt(_around_a_gap(question.text, question.suffix, tokenizer, objective))
    if not question.text:
        kind = "source" if config.layout == "encoder_decoder" else "prompt"
        raise UserError(f"the {kind} is empty. The model needs at least one token to start from. Give a text.")
    if isinstance(objective, UL2Objective):
        mode = _mode(question, objective)
        front = (mode_id(tokenizer.special_ids, mode),)
        if mode == "S":
            return Prompt((*front, *_encode([question.text], tokenizer)[0]))
        return _with_sentinels(question, tokenizer, front)
    if isinstance(objective, SpanCorruptionObjective) or question.gap is not None:
        return _with_sentinels(question, tokenizer, ())
    (ids,) = _encode([question.text], tokenizer)
    ends = config.layout == "encoder_decoder" and (objective is None or objective.kind == "seq2seq")
    return Prompt((*ids, tokenizer.eos_id) if ends else ids)


def answers_by_gap(ids: Sequence[int], sentinels: Sequence[int], tokenizer: Tokenizer) -> tuple[str | None, ...]:
    """What an answer puts into each gap; None for one that it does not name."""
    borders = set(all_sentinels(tokenizer.special_ids))
    found: dict[int, list[int]] = {}
    current: list[int] = []  # what stands before any sentinel belongs to no gap
    for token in ids:
        if token in borders:
            current = found.setdefault(token, [])
        else:
            current.append(token)
    return tuple(tokenizer.decode(found[one]) if one in found else None for one in sentinels)


def spelt_with_sentinels(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """The text of ids in which sentinels are written by their names."""
    names = {token: SENTINEL_NAME.format(n) for n, token in enumerate(all_sentinels(tokenizer.special_ids))}
    parts = []
    for is_name, tokens in groupby(ids, key=names.__contains__):
        run = list(tokens)
        parts.append("".join(names[token] for token in run) if is_name else tokenizer.decode(run))
    return "".join(parts)


def _check_options(question: Question, config: AnyModelConfig, objective: AnyObjective | None) -> None:
    """Raises UserError for an option that the objective gives no meaning to."""
    kind = None if objective is None else objective.kind
    trained = f"model.family={config.family}" + ("" if kind is None else f" trained with objective.kind={kind}")
    decoder = config.layout == "decoder"
    if question.suffix is not None and not (decoder and kind in ("fill_in_the_middle", None)):
        raise UserError(
            f"--suffix does not fit {trained}. Decoders that were trained with "
            "objective.kind=fill_in_the_middle fill gaps. Leave --suffix out."
        )
    if isinstance(objective, FillInTheMiddleObjective) and question.suffix is not None and not objective.rate:
        raise UserError(
            "--suffix does not fit objective.rate=0. No document of this run was rearranged, so that the markers of a "
            "gap mean nothing to it. Leave --suffix out."
        )
    if question.gap is not None and not (kind in ("span_corruption", "ul2") or (kind is None and not decoder)):
        other = " One gap is asked for with --suffix." if kind == "fill_in_the_middle" else ""
        raise UserError(
            f"--gap={question.gap} does not fit {trained}. Gaps are filled by models trained with "
            f"objective.kind=span_corruption or ul2.{other} Leave --gap out."
        )
    if question.mode is not None and kind != "ul2":
        raise UserError(
            f"--mode={question.mode} does not fit {trained}. Modes name the tasks of objective.kind=ul2. "
            "Leave --mode out."
        )
    if question.excerpt and question.gap is None:
        raise UserError(
            "--excerpt has no effect without --gap. Only texts with gaps are read as whole documents. Leave it out."
        )


def _mode(question: Question, objective: UL2Objective) -> str:
    """The mode that is asked for, or the one that fits. Raises UserError where none does."""
    trained = sorted({denoiser.mode for denoiser in objective.denoisers.values()})
    fitting = ["S"] if question.gap is None else ["R", "X"]
    mode = question.mode
    if mode is None:
        known = [mode for mode in fitting if mode in trained]
        if not known:
            remedy = "Mark gaps with --gap." if question.gap is None else "Leave --gap out."
            raise UserError(
                f"a text {'without' if question.gap is None else 'with'} gaps needs mode {' or '.join(fitting)}, and "
                f"this run's objective.denoisers have {', '.join(trained)}. A model knows the tasks that it was "
                f"trained on. {remedy}"
            )
        return known[0]
    if mode not in trained:
        raise UserError(
            f"--mode={mode} is none of this run's objective.denoisers ({', '.join(trained)}). A model knows the tasks "
            f"that it was trained on. Choose one of these."
        )
    if mode not in fitting:
        rule, remedy = (
            ("R and X fill marked gaps", "Mark them with --gap, or ask with --mode=S.")
            if question.gap is None
            else ("S continues a text, and has no gaps", "Leave --gap out, or ask with --mode=R.")
        )
        raise UserError(
            f"--mode={mode} does not fit a text {'without' if question.gap is None else 'with'} --gap. {rule}. {remedy}"
        )
    return mode


def _around_a_gap(prefix: str, suffix: str, tokenizer: Tokenizer, objective: AnyObjective | None) -> tuple[int, ...]:
    """Prefix, suffix, middle; or suffix, prefix, middle for who was trained with nothing else."""
    mark = fim_markers(tokenizer.special_ids)
    before, behind = _encode([prefix, suffix], tokenizer)
    if isinstance(objective, FillInTheMiddleObjective) and objective.spm_rate == 1:
        return (mark.prefix, mark.suffix, *behind, mark.middle, *before)
    return (mark.prefix, *before, mark.suffix, *behind, mark.middle)


def _with_sentinels(question: Question, tokenizer: Tokenizer, front: tuple[int, ...]) -> Prompt:
    """A sentinel for each gap. Raises UserError for gaps that no document of the training had."""
    if not question.gap:
        problem = "is not given" if question.gap is None else "marks nothing"
        raise UserError(
            f"--gap{'' if question.gap is None else '='} {problem}. This model fills gaps, and a text of your choice "
            "marks them. Give for example --gap '<gap>' --prompt 'The<gap> sat on the<gap>.'"
        )
    parts = question.text.split(question.gap)
    gaps, have = len(parts) - 1, all_sentinels(tokenizer.special_ids)
    if not gaps:
        raise UserError(
            f"--gap={question.gap} does not occur in the text. This model fills gaps, so there must be one. "
            f"Write {question.gap} where text is missing."
        )
    if gaps > len(have):
        raise UserError(
            f"the text has {gaps} gaps, and the tokenizer has {len(have)} sentinels. Each gap of a text has its own. "
            f"{'Ask about fewer at once.' if have else 'Ask a model whose tokenizer has sentinels.'}"
        )
    if any(not part for part in parts[1:-1]):
        raise UserError(
            "two gaps touch each other. In training at least a token stands between any two. Make one gap of them."
        )
    if not any(parts):
        raise UserError("the text is nothing but a gap. Something must be given. Write what stands around it.")
    first, *others = _encode(parts, tokenizer)
    ids = [*front, *first]
    for sentinel, part in zip(have, others, strict=False):
        ids += [sentinel, *part]
    end = () if question.excerpt else (tokenizer.eos_id,)
    return Prompt((*ids, *end), have[:gaps])


def _encode(texts: Sequence[str], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    return [tuple(ids.tolist()) for ids in tokenizer.encode_batch(texts)]
