"""A rank that trains nothing but speaks the protocol: heartbeats, lifeline, events, exit codes.

Driven by the variable FAKE, JSON: steps, step_s, commit_every, and faults, a list of
{attempt, rank, step, do}, where do is `exit:N`, `signal:N`, `hang`, `raise:N` (N calls deep), `slow:S` (once, S
seconds), or `stop-in-save`.
As a standby it imports nothing; `standby` in FAKE is what it does instead, `exit:N` or `slow:S`.
Its whole state is the file `fake.step` in the run directory, so a restart goes on from the last commit.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from pretrain.train.standby import stand_by
from pretrain.train.watch import Heartbeat, answer_stacks, die_with_parent


class Rank:
    def __init__(self, run: Path, attempt: int) -> None:
        self.fake: dict[str, Any] = json.loads(os.environ["FAKE"])
        self.rank, self.attempt, self.run = int(os.environ["RANK"]), attempt, run
        self.word = ""
        self.heartbeat = Heartbeat(int(os.environ["PRETRAIN_HEARTBEAT_FD"]))
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        with os.fdopen(int(os.environ["PRETRAIN_LIFELINE_FD"])) as words:
            for word in words:
                self.word = word.strip()
        os._exit(7)

    def misbehave(self, step: int) -> None:
        for fault in self.fake.get("faults", []):
            if (fault["attempt"], fault["rank"], fault["step"]) == (self.attempt, self.rank, step):
                kind, _, number = fault["do"].partition(":")
                print(f"rank {self.rank} does {fault['do']}", flush=True)
                if kind == "exit":
                    os._exit(int(number))
                if kind == "signal":
                    os.kill(os.getpid(), int(number))
                if kind == "stop-in-save":
                    self.heartbeat.phase("save", step)
                    os.kill(os.getpid(), signal.SIGSTOP)
                if kind == "raise":
                    self.dig(int(number))
                if kind == "slow":
                    time.sleep(float(number))
                while kind == "hang":
                    signal.pause()

    def dig(self, depth: int) -> None:
        if depth % 2:
            return self.dig(depth - 1)
        if depth:  # by another way: Python shortens what repeats itself
            return (lambda: self.dig(depth - 1))()
        raise ValueError("the row is odd")

    def commit(self, step: int) -> None:
        if self.rank == 0:
            (self.run / "fake.new").write_text(str(step))
            os.replace(self.run / "fake.new", self.run / "fake.step")
            name = f"step-{step:08d}-a{self.attempt:03d}"
            self.heartbeat.event("committed", step=step, checkpoint=name, attempt=self.attempt)

    def train(self) -> int:
        kept = self.run / "fake.step"
        first = int(kept.read_text()) if kept.exists() else 0
        if first and self.rank == 0:
            self.heartbeat.event("restored", step=first, checkpoint=f"step-{first:08d}", attempt=self.attempt)
        metrics = self.run / "metrics" / f"attempt-{self.attempt:03d}.jsonl"
        metrics.parent.mkdir(exist_ok=True)
        for step in range(first, int(self.fake["steps"])):
            self.heartbeat.phase("data", step)
            self.misbehave(step)
            self.heartbeat.phase("step", step, collective=True)
            time.sleep(float(self.fake.get("step_s", 0.02)))
            if self.rank == 0:
                with metrics.open("a") as stream:
                    stream.write(json.dumps({"t": time.time(), "step": step + 1, "loss": 5 / (step + 1)}) + "\n")
            print(f"rank {self.rank} step {step} loss {5 / (step + 1)}", flush=True)
            if (step + 1) % int(self.fake.get("commit_every", 5)) == 0:
                self.commit(step + 1)
            if self.word:
                self.heartbeat.phase("save", step + 1)
                self.commit(step + 1)
                return 4 if self.word == "stop" else 5
        self.commit(int(self.fake["steps"]))
        self.heartbeat.phase("done", int(self.fake["steps"]))
        return 0


def prepare() -> None:
    kind, _, number = json.loads(os.environ["FAKE"]).get("standby", "").partition(":")
    if kind == "exit":
        raise SystemExit(int(number))
    if kind == "slow":
        time.sleep(float(number))


def main() -> int:
    die_with_parent()
    answer_stacks()
    arguments = sys.argv[1:]
    if arguments == ["--standby"]:
        heartbeat = Heartbeat(int(os.environ["PRETRAIN_HEARTBEAT_FD"]))
        arguments = stand_by(int(os.environ["PRETRAIN_LIFELINE_FD"]), heartbeat, [prepare])
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", type=Path)
    parser.add_argument("--attempt", type=int)
    args = parser.parse_args(arguments)
    if os.environ["RANK"] == "0":
        listener = socket.socket(fileno=int(os.environ["PRETRAIN_MASTER_FD"]))
        assert listener.getsockname()[1] == int(os.environ["MASTER_PORT"])
    rank = Rank(args.run, args.attempt)
    rank.heartbeat.phase("start", 0)
    return rank.train()


if __name__ == "__main__":
    sys.exit(main())
