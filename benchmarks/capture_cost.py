"""What capture costs beside a plain forward pass: whole passes, and layer by layer; with and without sums at rest.

A capture ends with the last layer's queries and keys, so it saves that layer's attention, output projection and
feed-forward and the final norm; its sums cost something in every layer. Variants take turns, a pass each or a layer
each: a machine that slows down for a second slows down all of them. Processor time of all threads is what is compared,
wall time is beside it. The tap's own time is small beside what passes differ by from each other, so it is measured
directly as well, and so is what ending early saves.
"""

import os
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from common import Found, document_ids, layout_of, load_model, one_document_batches, spread

from qkscope.capture.backbone import evaluation, run_backbone, text_config
from qkscope.capture.collect import _Collector
from qkscope.capture.probe import probe_model
from qkscope.capture.replay import open_tap
from qkscope.capture.tap import StopForward
from qkscope.moments.moments import Moments

VARIANTS = ("plain", "sums", "sums, also before RoPE")
PLAIN = 0
THREADS = int(os.environ.get("QKSCOPE_BENCH_THREADS", "2"))  # one, where others are at work on the machine


def now() -> np.ndarray:
    """Processor time of all threads, and wall time."""
    return np.array([time.process_time(), time.perf_counter()])


class Capture:
    """A model, and one set of sums for each variant but the plain one; layers may be given to any of them."""

    def __init__(self, model, context: int) -> None:
        self.model, self.probe = model, probe_model(model, context=context)
        self.last = max(facts.layer for facts in self.probe.layers)
        pre_rope = layout_of(context)
        self._collectors = [None]
        for layout in (replace(pre_rope, unrotated_every=0), pre_rope):
            moments = Moments(layout, self.probe.layers, {"n_layers": self.probe.n_layers})
            self._collectors.append(_Collector(moments, text_config(model), None, None))
        self._marks: list[np.ndarray] = []
        self.in_tap = np.zeros((self.last + 1, 2))  # times that the last pass spent in each layer's tap

    def run(self, batch, variant_of) -> np.ndarray:
        """One pass, each layer as `variant_of(layer)` says: (parts, 2) times before, in each layer, and behind them."""
        self._marks = [now()]
        self.in_tap[:] = 0.0
        if all(variant_of(layer) == PLAIN for layer in range(self.last + 1)):
            run_backbone(self.model, torch.from_numpy(batch.ids))
        else:
            for collector in self._collectors[1:]:
                collector.start(batch)
            with open_tap(self.model, partial(self._observe, variant_of), "post_rope"), suppress(StopForward):
                run_backbone(self.model, torch.from_numpy(batch.ids))
        self._marks.append(now())
        return np.diff(self._marks, axis=0)

    def moments(self, variant: int) -> Moments:
        """The sums of a variant."""
        return self._collectors[variant].moments

    def by_layer(self, batch, shift: int) -> tuple[np.ndarray, np.ndarray]:
        """One pass whose layers take turns; the variant of each layer, and the times of all parts."""
        variants = (np.arange(self.last + 1) + shift) % len(VARIANTS)
        return variants, self.in_parts(batch, variants)

    def in_parts(self, batch, variants: np.ndarray) -> np.ndarray:
        """The times of all parts of one pass."""
        hooks = [layer.register_forward_pre_hook(self._mark) for layer in self.model.layers]
        hooks.append(self.model.layers[-1].register_forward_hook(self._mark))
        try:
            return self.run(batch, lambda layer: variants[layer])
        finally:
            for hook in hooks:
                hook.remove()

    def _mark(self, *_) -> None:
        self._marks.append(now())

    def _observe(self, variant_of, call) -> None:
        variant = variant_of(call.layer)
        if variant == PLAIN:
            return
        begun = now()
        self._collectors[variant].observe(call)
        self.in_tap[call.layer] = now() - begun
        if call.layer == self.last:
            raise StopForward


def whole_passes(capture: Capture, batches) -> np.ndarray:
    """(documents, variants, 2) times; which variant goes first changes from document to document."""
    found = np.zeros((len(batches), len(VARIANTS), 2))
    for number, batch in enumerate(batches):
        for step in range(len(VARIANTS)):
            variant = (number + step) % len(VARIANTS)
            found[number, variant] = capture.run(batch, lambda _, variant=variant: variant).sum(axis=0)
    return found


