"""What an agent starts as its rank in a campaign: it lends its place to a rank of `rank_server`, see there."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

FILES = ("PRETRAIN_HEARTBEAT_FD", "PRETRAIN_LIFELINE_FD", "PRETRAIN_MASTER_FD")


def main() -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(sys.argv[1])
        names = [name for name in FILES if name in os.environ]
        files = [int(os.environ[name]) for name in names]
        order = {"arguments": sys.argv[2:], "environment": dict(os.environ), "folder": os.getcwd(), "files": names}
        socket.send_fds(server, [json.dumps(order).encode()], [1, 2, *files])
        for descriptor in files:
            os.close(descriptor)  # the agent hears by them that the rank has ended

        def pass_on(number: int, frame: object) -> None:
            server.send(str(number).encode())

        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, pass_on)
        answer = server.recv(16)
    code = int(answer) if answer else 1
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main())
