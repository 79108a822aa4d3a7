"""The best-known peer in translation: `transformers`' Marian of the same sizes, trained by its own Seq2SeqTrainer.

Takes pairs, a tokenizer and how long to train -> a directory that `transformers` and `pretrain` open, its log, and
translations by its own `generate`. Run as a script, alone or as ranks of torch.distributed.run:
    python -m benchmarks.marian_peer train SPEC      trains and saves
    python -m benchmarks.marian_peer write SPEC      translates what was held out
SPEC is a `Spec` as JSON. Batches are grouped by length, as its documentation advises for pairs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from transformers import MarianConfig, MarianMTModel, Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback

IGNORED = -100
LOG_EVERY = 10


@dataclass(frozen=True, slots=True)
class Spec:
    """What is trained and for how long.

    Attributes:
        pairs, held_out: lines of JSON with `source` and `target`.
        out: the directory that is written.
        pairs_per_step: of an update, over all ranks.
        seconds: of training, from the end of the first step; or None and `steps`.
        model: sizes and dropout, by the names of MarianConfig.
        optimizer: by the names of the Trainer's arguments.
    """

    pairs: str
    held_out: str
    tokenizer: str
    out: str
    seed: int
    pairs_per_step: int
    seconds: float | None
    steps: int
    start_id: int
    pad_id: int
    end_id: int
    model: dict[str, Any]
    optimizer: dict[str, Any]

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class _Clock(TrainerCallback):
    """Ends the training when its time is over, and keeps its log with the time that training took."""

    def __init__(self, spec: Spec, log: Path) -> None:
        self._spec, self._log, self._start = spec, log, 0.0
        self._lines: list[dict[str, float]] = []

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._start

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1:
            self._start = time.monotonic()
        if self._spec.seconds is not None:
            # All ranks end after the same step: the first one's clock decides.
            over = torch.tensor([self._seconds >= self._spec.seconds], dtype=torch.int32)
            if torch.distributed.is_initialized():
                torch.distributed.broadcast(over, src=0)
            control.should_training_stop = bool(over.item()) or control.should_training_stop

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self._lines.append({"step": state.global_step, "seconds": self._seconds, "objective": logs["loss"]})

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            self._lines.append({"step": state.global_step, "seconds": self._seconds})
            self._log.write_text("".join(json.dumps(line) + "\n" for line in self._lines))


def _texts(path: str) -> tuple[list[str], list[str]]:
    pairs = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    return [pair["source"] for pair in pairs], [pair["target"] for pair in pairs]


def _encode(spec: Spec, texts: Sequence[str]) -> list[list[int]]:
    library = tokenizers.Tokenizer.from_file(spec.tokenizer)
    return [[*one.ids, spec.end_id] for one in library.encode_batch_fast(list(texts), add_special_tokens=False)]


def _collate(spec: Spec, examples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Padded to the longest, with the decoder's inputs, which the Trainer's label smoothing wants."""

    def padded(rows: list[list[int]], value: int) -> torch.Tensor:
        tensors = [torch.tensor(row) for row in rows]
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)

    sources = [example["input_ids"] for example in examples]
    targets = [example["labels"] for example in examples]
    return {
        "input_ids": padded(sources, spec.pad_id),
        "attention_mask": padded([[1] * len(row) for row in sources], 0),
        "decoder_input_ids": padded([[spec.start_id, *row[:-1]] for row in targets], spec.pad_id),
        "labels": padded(targets, IGNORED),
    }


def train(spec: Spec) -> None:
    """Trains and saves; the first rank writes."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    sources, targets = (_encode(spec, side) for side in _texts(spec.pairs))
    rows = [{"input_ids": source, "labels": target} for source, target in zip(sources, targets, strict=True)]
    ids = {"pad_token_id": spec.pad_id, "eos_token_id": spec.end_id, "decoder_start_token_id": spec.start_id}
    transformers.set_seed(spec.seed)
    config = MarianConfig(**spec.model, **ids, forced_eos_token_id=None, use_cache=True)
    model = MarianMTModel(config)
    out = Path(spec.out)
    out.mkdir(parents=True, exist_ok=True)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(out), per_device_train_batch_size=spec.pairs_per_step // ranks, max_steps=spec.steps,
        use_cpu=True, seed=spec.seed, optim="adamw_torch_fused", lr_scheduler_type="inverse_sqrt",
        train_sampling_strategy="group_by_length", logging_steps=LOG_EVERY, save_strategy="no", report_to=[],
        disable_tqdm=True, dataloader_num_workers=0, dataloader_pin_memory=False, **spec.optimizer,
        **({"ddp_backend": "gloo"} if ranks > 1 else {}),
    )  # fmt: skip
    trainer = Seq2SeqTrainer(
        model, arguments, train_dataset=rows, data_collator=lambda examples: _collate(spec, examples),
        callbacks=[_Clock(spec, out / "log.jsonl")],
    )  # fmt: skip
    trainer.train()
    if trainer.is_world_process_zero():
        model.save_pretrained(out)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def write(spec: Spec) -> None:
    """Translates with its own beam search, as long sentences as ours: `written.jsonl`."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    library = tokenizers.Tokenizer.from_file(spec.tokenizer)
    model = MarianMTModel.from_pretrained(spec.out).eval()
    texts, references = _texts(spec.held_out)
    sources = _encode(spec, texts)
    order = sorted(range(len(sources)), key=lambda number: len(sources[number]))
    found: dict[int, str] = {}
    for start in range(0, len(order), 32):
        group = order[start : start + 32]
        batch = _collate(spec, [{"input_ids": sources[number], "labels": [spec.end_id]} for number in group])
        with torch.inference_mode():
            written = model.generate(
                input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], num_beams=4, max_new_tokens=200
            )
        found |= {n: library.decode(row.tolist()).strip() for n, row in zip(group, written, strict=True)}
    lines = [
        {"source": text, "reference": reference, "hypothesis": found[number]}
        for number, (text, reference) in enumerate(zip(texts, references, strict=True))
    ]
    Path(spec.out, "written.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    {"train": train, "write": write}[sys.argv[1]](Spec(**json.loads(Path(sys.argv[2]).read_text())))
