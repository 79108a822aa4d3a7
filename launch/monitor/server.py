"""The web server behind `pretrain dashboard`: a few files and a few JSON answers. Read-only.

Takes a `RunsView` → HTTP on the standard library's threading server. Loopback alone needs no token, but
its Host header must be a loopback name (a page elsewhere must not read it through a name of its own);
opened wider, every request needs the token: `?token=` once, a cookie after that, or a Bearer header.
"""

from __future__ import annotations

import gzip
import hmac
import ipaddress
import socket
import sys
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

from pydantic_core import to_json

from launch.monitor.answers import answer_api, answer_picture
from launch.monitor.prometheus import format_metrics
from launch.monitor.runs_view import RunsView
from pretrain.errors import PretrainError
from pretrain.metrics.series import CONTENT_TYPE

STATIC = Path(__file__).parent / "static"
COOKIE = "pretrain_token"
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_SECURITY = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class DashboardServer(ThreadingHTTPServer):
    """Serves until `shutdown`.

    Args:
        address: host and port; port 0 takes a free one.
        token: what every request must bring; None on loopback alone.
    """

    daemon_threads = True

    def __init__(self, address: tuple[str, int], view: RunsView, token: str | None) -> None:
        self.view, self.token = view, token
        # Only these files exist, so no path of a request ever reaches the file system.
        self.files = {f"/{path.relative_to(STATIC)}": path for path in STATIC.rglob("*") if path.suffix in _TYPES}
        self.files["/"] = STATIC / "index.html"
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # Not HTTPServer's, which asks the name service for this machine's name and waits where there is none.
        TCPServer.server_bind(self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a page that was closed while it was answered
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        host, port = str(self.server_address[0]), self.server_address[1]
        if host in ("0.0.0.0", "::"):
            host = socket.gethostname()
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


class _Handler(BaseHTTPRequestHandler):
    server: DashboardServer
    protocol_version = "HTTP/1.1"
    timeout = 30.0

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = parse_qs(parts.query)
        if not self._may_ask():
            return self._refuse(HTTPStatus.FORBIDDEN, "This Host is not allowed. Use localhost or 127.0.0.1.")
        if not self._has_token(query):
            return self._refuse(
                HTTPStatus.UNAUTHORIZED, "A token is needed. Open the address that pretrain dashboard printed."
            )
        if self.server.token and "token" in query:
            return self._keep_token(parts.path, query)
        path = unquote(parts.path)
        if path in self.server.files:
            file = self.server.files[path]
            return self._send(HTTPStatus.OK, file.read_bytes(), _TYPES[file.suffix])
        if path == "/metrics":
            return self._send(HTTPStatus.OK, format_metrics(self.server.view).encode(), CONTENT_TYPE)
        if path == "/picture":
            return self._picture({name: values[-1] for name, values in query.items()})
        if path.startswith("/api/"):
            return self._answer(path.removeprefix("/api/"), {name: values[-1] for name, values in query.items()})
        self._refuse(HTTPStatus.NOT_FOUND, "There is no such page.")

    def do_HEAD(self) -> None:
        self.do_GET()

    def _answer(self, path: str, query: dict[str, str]) -> None:
        try:
            found = answer_api(self.server.view, path, query)
        except (PretrainError, ValueError) as error:
            return self._send_json(HTTPStatus.BAD_REQUEST, {"error": str(error)})
        if found is None:
            return self._send_json(HTTPStatus.NOT_FOUND, {"error": "There is no such answer."})
        self._send_json(HTTPStatus.OK, found)

    def _picture(self, query: dict[str, str]) -> None:
        try:
            body = answer_picture(self.server.view, query)
        except PretrainError as error:
            return self._send_json(HTTPStatus.BAD_REQUEST, {"error": str(error)})
        self._send(HTTPStatus.OK, body, "image/png")

    def _may_ask(self) -> bool:
        if self.server.token:
            return True
        host = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        return host == "localhost" or is_loopback(host)

    def _has_token(self, query: dict[str, list[str]]) -> bool:
        token = self.server.token
        if token is None:
            return True
        given = [*query.get("token", []), self.headers.get("Authorization", "").removeprefix("Bearer ")]
        try:
            cookie = SimpleCookie(self.headers.get("Cookie", "")).get(COOKIE)
        except CookieError:
            cookie = None
        given += [cookie.value] if cookie else []
        return any(hmac.compare_digest(word.encode(), token.encode()) for word in given)

    def _keep_token(self, path: str, query: dict[str, list[str]]) -> None:
        """Moves the token from the address, which people copy and proxies log, into a cookie."""
        left = urlencode([(name, value) for name, values in query.items() if name != "token" for value in values])
        self.send_response(HTTPStatus.SEE_OTHER)
        self.send_header("Location", "/" + path.lstrip("/") + (f"?{left}" if left else ""))
        self.send_header("Set-Cookie", f"{COOKIE}={self.server.token}; HttpOnly; SameSite=Strict; Path=/")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        self._send(status, f"{text}\n".encode(), "text/plain")

    def _send_json(self, status: HTTPStatus, value: Any) -> None:
        self._send(status, to_json(value, inf_nan_mode="null"), "application/json")

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        packed = len(body) > 2048 and "gzip" in self.headers.get("Accept-Encoding", "")
        if packed:
            body = gzip.compress(body, compresslevel=3)
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        if packed:
            self.send_header("Content-Encoding", "gzip")
        for name, value in _SECURITY.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Silent: a page that is kept open asks every two seconds."""


def is_loopback(host: str) -> bool:
    """Whether a host is an address of this machine's loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
