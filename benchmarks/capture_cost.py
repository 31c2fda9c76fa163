"""What the tap adds to a forward pass. Layers alternate: a machine that slows down for a second slows down both."""

import time
from functools import partial

import numpy as np
import torch
from common import Found, document_ids, layout_of, load_model, one_document_batches, spread

from qkscope.capture.backbone import evaluation, run_backbone, text_config
from qkscope.capture.collect import _Collector
from qkscope.capture.prerope import open_tap
from qkscope.capture.probe import probe_model
from qkscope.moments.moments import Moments


class Layers:
    """Seconds of each layer of one forward pass, those that are tapped apart from the others."""

    def __init__(self, model) -> None:
        self._marks: list[float] = []
        self._hooks = [layer.register_forward_pre_hook(self._mark) for layer in model.layers]
        self._hooks.append(model.layers[-1].register_forward_hook(self._mark))

    def _mark(self, *_) -> None:
        self._marks.append(time.perf_counter())

    def seconds(self, run) -> np.ndarray:
        self._marks.clear()
        run()
        return np.diff(self._marks)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def in_turn(model, ids: np.ndarray, rounds: int) -> tuple[list[float], list[float], float]:
    """Tapped over plain: ratios per round (all documents into one set of sums) and per document; the tap's seconds.

    Every document runs twice. The first pass taps the even layers, the second the odd ones; each layer is compared with
    itself, so that after both each has seen the document once with and once without the tap.
    """
    probe, layers = probe_model(model), Layers(model)
    of_rounds, of_documents, beyond = [], [], []
    for _ in range(rounds):
        moments = Moments(layout_of(ids.shape[1]), probe.layers, {"n_layers": probe.n_layers})
        collector = _Collector(moments, text_config(model), None, None)
        totals = np.zeros(2)  # plain, tapped
        for batch in one_document_batches(ids):
            here = np.zeros(2)
            for parity in (0, 1):
                seconds = layers.seconds(partial(run, model, collector, batch, parity))
                tapped = np.arange(len(seconds)) % 2 == parity
                here += [seconds[~tapped].sum(), seconds[tapped].sum()]
            of_documents.append(here[1] / here[0])
            totals += here
        of_rounds.append(totals[1] / totals[0])
        beyond.append(totals[1] - totals[0])
    layers.close()
    return of_rounds, of_documents, float(np.median(beyond))


def run(model, collector: _Collector, batch, parity: int) -> None:
    """One forward pass that taps every other layer."""

    def observe(call) -> None:
        if call.layer % 2 == parity:
            collector.observe(call)

    with evaluation(model), open_tap(model, observe, "post_rope"):
        collector.start(batch)
        run_backbone(model, torch.from_numpy(batch.ids))


def capture(quick: bool) -> Found:
    found = Found()
    ids = document_ids(8, 2048)[: 4 if quick else 8]
    rounds, documents, beyond = in_turn(load_model(), ids, 1 if quick else 4)
    name = f"capture ÷ plain forward, {len(ids)} × 2048 tokens, float32, all heads, 16 buckets, 8 groups"
    found.row(name, spread(rounds), "≤ 1.04, aim 1.02", np.median(rounds) <= 1.04)
    found.row("the same, each document by itself", spread(documents))
    found.notes.append(f"The tap adds {beyond:.2f} s to {len(ids)} documents, first touch of its memory included.")
    return found


def capture_long(quick: bool) -> Found:
    found = Found()
    ids = document_ids(2, 4096 if quick else 8192)
    rounds, documents, _ = in_turn(load_model(), ids, 1 if quick else 3)
    name = f"capture ÷ plain forward, {len(ids)} × {ids.shape[1]} tokens"
    found.row(name, spread(rounds), "≤ 1.02", np.median(rounds) <= 1.02)
    found.row("the same, each document by itself", spread(documents))
    return found


def real_shape(quick: bool) -> Found:
    """Four layers of SmolLM3-3B's width with random weights."""
    from transformers import SmolLM3Config, SmolLM3Model

    config = SmolLM3Config(num_hidden_layers=4, vocab_size=4096, pad_token_id=0)
    torch.manual_seed(0)
    model = SmolLM3Model(config).to(torch.float32)
    facts = probe_model(model).layers[0]
    tokens = 1024 if quick else 4096
    ids = np.random.default_rng(0).integers(0, 4096, (1 if quick else 4, tokens))
    rounds, documents, _ = in_turn(model, ids, 1 if quick else 2)
    found = Found()
    shape = f"hidden {config.hidden_size}, {facts.q_heads} + {facts.kv_heads} heads, d = {facts.head_dim}"
    name = f"capture ÷ plain forward, 4 layers of SmolLM3-3B's shape ({shape}), {len(ids)} × {tokens} tokens"
    found.row(name, spread(rounds))
    found.row("the same, each document by itself", spread(documents))
    return found
