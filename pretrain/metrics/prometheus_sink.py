"""Rank 0's own Prometheus exporter, for runs without the dashboard and without Ray: `metrics.prometheus.port`.

Takes records -> the newest of each kind at http://HOST:PORT/metrics. A scrape is written and answered in a thread of
its own; whoever asks slowly or not at all costs the loop nothing. It ends with the attempt, and an alert on absent
series is what tells that; the dashboard's `/metrics` outlives its runs.
"""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from pretrain.config.schema import RunConfig
from pretrain.log import Log
from pretrain.metrics.series import CONTENT_TYPE, SERIES, Samples, add_record, format_samples, merge_record
from pretrain.metrics.sinks import MetricsHome, finite

_SLOWEST_CLIENT_S = 10.0


def open_sink(config: RunConfig, home: MetricsHome, attempt: int, log: Log) -> PrometheusSink:
    """See `sinks._TRACKERS`."""
    chosen = config.metrics.prometheus
    assert chosen.port is not None
    return PrometheusSink((chosen.host, chosen.port), {"run": home.name, "attempt": str(attempt)}, log)


class PrometheusSink:
    """See the module.

    Attributes:
        address: where it listens; None where it cannot, which costs one warning.
    """

    def __init__(self, address: tuple[str, int], labels: dict[str, str], log: Log) -> None:
        self._labels = labels
        self._merged: dict[str, Any] = {}  # replaced as a whole, so that a scrape sees one record
        self.address: tuple[str, int] | None = None
        self._server: _Server | None = None
        try:
            self._server = _Server(address, self)
        except OSError as error:
            log.warning(
                f"metrics.prometheus.port={address[1]} cannot be listened on: {error.strerror}. Training goes on."
            )
            return
        self.address = (address[0], int(self._server.server_address[1]))
        log.info("serves its metrics", address=f"http://{address[0]}:{self.address[1]}/metrics")
        threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()

    def write(self, record: dict[str, Any]) -> None:
        self._merged = merge_record(self._merged, record)

    def text(self) -> bytes:
        """What a scrape gets."""
        samples: Samples = {}
        add_record(samples, finite(self._merged), self._labels)
        return format_samples(samples, SERIES).encode()

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], sink: PrometheusSink) -> None:
        self.sink = sink
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's asks the name service for this machine's name


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _SLOWEST_CLIENT_S

    def do_GET(self) -> None:
        found = self.path.partition("?")[0] == "/metrics"
        body = self.server.sink.text() if found else b"see /metrics\n"
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""
