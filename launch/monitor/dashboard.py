"""`pretrain dashboard`: starts the web server over the runs of a home, and says where it is.

Takes arguments → a server until Ctrl-C. Without a cluster: everything comes from run directories.
"""

from __future__ import annotations

import argparse
import os
import secrets

from launch.monitor.runs_view import RunsView
from launch.monitor.server import DashboardServer, is_loopback
from pretrain.errors import ExitCode, UserError
from pretrain.rundir import home_url

TOKEN_VARIABLE = "PRETRAIN_DASHBOARD_TOKEN"


def run_dashboard(args: argparse.Namespace) -> int:
    """Handler of `pretrain dashboard`."""
    view = RunsView(home_url(args.home))
    token = choose_token(args.host)
    try:
        server = DashboardServer((args.host, args.port), view, token)
    except OSError as error:
        raise UserError(
            f"--host={args.host} --port={args.port} cannot be listened on: {error.strerror}. "
            "It must be an address of this machine and a free port. Choose another --port, or --port 0 for any."
        ) from None
    with server:
        print(f"runs of   {view.home.url}")
        print(f"dashboard {server.url}{f'?token={token}' if token else ''}", flush=True)
        print("Ctrl-C ends it; the runs go on", flush=True)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:  # the way to end it
            pass
        finally:
            view.close()
    return int(ExitCode.DONE)


def choose_token(host: str) -> str | None:
    """None for loopback without a token of its own; else that of the environment, or a new one."""
    given = os.environ.get(TOKEN_VARIABLE)
    if given and len(given) < 16:
        raise UserError(
            f"{TOKEN_VARIABLE} has {len(given)} characters. A token has at least 16. Unset it, and one is made."
        )
    return given or (None if is_loopback(host) else secrets.token_urlsafe(24))
