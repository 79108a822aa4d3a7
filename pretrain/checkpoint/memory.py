"""The memory tier: copies in a tmpfs of each node, every few steps, that outlive the processes, and a lost node.

    /dev/shm/pretrain-ram-<run's uuid>-<node>/owner.json                    whose it is
                                             /step-00000012-a001/rank-00000.safetensors and .part.json

takes -> directory, run, World; gives -> a store for this node's ranks, and what the ranks of all nodes
hold together. Every rank's files also go to the next node of a ring. A copy counts when the parts that living
nodes hold cover every range; a rank reads what it needs from whichever of them has it, its own first.
A node is a tmpfs: boot of the kernel and device of the mount.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pretrain.checkpoint.files import Ranges, Sources, size_problem
from pretrain.checkpoint.format import PART_SUFFIX, Manifest, parse_name, rank_file
from pretrain.checkpoint.peers import Peer, PeerServer, own_address
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
        holders: nodes that hold each file, by the file's name.
        problem: why it does not count; None when it covers everything.
    """

    manifest: Manifest
    holders: dict[str, tuple[str, ...]]
    problem: str | None

    @property
    def name(self) -> str:
        return self.manifest.name


class MemoryTier:
    """This rank's view of the memory tier of its run.

    Attributes:
        store: of the copies on this node.
        node: identifier of this rank's node.
        partner: folder of the node that keeps a second copy of this one's files; None when there is no other.
        passed_over: copies that a restore could not use, (name, why).
    """

    def __init__(self, folder: Path, nodes: list[str], world: World, *, with_partner: bool = True) -> None:
        """Use `open`. A collective."""
        self.store: Store = open_store(folder)
        self.node = nodes[world.rank]
        self.passed_over: list[tuple[str, str]] = []
        self._folder, self._nodes, self._world = folder, nodes, world
        self._server: PeerServer | None = None
        self._peers: dict[str, Peer] = {}
        ring = list(dict.fromkeys(nodes))
        if len(ring) > 1:
            self._meet(ring)
        following = ring[(ring.index(self.node) + 1) % len(ring)]
        self._ring = ring if with_partner else []
        self.partner = self._peers.get(following) if with_partner else None

    @classmethod
    def open(cls, base: Path, owner: MemoryOwner, world: World, *, with_partner: bool = True) -> MemoryTier:
        """Joins this node's tier, which its first rank makes if it is not there. A collective.

        Args:
            with_partner: where there are other nodes, the next one keeps a second copy of each file.

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
        return cls(folder, nodes, world, with_partner=with_partner)

    def _meet(self, ring: list[str]) -> None:
        """Each node's first rank serves its folder; all learn where. A collective."""
        token = gather_texts(secrets.token_hex(32) if self._world.is_main else "")[0]
        address = ""
        if self.is_leader:
            self._server = PeerServer(self.store, token, own_address())
            address = self._server.address
        addresses = gather_texts(address)
        self._peers = {node: Peer(addresses[self._nodes.index(node)], token) for node in ring if node != self.node}

    def close(self) -> None:
        """Serves no more, and asks nobody. No collective."""
        for peer in self._peers.values():
            peer.close()
        if self._server is not None:
            self._server.close()
            self._server = None

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

    @property
    def ranks_kept_here(self) -> list[int]:
        """Ranks whose files this node keeps: its own, and those of the node before it in the ring."""
        kept = {self.node}
        if len(self._ring) > 1:
            kept.add(self._ring[self._ring.index(self.node) - 1])
        return [rank for rank, node in enumerate(self._nodes) if node in kept]

    def copies(self) -> list[MemoryCopy]:
        """What all nodes hold together, newest first; the same on every rank. A collective."""
        mine = [manifest.encode().decode() for manifest in self._local_parts()] if self.is_leader else []
        merged: dict[tuple[str, str], MemoryCopy] = {}
        for rank, text in enumerate(gather_texts(json.dumps(mine))):
            for part in json.loads(text):
                manifest = Manifest.decode(part.encode(), f"memory of rank {rank}'s node", part=True)
                key = (manifest.name, manifest.save_id)
                before = merged.get(key) or MemoryCopy(replace(manifest, files=()), {}, None)
                files = {file.name: file for file in (*manifest.files, *before.manifest.files)}
                there = {file.name: (self._nodes[rank],) for file in manifest.files}
                holders = {name: (*before.holders.get(name, ()), *there.get(name, ())) for name in files}
                manifest = replace(manifest, files=tuple(files[name] for name in sorted(files)))
                merged[key] = MemoryCopy(manifest, holders, None)
        found = [replace(copy, problem=_incomplete(copy.manifest)) for copy in merged.values()]
        return sorted(found, key=lambda copy: (parse_name(copy.name) or (0, 0), copy.problem is None), reverse=True)

    def sources(self, copy: MemoryCopy) -> Sources:
        """Where this rank reads the files of a copy: on its own node if it is there, else on one that has it."""
        here, folders = self.store.child(copy.name), {node: peer.child(copy.name) for node, peer in self._peers.items()}

        def of(file: str) -> Sequence[Ranges]:
            nodes = sorted(copy.holders[file], key=lambda node: node != self.node)
            return [here if node == self.node else folders[node] for node in nodes]

        return of

    def keep(self, names: Iterable[str]) -> None:
        """Deletes all other copies of this run on this node; only its leader does."""
        kept = set(names)
        for name in self.store.names() if self.is_leader else ():
            if parse_name(name) and name not in kept:
                self.store.delete_tree(name)

    def discard(self) -> None:
        """Gives this node's memory back; only its leader does. All ranks must have ended their saves."""
        self.close()
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
