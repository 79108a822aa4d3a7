"""`pretrain checkpoint ACTION`: what a run has saved, whether it is whole, what is kept, exchange with Hugging Face."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from pretrain.config.units import parse_bytes
from pretrain.errors import CheckpointError, ExitCode

if TYPE_CHECKING:
    from pretrain.store import Store

_RUN_HELP = "name of a run, or its path or URL"


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "checkpoint",
        help="list, verify, compare, pin and export checkpoints",
        description="Looks at the checkpoints of a run, and says which are kept. Needs no cluster.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _register_looking(actions)
    _register_keeping(actions)


def _register_looking(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    listing = actions.add_parser(
        "list",
        help="show what is there, newest first",
        description="Lists the checkpoints of a run, newest first. Looks at manifests and sizes, not at content.",
    )
    listing.add_argument("run", metavar="RUN", help=_RUN_HELP)
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.set_defaults(handler="launch.commands.checkpoint:list_")

    verify = actions.add_parser(
        "verify",
        help="read and hash every byte",
        description="Verifies checkpoints by the sha256 of every piece of every file. Exit code 2 if one is damaged. "
        "One that a restore had set aside and that is good again is used again.",
    )
    verify.add_argument("run", metavar="RUN", help=_RUN_HELP)
    verify.add_argument("checkpoint", metavar="CHECKPOINT", nargs="?", help="name of one; default: all published ones")
    verify.add_argument("--json", action="store_true", help="print JSON")
    verify.set_defaults(handler="launch.commands.checkpoint:verify")

    diff = actions.add_parser(
        "diff",
        help="compare two checkpoints bit by bit",
        description="Compares weights and optimizer state, whatever ranks and ZeRO stages saved them. "
        "Exit code 0 if all is equal, 3 if not.",
    )
    diff.add_argument("first", metavar="RUN[:CHECKPOINT]", help="default: the newest checkpoint of the run")
    diff.add_argument("second", metavar="RUN[:CHECKPOINT]", help="the same, or :CHECKPOINT of the first run")
    diff.add_argument("--json", action="store_true", help="print JSON")
    diff.set_defaults(handler="launch.commands.checkpoint:diff")


def _register_keeping(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    export = actions.add_parser(
        "export",
        help="write a Hugging Face directory",
        description="Writes a checkpoint's weights, config and tokenizer as a directory that transformers loads.",
    )
    export.add_argument("run", metavar="RUN", help=_RUN_HELP)
    export.add_argument("--checkpoint", metavar="CHECKPOINT", help="name of one; default: the newest")
    export.set_defaults(handler="launch.export:run_export")

    average = actions.add_parser(
        "average",
        help="write the mean of the last checkpoints",
        description="Writes the mean of the weights of a run's last checkpoints as export does, with their names in "
        "origin.json. The mean is taken in float64, one weight at a time. Checkpoints must lie near each other for "
        "what the run still learns: the mean of distant ones is worse than the last.",
    )
    average.add_argument("run", metavar="RUN", help=_RUN_HELP)
    average.add_argument("--last", metavar="N", type=int, default=5, help="how many of the newest (default: 5)")
    average.set_defaults(handler="launch.export:run_average")
    for writing in (export, average):
        writing.add_argument("--out", metavar="DIR", required=True, help="directory that does not exist yet")
        writing.add_argument(
            "--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of the written weights"
        )
        writing.add_argument(
            "--shard-bytes", type=parse_bytes, default=5_000_000_000, help="largest safetensors file (default: 5 GB)"
        )

    importing = actions.add_parser(
        "import",
        help="start a run from a Hugging Face directory",
        description="Makes a new run whose step 0 is a model of transformers: Llama, Qwen3, Mixtral, Gemma, GPT-2, T5, "
        "Marian, BERT. pretrain resume NAME trains it on. CONFIG must describe the same model; what differs is named.",
    )
    importing.add_argument("directory", metavar="DIR", help="directory with config.json and *.safetensors")
    importing.add_argument("config", metavar="CONFIG", help="YAML file of the run")
    importing.add_argument("overrides", metavar="key=value", nargs="*", help="changes to the config")
    importing.add_argument("--name", help="name of the run (default: `name` of the config)")
    importing.set_defaults(handler="launch.importing:run_import")

    for action, what in (("pin", "keep a checkpoint for good"), ("unpin", "let retention decide about it again")):
        parser = actions.add_parser(
            action,
            help=what,
            description=f"{what[0].upper()}{what[1:]}. The newest good checkpoint is kept in any case.",
        )
        parser.add_argument("run", metavar="RUN", help=_RUN_HELP)
        parser.add_argument("checkpoint", metavar="CHECKPOINT", help="name of one, as list shows it")
        parser.set_defaults(handler=f"launch.commands.checkpoint:{action}")


def list_(args: argparse.Namespace) -> int:
    from launch.tables import print_rows
    from pretrain.checkpoint import list_checkpoints
    from pretrain.rundir import RunDirectory

    found = [info.to_json() for info in list_checkpoints(RunDirectory.locate(args.run).checkpoints)]
    if not found and not args.json:
        print("no checkpoints yet")
        return ExitCode.DONE
    if not args.json:
        for row in found:
            row["state"] = row["problem"] or ("whole, pinned" if row["pinned"] else "whole")
            row["MB"] = None if row["bytes"] is None else round(row["bytes"] / 1e6, 1)
    print_rows(("name", "step", "attempt", "ranks", "MB", "state"), found, as_json=args.json)
    return ExitCode.DONE


def verify(args: argparse.Namespace) -> int:
    from launch.tables import print_rows
    from pretrain.checkpoint import CheckpointInfo, list_checkpoints, take_back, verify_checkpoint
    from pretrain.rundir import RunDirectory

    store = RunDirectory.locate(args.run).checkpoints
    names = [args.checkpoint] if args.checkpoint else [info.name for info in list_checkpoints(store)]
    rows: list[dict[str, Any]] = []
    for name in names:
        problems = verify_checkpoint(store, name)
        if problems == [CheckpointInfo.UNFINISHED] and not args.checkpoint:
            continue  # the leftover of an interrupted save is no checkpoint
        back = not problems and take_back(store, name)
        rows.append({"name": name, "good": not problems, "problems": problems, "taken_back": back})
    if not rows:
        raise CheckpointError(
            f"no published checkpoint in {store.url}. Train until checkpoint.every_steps have passed."
        )
    if not args.json:
        for row in rows:
            good = "every byte as written" + (", used again from now on" if row["taken_back"] else "")
            row["result"] = "; ".join(row["problems"]) or good
    print_rows(("name", "result"), rows, as_json=args.json)
    return ExitCode.DONE if all(row["good"] for row in rows) else ExitCode.USER_ERROR


def pin(args: argparse.Namespace) -> int:
    from pretrain.checkpoint import pin as keep
    from pretrain.rundir import RunDirectory

    keep(RunDirectory.locate(args.run).checkpoints, args.checkpoint)
    print(f"{args.checkpoint} is kept until pretrain checkpoint unpin {args.run} {args.checkpoint}")
    return ExitCode.DONE


def unpin(args: argparse.Namespace) -> int:
    from pretrain.checkpoint import unpin as let_go
    from pretrain.rundir import RunDirectory

    was_pinned = let_go(RunDirectory.locate(args.run).checkpoints, args.checkpoint)
    print(f"{args.checkpoint} {'is no longer pinned' if was_pinned else 'was not pinned'}")
    return ExitCode.DONE


def diff(args: argparse.Namespace) -> int:
    from launch.tables import format_table, print_json
    from pretrain.checkpoint import diff_checkpoints, weights_sha256

    first_run, _, _ = _split(args.first)
    second = args.second if not args.second.startswith(":") else first_run + args.second
    sides = [_open(args.first), _open(second)]
    differences = diff_checkpoints(*sides[0], *sides[1])
    unequal = [difference for difference in differences if not difference.equal]
    hashes = [weights_sha256(*side) for side in sides]
    if args.json:
        checkpoints = [
            {"checkpoint": f"{store.url}/{name}", "weights_sha256": value}
            for (store, name), value in zip(sides, hashes, strict=True)
        ]
        answer = {"equal": not unequal, "checkpoints": checkpoints, "tensors": len(differences)}
        print_json({**answer, "unequal": [difference.to_json() for difference in unequal]})
    else:
        for (store, name), value in zip(sides, hashes, strict=True):
            print(f"weights {value[:16]}  {store.url}/{name}")
        if unequal:
            print(
                format_table(("parameter", "key", "max difference"), [(d.parameter, d.key, d.max_abs) for d in unequal])
            )
        print(f"{len(unequal)} of {len(differences)} tensors differ" if unequal else "equal bit for bit")
    return ExitCode.FAILED if unequal else ExitCode.DONE


def _open(text: str) -> tuple[Store, str]:
    from pretrain.checkpoint import newest_checkpoint
    from pretrain.rundir import RunDirectory

    run, _, name = _split(text)
    store = RunDirectory.locate(run).checkpoints
    return store, name or newest_checkpoint(store)


def _split(text: str) -> tuple[str, str, str]:
    """RUN:CHECKPOINT; the colon of a URL or path is no separator."""
    head, colon, tail = text.rpartition(":")
    return (head, colon, tail) if colon and tail.startswith("step-") else (text, "", "")
