"""What a build says: where it is while it runs, and what came of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pretrain.data.format import Manifest
from pretrain.data.shard_entries import ShardEntry


@dataclass(frozen=True, slots=True)
class BuildProgress:
    """Where a build is.

    Attributes:
        phase: read, encode, pack or write.
        done_bytes, total_bytes: of text, in this phase; for `read` the total is about right, for `pack` None.
        done_tokens: in this phase.
        session_bytes, session_tokens: those done since `phase_started_s`, not by an earlier build.
        elapsed_s, phase_started_s: seconds since the start.
        files: of the inputs.
    """

    phase: str
    done_bytes: int
    total_bytes: int | None
    done_tokens: int
    session_bytes: int
    session_tokens: int
    elapsed_s: float
    phase_started_s: float
    files: int

    @property
    def seconds_left(self) -> float | None:
        """Of this phase, at its own speed; None where nobody can tell."""
        if self.total_bytes is None or not self.session_bytes:
            return None
        speed = self.session_bytes / max(self.elapsed_s - self.phase_started_s, 1e-3)
        return max(self.total_bytes - self.done_bytes, 0) / speed


@dataclass(frozen=True, slots=True)
class BuildReport:
    """What a build did. Every document that was read is in a source or in one of the counts.

    Attributes:
        sources: directory of each split that was built, with its manifest.
        read_bytes: text that was read.
        empty, invalid, duplicates, not_selected: documents left out, by reason.
        too_long, shortened: documents that no row could hold: left out, or cut to fit.
        other_members: members of raw tars that hold no text.
        repaired: texts with lone surrogates, which were replaced.
        lengths: histogram of tokens per document by side, of all splits; see `histogram`.
        tasks, reused_tasks: pieces of work, and those that an unfinished build had done before.
        seconds: wall clock of this build, without what was done before.
        encoded_bytes: text that was tokenised in these seconds.
    """

    sources: dict[str, tuple[str, Manifest]]
    files: int
    documents_read: int
    read_bytes: int
    empty: int
    invalid: int
    invalid_examples: tuple[str, ...]
    repaired: int
    other_members: int
    duplicates: int
    not_selected: int
    too_long: int
    shortened: int
    lengths: dict[str, dict[str, int]]
    tasks: int
    reused_tasks: int
    seconds: float
    encoded_bytes: int

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        values["sources"] = {
            split: {"path": path}
            | {key: value for key, value in manifest.body().items() if key != "shards"}
            | {
                "sha256": manifest.sha256,
                "shards": len(manifest.shards),
                "bytes_per_token": manifest.text_bytes / max(manifest.tokens + manifest.source_tokens, 1),
            }
            for split, (path, manifest) in self.sources.items()
        }
        return values

    def stored(self) -> dict[str, Any]:
        """JSON that `restored` takes."""
        sources = {
            split: [path, manifest.body() | {"sha256": manifest.sha256}]
            for split, (path, manifest) in self.sources.items()
        }
        return asdict(self) | {"sources": sources}

    @classmethod
    def restored(cls, values: dict[str, Any]) -> BuildReport:
        """From `stored`."""
        sources = {}
        for split, (path, body) in values["sources"].items():
            shards = tuple(ShardEntry(**shard) for shard in body.pop("shards"))
            sources[split] = (path, Manifest(**body, shards=shards))
        return cls(**values | {"sources": sources, "invalid_examples": tuple(values["invalid_examples"])})
