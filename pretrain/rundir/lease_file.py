"""The files of leases: `lease/<number>.json`, what they say, and how they look to someone who only reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pretrain.rundir.process import ProcessIdentity, is_alive
from pretrain.rundir.records import read_record
from pretrain.store import Store

DEAD_AFTER_S = 30.0
_REMEDY = "Make sure that no process trains this run any more, then take it over with pretrain resume RUN --takeover."


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """What the file of a lease says."""

    number: int
    uuid: str
    holder: ProcessIdentity
    purpose: str
    renewed_at: float
    released: bool

    def to_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "uuid": self.uuid,
            **self.holder.to_json(),
            "purpose": self.purpose,
            "renewed_at": self.renewed_at,
            "released": self.released,
        }


def lease_key(number: int) -> str:
    return f"lease/{number:06d}.json"


def lease_numbers(store: Store) -> list[int]:
    """Numbers of all leases ever given, rising."""
    stems = [name.removesuffix(".json") for name in store.names("lease")]
    return sorted(int(stem) for stem in stems if stem.isdigit())


def newest_number(store: Store) -> int:
    """Number of the newest lease, 0 if there never was one; the journal counts too, should leases be deleted."""
    journal = [int(name) for name in store.names("journal") if name.isdigit()]
    return max([0, *lease_numbers(store), *journal])


def read_lease(store: Store, number: int) -> LeaseRecord:
    """The file of a lease. Raises NotFoundError, DamagedFileError or StoreError."""
    body = read_record(store, lease_key(number), _REMEDY)
    return LeaseRecord(
        number=int(body["number"]),
        uuid=str(body["uuid"]),
        holder=ProcessIdentity.from_json(body),
        purpose=str(body["purpose"]),
        renewed_at=float(body["renewed_at"]),
        released=bool(body["released"]),
    )


def newest_lease(store: Store) -> LeaseRecord | None:
    """The run's last lease, held or not. Raises DamagedFileError or StoreError."""
    numbers = lease_numbers(store)
    return read_lease(store, numbers[-1]) if numbers else None


def is_held(record: LeaseRecord, now: float) -> bool:
    """Whether a lease looks held to someone who only looks once."""
    if record.released:
        return False
    alive = is_alive(record.holder)
    return now - record.renewed_at <= DEAD_AFTER_S if alive is None else alive
