"""What produced a result: model and commit, documents, tokens, precision, kernel, versions."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import islice
from typing import Any

from qkscope.capture.config import MISSING, find_value
from qkscope.capture.fingerprint import attention_hashes, count_parameters, weights_file_state, weights_fingerprint
from qkscope.capture.probe import ProbedModel
from qkscope.documents.encode import Encoder
from qkscope.results.environment import environment
from qkscope.results.provenance import CheckpointRecord
from qkscope.run.plan import CheckpointPlan

LISTED = 100  # duplicates that are listed: [document, the one with the same tokens]


def checkpoint_provenance(plan: CheckpointPlan, probe: ProbedModel, backbone: Any) -> CheckpointRecord:
    """Everything about one checkpoint's capture; stored inside its moments file."""
    return CheckpointRecord.of(
        {
            **_named(plan, backbone),
            "attention_hashes": attention_hashes(backbone),
            **_weights(plan),
            **_layers(plan, probe),
            **_computed(plan, probe, backbone),
            **_read(plan),
            "layers": [facts.outline() for facts in probe.layers],
            "fingerprint": plan.fingerprint(),
            "settings": plan.settings(),
            "environment": environment(),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
        }
    )


def _named(plan: CheckpointPlan, backbone: Any) -> dict[str, Any]:
    """What the checkpoint is called, and where it stands in its study."""
    checkpoint = plan.checkpoint
    return {
        "name": checkpoint.name,
        "label": checkpoint.label,
        "phase": checkpoint.phase,
        "step": checkpoint.step,
        "trained_tokens": checkpoint.tokens,
        "run": checkpoint.run,
        "context": plan.context,
        "family": checkpoint.family,
        "parameters": checkpoint.parameters or count_parameters(backbone),
        "tags": checkpoint.tags,
    }


def _weights(plan: CheckpointPlan) -> dict[str, Any]:
    """Where weights, config and tokenizer come from."""
    checkpoint = plan.checkpoint
    return {
        "model": checkpoint.model,
        "revision": checkpoint.revision,
        "commit": plan.commit,
        "base_model": plan.source.location if plan.source.adapter else None,
        "adapter_commit": plan.source.adapter_revision,
        "weights": weights_fingerprint(plan.source),
        "weights_file_state": weights_file_state(plan.source),
        "trust_remote_code": plan.trust_remote_code,
        "config_overrides": checkpoint.config or {},
        "tokenizer": checkpoint.tokenizer or checkpoint.model,
        "tokenizer_commit": plan.tokenizer_source.revision if plan.tokenizer_source.kind == "hub" else None,
        "tokenizer_fingerprint": plan.tokenizer_fingerprint,
        "model_type": getattr(plan.config, "model_type", None),
    }


def _layers(plan: CheckpointPlan, probe: ProbedModel) -> dict[str, Any]:
    """How many layers there are, and how they encode position."""
    return {
        "n_layers": probe.n_layers,
        "layers_without_attention": list(probe.gaps),
        "rope_theta": _config_value(plan, "rope_theta"),
        "max_position_embeddings": _config_value(plan, "max_position_embeddings"),
    }


def _computed(plan: CheckpointPlan, probe: ProbedModel, backbone: Any) -> dict[str, Any]:
    """In which precision, where and by which kernel."""
    parameter = next(backbone.parameters())
    return {
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "device": str(parameter.device),
        "kernel": getattr(backbone.config, "_attn_implementation", None) or ", ".join(probe.kernels),
        "kernel_functions": list(probe.kernels),
        "stage": plan.study.stage,
    }


def _read(plan: CheckpointPlan) -> dict[str, Any]:
    """Documents and tokens."""
    return {
        "corpus": {
            "source": plan.corpus.source,
            "fingerprint": plan.corpus.fingerprint,
            "documents": len(plan.corpus.documents),
            "special_tokens": plan.corpus.settings.special_tokens,
        },
        "texts_begin_with": _opening(plan),
        "documents": len(plan.documents),
        "documents_too_short": plan.too_short,
        "documents_duplicate": len(plan.duplicates),
        "duplicates": [list(pair) for pair in islice(plan.duplicates.items(), LISTED)],
        "documents_uncertain": plan.uncertain,
        "tokens": plan.tokens,
        "tokens_fingerprint": plan.corpus.tokens_fingerprint(plan.context, plan.documents),
        "protocol": plan.study.protocol,
        "sample": None if plan.layout.rate == 1 else {"rate": plan.layout.rate, "seed": plan.layout.seed},
    }


def _opening(plan: CheckpointPlan) -> list[str]:
    """The special tokens before every text, as the tokenizer spells them."""
    encoder = Encoder(plan.tokenizer, plan.corpus.settings.special_tokens)
    return [str(token) for token in plan.tokenizer.convert_ids_to_tokens(encoder.opening())]


def _config_value(plan: CheckpointPlan, key: str) -> Any:
    value = find_value(plan.config, key)
    return None if value is MISSING else value
