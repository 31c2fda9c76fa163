"""The sums of one step: every rank's share of the probe documents through the model as it is now."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qkscope.errors import CaptureError
from qkscope.layers import LayerFacts, Stage
from qkscope.moments.layout import PADDING, Layout
from qkscope.results.environment import environment
from qkscope.results.provenance import CheckpointRecord
from qkscope.train.documents import ProbeDocuments
from qkscope.train.ranks import Ranks

if TYPE_CHECKING:
    import torch
    from torch import nn

    from qkscope.capture.collect import Batch
    from qkscope.moments.moments import Moments

SPARE = -1  # the number of a document that is run and not summed


@dataclass(frozen=True)
class Measurement:
    """What is summed, how, and by whom."""

    documents: ProbeDocuments
    layout: Layout
    stage: Stage
    rows: int  # documents of a pass
    autocast: torch.dtype | None
    ranks: Ranks


def measure(model: nn.Module, wanted: Measurement) -> Moments | None:
    """The sums of all ranks, on rank 0 (None elsewhere); the model and its training are left as they were."""
    from qkscope.train.as_it_was import untouched

    with untouched(model, wanted.autocast):
        mine = wanted.ranks.together(
            lambda: _sums(model, wanted),
            same=lambda moments: (wanted.documents.fingerprint, tuple(moments.layers.values())),
        )
        return wanted.ranks.merged(mine)


def _sums(model: nn.Module, wanted: Measurement) -> Moments:
    """This rank's sums."""
    from qkscope.capture.backbone import text_config
    from qkscope.capture.collect import collect_moments
    from qkscope.capture.probe import probe_model

    probed = probe_model(model, context=wanted.layout.context, some_heads=wanted.ranks.heads)
    parameter, config = next(model.parameters()), text_config(model)
    _require_even(probed.layers, config, wanted.ranks)
    documents = wanted.documents
    values = {
        "context": wanted.layout.context,
        "model_type": getattr(config, "model_type", None),
        "n_layers": probed.n_layers,
        "layers_without_attention": list(probed.gaps),
        "max_position_embeddings": getattr(config, "max_position_embeddings", None),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "autocast": _autocast(parameter),
        "device": str(parameter.device),
        "kernel": getattr(config, "_attn_implementation", None) or ", ".join(probed.kernels),
        "kernel_functions": list(probed.kernels),
        "stage": wanted.stage,
        "corpus": documents.record(),
        "documents": len(documents.windows),
        "documents_too_short": documents.too_short,
        "tokens": len(documents.windows) * documents.context,
        "ranks": wanted.ranks.size,
        "layers": [facts.outline() for facts in probed.layers],
        "environment": environment(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return collect_moments(
        model,
        probe_batches(wanted),
        wanted.layout,
        probe=probed,
        provenance=CheckpointRecord.of(values).to_json(),
        stage=wanted.stage,
        choose_positions=_kept_positions,
    )


def _require_even(layers: Sequence[LayerFacts], config: Any, ranks: Ranks) -> None:
    """Refuse key heads that several ranks of a tensor-parallel model hold at once: they would count twice."""
    stated = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    held = max((facts.kv_heads for facts in layers), default=0) * ranks.size
    if ranks.heads and isinstance(stated, int) and held != stated:
        raise CaptureError(
            f"the {stated} key heads of a tensor-parallel model are {held} over its {ranks.size} ranks: some are "
            "duplicated; measure saved checkpoints"
        )


def _autocast(parameter: torch.Tensor) -> str | None:
    """The precision that products are cast to, as it is in force now."""
    import torch

    kind = parameter.device.type
    return str(torch.get_autocast_dtype(kind)).removeprefix("torch.") if torch.is_autocast_enabled(kind) else None


def probe_batches(wanted: Measurement) -> Iterator[Batch]:
    """This rank's documents, in passes of so many rows; document i is in group i mod groups, whoever runs it."""
    from qkscope.capture.collect import make_batch

    windows, mine = wanted.documents.windows, wanted.ranks.share(len(wanted.documents.windows))
    for start in range(0, len(mine), wanted.rows):
        numbers = [SPARE if number is None else number for number in mine[start : start + wanted.rows]]
        yield make_batch(
            [windows[max(number, 0)] for number in numbers],
            [max(number, 0) % wanted.layout.groups for number in numbers],
            [f"probe document {max(number, 0)}" for number in numbers],
            numbers,
        )


def _kept_positions(_layer: int, batch: Batch) -> NDArray[np.int64] | None:
    """All positions, but none of a document that is run only because other ranks run one."""
    if SPARE not in batch.documents:
        return batch.positions
    grid = np.broadcast_to(np.arange(batch.ids.shape[1]), batch.ids.shape)
    return np.where(_column(batch.documents) == SPARE, PADDING, grid)


def _column(numbers: Sequence[int]) -> NDArray[np.int64]:
    return np.asarray(numbers, dtype=np.int64)[:, None]
