"""What produced a result: model and commit, documents, tokens, precision, kernel, versions."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import islice
from typing import Any

from qkscope.capture.fingerprint import attention_hashes, count_parameters, weights_file_state, weights_fingerprint
from qkscope.capture.load import MISSING, find_value
from qkscope.capture.probe import ProbedModel
from qkscope.documents.encode import Encoder
from qkscope.results.environment import environment
from qkscope.results.provenance import CheckpointRecord
from qkscope.run.checkpoint_plan import CheckpointPlan

MAX_DUPLICATES = 100  # that are listed, as [document, the one with the same tokens]


def checkpoint_provenance(plan: CheckpointPlan, probe: ProbedModel, backbone: Any) -> CheckpointRecord:
    """Everything about one checkpoint's capture; stored inside its moments file, with keys in this order."""
    checkpoint, source = plan.checkpoint, plan.source
    return CheckpointRecord.of(
        {
            # the checkpoint and its place in the study
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
            "attention_hashes": attention_hashes(backbone),
            # weights, config and tokenizer
            "model": checkpoint.model,
            "revision": checkpoint.revision,
            "commit": plan.commit,
            "base_model": source.location if source.adapter else None,
            "adapter_commit": source.adapter_revision,
            "weights": weights_fingerprint(source),
            "weights_file_state": weights_file_state(source),
            "trust_remote_code": plan.trust_remote_code,
            "config_overrides": checkpoint.config or {},
            "tokenizer": checkpoint.tokenizer or checkpoint.model,
            "tokenizer_commit": plan.tokenizer_source.revision if plan.tokenizer_source.kind == "hub" else None,
            "tokenizer_fingerprint": plan.tokenizer_fingerprint,
            "model_type": getattr(plan.config, "model_type", None),
            # layers and how they encode position
            "n_layers": probe.n_layers,
            "layers_without_attention": list(probe.gaps),
            "rope_theta": _config_value(plan, "rope_theta"),
            "max_position_embeddings": _config_value(plan, "max_position_embeddings"),
            **_computation(plan, probe, backbone),
            **_documents(plan),
            "layers": [facts.outline() for facts in probe.layers],
            "fingerprint": plan.fingerprint(),
            "settings": plan.settings(),
            "environment": environment(),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
        }
    )


def _computation(plan: CheckpointPlan, probe: ProbedModel, backbone: Any) -> dict[str, Any]:
    parameter = next(backbone.parameters())
    return {
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "device": str(parameter.device),
        "kernel": getattr(backbone.config, "_attn_implementation", None) or ", ".join(probe.kernels),
        "kernel_functions": list(probe.kernels),
        "stage": plan.study.stage,
    }


def _documents(plan: CheckpointPlan) -> dict[str, Any]:
    encoder = Encoder(plan.tokenizer, plan.corpus.settings.special_tokens)
    return {
        "corpus": {
            "source": plan.corpus.source,
            "fingerprint": plan.corpus.fingerprint,
            "documents": len(plan.corpus.documents),
            "special_tokens": plan.corpus.settings.special_tokens,
        },
        "texts_begin_with": [str(token) for token in plan.tokenizer.convert_ids_to_tokens(encoder.opening())],
        "documents": len(plan.documents),
        "documents_too_short": plan.too_short,
        "documents_duplicate": len(plan.duplicates),
        "duplicates": [list(pair) for pair in islice(plan.duplicates.items(), MAX_DUPLICATES)],
        "documents_uncertain": plan.uncertain,
        "tokens": plan.tokens,
        "tokens_fingerprint": plan.corpus.tokens_fingerprint(plan.context, plan.documents),
        "protocol": plan.study.protocol,
        "sample": None if plan.layout.rate == 1 else {"rate": plan.layout.rate, "seed": plan.layout.seed},
    }


def _config_value(plan: CheckpointPlan, key: str) -> Any:
    value = find_value(plan.config, key)
    return None if value is MISSING else value
