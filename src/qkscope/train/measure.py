"""The sums of one step: every rank's share of the probe documents through the model as it is now."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qkscope.errors import CaptureError
from qkscope.layers import LayerFacts
from qkscope.moments.layout import PADDING
from qkscope.results.environment import environment
from qkscope.results.provenance import CheckpointRecord
from qkscope.train.documents import ProbeDocuments
from qkscope.train.ranks import Ranks

if TYPE_CHECKING:
    import torch
    from torch import nn

    from qkscope.capture.collect import Batch
    from qkscope.capture.probe import ProbedModel
    from qkscope.moments.moments import Moments
    from qkscope.train.probe import ProbeSettings

SPARE = -1  # the number of a document that is run and not summed


def measure(model: nn.Module, documents: ProbeDocuments, settings: ProbeSettings, ranks: Ranks) -> Moments | None:
    """The sums of all ranks, on rank 0 (None elsewhere); the model and its training are left as they were."""
    from qkscope.train.preserve_state import untouched

    with untouched(model, settings.autocast):
        mine = ranks.together(
            lambda: _sums(model, documents, settings, ranks),
            same=lambda moments: (documents.fingerprint, tuple(moments.layers.values())),
        )
        return ranks.merged(mine)


def _sums(model: nn.Module, documents: ProbeDocuments, settings: ProbeSettings, ranks: Ranks) -> Moments:
    """This rank's sums."""
    from qkscope.capture.backbone import text_config
    from qkscope.capture.collect import collect_moments
    from qkscope.capture.probe import probe_model

    probed = probe_model(model, context=documents.context, some_heads=ranks.heads)
    _require_even(probed.layers, text_config(model), ranks)
    return collect_moments(
        model,
        _batches(documents, settings, ranks),
        settings.layout(documents.context),
        probe=probed,
        provenance=_provenance(model, probed, documents, settings, ranks),
        stage=settings.stage,
        choose_positions=_summed_positions,
    )


def _provenance(
    model: nn.Module, probed: ProbedModel, documents: ProbeDocuments, settings: ProbeSettings, ranks: Ranks
) -> dict[str, Any]:
    from qkscope.capture.backbone import text_config

    parameter, config = next(model.parameters()), text_config(model)
    values = {
        "context": documents.context,
        "model_type": getattr(config, "model_type", None),
        "n_layers": probed.n_layers,
        "layers_without_attention": list(probed.gaps),
        "max_position_embeddings": getattr(config, "max_position_embeddings", None),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "autocast": _autocast_in_force(parameter),
        "device": str(parameter.device),
        "kernel": getattr(config, "_attn_implementation", None) or ", ".join(probed.kernels),
        "kernel_functions": list(probed.kernels),
        "stage": settings.stage,
        "corpus": documents.record(),
        "documents": len(documents.windows),
        "documents_too_short": documents.too_short,
        "tokens": len(documents.windows) * documents.context,
        "ranks": ranks.size,
        "layers": [facts.outline() for facts in probed.layers],
        "environment": environment(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return CheckpointRecord.of(values).to_json()


def _require_even(layers: Sequence[LayerFacts], config: Any, ranks: Ranks) -> None:
    """Refuse key heads that several ranks of a tensor-parallel model hold at once: they would count twice."""
    stated = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    over_ranks = max((facts.kv_heads for facts in layers), default=0) * ranks.size
    if ranks.heads and isinstance(stated, int) and over_ranks != stated:
        raise CaptureError(
            f"the {stated} key heads of a tensor-parallel model are {over_ranks} over its {ranks.size} ranks: some are "
            "duplicated; measure saved checkpoints"
        )


def _autocast_in_force(parameter: torch.Tensor) -> str | None:
    """The precision that products are cast to now."""
    import torch

    kind = parameter.device.type
    return str(torch.get_autocast_dtype(kind)).removeprefix("torch.") if torch.is_autocast_enabled(kind) else None


def _batches(documents: ProbeDocuments, settings: ProbeSettings, ranks: Ranks) -> Iterator[Batch]:
    """This rank's documents, pass by pass; document i is in group i mod groups, whoever runs it."""
    from qkscope.capture.collect import make_batch

    share, rows = ranks.share(len(documents.windows)), max(1, settings.batch_tokens // documents.context)
    for start in range(0, len(share), rows):
        numbers = share[start : start + rows]
        run = [number or 0 for number in numbers]  # any document will do for a pass that only other ranks need
        yield make_batch(
            [documents.windows[number] for number in run],
            [number % settings.groups for number in run],
            [f"probe document {number}" for number in run],
            [SPARE if number is None else number for number in numbers],
        )


def _summed_positions(_layer: int, batch: Batch) -> NDArray[np.int64] | None:
    """All positions, but none of a document that is run only because other ranks run one."""
    if SPARE not in batch.documents:
        return batch.positions
    spare = np.asarray(batch.documents)[:, None] == SPARE  # (rows, 1)
    return np.where(spare, PADDING, np.broadcast_to(np.arange(batch.ids.shape[1]), batch.ids.shape))
