"""A run on raw tars that is killed with -9 ends with the weights of one that was left alone."""

from __future__ import annotations

import io
import json
import random
import signal
import tarfile
from pathlib import Path

from pretrain.checkpoint import list_checkpoints, weights_sha256
from pretrain.faults import VARIABLE
from pretrain.rundir import RunDirectory
from tests.ranks import run_ranks
from tests.tiny import CONFIGS, build_tiny, steps_of
from tests.train.rank_programs import trainings


def test_a_killed_run_on_raw_tars_goes_on_bit_for_bit(tmp_path: Path) -> None:
    tiny, rng = build_tiny(tmp_path, documents=80), random.Random(1)
    (tmp_path / "raw").mkdir()
    for shard in range(3):
        with tarfile.open(tmp_path / "raw" / f"{shard}.tar", "w") as archive:
            for number in range(25):
                data = " ".join(
                    rng.choices("the a cat dog runs under red trees".split(), k=rng.randint(5, 60))
                ).encode()
                info = tarfile.TarInfo(f"{number}.txt")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    common = [
        *(str(CONFIGS / "tiny-decoder.yaml"), f"tokenizer={tiny.tokenizer}", f"data.sources.text.path={tmp_path}/raw"),
        *("data.reading=raw", "data.lanes=2", "checkpoint.every_steps=2", "schedule.total_steps=6"),
    ]
    orders = tmp_path / "orders.json"
    orders.write_text(json.dumps([{"point": "step.before_update", "do": "kill", "nth": 5}]))

    def train(*runs: list[str], check: bool = True) -> list[int]:
        environment = {VARIABLE: str(orders)} if not check else {}
        results = run_ranks(
            trainings, ranks=1, arguments={"runs": list(runs), "home": str(tmp_path)}, timeout_s=280, check=check,
            environment=environment,
        )  # fmt: skip
        assert not check or [result.value for result in results] == [[0]], results[0].output[-3000:]
        return [result.returncode for result in results]

    train([*common, "name=whole"])
    assert train([*common, "name=torn"], check=False)[0] == -signal.SIGKILL
    assert max(steps_of(tmp_path / "torn")) == 4
    train([*common, "name=torn", "--resume", "must"])
    whole, torn = steps_of(tmp_path / "whole"), steps_of(tmp_path / "torn")
    assert list(torn) == list(range(1, 7))
    for step, record in whole.items():
        for field in ("loss", "gradient_norm", "data_digest", "tokens"):
            assert torn[step][field] == record[field], (step, field)
    runs = [RunDirectory.locate(str(tmp_path / name)) for name in ("whole", "torn")]
    newest = [weights_sha256(run.checkpoints, list_checkpoints(run.checkpoints)[0].name) for run in runs]
    assert newest[0] == newest[1]
