"""`pretrain evaluate TARGET`: losses and translations of a trained model, as numbers."""

from __future__ import annotations

import argparse
import sys

from launch.commands.arguments import natural, positive
from launch.commands.generate import add_beam_arguments, add_target, beam_options
from pretrain.errors import ExitCode, UserError

MAX_TOKENS = 200
DESCRIPTION = """\
Measures a trained model: loss, perplexity and bits per byte of each held-out source (the run's own, or those given
with --data), and with --pairs BLEU and chrF of its translations. TARGET is a run (its newest checkpoint),
RUN:CHECKPOINT, or an exported directory; --average takes the mean weights of the newest N checkpoints.

  pretrain evaluate quickstart
  pretrain evaluate quickstart --follow        beside a run, on any machine that sees it; kept in its evaluations/
  pretrain evaluate translation --average 5 --pairs test.jsonl --beams 4 --samples translations.jsonl"""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "evaluate",
        help="measure a trained model",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_target(parser)
    parser.add_argument(
        "--data", action="append", default=[], metavar="NAME=DIR", help="held-out source; may be repeated"
    )
    parser.add_argument("--max-rows", type=positive, metavar="N", help="rows per source at most (default: the run's)")
    parser.add_argument("--pairs", metavar="FILE", help="lines of JSON with held-out pairs to translate")
    parser.add_argument("--source-field", metavar="NAME", help="field of the source text in them (default source)")
    parser.add_argument("--target-field", metavar="NAME", help="field of the reference (default target)")
    parser.add_argument("--max-pairs", type=positive, metavar="N", help="translate the first N pairs only")
    parser.add_argument(
        "--max-tokens", type=positive, metavar="N", help="tokens of a translation at most (default 200)"
    )
    add_beam_arguments(parser)
    parser.add_argument("--samples", metavar="FILE", help="keep every translation there, as lines of JSON")
    parser.add_argument("--show", type=natural, default=5, metavar="N", help="translations to print (default 5)")
    parser.add_argument(
        "--follow", action="store_true", help="measure every checkpoint, new ones as they come, until the run has ended"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler="launch.commands.evaluate:run")


def run(args: argparse.Namespace) -> int:
    """Measures and prints. Raises UserError for what cannot be measured."""
    from launch.evaluation import Evaluation, check_writable, measure_losses, score_translations, write_samples
    from launch.tables import print_json
    from launch.trained import open_trained
    from pretrain.generate.translations import check_translates, read_pairs

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    if args.follow:
        return _follow(args)
    sources = _sources(args.data)
    beams = beam_options(args)
    pairs = None
    if args.pairs is not None:
        fields = {"source_field": args.source_field or "source", "target_field": args.target_field or "target"}
        pairs = read_pairs(args.pairs, **fields, limit=args.max_pairs)
    else:
        _check_no_translation(args)
    if args.samples is not None:
        check_writable(args.samples)  # before hours of translating
    trained = open_trained(args.target, checkpoint=args.checkpoint, average=args.average)
    if pairs is not None:
        check_translates(trained.writer)
    result = Evaluation(trained.where, trained.checkpoints)
    held_out = sources or pairs is None or (trained.run is not None and trained.run.data.validation)
    if args.max_rows is not None and not held_out:
        raise UserError(
            "--max-rows has no effect here: no loss is measured. Name a source with --data, or leave it out."
        )
    if held_out:
        result.losses = measure_losses(trained, sources, max_rows=args.max_rows, say=say)
    if pairs is not None:
        result.scores, result.samples = score_translations(
            trained, pairs, beams=beams, max_tokens=args.max_tokens or MAX_TOKENS, say=say
        )
        if args.samples is not None:
            write_samples(args.samples, result.samples)
    if args.json:
        print_json(result.to_json())
    else:
        print(_text(result, args.show))
    return ExitCode.DONE


def _check_no_translation(args: argparse.Namespace) -> None:
    """Raises UserError for an option that would have no effect."""
    options = {"--samples": args.samples, "--max-pairs": args.max_pairs, "--max-tokens": args.max_tokens,
               "--beams": args.beams, "--source-field": args.source_field,
               "--target-field": args.target_field}  # fmt: skip
    given = [option for option, value in options.items() if value is not None]
    if given:
        raise UserError(f"{given[0]} has no effect without --pairs. It is about translations. Give --pairs FILE.")


def _follow(args: argparse.Namespace) -> int:
    from launch.evaluator import Evaluator
    from pretrain.rundir import RunDirectory

    given = [
        option
        for option, value in (("--data", args.data), ("--pairs", args.pairs), ("--checkpoint", args.checkpoint),
                              ("--max-rows", args.max_rows), ("--max-pairs", args.max_pairs),
                              ("--max-tokens", args.max_tokens),
                              ("--source-field", args.source_field), ("--target-field", args.target_field),
                              ("--samples", args.samples), ("--beams", args.beams),
                              ("--length-penalty", args.length_penalty), ("--score", args.score),
                              ("--json", args.json))
        if value
    ]  # fmt: skip
    if given:
        raise UserError(
            f"{given[0]} does not go with --follow. Every checkpoint is measured on what the run's config names "
            "(data.validation, eval.max_rows, eval.translation). Leave it out."
        )
    run = RunDirectory.locate(args.target)
    config = run.config()
    if not config.data.validation and config.eval.translation is None:
        raise UserError(
            f"{run.url} has neither data.validation nor eval.translation. Checkpoints are measured on held-out text. "
            "Resume the run with one of them, or evaluate it with --data NAME=DIR."
        )
    average = args.average
    if average is None:
        average = config.eval.checkpoints.average if config.eval.checkpoints else 1
    if average < 1:
        raise UserError(f"--average={average} is a mean of nothing. It takes at least one checkpoint. Set --average 5.")
    Evaluator(run, config, average, lambda text: print(text, flush=True)).follow()
    return ExitCode.DONE


def _text(result: object, show: int) -> str:
    from launch.evaluation import Evaluation
    from launch.tables import format_table

    assert isinstance(result, Evaluation)
    mean = f" (mean of {len(result.checkpoints)})" if len(result.checkpoints) > 1 else ""
    lines = [f"{result.where}{mean}"]
    if result.losses:
        header = ("source", "loss", "perplexity", "bits/byte", "target tokens")
        rows = [
            (name, totals.loss, totals.perplexity, totals.bits_per_byte, totals.target_tokens)
            for name, totals in result.losses.items()
        ]
        lines.append(format_table(header, rows))
    for sample in result.samples[:show]:
        lines += [f"> {sample.source}", f"= {sample.reference}", f"< {sample.hypothesis}", ""]
    if result.scores is not None:
        scores = result.scores
        lines.append(f"BLEU {scores.bleu:.2f}  chrF {scores.chrf:.2f}  ({scores.sentences} sentences)")
        lines += [scores.bleu_signature, scores.chrf_signature]
    return "\n".join(lines)


def _sources(texts: list[str]) -> dict[str, str]:
    """Directories by name. Raises UserError for a text without both, and for a name that stands twice."""
    sources: dict[str, str] = {}
    for text in texts:
        name, path = _named(text)
        if name in sources:
            raise UserError(f"--data={text} has a name that is taken. Each source has its own. Name it otherwise.")
        sources[name] = path
    return sources


def _named(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise UserError(
            f"--data={text} is not NAME=DIR. A held-out source has a name. Write --data prose=build/heldout."
        )
    return name, path