def layer_by_layer(capture: Capture, batches) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(documents, variants, 2) times of passes, put together of layers that took turns in three over each document.

    Then, in the same shape, those of a plain pass minus what ending early saves plus what was spent in the tap, and the
    latter alone.
    """
    whole = np.zeros((len(batches), len(VARIANTS), 2))
    in_tap, behind = np.zeros_like(whole), np.zeros_like(whole)
    for number, batch in enumerate(batches):
        for shift in range(len(VARIANTS)):
            variants, times = capture.by_layer(batch, shift)
            whole[number] += times[0] / len(VARIANTS)  # the embedding, which every variant runs
            for layer, variant in enumerate(variants):
                whole[number, variant] += times[1 + layer]
                in_tap[number, variant] += capture.in_tap[layer]
            behind[number, variants[-1]] = times[1 + capture.last] - capture.in_tap[-1]
            if variants[-1] == PLAIN:
                whole[number, PLAIN] += times[-1]  # the final norm, which no capture runs
                behind[number, PLAIN] += times[-1]
    saved = behind[:, [PLAIN]] - behind
    return whole, whole[:, [PLAIN]] - saved + in_tap, in_tap


def compared(found: Found, times: np.ndarray, shape: str, how: str) -> None:
    for variant, bound in ((1, 1.00), (2, 1.02)):
        ratios = times[:, variant] / times[:, PLAIN]
        total = times[:, variant].sum(axis=0) / times[:, PLAIN].sum(axis=0)
        name = f"capture ({VARIANTS[variant]}) ÷ plain forward, {shape}, {how}"
        text = f"{spread(ratios[:, 0])}, overall {total[0]:.3f}; wall {spread(ratios[:, 1])}"
        found.row(name, text, f"≤ {bound:.2f}", float(np.median(ratios[:, 0])) <= bound)


def in_whole_passes(ids: np.ndarray) -> Found:
    model, found = ready(ids), Found()
    with evaluation(model):
        times = whole_passes(Capture(model, ids.shape[1]), one_document_batches(ids))
    compared(found, times, f"{len(ids)} × {ids.shape[1]} tokens", "whole passes")
    found.notes.append(plain_note(times))
    return found


def in_layers(ids: np.ndarray) -> Found:
    model, found, shape = ready(ids), Found(), f"{len(ids)} × {ids.shape[1]} tokens"
    with evaluation(model):
        times, by_account, in_tap = layer_by_layer(Capture(model, ids.shape[1]), one_document_batches(ids))
    compared(found, times, shape, "layer by layer")
    compared(found, by_account, shape, "plain − saved by stopping early + tap")
    for variant in (1, 2):
        own = 100 * in_tap[:, variant, 0] / times[:, PLAIN, 0]
        found.notes.append(
            f"Inside the tap ({VARIANTS[variant]}), as a share of a plain pass, by document: "
            f"{', '.join(f'{share:.1f}' for share in own)} %."
        )
    saved = 100 * (1 - (by_account - in_tap)[:, 1:, 0] / times[:, [PLAIN], 0])
    found.notes.append(f"Stopping early saves {spread(saved.ravel(), 1)} % of it.")
    found.notes.append(plain_note(times))
    return found


def ready(ids: np.ndarray):
    torch.set_num_threads(THREADS)
    model = load_model()
    with evaluation(model):
        run_backbone(model, torch.from_numpy(ids[:1, :256]))  # lazy initialisation is nobody's cost
    return model


def plain_note(times: np.ndarray) -> str:
    seconds = np.median(times[:, PLAIN], axis=0)
    return f"A plain pass takes {seconds[0]:.1f} s of processor time, {seconds[1]:.1f} s of wall time."


def capture(quick: bool) -> Found:
    """SmolLM2-135M, documents of 2048 tokens."""
    return in_whole_passes(document_ids(8, 2048)[:1, :512] if quick else document_ids(8, 2048))


def capture_layers(quick: bool) -> Found:
    return in_layers(document_ids(8, 2048)[:1, :512] if quick else document_ids(8, 2048))


def capture_long(quick: bool) -> Found:
    """Documents of 8192 tokens."""
    return in_whole_passes(document_ids(2, 8192)[:1, :1024] if quick else document_ids(2, 8192))


def capture_long_layers(quick: bool) -> Found:
    return in_layers(document_ids(2, 8192)[:1, :1024] if quick else document_ids(2, 8192))


def real_shape(quick: bool) -> Found:
    """Four layers of SmolLM3-3B's width with random weights: ending early saves one layer in four, not in 36."""
    from transformers import SmolLM3Config, SmolLM3Model

    config = SmolLM3Config(num_hidden_layers=4, vocab_size=4096, pad_token_id=0)
    torch.manual_seed(0)
    torch.set_num_threads(THREADS)
    model = SmolLM3Model(config).to(torch.float32)
    tokens = 1024 if quick else 4096
    ids = np.random.default_rng(0).integers(0, 4096, (1 if quick else 4, tokens))
    capture, found = Capture(model, tokens), Found()
    facts = capture.probe.layers[0]
    ratios = []
    with evaluation(model):
        for batch in one_document_batches(ids):
            of_layers = np.zeros((len(VARIANTS), 2))
            for shift in range(len(VARIANTS)):
                variants, times = capture.by_layer(batch, shift)
                for layer, variant in enumerate(variants[:-1]):
                    of_layers[variant] += times[1 + layer]
            ratios.append(of_layers[1:] / of_layers[PLAIN])
    shape = f"hidden {config.hidden_size}, {facts.q_heads} + {facts.kv_heads} heads, d = {facts.head_dim}"
    for variant, of_variant in zip(VARIANTS[1:], np.swapaxes(ratios, 0, 1), strict=True):
        name = f"three whole layers with {variant} ÷ the same layers plain, SmolLM3-3B's shape ({shape}), "
        text = f"{spread(of_variant[:, 0])}; wall {spread(of_variant[:, 1])}"
        found.row(f"{name}{len(ids)} × {tokens} tokens", text)
    return found
