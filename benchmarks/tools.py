"""What a user would do today with TransformerLens or nnsight: cache rotated q and k, then sklearn per head.

Runs in `.cache/bench-venv`: `python benchmarks/tools.py transformer-lens|nnsight MODEL IDS.npy OUT.csv`.
"""

import csv
import json
import os
import resource
import sys
import time

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
from sklearn_step import COLUMNS, layers_rows


def main() -> None:
    tool, model, ids, out = sys.argv[1], sys.argv[2], np.load(sys.argv[3]), sys.argv[4]
    forward = {"transformer-lens": transformer_lens, "nnsight": nnsight}[tool](model)
    with torch.inference_mode():
        forward(torch.from_numpy(ids[:1, :256]))
        before, marks, spent = peak_mb(), [time.perf_counter()], sum(os.times()[:4])
        documents = [forward(torch.from_numpy(row)[None]) for row in ids]
    marks.append(time.perf_counter())
    layers = {
        layer: tuple(np.concatenate([found[layer][i] for found in documents], axis=1) for i in (0, 1))
        for layer in documents[0]
    }
    del documents
    rows = layers_rows(layers, np.tile(np.arange(ids.shape[1]), len(ids)))
    marks.append(time.perf_counter())
    with open(out, "w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *rows])
    capture, analysis = np.diff(marks).tolist()
    processor = sum(os.times()[:4]) - spent
    seconds = {"capture": capture, "analysis": analysis, "total": capture + analysis, "processor": processor}
    print(json.dumps({"seconds": seconds, "peak_mb": peak_mb() - before}))


def transformer_lens(folder: str):
    from transformer_lens.model_bridge import TransformerBridge

    bridge = TransformerBridge.boot_transformers(folder, device="cpu", dtype=torch.float32)
    layers = bridge.cfg.n_layers

    def forward(ids):
        _, cache = bridge.run_with_cache(
            ids, names_filter=lambda name: name.endswith(("hook_rot_q", "hook_rot_k")), return_type=None
        )
        found = {}
        for layer in range(layers):
            q, k = (cache[f"blocks.{layer}.attn.hook_rot_{kind}"][0].transpose(0, 1).numpy() for kind in "qk")
            found[layer] = (q, k)
        return found

    return forward


def nnsight(folder: str):
    from nnsight import LanguageModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = LanguageModel(plain, tokenizer=AutoTokenizer.from_pretrained(folder))
    layers = plain.config.num_hidden_layers

    def forward(ids):
        saved = []
        with model.trace(ids, use_cache=False, logits_to_keep=1):
            for layer in range(layers):
                saved.append(model.model.layers[layer].self_attn.source.apply_rotary_pos_emb_0.output.save())
        return {layer: tuple(x[0].numpy() for x in pair) for layer, pair in enumerate(saved)}

    return forward


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
