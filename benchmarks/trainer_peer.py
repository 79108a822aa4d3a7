"""The best-known peer: `transformers`' Llama of the same size, trained by its own Trainer, a step at a time.

The Trainer runs in a thread that its callback stops before every optimizer step, so that its steps can be
measured in turn with ours. What is timed is its own step: data, forward, backward, clipping and update.
"""

from __future__ import annotations

import tempfile
import threading
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

from benchmarks.bare_loop import Shape
from benchmarks.result import clock


class _Gate(TrainerCallback):
    """Lets one optimizer step through for each `release`."""

    def __init__(self) -> None:
        self.ready, self.go, self.done = threading.Event(), threading.Semaphore(0), threading.Semaphore(0)
        self.ended = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.ready.set()
        self.go.acquire()
        control.should_training_stop = self.ended

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = control.should_training_stop or self.ended
        self.done.release()


class _Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The same rows again and again; every position has a label."""

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.ids[index % len(self.ids)]
        return {"input_ids": row, "labels": row}


class TrainerPeer:
    """A Trainer over rows [B, S], `rows` to a micro-batch and `accumulation` of them to a step."""

    def __init__(self, shape: Shape, ids: torch.Tensor, *, rows: int, accumulation: int, bf16: bool) -> None:
        logging.set_verbosity_error()
        config = LlamaConfig(
            vocab_size=shape.vocabulary_size, hidden_size=shape.width, num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads, num_key_value_heads=shape.num_kv_heads,
            intermediate_size=shape.feed_forward_width, tie_word_embeddings=shape.tied, use_cache=False,
            max_position_embeddings=ids.shape[1], attn_implementation="sdpa",
        )  # fmt: skip
        self._gate = _Gate()
        self._folder = tempfile.TemporaryDirectory(prefix="trainer-")
        arguments = TrainingArguments(
            output_dir=self._folder.name, per_device_train_batch_size=rows, gradient_accumulation_steps=accumulation,
            max_steps=1 << 20, use_cpu=True, bf16=bf16, optim="adamw_torch_fused", learning_rate=1e-3,
            weight_decay=0.1, adam_beta2=0.95, max_grad_norm=1.0, lr_scheduler_type="constant", save_strategy="no",
            logging_strategy="no", report_to=[], disable_tqdm=True,
        )  # fmt: skip
        self._trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=_Rows(ids), callbacks=[self._gate])
        self._trainer.remove_callback(PrinterCallback)  # stdout belongs to the results
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._gate.ready.wait(120)
        if isinstance(self._trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel):
            self.close()
            raise RuntimeError("the Trainer wrapped its model for several ranks; begin it before a process group is up")

    def _run(self) -> None:
        try:
            self._trainer.train()
        except BaseException as error:
            self._error = error
            self._gate.ready.set()
            self._gate.done.release()

    def step(self) -> float:
        """Seconds of one optimizer step.

        Raises:
            RuntimeError: the Trainer failed.
        """
        start = clock()
        self._gate.go.release()
        self._gate.done.acquire()
        if self._error is not None:
            raise RuntimeError(f"the Trainer failed: {self._error}") from self._error
        return clock() - start

    def close(self) -> None:
        """Ends the training after one more step."""
        self._gate.ended = True
        self._gate.go.release()
        self._thread.join(120)
        self._folder.cleanup()
