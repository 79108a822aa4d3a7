"""`pretrain generate TARGET`: text from a trained model."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.errors import ExitCode, UserError

if TYPE_CHECKING:
    from pretrain.generate.beam import BeamOptions
    from pretrain.generate.prompts import Question
    from pretrain.generate.sampling import SamplingOptions
    from pretrain.generate.text import Generated

DESCRIPTION = """\
Continues a prompt with a decoder, fills gaps, or writes the target of a source text with an encoder-decoder. TARGET is
a run (its newest checkpoint), RUN:CHECKPOINT, or an exported directory; weights are in fp32 on the CPU. Without
--prompt and --file the text is read from stdin; with --lines each line is a text of its own, and several are written
at once. Greedy unless --temperature or --beams is given; the same seed gives the same text.

The prompt is given the form that the run's objective trained: fill_in_the_middle fills the gap before --suffix;
span_corruption and ul2 fill the gaps that --gap marks, which are printed one by one behind the whole text; ul2
continues a text without gaps. For most tokenizers the space before a word is part of it, so leave it to the gap.

  pretrain generate quickstart --prompt 'def main(' --temperature 0.8 --top-p 0.95
  pretrain generate translation --file sentences.txt --lines --beams 4
  pretrain generate code --prompt 'def add(a, b):' --suffix 'return total'
  pretrain generate spans --prompt 'The<gap> sat on the<gap>.' --gap '<gap>'"""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "generate",
        help="let a trained model write text",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_target(parser)
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--prompt", "--source", dest="prompt", metavar="TEXT", help="text to continue or to translate")
    text.add_argument("--file", metavar="PATH", help="read that text from a file")
    parser.add_argument("--suffix", metavar="TEXT", help="what follows the gap (decoders with fill_in_the_middle)")
    parser.add_argument("--gap", metavar="MARK", help="what marks a gap in the text (span_corruption and ul2)")
    parser.add_argument(
        "--mode",
        choices=("R", "S", "X"),
        help="task of ul2: R fills gaps, X long or many ones, S continues (default: R with --gap, else S)",
    )
    parser.add_argument(
        "--excerpt", action="store_true", help="the text with gaps goes on: no end-of-text id is put behind it"
    )
    parser.add_argument(
        "--lines", action="store_true", help="every line is a text of its own; an empty one stays empty"
    )
    parser.add_argument("--max-tokens", type=int, default=200, metavar="N", help="new tokens at most (default 200)")
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 = greedy (default); 1 = as the model thinks"
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from the K most likely tokens only")
    parser.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="draw from the most likely tokens that make up P (default 1)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws (default 0)")
    add_beam_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler="launch.commands.generate:run")


def add_target(parser: argparse.ArgumentParser) -> None:
    """TARGET, --checkpoint and --average: which weights."""
    parser.add_argument(
        "target",
        metavar="TARGET",
        help="a run's name or path, RUN:CHECKPOINT, a checkpoint's directory, or a directory with config.json",
    )
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--checkpoint", metavar="NAME", help="checkpoint of the run (default: the newest)")
    chosen.add_argument(
        "--average",
        type=int,
        metavar="N",
        help="mean weights of the run's newest N checkpoints, which should lie near each other",
    )


def add_beam_arguments(parser: argparse.ArgumentParser) -> None:
    """--beams, --length-penalty and --score."""
    parser.add_argument("--beams", type=int, metavar="B", help="beam search with B beams instead of single choices")
    parser.add_argument("--length-penalty", type=float, metavar="A", help="exponent of the length in it (default 0.6)")
    parser.add_argument(
        "--score",
        choices=("paper", "transformers"),
        help="log P / ((5 + n) / 6)^A as in the paper (default), or log P / n^A as transformers has it",
    )


def beam_options(args: argparse.Namespace) -> BeamOptions | None:
    """What the arguments of `add_beam_arguments` say; None without --beams. Raises UserError."""
    from pretrain.generate.beam import BeamOptions

    given = {"alpha": args.length_penalty, "rule": args.score}
    given = {name: value for name, value in given.items() if value is not None}
    if args.beams is None and given:
        option = "--score" if args.length_penalty is None else "--length-penalty"
        raise UserError(f"{option} has no effect without --beams. It scores beams. Set --beams 4, or leave it out.")
    return None if args.beams is None else BeamOptions(args.beams, **given)


def _sampling_options(args: argparse.Namespace) -> SamplingOptions:
    """Raises UserError for values outside their range, and for those that nothing would be drawn by."""
    from pretrain.generate.sampling import SamplingOptions

    options = SamplingOptions(args.temperature, args.top_k, 1.0 if args.top_p is None else args.top_p, args.seed)
    drawn = [name for name, value in (("--top-k", args.top_k), ("--top-p", args.top_p)) if value is not None]
    if drawn and not args.temperature:
        raise UserError(
            f"{drawn[0]} has no effect at --temperature=0, where the most likely token is taken. "
            "Set --temperature 1, or leave it out."
        )
    return options


def run(args: argparse.Namespace) -> int:
    """Opens the target, writes, prints texts or JSON."""
    from launch.trained import open_trained
    from pretrain.generate.prompts import Question
    from pretrain.generate.text import Generated, write_texts

    sampling = _sampling_options(args)
    beams = beam_options(args)
    if beams is not None and args.temperature:
        raise UserError(
            f"--beams={args.beams} and --temperature={args.temperature} exclude each other. Beam search draws nothing. "
            "Leave one out."
        )
    text = _read_text(args)
    texts = _lines(text) if args.lines else [text]
    blank = [args.lines and not one.strip() for one in texts]
    if all(blank):
        raise UserError("no line holds a text. With --lines each is a text of its own. Give at least one.")
    trained = open_trained(args.target, checkpoint=args.checkpoint, average=args.average)
    writer = trained.writer
    questions = [
        Question(one, args.suffix, args.gap, args.mode, args.excerpt)
        for one, left_out in zip(texts, blank, strict=True)
        if not left_out
    ]
    written = write_texts(writer, questions, max_tokens=args.max_tokens, sampling=sampling, beams=beams)
    answers = zip(questions, written, strict=True)
    facts = {"run": trained.where if trained.run is None else trained.run.name, "checkpoint": trained.checkpoint}
    rows = []
    for one, left_out in zip(texts, blank, strict=True):
        question, new = (Question(one), Generated("", (), ended=True)) if left_out else next(answers)
        rows.append({**facts, **_row(question, new)})
        if not args.json:
            print(_shown(question, new, reads_sources=writer.reads_sources), flush=True)
    if args.json:
        print(json.dumps(rows if args.lines else rows[0], indent=2, ensure_ascii=False))
    return ExitCode.DONE


def _row(question: Question, new: Generated) -> dict[str, Any]:
    row: dict[str, Any] = {"prompt": question.text, "text": new.text, "tokens": len(new.ids), "ended": new.ended}
    if new.gaps:
        row |= {"gaps": list(new.gaps), "filled": _filled(question, new)}
    return row if new.score is None else {**row, "score": new.score}


def _shown(question: Question, new: Generated, *, reads_sources: bool) -> str:
    """What is printed: the text after its prompt, or the text with its gaps filled and a line for each gap."""
    if new.gaps:
        lines = [f"gap {n}: {'(left out)' if gap is None else repr(gap)}" for n, gap in enumerate(new.gaps, 1)]
        return "\n".join([_filled(question, new), *lines])
    return new.text if reads_sources else question.text + new.text + (question.suffix or "")


def _filled(question: Question, new: Generated) -> str:
    """The text with what belongs into its gaps; one that the model left out stays marked."""
    assert question.gap is not None  # only marked gaps have answers
    first, *others = question.text.split(question.gap)
    return first + "".join(
        (question.gap if gap is None else gap) + part for gap, part in zip(new.gaps, others, strict=True)
    )


def _lines(text: str) -> list[str]:
    """As files have them: str.splitlines would also split at form feeds, U+0085 and U+2028, which are text."""
    lines = text.replace("\r\n", "\n").split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def _read_text(args: argparse.Namespace) -> str:
    """The prompt or source.

    Raises:
        UserError: no text is given, or the file or stdin cannot be read.
    """
    if args.prompt is not None:
        return str(args.prompt)
    if args.file is not None:
        try:
            return Path(args.file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--file={args.file} cannot be read: {error}. It must be a UTF-8 text file.") from None
    if sys.stdin is None or sys.stdin.isatty():
        raise UserError("no text is given. The model needs something to start from. Use --prompt, --file or stdin.")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UserError(f"stdin cannot be read: {error}. It must be UTF-8 text.") from None
