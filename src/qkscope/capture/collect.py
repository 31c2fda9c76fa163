"""Run batches through a tapped model and keep nothing but the sums.

The run proves itself: every attention layer must have called once per forward pass with every token, or nothing
is returned. A pass ends with the last wanted layer's queries and keys: nothing that comes after changes a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from qkscope.capture.attention import prove_attention, softmax_rule
from qkscope.capture.backbone import can_stop_early, evaluation, run_backbone, text_backbone, text_config
from qkscope.capture.probe import ProbedModel, attention_kind, probe_model, probe_tokens, require_identical
from qkscope.capture.repeated_tokens import measure_head_types
from qkscope.capture.replay import open_tap
from qkscope.capture.tap import AttentionCall, StopForward, Tap
from qkscope.errors import BatchError, CaptureError, DocumentFailure, OutOfMemory, QkscopeError, first_line
from qkscope.layers import LayerFacts, Stage
from qkscope.moments.attention_running import RowBatch
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
    first_shard: bool = True,
    done: Callable[[Batch], None] = lambda batch: None,
) -> Moments:
    """Every head's moments over all batches, after or before rotation.

    Layers behind `last_layer` are left out, and not run. `choose_positions` gives the positions that a layer sums of a
    batch, -1 for tokens that a sample leaves out (by default all are summed). `on_call` is called with every attention
    call, `done` with every finished batch. Repeated random tokens are run once, for the `first_shard`.
    """
    probed = probe or probe_model(model, context=layout.context)
    layers = [facts for facts in probed.layers if last_layer is None or facts.layer <= last_layer]
    if stage == "pre_rope":
        prove_pre_rope(model, layers)
    no_rows = prove_attention(model, layers) if layout.rows and stage == "post_rope" else {}
    if stage == "pre_rope":
        layout = replace(layout, rows=0, repeated=0)
    about = {"n_layers": probed.n_layers, **({"attention_not_evaluated": no_rows} if no_rows else {})}
    moments = Moments(layout, layers, about | dict(provenance or {}))
    backbone = text_backbone(model)
    if first_shard and layout.repeated:
        moments.add_head_types(measure_head_types(model, probed, layout.groups, no_rows))
    collector = _Collector(moments, text_config(model), choose_positions, on_call, no_rows)
    with evaluation(model), open_tap(backbone, collector.observe, stage) as tap:
        tap.last = frozenset(moments.layers) if can_stop_early(model) else None
        for batch in batches:
            collector.start(batch)
            with _named_after_documents(batch):
                run_until_seen(backbone, batch, collector.mask)
                moments.finish_batch()
                if moments.has_non_finite():  # on a device; a second pass finds the place
                    collector.locating = True
                    run_until_seen(backbone, batch, collector.mask)
                    raise CaptureError("sums on a device are not finite, though every vector is: they overflow float32")
            done(batch)
    _require_all_called(tap, layers)
    moments.require_complete()
    return moments


def run_until_seen(backbone: nn.Module, batch: Batch, mask: torch.Tensor | None) -> None:
    """One forward pass, as far as the tap needs it."""
    with suppress(StopForward):
        run_backbone(backbone, torch.from_numpy(batch.ids), mask)


@contextmanager
def _named_after_documents(batch: Batch) -> Iterator[None]:
    """Turn whatever a model raises into an error that says which documents it was given."""
    try:
        yield
    except QkscopeError:
        raise
    except Exception as error:
        what, names = f"{type(error).__name__}: {first_line(error)}", batch.names
        if ran_out_of_memory(error):
            failure: BatchError = OutOfMemory(f"out of memory in a batch of {len(names)} x {batch.ids.shape[1]} tokens")
        elif len(names) == 1:
            raise DocumentFailure.of(batch.documents[0], names[0], f"the model fails on it ({what})") from error
        else:
            failure = BatchError(f"the model failed on a batch of documents ({', '.join(names)}): {what}")
        failure.documents = tuple(batch.documents)
        raise failure from error


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

    batch: Batch
    mask: torch.Tensor | None = None
    locating = False  # only look for numbers that are not finite

    def __init__(
        self,
        moments: Moments,
        config: Any,
        choose_positions: ChoosePositions | None,
        on_call: OnCall | None,
        no_rows: Collection[int] = (),
    ) -> None:
        self.moments, self._config = moments, config
        self._choose_positions, self._on_call = choose_positions, on_call
        self._rows: RowBatch | None = None
        self._no_rows = no_rows

    def start(self, batch: Batch) -> None:
        self.batch, self._positions = batch, batch.positions
        if self.moments.layout.rows:
            self._rows = RowBatch(tuple(batch.documents), tuple(batch.groups), tuple(batch.lengths), batch.ids.shape[1])
        self.mask = None if self._positions is None else torch.from_numpy((self._positions != PADDING).astype(np.int64))

    def observe(self, call: AttentionCall) -> None:
        batch, facts = self.batch, self.moments.layers.get(call.layer)
        if facts is None and call.layer > max(self.moments.layers):
            return  # behind the last wanted layer, where the pass could not be ended
        kind = attention_kind(call.layer, call.sliding_window, self._config)
        if facts is None or (facts.attention, facts.attention_window) != kind:
            raise CaptureError(
                f"layer {call.layer} now calls with {kind[0]} attention (window {kind[1]}), but the probe saw {facts}"
            )
        positions = self._positions if self._choose_positions is None else self._choose_positions(call.layer, batch)
        use = self.moments.locate if self.locating else self.moments.add
        try:
            use(call.layer, call.query, call.key, positions=positions, groups=batch.groups)
            if self._rows is not None and call.layer not in self._no_rows and not self.locating:
                rule = softmax_rule(call)
                assert rule is not None  # such layers are among those without rows
                self.moments.add_attention(call.layer, call.query, call.key, self._rows, rule, call.sinks)
        except NonFiniteActivation as error:
            raise error.in_document(batch.documents[error.row], batch.names[error.row]) from None
        if self._on_call is not None and not self.locating:
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


# -- before rotation ---------------------------------------------------------------------------------------


def prove_pre_rope(model: nn.Module, layers: Iterable[LayerFacts]) -> None:
    """Refuse a model whose pre-RoPE vectors are not what they are called, on a few tokens before the real run.

    Its output must not change; at position 0, and in layers without rotation everywhere, both stages must be equal;
    in rotary layers some later token must differ.
    """
    backbone = text_backbone(model)
    tokens = probe_tokens(backbone, text_config(model))
    calls: dict[Stage, dict[int, AttentionCall]] = {"post_rope": {}, "pre_rope": {}}
    with evaluation(model):
        untouched = run_backbone(backbone, tokens)
        for stage, seen in calls.items():
            with open_tap(backbone, lambda call, seen=seen: seen.__setitem__(call.layer, call), stage):  # type: ignore[misc]
                require_identical(untouched, run_backbone(backbone, tokens))
    for facts in layers:
        after, before = (calls[stage][facts.layer] for stage in calls)
        for name, rotated, unrotated in (("queries", after.query, before.query), ("keys", after.key, before.key)):
            where = f"layer {facts.layer} cannot be captured before rotation: its {name}"
            if not _same(rotated[:, :, 0], unrotated[:, :, 0]):
                raise CaptureError(f"{where} change at position 0, where a rotation changes nothing")
            same = _same(rotated, unrotated)
            if facts.rotary == "nope" and not same:
                raise CaptureError(f"{where} change although the layer has no rotation")
            if facts.rotary == "rotary" and same:
                raise CaptureError(f"{where} stay the same although the layer has a rotation")


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    # NaNs are found, and reported with their place, by the real run.
    return left.shape == right.shape and torch.equal(left.nan_to_num(0.0), right.nan_to_num(0.0))
