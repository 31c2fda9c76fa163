"""What `HeadsCallback` costs a training: SmolLM2-135M's shape with random weights under the real Trainer, on two cores.

`python benchmarks/training.py` trains the same model on the same tokens with and without the callback, in processes of
their own, alternating. It compares user CPU time of the training loop, because the machine may do other things: with
the callback minus without, over the number of measurements, is what one measurement costs. The callback measures at the
first and the last step; its share at `--every` steps is that cost over so many steps of the training without it. Tables
and page, made once at the end, are counted separately. Losses and weights must be bit-identical.

It writes benchmarks/results/training.json. Several minutes of two idle cores.
"""

import argparse
import hashlib
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

RESULTS = Path(__file__).parent / "results/training.json"
SHAPE = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 2048, "tie_word_embeddings": True,
}  # fmt: skip


SIZES = ("steps", "batch", "length", "documents", "tokens", "threads")


def cpu():
    """User CPU seconds of this process, and of any that it has waited for."""
    return sum(resource.getrusage(who).ru_utime for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def train(options):
    """One training; what it took and what came of it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    from qkscope.lenses.registry import head_tables

    head_tables()  # what is imported once is no part of a measurement
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    rows = torch.randint(0, SHAPE["vocab_size"], (options.steps * options.batch, options.length))
    data = [{"input_ids": row, "labels": row} for row in rows]
    seconds = {}

    class Clock(TrainerCallback):
        """Comes after the callback of qkscope at the end of the last step, and before its end of the training."""

        def on_step_end(self, args, state, control, **kwargs):
            seconds["loop"] = cpu() - begun

    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder, per_device_train_batch_size=options.batch, max_steps=options.steps, logging_steps=1, seed=0,
            report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model, settings, train_dataset=data)
        if options.measured:
            from qkscope.train import HeadsCallback

            documents = torch.randint(0, SHAPE["vocab_size"], (options.documents, options.tokens)).tolist()
            trainer.add_callback(HeadsCallback(documents, trainer, every=options.steps, strict=True))
        trainer.add_callback(Clock())
        torch.manual_seed(1)
        begun = cpu()
        trainer.train()
        seconds["end"] = cpu() - begun - seconds["loop"]
    weights = hashlib.sha256()
    for _, tensor in sorted(model.state_dict().items()):
        weights.update(tensor.contiguous().numpy().tobytes())
    lines = [line for line in trainer.state.log_history if "loss" in line]
    measured = [line for line in trainer.state.log_history if "eval_qkscope/r_q_mean" in line]
    return {
        **seconds,
        "losses": [line["loss"] for line in lines],
        "weights": weights.hexdigest(),
        "measured": len(measured),
    }


def compare(options):
    """Alternating trainings without and with the callback."""
    given = [
        f"--{name}={getattr(options, name)}" for name in ("steps", "batch", "length", "documents", "tokens", "threads")
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "OMP_WAIT_POLICY": "PASSIVE"}
    runs = {False: [], True: []}
    for number in range(options.pairs):
        for measured in (False, True) if number % 2 == 0 else (True, False):
            command = [sys.executable, __file__, "--train", *given, *(["--measured"] if measured else [])]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            runs[measured].append(json.loads(done.stdout.splitlines()[-1]))
            print(f"{'with' if measured else 'without'}: {runs[measured][-1]['loop']:.1f} s", flush=True)
    plain, called = runs[False], runs[True]
    every = [*plain, *called]
    assert len({run["weights"] for run in every}) == 1 and len({tuple(run["losses"]) for run in every}) == 1
    step = sum(run["loop"] for run in plain) / len(plain) / options.steps
    pairs = list(zip(plain, called, strict=True))
    costs = [(b["loop"] - a["loop"]) / b["measured"] for a, b in pairs]
    cost = sum(costs) / len(costs)
    return {
        **{
            name: getattr(options, name)
            for name in ("steps", "batch", "length", "documents", "tokens", "threads", "pairs")
        },
        "machine": platform.processor() or platform.machine(),
        "load": os.getloadavg()[0],
        "seconds_per_step": step,
        "seconds_per_measurement": cost,
        "of_each_pair": costs,
        "share": cost / (options.every * step),
        "seconds_of_tables_and_page": sum(b["end"] - a["end"] for a, b in zip(plain, called, strict=True))
        / options.pairs,
        "bit_identical": True,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--batch", type=int, default=2, help="rows of a step")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--documents", type=int, default=4, help="that are measured on")
    parser.add_argument("--tokens", type=int, default=256, help="of each document")
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--train", action="store_true", help="one training, as the comparison starts them")
    parser.add_argument("--measured", action="store_true")
    chosen = parser.parse_args()
    if chosen.train:
        print(json.dumps(train(chosen)))
    else:
        found = compare(chosen)
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
        print(json.dumps(found, indent=1))
