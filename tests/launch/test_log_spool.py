"""Logs on their way into an object store: what a rank said last is there when its agent has ended."""

from __future__ import annotations

import threading

from launch.agents.spool import LogSpool


def test_what_was_written_while_a_slow_copy_went_up_is_copied_before_the_spool_ends() -> None:
    stored: dict[str, bytes] = {}
    under_way, go_on = threading.Event(), threading.Event()

    def put(url: str, key: str, data: bytes) -> None:
        under_way.set()
        assert go_on.wait(10.0)
        stored[f"{url}/{key}"] = data

    spool = LogSpool(put)
    log = spool.add("s3://bucket/run", "logs/attempt-001/rank-00000.log")
    log.write_bytes(b"step 1\n")
    spool.flush()
    assert under_way.wait(10.0)
    log.write_bytes(b"step 1\nthe traceback\n")
    closing = threading.Thread(target=spool.close)
    closing.start()
    while not spool._closed:
        pass
    go_on.set()
    closing.join(10.0)
    assert stored == {"s3://bucket/run/logs/attempt-001/rank-00000.log": b"step 1\nthe traceback\n"}
    assert not log.exists()
