"""Whole runs without Ray: the same rows and losses for any number of ranks, exact resumes, orderly ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pretrain.checkpoint import list_checkpoints, weights_sha256
from pretrain.errors import ExitCode
from pretrain.optim.schedules import learning_rate_at
from pretrain.rundir import RunDirectory
from tests.ranks import run_ranks
from tests.tiny import Tiny, build_tiny, steps_of, validations_of
from tests.train.rank_programs import trainings

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return build_tiny(tmp_path_factory.mktemp("tiny"))


def _train(ranks: int, home: Path, *runs: list[str]) -> None:
    results = run_ranks(trainings, ranks=ranks, arguments={"runs": list(runs), "home": str(home)}, timeout_s=150)
    assert [result.value for result in results] == [[0] * len(runs)] * ranks, results[0].output[-4000:]


def _weights(home: Path, name: str) -> str:
    run = RunDirectory.locate(str(home / name))
    return weights_sha256(run.checkpoints, list_checkpoints(run.checkpoints)[0].name)


def test_any_number_of_ranks_trains_the_same_rows_to_the_same_losses(tiny, tmp_path):
    # Dropout is on; 4 micro-batches a step, so 3 ranks get an empty one each second round.
    for ranks in (1, 2, 3, 4):
        _train(ranks, tmp_path, tiny.decoder(f"name=r{ranks}", "eval.every_steps=4"))
    runs = {ranks: steps_of(tmp_path / f"r{ranks}") for ranks in (1, 2, 3, 4)}
    validations = {ranks: validations_of(tmp_path / f"r{ranks}") for ranks in (1, 2, 3, 4)}
    assert list(runs[1]) == list(range(1, 9))
    assert len({record["data_digest"] for record in runs[1].values()}) == 8  # other rows at each step
    for ranks in (2, 3, 4):
        for step, record in runs[1].items():
            other = runs[ranks][step]
            assert other["data_digest"] == record["data_digest"]
            assert other["target_tokens"] == record["target_tokens"]
            assert other["loss"] == pytest.approx(record["loss"], rel=1e-5)
        assert list(validations[ranks]) == [4, 8]
        for step, validation in validations[1].items():
            there = validations[ranks][step]["text"]
            assert there["target_bytes"] == validation["text"]["target_bytes"]
            assert there["bits_per_byte"] == pytest.approx(validation["text"]["bits_per_byte"], rel=1e-5)


def test_a_resumed_run_repeats_the_untouched_one_bit_for_bit_and_validation_disturbs_nothing(tiny, tmp_path):
    # A constant rate, because the cosine of 4 steps is another curve than that of 8.
    common = ["engine.precision=bf16", "schedule.kind=constant", "schedule.warmup_steps=2"]
    whole = tiny.decoder("name=whole", *common, "schedule.total_steps=8")
    samples = ['eval.samples.prompts=["the cat"]', "eval.samples.every_steps=1", "eval.samples.attention_maps=true"]
    first = tiny.decoder("name=parts", *common, "schedule.total_steps=4", "eval.every_steps=1", *samples)
    rest = tiny.decoder("name=parts", *common, "schedule.total_steps=8", "eval.every_steps=3", "--resume", "must")
    _train(2, tmp_path, whole, first)
    _train(2, tmp_path, rest)  # in processes of its own: a resume waits for those of the attempt before
    untouched, resumed = steps_of(tmp_path / "whole"), steps_of(tmp_path / "parts")
    assert list(resumed) == list(untouched) == list(range(1, 9))
    for step, record in untouched.items():
        for field in ("loss", "gradient_norm", "data_digest", "learning_rate", "tokens"):
            assert resumed[step][field] == record[field], (step, field)
    assert _weights(tmp_path, "parts") == _weights(tmp_path, "whole")
    (change,) = [e for e in RunDirectory.locate(str(tmp_path / "parts")).events() if e.kind == "config_changed"]
    assert any("schedule.total_steps" in line and "4" in line and "8" in line for line in change.fields["changes"])


def test_samples_are_what_the_weights_of_the_step_write_at_stage_3_and_an_impossible_one_ends_nothing(tiny, tmp_path):
    from launch.trained import open_trained
    from pretrain.generate.sampling import SamplingOptions
    from pretrain.generate.text import generate_text

    prompts = ["the cat sees", "a red", "the " * 200]  # the last has more tokens than are allowed for
    given = [f"eval.samples.prompts={json.dumps(prompts)}", "eval.samples.every_steps=3", "eval.samples.temperature=0"]
    given += ["eval.samples.max_tokens=12", "eval.samples.attention_maps=true", "engine.zero_stage=3",
              "checkpoint.ram_every_steps=2"]  # fmt: skip
    _train(
        2,
        tmp_path,
        tiny.decoder(
            "name=writes", "model.positions=learned", "model.max_length=64", "checkpoint.every_steps=3", *given
        ),
    )
    run = RunDirectory.locate(str(tmp_path / "writes"))
    assert run.store.names("samples") == [f"prompts-{step:08d}.jsonl" for step in (3, 6, 8)]
    for name in list_checkpoints(run.checkpoints):
        lines = run.store.get(f"samples/prompts-{name.step:08d}.jsonl").splitlines()
        told = [json.loads(line) for line in lines]
        assert [entry["prompt"] for entry in told] == prompts
        trained = open_trained(str(tmp_path / "writes"), checkpoint=name.name)
        for entry in told[:2]:
            text = generate_text(trained.writer, entry["prompt"], sampling=SamplingOptions(), max_tokens=12).text
            assert entry["text"] == text != ""
        assert "model.max_length=64" in told[2]["error"]
    assert run.store.get("plots/attention-step-00000008.png").startswith(b"\x89PNG")
    records = steps_of(tmp_path / "writes")
    assert records.keys() == set(range(1, 9))
    copies = {step: record["memory_copy_step"] for step, record in records.items()}
    known = {step: copied for step, copied in copies.items() if copied is not None}
    assert known
    assert all(copied in (2, 4) and copied < step for step, copied in known.items())


def test_the_learning_rate_depends_on_optimizer_steps_only(tiny, tmp_path):
    from pretrain.config import load_config

    _train(2, tmp_path, tiny.decoder("name=lr"))
    config, *overrides = tiny.decoder()
    schedule = load_config(config, overrides).schedule
    for step, record in steps_of(tmp_path / "lr").items():
        assert record["learning_rate"] == learning_rate_at(step - 1, 1e-2, schedule)
    assert steps_of(tmp_path / "lr")[1]["learning_rate"] == pytest.approx(0.5e-2)  # 1 of 2 warm-up steps


def _spawn(home: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pretrain", *arguments],
        cwd=ROOT,
        env={**os.environ, "PRETRAIN_HOME": str(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _wait_for_step(home: Path, name: str, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 200
    while max(steps_of(home / name), default=0) < step:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _endless(total_steps: int = 100_000) -> tuple[str, ...]:
    return ("schedule.kind=constant", f"schedule.total_steps={total_steps}", "checkpoint.every_steps=50000")


@pytest.mark.parametrize(("how", "code", "end"), [("signal", 5, "interrupted"), ("request", 4, "stopped")])
def test_a_run_that_is_told_to_end_saves_its_last_step_and_can_go_on(tiny, tmp_path, how, code, end):
    process = _spawn(tmp_path, *tiny.decoder("name=ended", *_endless()))
    _wait_for_step(tmp_path, "ended", 3, process)
    run = RunDirectory.locate(str(tmp_path / "ended"))
    if how == "signal":
        process.send_signal(signal.SIGTERM)
    else:
        run.request_stop()
    output, _ = process.communicate(timeout=30)
    assert process.returncode == code, output
    last = max(steps_of(tmp_path / "ended"))
    assert [checkpoint.step for checkpoint in list_checkpoints(run.checkpoints)] == [last]
    assert run.events()[-1].kind == end
    assert run.events()[-1].fields["step"] == last
    more = _spawn(tmp_path, *tiny.decoder("name=ended", *_endless(last + 1), "--resume", "auto"))
    output, _ = more.communicate(timeout=60)
    assert more.returncode == 0, output
    assert max(steps_of(tmp_path / "ended")) == last + 1


def test_an_existing_name_and_a_second_trainer_are_refused_and_leave_the_run_alone(tiny, tmp_path):
    process = _spawn(tmp_path, *tiny.decoder("name=taken", *_endless()))
    try:
        _wait_for_step(tmp_path, "taken", 1, process)
        before = (tmp_path / "taken" / "run.yaml").read_bytes()
        again = _spawn(tmp_path, *tiny.decoder("name=taken"))
        output, _ = again.communicate(timeout=60)
        assert again.returncode == ExitCode.USER_ERROR
        assert "name=taken exists already" in output
        assert "pretrain resume taken" in output
        second = _spawn(
            tmp_path, *tiny.decoder("name=taken", *_endless(), "checkpoint.keep_last=9", "--resume", "auto")
        )
        output, _ = second.communicate(timeout=60)
        assert second.returncode == ExitCode.USER_ERROR
        assert f"held by pid {process.pid}" in output
        assert "Traceback" not in output
        assert process.poll() is None
        assert (tmp_path / "taken" / "run.yaml").read_bytes() == before
    finally:
        process.kill()
        process.communicate()


def test_a_killed_trainer_is_replaced_at_once_and_ends_with_the_same_weights(tiny, tmp_path):
    steps = ("schedule.total_steps=30", "checkpoint.every_steps=5")
    whole = _spawn(tmp_path, *tiny.decoder("name=whole", *steps))
    assert whole.wait(90) == 0, whole.communicate()[0]
    killed = _spawn(tmp_path, *tiny.decoder("name=killed", *steps))
    _wait_for_step(tmp_path, "killed", 12, killed)
    killed.kill()
    killed.communicate()
    assert max(steps_of(tmp_path / "killed")) < 30
    resumed = _spawn(tmp_path, *tiny.decoder("name=killed", *steps, "--resume", "must"))
    output, _ = resumed.communicate(timeout=90)
    assert resumed.returncode == 0, output
    assert steps_of(tmp_path / "killed").keys() == steps_of(tmp_path / "whole").keys()
    assert _weights(tmp_path, "killed") == _weights(tmp_path, "whole")
    whole.communicate()


def test_the_same_ranks_under_ray_train_to_the_same_weights(tiny, tmp_path):
    _train(2, tmp_path, tiny.decoder("name=plain"))
    done = subprocess.run(
        [sys.executable, "-m", "launch.cli", "train", *tiny.decoder("name=ray")],
        cwd=ROOT,
        env={**os.environ, "PRETRAIN_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    plain, ray = steps_of(tmp_path / "plain"), steps_of(tmp_path / "ray")
    assert list(ray) == list(range(1, 9))
    assert [record["loss"] for record in ray.values()] == [record["loss"] for record in plain.values()]
    assert _weights(tmp_path, "ray") == _weights(tmp_path, "plain")


CANNOT_TRAIN = {
    "batch.global_batch_size=4096": "batch.global_batch_size=4096 is more than the",
    "batch.sequence_length=48": "sequence_length",
    "model.vocabulary_size=256": "vocabulary",
    "tokenizer=/nowhere/tokenizer.json": "tokenizer=/nowhere/tokenizer.json does not exist",
}


def _changed(tiny, name, change):
    """The decoder with one field changed, which may be one of those that `tiny` gives."""
    key = change.split("=")[0]
    return [*(word for word in tiny.decoder(name) if not word.startswith(f"{key}=")), change]


def test_what_cannot_train_ends_with_one_error_line_and_code_2(tiny, tmp_path):
    changes = list(CANNOT_TRAIN)
    runs = [_changed(tiny, f"name=bad{number}", change) for number, change in enumerate(changes)]
    (ended,) = run_ranks(trainings, ranks=1, arguments={"runs": runs, "home": str(tmp_path)}, timeout_s=100)
    process = _spawn(tmp_path, *_changed(tiny, "name=bad", changes[-1]))
    output, _ = process.communicate(timeout=60)
    assert (ended.value, process.returncode) == ([ExitCode.USER_ERROR] * 4, ExitCode.USER_ERROR), output
    for text, messages in ((ended.output, list(CANNOT_TRAIN.values())), (output, [CANNOT_TRAIN[changes[-1]]])):
        errors = [line for line in text.splitlines() if " ERROR " in line]
        assert len(errors) == len(messages), text
        assert all(message in line for message, line in zip(messages, errors, strict=True)), text
        assert "Traceback" not in text


COMPILED = pytest.param("while its kernels are compiled", marks=pytest.mark.slow)
EVALUATING = pytest.param("in an evaluation of many rows", marks=pytest.mark.slow)


@pytest.mark.parametrize("when", ["before its first step", "in a step", EVALUATING, COMPILED])
def test_torchrun_ranks_save_the_same_step_when_one_of_them_gets_a_signal(tiny, tmp_path, when):
    evaluated = [f"data.validation.v{n}.path={tiny.folder / 'text' / 'train'}" for n in range(20)]
    evaluations = ["eval.every_steps=2", *evaluated] if "evaluation" in when else []
    compiled = ["model.kernels=compiled"] if "compiled" in when else []
    point = {"before its first step": "start.built", "while its kernels are compiled": "step.agreed"}.get(when)
    faults = tmp_path / "faults.json"
    faults.write_text(json.dumps([{"point": point, "do": "sleep:3", "rank": 1}] if point else []))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "pretrain"]
    process = subprocess.Popen(
        [*command, *tiny.decoder("name=pair", *_endless(), *evaluations, *compiled)],
        cwd=ROOT,
        env={
            **os.environ,
            "PRETRAIN_HOME": str(tmp_path),
            "PRETRAIN_FAULTS": str(faults),
            "OMP_NUM_THREADS": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if point:
        deadline = time.monotonic() + 150
        while not (tmp_path / "faults.json.fired-0").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
    else:
        _wait_for_step(tmp_path, "pair", 2, process)
    run = RunDirectory.locate(str(tmp_path / "pair"))
    (started,) = [event for event in run.events() if event.kind == "ranks_started"]
    assert [entry["rank"] for entry in started.fields["processes"]] == [0, 1]
    os.kill(started.fields["processes"][1]["pid"], signal.SIGTERM)
    output, _ = process.communicate(timeout=200)
    assert run.events()[-1].kind == "interrupted", output
    assert [c.step for c in list_checkpoints(run.checkpoints)] == [run.events()[-1].fields["step"]]
    if point:  # the step that was being compiled is done, none was begun after it
        assert run.events()[-1].fields["step"] == (1 if compiled else 0)
    if evaluations:  # it did not wait for its end
        assert validations_of(tmp_path / "pair") == {}
        assert run.events()[-1].fields["step"] == 2
