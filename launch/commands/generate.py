"""`pretrain generate RUN`: text from a trained model."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pretrain.errors import ExitCode, UserError

if TYPE_CHECKING:
    from pretrain.config import RunConfig
    from pretrain.data.tokenizer import Tokenizer
    from pretrain.rundir import RunDirectory

DESCRIPTION = """\
Continues a prompt with a decoder, or writes the target of a source text with an encoder-decoder. Weights come
from the newest checkpoint of the run, in fp32 on the CPU. Without --prompt and --file the text is read from
stdin. Greedy unless --temperature is given; the same seed gives the same text.

  pretrain generate quickstart --prompt 'def main(' --temperature 0.8 --top-p 0.95"""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "generate",
        help="let a trained model write text",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", help="name or path of the run")
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--prompt", "--source", dest="prompt", metavar="TEXT", help="text to continue or to translate")
    text.add_argument("--file", metavar="PATH", help="read that text from a file")
    parser.add_argument("--checkpoint", metavar="NAME", help="checkpoint to use (default: the newest)")
    parser.add_argument("--max-tokens", type=int, default=200, metavar="N", help="new tokens at most (default 200)")
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 = greedy (default); 1 = as the model thinks"
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from the K most likely tokens only")
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw from the most likely tokens that make up P (default 1)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws (default 0)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler="launch.commands.generate:run")


def run(args: argparse.Namespace) -> int:
    """Loads run, tokenizer and weights, generates, prints the text (after its prompt) or JSON."""
    from pretrain.checkpoint import newest_checkpoint, read_weights
    from pretrain.generate.load import load_model
    from pretrain.generate.sampling import SamplingOptions
    from pretrain.generate.text import generate_text
    from pretrain.rundir import RunDirectory

    directory = RunDirectory.locate(args.run)
    sampling = SamplingOptions(args.temperature, args.top_k, args.top_p, args.seed)
    text = _read_text(args)
    config = directory.config()
    name = args.checkpoint or newest_checkpoint(directory.checkpoints)
    tokenizer = tokenizer_of(directory, config)
    model = load_model(config, read_weights(directory.checkpoints, name), f"{directory.url}/checkpoints/{name}")
    written = generate_text(model, config.model, tokenizer, text, sampling=sampling, max_tokens=args.max_tokens)
    if args.json:
        body = {"run": directory.name, "checkpoint": name, "prompt": text, "text": written.text}
        print(json.dumps({**body, "tokens": len(written.ids), "ended": written.ended}, indent=2, ensure_ascii=False))
    else:
        print(written.text if config.model.layout == "encoder_decoder" else text + written.text)
    return ExitCode.DONE


def tokenizer_of(directory: RunDirectory, config: RunConfig) -> Tokenizer:
    """The run's own copy; the config's path for runs that have not made one yet."""
    from pretrain.data.tokenizer import Tokenizer
    from pretrain.store import NotFoundError

    try:
        return Tokenizer(directory.store.get("tokenizer.json"), f"{directory.url}/tokenizer.json")
    except NotFoundError:
        return Tokenizer.load(config.tokenizer)


def _read_text(args: argparse.Namespace) -> str:
    """The prompt or source.

    Raises:
        UserError: no text is given, or the file cannot be read.
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
    return sys.stdin.read()
