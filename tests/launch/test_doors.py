"""A cluster on this machine and a run that was submitted to it: who may knock, and where secrets do not stand."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from pretrain.rundir import RunDirectory
from tests.launch.planted import PLANTED, command_lines_with, files_with
from tests.launch.runs import RANK_COMMAND, write_config
from tests.launch.test_jobs import Cluster, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="d", dir="/tmp") as temporary:
        cluster = Cluster(tmp_path, Path(temporary), PRETRAIN_RANK_COMMAND=json.dumps(RANK_COMMAND), **PLANTED)
        cluster.up()
        yield cluster
        cluster.down()
        assert cluster.processes() == []
        assert list(cluster.temporary.iterdir()) == []


_WALK_IN = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False)
print(ray.get(ray.remote(num_cpus=0)(lambda: "is inside").remote(), timeout=60))
"""


def walk_in(cluster: Cluster, **token: str) -> subprocess.CompletedProcess[str]:
    """A program that takes part in the cluster by Ray's own port, with that token."""
    environment = {name: value for name, value in cluster.environment.items() if not name.startswith("RAY_AUTH")}
    address = environment.pop("RAY_ADDRESS")
    words = [sys.executable, "-c", _WALK_IN, address]
    return subprocess.run(words, env={**environment, **token}, capture_output=True, text=True, timeout=240)


def status_of(host: str, path: str, token: str | None, method: str = "GET") -> int | None:
    """Of the answer to a request with that token; None where nobody speaks HTTP."""
    connection = http.client.HTTPConnection(host, timeout=10.0)
    headers = {"Content-Type": "application/json"} | ({} if token is None else {"Authorization": f"Bearer {token}"})
    try:
        connection.request(method, path, body='{"entrypoint": "true"}' if method == "POST" else None, headers=headers)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def doors(cluster: Cluster) -> dict[int, str]:
    """Ports that processes of the cluster listen at, with their addresses."""
    found = {}
    for process in cluster.processes():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found[connection.laddr.port] = connection.laddr.ip.removeprefix("::ffff:")
    return found


def test_only_who_has_the_token_gets_a_job_in_and_no_secret_is_written_down(cluster: Cluster, tmp_path: Path) -> None:
    token_file = Path(cluster.environment["RAY_AUTH_TOKEN_PATH"])
    assert token_file.stat().st_mode & 0o777 == 0o600
    assert token_file.parent.stat().st_mode & 0o777 == 0o700
    token = token_file.read_text()
    assert len(token) == 64
    dashboard = urlsplit(cluster.environment["RAY_API_SERVER_ADDRESS"])
    for path in ("/api/jobs/", "/nodes?view=summary"):
        assert status_of(dashboard.netloc, path, token) == 200
        assert {status_of(dashboard.netloc, path, None), status_of(dashboard.netloc, path, "0" * 64)} <= {401, 403}

    inside = walk_in(cluster, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token)
    assert (inside.returncode, inside.stdout) == (0, "is inside\n"), inside.stderr
    strangers = ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64})
    for stranger in (walk_in(cluster, **token_of) for token_of in strangers):
        assert (stranger.returncode, stranger.stdout) == (1, "")
        assert "auth" in stranger.stderr.lower(), stranger.stderr

    config = write_config(tmp_path, "sent", fake={"steps": 5000, "step_s": 0.05})
    sent = cluster.pretrain("submit", str(config), "--address", "auto")
    assert (sent.returncode, sent.stdout) == (0, "sent\n"), sent.stderr
    run = RunDirectory.locate(str(cluster.home / "sent"))
    wait_for(lambda: any(event.kind == "committed" for event in run.events()))
    found = doors(cluster)
    assert dashboard.port is not None
    assert found[dashboard.port] == "127.0.0.1"
    for port in found:
        for path in ("/api/jobs/", "/api/job_agent/jobs/"):  # of the head, of each node
            assert status_of(f"127.0.0.1:{port}", path, None, "POST") in (None, 401, 403, 404, 405), port
    words = [*PLANTED.values(), token]
    assert command_lines_with(words) == []
    stopped = cluster.pretrain("stop", "sent", "--now")
    assert stopped.returncode == 0, stopped.stderr
    assert (cluster.home / "sent").stat().st_mode & 0o777 == 0o700
    assert files_with(words, cluster.home) == []
    assert files_with(words, cluster.temporary) == [f"{token_file} has {token}"]
    assert not any(word in sent.stderr + stopped.stdout + stopped.stderr for word in words)
