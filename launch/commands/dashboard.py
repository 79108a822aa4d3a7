"""`pretrain dashboard`: all runs in a browser."""

from __future__ import annotations

import argparse


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "dashboard",
        help="show all runs in a browser",
        description="Serves a web page with all runs of a home: state, where the time goes, live curves, attempts, "
        "faults, checkpoints, logs, and runs overlaid. Only reads run directories; needs no cluster. Reachable from "
        "this machine alone unless --host says otherwise; then a token is needed, which is printed.",
    )
    parser.add_argument("--home", help="look here instead of PRETRAIN_HOME")
    parser.add_argument("--port", type=_port, default=7070, help="port to listen on (default 7070; 0 for any)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    parser.set_defaults(handler="launch.monitor.dashboard:run_dashboard")


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"--port={text} is no port. It is 0 to 65535")
    return int(text)
