"""Which faults a campaign tries, from a seed. PURE.

takes → seed, number of trials; gives → `Trial`s. Every named point that a rank passes comes at least five
times among 160 direct trials, each time at another passage, on another rank, with or without copies in memory,
and once on a mixture of experts, which two ranks share.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

STEPS = 10
SAVE_EVERY = 3  # durable; copies in memory, where they are on, come every step between
GUILTY_STEP = 7  # whose rows spoil the loss, in trials that go back
_SAVES = STEPS // SAVE_EVERY + 1
_EXPERTS_EVERY = 5

Order = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Trial:
    """One run that is hurt.

    Attributes:
        name: what happens to it, for the report and for counting points.
        orders: faults inside the product (`pretrain.faults`).
        act: what the harness does to the files after the first death: `flip NAME`, `cut NAME`, `lose NAME`.
        experts: the run is a mixture of experts.
        guilty: the run meets rows that spoil its loss, goes back and jumps over them.
        overrides: more of the config.
        bound_s: the whole trial ends within.
    """

    number: int
    name: str
    ranks: int
    memory: bool
    orders: tuple[Order, ...]
    act: str = ""
    overrides: tuple[str, ...] = ()
    bound_s: float = 60.0
    tags: tuple[str, ...] = field(default=())
    on_s3: bool = False  # the run directory is a bucket
    guilty: bool = False
    experts: bool = False

    @property
    def counted(self) -> frozenset[str]:
        """What this trial counts for once its faults have fired: its tags, and the points of its faults."""
        return frozenset(self.tags) | {
            str(order["point"]) for order in self.orders if not order["do"].startswith("sleep")
        }


# Point -> (how often a run of ten steps passes it at least, whether only rank 0 does).
_PASSAGES: dict[str, tuple[int, bool]] = {
    "start.process_group": (1, False),
    "start.built": (1, False),
    "step.begins": (STEPS, False),
    "step.agreed": (STEPS, False),
    "step.microstep": (2 * STEPS, False),
    "step.before_update": (STEPS, False),
    "step.after_update": (STEPS, False),
    "step.logged": (STEPS, False),
    "save.copied": (_SAVES, False),
    "save.written": (_SAVES, False),
    "save.before_manifest": (_SAVES, True),
    "save.after_manifest": (_SAVES, True),
    "journal.before": (5, True),
    "journal.after": (5, True),
    "lease.renew": (1, True),
}
# Point of the store -> files whose writing passes it, and how often.
_FILES = (("rank-0000", _SAVES), ("MANIFEST", _SAVES), ("journal/", 5), ("lease/", 1))
_STORE = ("store.open", "store.mid_write", "store.before_fsync", "store.before_rename", "store.after_rename")
_LOADS = ("load.chosen", "load.verified", "load.read", "load.done")
_DAMAGE = ("flip rank-00000.safetensors", "cut rank-00000.safetensors", "lose rank-00000.safetensors",
           "flip MANIFEST.json", "lose MANIFEST.json", "cut MANIFEST.json")  # fmt: skip
_SLOWER = {"point": "step.begins", "do": "sleep:0.3", "times": STEPS}


def direct_trials(count: int, seed: int) -> list[Trial]:
    """`count` trials on rank processes without agents."""
    draw = random.Random(seed)
    makers: list[Callable[[random.Random, int], Trial]] = [
        *(_kill_at(point) for point in _PASSAGES),
        *(_kill_in_store(point) for point in _STORE),
        *(_kill_in_load(point) for point in _LOADS),
        _kill_both, _stop_a_rank, _fail_writes, _slow_disk, _damage, _damage, _s3, _kill_while_going_back,
    ]  # fmt: skip
    cycle: Iterator[Callable[[random.Random, int], Trial]] = itertools.cycle(makers)
    trials = [next(cycle)(draw, number) for number in range(count)]
    # The number of makers is no multiple of the period, so each has its turn; only a decoder can be spoilt.
    return [
        _of_experts(trial) if trial.number % _EXPERTS_EVERY == 3 and not trial.guilty else trial for trial in trials
    ]


def _of_experts(trial: Trial) -> Trial:
    return replace(trial, name=f"{trial.name}, experts", experts=True, tags=(*trial.tags, f"experts on {trial.ranks}"))


def _place(draw: random.Random) -> tuple[int, bool]:
    return draw.choice((1, 2, 2)), draw.random() < 0.5


def _kill_at(point: str) -> Callable[[random.Random, int], Trial]:
    passages, only_main = _PASSAGES[point]

    def make(draw: random.Random, number: int) -> Trial:
        ranks, memory = _place(draw)
        rank = 0 if only_main else draw.randrange(ranks)
        order: Order = {"point": point, "do": "kill", "nth": draw.randint(1, passages), "rank": rank}
        orders = (order, _SLOWER) if point == "lease.renew" else (order,)
        return Trial(number, f"kill {point}", ranks, memory, orders)

    return make


def _kill_in_store(point: str) -> Callable[[random.Random, int], Trial]:
    def make(draw: random.Random, number: int) -> Trial:
        ranks, memory = _place(draw)
        files = [(name, times) for name, times in _FILES]
        if point in ("store.before_rename", "store.after_rename"):  # journal events are linked, not renamed
            files = [(name, times) for name, times in files if name != "journal/"]
        name, times = draw.choice(files)
        rank = draw.randrange(ranks) if name == "rank-0000" else 0
        order: Order = {"point": point, "do": "kill", "nth": draw.randint(1, times), "rank": rank, "detail": name}
        return Trial(number, f"kill {point} {name}", ranks, memory, (order,))

    return make


def _kill_in_load(point: str) -> Callable[[random.Random, int], Trial]:
    def make(draw: random.Random, number: int) -> Trial:
        ranks, memory = _place(draw)
        first: Order = {"point": "step.after_update", "do": "kill", "nth": draw.randint(SAVE_EVERY + 2, STEPS - 1),
                        "rank": draw.randrange(ranks)}  # fmt: skip
        # The first start passes `chosen` once as well, with nothing to choose from.
        nth = 1
        order: Order = {"point": point, "do": "kill", "nth": nth, "rank": draw.randrange(ranks)}
        if point == "load.chosen":
            first = {**first, "point": "step.begins"}
        return Trial(number, f"kill {point}", ranks, memory, (first, order))

    return make


def _kill_both(draw: random.Random, number: int) -> Trial:
    _, memory = _place(draw)
    nth = draw.randint(2, STEPS - 1)
    orders = tuple({"point": "step.begins", "do": "kill", "nth": nth, "rank": rank} for rank in (0, 1))
    return Trial(number, "kill two at once", 2, memory, orders, tags=("two",))


def _stop_a_rank(draw: random.Random, number: int) -> Trial:
    _, memory = _place(draw)
    order: Order = {"point": "step.microstep", "do": "stop", "nth": draw.randint(3, 2 * STEPS - 2),
                    "rank": draw.randrange(2)}  # fmt: skip
    overrides = ("health.data_timeout_s=1", "health.collective_timeout_s=2", "health.heartbeat_timeout_s=3")
    return Trial(number, "stop a rank", 2, memory, (order,), overrides=overrides, tags=("stop",))


def _fail_writes(draw: random.Random, number: int) -> Trial:
    ranks, memory = _place(draw)
    error = draw.choice(("ENOSPC", "EROFS", "EIO", "EDQUOT"))
    name, rank = draw.choice((("rank-0000", draw.randrange(ranks)), ("MANIFEST", 0), ("journal/", 0)))
    point = "store.open" if error == "EROFS" else draw.choice(("store.mid_write", "store.before_fsync"))
    order: Order = {"point": point, "do": f"error:{error}", "nth": draw.randint(1, 2), "rank": rank, "detail": name,
                    "times": draw.randint(1, 2)}  # fmt: skip
    return Trial(number, f"{error} {point} {name}", ranks, memory, (order,), tags=("full disk" if error != "EROFS" else
                 "read-only disk",))  # fmt: skip


def _s3(draw: random.Random, number: int) -> Trial:
    """An upload and a download that fail, or a kill in an upload, with a kill between, so that there is a download."""
    ranks = draw.choice((1, 2, 2))
    name, rank = draw.choice((("rank-0000", draw.randrange(ranks)), ("MANIFEST", 0)))
    upload: Order = {"point": "store.upload", "nth": draw.randint(1, 2), "rank": rank, "detail": name}
    upload |= draw.choice(({"do": "kill"}, {"do": "error:ECONNRESET", "times": draw.randint(1, 2)}))
    nth = draw.randint(2 * SAVE_EVERY + 1, STEPS)
    if upload["do"] == "kill" and upload["nth"] == 2:  # what starts then goes on behind the first save
        nth = STEPS - SAVE_EVERY
    if upload["do"] != "kill" and upload["nth"] == 1:  # the first save fails; the second one is whole a step later
        upload["times"], nth = 1, max(nth, 2 * SAVE_EVERY + 2)
    orders: tuple[Order, ...] = (
        upload,
        {"point": "step.begins", "do": "kill", "nth": nth, "rank": 0},
        {"point": "store.download", "do": draw.choice(("error:ECONNRESET", "kill")), "detail": "rank-0000",
         "rank": draw.randrange(ranks)},
    )  # fmt: skip
    name = f"S3 {upload['do']} in upload of {name}, {orders[2]['do']} in download"
    return Trial(number, name, ranks, False, (*orders, _SLOWER), tags=("S3",), on_s3=True)


def _kill_while_going_back(draw: random.Random, number: int) -> Trial:
    ranks, memory = _place(draw)
    orders = tuple(
        {"point": point, "do": "kill", "rank": draw.randrange(ranks), "nth": draw.randint(1, most)}
        for point, most in (("health.before_rollback", 2), ("health.after_rollback", 1))
    )
    overrides = ("health.spike_z_score=12", "health.spike_window_steps=6")
    return Trial(number, "kill while it goes back", ranks, memory, orders, overrides=overrides, guilty=True)


def _slow_disk(draw: random.Random, number: int) -> Trial:
    ranks, memory = _place(draw)
    orders: tuple[Order, ...] = (
        {"point": "store.before_fsync", "do": "sleep:0.2", "rank": 0, "times": 20},
        {"point": "step.begins", "do": "kill", "nth": draw.randint(3, STEPS), "rank": draw.randrange(ranks)},
    )
    return Trial(number, "slow disk, kill", ranks, memory, orders, tags=("slow disk",))


def _damage(draw: random.Random, number: int) -> Trial:
    ranks = draw.choice((1, 2))
    order: Order = {"point": "step.begins", "do": "kill", "nth": draw.randint(2 * SAVE_EVERY + 3, STEPS),
                    "rank": draw.randrange(ranks)}  # fmt: skip
    act = draw.choice(_DAMAGE)
    return Trial(number, f"kill, {act}", ranks, False, (order, _SLOWER), act=act, tags=(act.split(" ")[0],))
