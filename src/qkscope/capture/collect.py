"""Run batches through a tapped model and keep nothing but the sums.

The run proves itself: every attention layer must have called once per forward pass with every token, or nothing
is returned. A pass ends with the last wanted layer's queries and keys: nothing that comes after changes a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from qkscope.capture.backbone import can_stop_early, evaluation, run_backbone, text_backbone, text_config
from qkscope.capture.prerope import open_tap, prove_pre_rope
from qkscope.capture.probe import ProbedModel, attention_kind, probe_model
from qkscope.capture.tap import AttentionCall, StopForward, Tap
from qkscope.errors import BatchError, CaptureError, DocumentFailure, OutOfMemory, QkscopeError, first_line
from qkscope.layers import LayerFacts, Stage
from qkscope.moments.layout import PADDING, Layout
from qkscope.moments.moments import Moments, NonFiniteActivation


@dataclass(frozen=True)
class Batch:
    """Token windows that go through the model together."""

    ids: NDArray[np.int64]  # (rows, tokens)
    groups: list[int]
    names: list[str]
    lengths: list[int]  # real tokens per row; the rest, on the right, is padding
    documents: list[int]  # each row's index in the corpus

    @property
    def positions(self) -> NDArray[np.int64] | None:
        """Token positions with padding marked; None where nothing is padded."""
        if all(length == self.ids.shape[1] for length in self.lengths):
            return None
        grid = np.broadcast_to(np.arange(self.ids.shape[1]), self.ids.shape)
        return np.where(grid < np.array(self.lengths)[:, None], grid, PADDING)

    @property
    def tokens(self) -> int:
        """Real tokens in the batch."""
        return sum(self.lengths)


ChoosePositions = Callable[[int, Batch], NDArray[np.int64] | None]
OnCall = Callable[[AttentionCall, Batch], None]


def make_batch(
    windows: Sequence[Sequence[int] | NDArray[Any]], groups: list[int], names: list[str], documents: list[int]
) -> Batch:
    """Windows of any lengths as one batch, padded on the right."""
    lengths = [len(window) for window in windows]
    ids = np.zeros((len(windows), max(lengths)), dtype=np.int64)
    for row, window in enumerate(windows):
        ids[row, : lengths[row]] = np.asarray(window, dtype=np.int64)
    return Batch(ids, groups, names, lengths, documents)


def collect_moments(
    model: nn.Module,
    batches: Iterable[Batch],
    layout: Layout,
    *,
    probe: ProbedModel | None = None,
    provenance: Mapping[str, Any] | None = None,
    stage: Stage = "post_rope",
    last_layer: int | None = None,
    choose_positions: ChoosePositions | None = None,
    on_call: OnCall | None = None,
    done: Callable[[Batch], None] = lambda batch: None,
) -> Moments:
    """Every head's moments over all batches, after or before rotation.

    Layers behind `last_layer` are left out, and not run. `choose_positions` gives the positions that a layer sums of a
    batch, -1 for tokens that a sample leaves out (by default all are summed). `on_call` is called with every attention
    call, `done` with every finished batch.
    """
    probed = probe or probe_model(model, context=layout.context)
    layers = [facts for facts in probed.layers if last_layer is None or facts.layer <= last_layer]
    if stage == "pre_rope":
        prove_pre_rope(model, layers)
    moments = Moments(layout, layers, {"n_layers": probed.n_layers, **(provenance or {})})
    backbone = text_backbone(model)
    collector = _Collector(moments, text_config(model), choose_positions, on_call)
    with evaluation(model), open_tap(backbone, collector.observe, stage) as tap:
        tap.last = frozenset(moments.layers) if can_stop_early(model) else None
        for batch in batches:
            collector.start(batch)
            with _named_after_documents(batch):
                _run(backbone, batch, collector)
            done(batch)
    _require_all_called(tap, layers)
    moments.require_complete()
    return moments


def _run(backbone: nn.Module, batch: Batch, collector: _Collector) -> None:
    """One forward pass as far as it is needed; what a device saw that is not finite is looked for by a second one."""
    ids = torch.from_numpy(batch.ids)
    with suppress(StopForward):
        run_backbone(backbone, ids, collector.mask)
    if collector.moments.has_non_finite():
        collector.locating = True
        with suppress(StopForward):
            run_backbone(backbone, ids, collector.mask)
        raise CaptureError("sums on the device are not finite, though every query and key is: they overflow float32")


@contextmanager
def _named_after_documents(batch: Batch) -> Iterator[None]:
    """Turn whatever a model raises into an error that says which documents it was given."""
    try:
        yield
    except QkscopeError:
        raise
    except Exception as error:
        raise _batch_error(batch, error) from error


def _batch_error(batch: Batch, error: Exception) -> BatchError:
    what = f"{type(error).__name__}: {first_line(error)}"
    if ran_out_of_memory(error):
        failure: BatchError = OutOfMemory(
            f"out of memory in a batch of {len(batch.names)} x {batch.ids.shape[1]} tokens"
        )
    elif len(batch.names) == 1:
        return DocumentFailure.of(batch.documents[0], batch.names[0], f"the model fails on it ({what})")
    else:
        failure = BatchError(f"the model failed on a batch of documents ({', '.join(batch.names)}): {what}")
    failure.documents = tuple(batch.documents)
    return failure


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether torch (or Python) could not get memory, on whichever device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # The host's allocator, and Apple's, raise errors of no type of their own.
    signs = ("can't allocate memory", "not enough memory", "out of memory")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def try_document(model: nn.Module, ids: NDArray[np.int64]) -> str | None:
    """Why the model fails on this one window, or None if it does not."""
    backbone = text_backbone(model)
    try:
        with evaluation(model):
            run_backbone(backbone, torch.from_numpy(ids[None, :]))
    except Exception as error:
        return f"the model fails on it ({type(error).__name__}: {error})"
    return None


class _Collector:
    """Hands each attention call of the current batch to the moments."""

    def __init__(
        self, moments: Moments, config: Any, choose_positions: ChoosePositions | None, on_call: OnCall | None
    ) -> None:
        self.moments = moments
        self.locating = False  # only look for numbers that are not finite
        self._config = config
        self._choose_positions = choose_positions
        self._on_call = on_call
        self._batch: Batch | None = None
        self._positions: NDArray[np.int64] | None = None
        self.mask: torch.Tensor | None = None

    def start(self, batch: Batch) -> None:
        self._batch = batch
        self._positions = batch.positions
        self.mask = None if self._positions is None else torch.from_numpy((self._positions != PADDING).astype(np.int64))

    def observe(self, call: AttentionCall) -> None:
        batch = self._batch
        if batch is None:  # pragma: no cover - a tap is only open while a batch runs
            raise CaptureError("an attention call arrived outside a batch")
        facts = self.moments.layers.get(call.layer)
        if facts is None and call.layer > max(self.moments.layers):
            return  # behind the last wanted layer, where the pass could not be ended
        kind = attention_kind(call.layer, call.sliding_window, self._config)
        if facts is None or (facts.attention, facts.attention_window) != kind:
            raise CaptureError(
                f"layer {call.layer} now calls with {kind[0]} attention (window {kind[1]}), but the probe saw {facts}"
            )
        positions = self._positions if self._choose_positions is None else self._choose_positions(call.layer, batch)
        placed: dict[str, Any] = {"positions": positions, "groups": batch.groups}
        try:
            if self.locating:
                bad = self.moments.locate(call.layer, call.query, call.key, **placed)
                if bad is not None:
                    raise bad
                return
            self.moments.add(call.layer, call.query, call.key, **placed)
        except NonFiniteActivation as error:
            raise error.in_document(batch.documents[error.row], batch.names[error.row]) from None
        if self._on_call is not None:
            self._on_call(call, batch)


def _require_all_called(tap: Tap, layers: Sequence[LayerFacts]) -> None:
    if not tap.forwards:
        raise CaptureError("no batch was given, so nothing was captured")
    for facts in layers:
        if tap.calls[facts.layer] != tap.forwards:
            raise CaptureError(
                f"layer {facts.layer} called its attention {tap.calls[facts.layer]} times in {tap.forwards} forward "
                "passes; its sums are incomplete"
            )
    tokens = {facts.layer: tap.tokens[facts.layer] for facts in layers}
    if len(set(tokens.values())) != 1:
        raise CaptureError(f"layers saw different numbers of tokens (layer: tokens): {tokens}")
