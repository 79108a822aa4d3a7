"""A process that saves to a URL and hangs in the middle of its second save, to be killed there.

`python -m tests.checkpoint.s3_saver URL` prints `saved` and `uploading`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from pretrain.checkpoint import save
from pretrain.store import Store, open_store
from pretrain.store.remote import RemoteStore
from pretrain.topology import World
from tests.checkpoint.flips import Plain


class Stuck(RemoteStore):
    """Its large files stop after their first parts."""

    def put_stream(self, key: str, chunks: Iterable[bytes | memoryview]) -> int:
        if not key.endswith(".safetensors"):
            return super().put_stream(key, chunks)

        def slow() -> Iterator[Any]:
            for number, chunk in enumerate(chunks):
                yield chunk
                if number == 5:
                    time.sleep(0.5)  # parts are under way
                    print("uploading", flush=True)
                    time.sleep(600)

        return super().put_stream(key, slow())

    def child(self, prefix: str) -> Store:
        return Stuck(f"{self.url}/{prefix}")


def main() -> None:
    url = sys.argv[1]
    for step, store in ((1, open_store(url)), (2, Stuck(url))):
        save(
            store, Plain(step, rows=4), step=step, attempt=1, training_state={"step": step}, world=World(),
            guard=lambda: None,
        ).wait()  # fmt: skip
        print("saved", flush=True)


if __name__ == "__main__":
    main()
