"""`python -m benchmarks NAME [--quick] [--json]`: measures one part side by side with its baseline.

Each benchmark runs in a process of its own with the threads that it asks for, so that nothing an
earlier one imported or set changes the numbers.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys

from benchmarks.result import CPU_TIME, as_json, as_table

# Name -> (threads of the measuring process, what is measured).
BENCHMARKS = {
    "step": (2, "tokens/s of a training step against a bare loop, transformers' Trainer and, over 2 ranks, DDP"),
    "encdec": (2, "tokens/s of an encoder-decoder on packed pairs against transformers' T5; fill of the rows"),
    "loss": (2, "fused linear cross-entropy against plain: time and peak memory"),
    "attention": (2, "packed documents against a dense mask; growth of peak memory with the length"),
    "loader": (1, "tokens/s from shards against webdataset and a memory map; time to resume"),
    "build": (2, "text to shards against bare encode_batch_fast on as many threads"),
    "checkpoint": (2, "stall and bandwidth of a save against a memory copy, DeepSpeed's save and a plain write"),
    "recover": (1, "kill -9 of a rank to the next finished step of pretrain train"),
    "growth": (1, "exponents of time over ranks, shards, parameters and checkpoints"),
    "plan": (1, "planned memory against measured peaks; planned speed against published training reports"),
    "metrics": (1, "what a logged step, and one with norms by layer, adds to a step of the quickstart's model"),
    "dashboard": (1, "pages and memory of the dashboard over 1,000 runs of 100,000 records"),
    "translate": (2, "BLEU of the paper's architecture against transformers' Marian, trained for the same time"),
    "follow": (2, "losses of T5, BERT and Llama-like runs beside transformers' models trained on the same rows"),
    "infilling": (1, "gaps of a toy language filled by models of each objective, against a causal model"),
    "startup": (1, "pretrain train and submit to the first finished step, by phase"),
}
_CHILD = "PRETRAIN_BENCHMARK_CHILD"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measures one part side by side with its baseline, in interleaved repetitions; medians.",
        epilog="\n".join(f"  {name:<12}{text}" for name, (_, text) in BENCHMARKS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=list(BENCHMARKS), metavar="NAME", help="one of the names below")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions and smaller inputs")
    parser.add_argument("--json", action="store_true", help="a JSON list instead of the table")
    parser.add_argument(
        "--cpu-time", action="store_true", help="CPU time on one thread instead of wall time, for a machine under load"
    )
    parser.add_argument("--part", help="one part of it alone; a wrong name is answered with the right ones")
    arguments = parser.parse_args()
    if os.environ.get(_CHILD) != arguments.name:
        threads = 1 if arguments.cpu_time else BENCHMARKS[arguments.name][0]
        environment = {**os.environ, _CHILD: arguments.name, "OMP_NUM_THREADS": str(threads), "DS_ACCELERATOR": "cpu"}
        environment |= {CPU_TIME: "1"} if arguments.cpu_time else {}
        # In this very process, so that whoever ends it (a time limit) leaves nothing behind.
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks", *sys.argv[1:]], environment)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what was started is ended on the way out
    flags = ["--quick"] * arguments.quick + ["--cpu-time"] * arguments.cpu_time
    flags += [f"--part {arguments.part}"] if arguments.part else []
    command = " ".join(["python -m benchmarks", arguments.name, *flags])
    module = importlib.import_module(f"benchmarks.{arguments.name}")
    parts = getattr(module, "PARTS", {})
    if arguments.part is not None and arguments.part not in parts:
        parser.error(f"--part={arguments.part} is no part of {arguments.name}. It has: {', '.join(parts) or 'none'}.")
    if arguments.part is None:
        results = module.measure(quick=arguments.quick, command=command)
    else:
        results = module.measure_part(arguments.part, quick=arguments.quick, command=command)
    print(as_json(results) if arguments.json else as_table(results), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
