"""`pretrain inspect attention RUN`: what the heads of a trained model look at."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from launch.outputs import write_output
from pretrain.errors import ExitCode, UserError

if TYPE_CHECKING:
    from pretrain.generate.attention import Inspection

DESCRIPTION = """\
Draws attention maps and the entropy of every head for a text, and warns of heads that collapsed to near-uniform or to
one position, and of a wrong scale. Weights come from the newest checkpoint, in fp32 on the CPU. An encoder-decoder
reads --prompt as its source; without --target it writes one itself. Without --layer the last layer of each kind is
drawn; the numbers are always of all.

  pretrain inspect attention quickstart --prompt 'def add(a, b): return a + b' --layer decoder.0"""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("inspect", help="look into a trained model")
    kinds = parser.add_subparsers(dest="kind", metavar="WHAT", required=True)
    attention = kinds.add_parser(
        "attention",
        help="maps and entropies of the heads as a picture",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    attention.add_argument("run", metavar="RUN", help="name or path of the run")
    attention.add_argument("--prompt", "--source", dest="prompt", required=True, metavar="TEXT", help="text to read")
    attention.add_argument("--target", metavar="TEXT", help="target to read with it; encoder-decoders only")
    attention.add_argument("--checkpoint", metavar="NAME", help="checkpoint to use (default: the newest)")
    attention.add_argument(
        "--layer", action="append", metavar="NAME", help="layer to draw, such as decoder.0 or cross.5; may be repeated"
    )
    attention.add_argument("--out", metavar="PATH", help="the picture (default: RUN/plots/attention-CHECKPOINT.png)")
    attention.add_argument("--json", action="store_true", help="print JSON")
    attention.set_defaults(handler="launch.commands.inspect:run")


def run(args: argparse.Namespace) -> int:
    """Loads run, tokenizer and weights, looks, draws, prints facts and warnings."""
    from launch.trained import open_checkpoints
    from pretrain.checkpoint import newest_checkpoint
    from pretrain.generate.attention import inspect_attention
    from pretrain.generate.attention_picture import draw_inspection
    from pretrain.rundir import RunDirectory

    directory = RunDirectory.locate(args.run)
    name = args.checkpoint or newest_checkpoint(directory.checkpoints)
    writer = open_checkpoints(directory, directory.config(), [name]).writer
    found = inspect_attention(writer, args.prompt, args.target)
    picture = draw_inspection(f"{directory.name}, {name}", found, _layers_to_draw(found, args.layer))
    if args.out is None:
        key = f"plots/attention-{name}.png"
        directory.store.put(key, picture)
        where = f"{directory.url}/{key}"
    else:
        write_output("--out", args.out, picture)
        where = args.out
    _report(found, args, directory.name, name, where)
    return ExitCode.DONE


def _report(found: Inspection, args: argparse.Namespace, run_name: str, checkpoint: str, where: str) -> None:
    from launch.tables import format_table, print_json

    if args.json:
        body = {"run": run_name, "checkpoint": checkpoint, "picture": where, "warnings": found.warnings}
        print_json({**body, "heads": [asdict(fact) for fact in found.facts]})
        return
    header = ["layer", "head", "entropy", "of uniform", "largest score", "top position", "its share"]
    rows = [
        [
            fact.layer, str(fact.head), f"{fact.entropy:.2f}", f"{fact.entropy_fraction:.0%}",
            f"{fact.largest_score:.3g}", str(fact.top_position), f"{fact.top_share:.0%}",
        ]
        for fact in found.facts
    ]  # fmt: skip
    if rows:
        print(format_table(header, rows))
    else:
        print("no query sees 8 keys: the text is too short for entropies; the maps are drawn")
    for warning in found.warnings:
        print(f"warning: {warning}")
    print(where)


def _layers_to_draw(found: Inspection, asked: list[str] | None) -> list[str]:
    """The layers by name; the last of each kind when none is asked for.

    Raises:
        UserError: a layer that the model does not have.
    """
    from pretrain.generate.attention_picture import last_layers

    names = [item.name for item in found.maps]
    if asked is None:
        return last_layers(found)
    unknown = [name for name in asked if name not in names]
    if unknown:
        raise UserError(f"--layer={unknown[0]} does not exist. This model has {', '.join(names)}. Name one of them.")
    return asked
