"""A large object on S3 in parts that go up side by side, straight from memory, visible whole or not at all.

takes -> pieces of a file; gives -> one object. The parts of an upload that was interrupted are no object, but they
take space: `abandoned` finds them. Memory: one part per thread, beside what the pieces themselves are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any

from pretrain.faults import passing

_PART_BYTES = 16 * 2**20  # at least 5 MiB, and at most 10,000 parts; grows for larger objects
_THREADS = 4
_GROW_EVERY = 1000  # parts of one size: 16 GB in parts of 16 MiB, then parts of 32 MiB, …


def put_in_parts(files: Any, path: str, chunks: Iterable[bytes | memoryview]) -> int:
    """Writes an object from pieces; gives its bytes. After an error nothing of it is left.

    Args:
        files: an s3fs file system.
    """
    parts = _joined(chunks)
    first, second = next(parts, b""), next(parts, None)
    if second is None:
        passing("store.upload", path)
        files.pipe_file(path, first)
        return len(first)
    bucket, key, _ = files.split_path(path)
    upload = files.call_s3("create_multipart_upload", Bucket=bucket, Key=key)["UploadId"]
    try:
        tags, size = _send(files, {"Bucket": bucket, "Key": key, "UploadId": upload}, first, second, parts)
        files.call_s3(
            "complete_multipart_upload", Bucket=bucket, Key=key, UploadId=upload, MultipartUpload={"Parts": tags}
        )
    except BaseException:
        with suppress(Exception):  # the first error counts; what is left is removed at the next start
            files.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload)
        raise
    files.invalidate_cache(path)
    return size


def abandoned(files: Any, root: str) -> Iterator[dict[str, str]]:
    """Uploads below a folder that were begun and neither ended nor given up: arguments to abort each."""
    bucket, prefix, _ = files.split_path(root)
    marker: dict[str, str] = {}
    while True:
        try:
            page = files.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/", **marker)
        except FileNotFoundError:  # the word of some stores for a bucket that never had one
            return
        for upload in page.get("Uploads", []):
            yield {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
        if not page.get("IsTruncated"):
            return
        marker = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}


def _send(
    files: Any, upload: dict[str, str], first: bytes, second: bytes, rest: Iterator[bytes]
) -> tuple[list[dict[str, Any]], int]:
    """Uploads all parts, a few at once; gives their tags in order, and their bytes."""

    def send(number: int, data: bytes) -> dict[str, Any]:
        passing("store.upload", upload["Key"])
        answer = files.call_s3("upload_part", **upload, PartNumber=number, Body=data)
        return {"PartNumber": number, "ETag": answer["ETag"]}

    tags: list[Future[dict[str, Any]]] = []
    size = 0
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="upload") as pool:
        running: set[Future[dict[str, Any]]] = set()
        for data in _chain(first, second, rest):
            while len(running) >= _THREADS:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()  # an error ends the upload at once
            future = pool.submit(send, len(tags) + 1, data)
            tags.append(future)
            running.add(future)
            size += len(data)
    return [future.result() for future in tags], size


def _chain(first: bytes, second: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield second
    yield from rest


def _joined(chunks: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    """Pieces as parts of a size that S3 takes."""
    buffer, count = bytearray(), 0
    for chunk in chunks:
        buffer += memoryview(chunk).cast("B")
        while len(buffer) >= (limit := _PART_BYTES << count // _GROW_EVERY):
            yield bytes(buffer[:limit])
            del buffer[:limit]
            count += 1
    if buffer:
        yield bytes(buffer)
