"""The memory tier: copies in a tmpfs of each node, every few steps, that outlive the processes.

    /dev/shm/pretrain-ram-<run's uuid>-<node>/owner.json                    whose it is
                                             /step-00000012-a001/rank-00000.safetensors and .part.json

takes -> directory, run, World; gives -> a store for this node's ranks, and what the ranks of all nodes
hold together. A copy counts when the parts that living nodes hold cover every range; a rank reads
only the files of its own node. A node is a tmpfs: boot of the kernel and device of the mount.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pretrain.checkpoint.files import size_problem
from pretrain.checkpoint.format import PART_SUFFIX, Manifest, parse_name, rank_file
from pretrain.engine.distributed import gather_texts
from pretrain.errors import PretrainError, UserError
from pretrain.rundir.memory_folders import PREFIX, MemoryOwner, folder_bytes, write_owner
from pretrain.store import Store, open_store
from pretrain.topology import World

COPIES = 2  # the newest complete one, and the one before it or the one that is being written


@dataclass(frozen=True, slots=True)
class MemoryCopy:
    """One state in the memory of the nodes, as all ranks see it.

    Attributes:
        manifest: of all files that are there, whichever node holds them.
        nodes: node of each file, by the file's name.
        problem: why it does not count; None when it covers everything.
    """

    manifest: Manifest
    nodes: dict[str, str]
    problem: str | None

    @property
    def name(self) -> str:
        return self.manifest.name


class MemoryTier:
    """This rank's view of the memory tier of its run.

    Attributes:
        store: of the copies on this node.
        node: identifier of this rank's node.
        passed_over: copies that a restore could not use, (name, why).
    """

    def __init__(self, folder: Path, node: str, nodes: list[str], world: World) -> None:
        """Use `open`."""
        self.store: Store = open_store(folder)
        self.node = node
        self.passed_over: list[tuple[str, str]] = []
        self._folder, self._nodes, self._world = folder, nodes, world

    @classmethod
    def open(cls, base: Path, owner: MemoryOwner, world: World) -> MemoryTier:
        """Joins this node's tier, which its first rank makes if it is not there. A collective.

        Raises:
            UserError: a node's directory is absent or cannot be written, on every rank.
        """
        node, problem = _identify(base)
        nodes = gather_texts(node)
        folder = base / f"{PREFIX}{owner.uuid}-{node}"
        if not problem and nodes.index(node) == world.rank:
            problem = write_owner(folder, owner)
        problems = sorted({text for text in gather_texts(problem) if text})
        if problems:
            raise UserError("; ".join(problems))
        return cls(folder, node, nodes, world)

    @property
    def is_leader(self) -> bool:
        """Whether this rank lists and deletes for its node."""
        return self._nodes.index(self.node) == self._world.rank

    @property
    def ranks_here(self) -> list[int]:
        """Ranks of this node, this one included."""
        return [rank for rank, node in enumerate(self._nodes) if node == self.node]

    def held_bytes(self) -> int:
        """What the copies of this run take on this node."""
        return folder_bytes(self._folder)

    def copies(self) -> list[MemoryCopy]:
        """What all nodes hold together, newest first; the same on every rank. A collective."""
        mine = [manifest.encode().decode() for manifest in self._local_parts()] if self.is_leader else []
        merged: dict[tuple[str, str], MemoryCopy] = {}
        for rank, text in enumerate(gather_texts(json.dumps(mine))):
            for part in json.loads(text):
                manifest = Manifest.decode(part.encode(), f"memory of rank {rank}'s node", part=True)
                key = (manifest.name, manifest.save_id)
                nodes = {file.name: self._nodes[rank] for file in manifest.files}
                if key in merged:
                    nodes = {**nodes, **merged[key].nodes}
                    files = {file.name: file for file in (*manifest.files, *merged[key].manifest.files)}
                    manifest = replace(manifest, files=tuple(files[name] for name in sorted(files)))
                merged[key] = MemoryCopy(manifest, nodes, None)
        found = [replace(copy, problem=_incomplete(copy.manifest)) for copy in merged.values()]
        return sorted(found, key=lambda copy: (parse_name(copy.name) or (0, 0), copy.problem is None), reverse=True)

    def readable(self, copy: MemoryCopy) -> Manifest:
        """The manifest of those files of a copy that lie on this node."""
        here = tuple(file for file in copy.manifest.files if copy.nodes[file.name] == self.node)
        return replace(copy.manifest, files=here)

    def to_verify(self, copy: MemoryCopy) -> Manifest:
        """This rank's share of the files that lie on this node."""
        here, ranks = self.readable(copy), self.ranks_here
        return replace(here, files=here.files[ranks.index(self._world.rank) :: len(ranks)])

    def keep(self, names: Iterable[str]) -> None:
        """Deletes all other copies of this run on this node; only its leader does."""
        kept = set(names)
        for name in self.store.names() if self.is_leader else ():
            if parse_name(name) and name not in kept:
                self.store.delete_tree(name)

    def discard(self) -> None:
        """Gives this node's memory back; only its leader does. All ranks must have ended their saves."""
        if self.is_leader:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _local_parts(self) -> list[Manifest]:
        """One manifest per save with the whole-looking files of this node."""
        merged: dict[tuple[str, str], Manifest] = {}
        keys = [key for key in self.store.list() if key.endswith(PART_SUFFIX)]
        for name, key in ((key.partition("/")[0], key) for key in keys):
            if parse_name(name):
                with suppress(PretrainError):
                    part = Manifest.decode(self.store.get(key), f"{self.store.url}/{key}", part=True)
                    if part.name == name and not any(size_problem(self.store, name, file) for file in part.files):
                        files = merged[name, part.save_id].files if (name, part.save_id) in merged else ()
                        merged[name, part.save_id] = replace(part, files=(*files, *part.files))
        return list(merged.values())


def _incomplete(manifest: Manifest) -> str | None:
    if manifest.first_hole() is None:
        return None
    there = {file.name for file in manifest.files}
    absent = [rank for rank in range(int(manifest.origin["ranks"])) if rank_file(rank) not in there]
    return f"no living node holds the files of ranks {absent}" if absent else "its files do not cover everything once"


def _identify(base: Path) -> tuple[str, str]:
    """The node that a directory's memory belongs to, or what is wrong with the directory."""
    try:
        device = os.stat(base).st_dev
        if not os.access(base, os.W_OK | os.X_OK) or not base.is_dir():
            raise PermissionError(13, "it is no directory that this user may write into")
        boot = Path("/proc/sys/kernel/random/boot_id")
        start = boot.read_text().strip() if boot.exists() else os.uname().nodename
    except OSError as error:
        where = f"checkpoint.ram_directory={base} on {os.uname().nodename}"
        rule = "It must be a directory in memory that every rank may write into"
        return "", f"{where} cannot be used: {error.strerror}. {rule}. Make it or name another."
    return hashlib.sha256(f"{start}/{device}".encode()).hexdigest()[:12], ""
