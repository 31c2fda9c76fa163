"""What is to be captured of one checkpoint, and in which shards: known before a weight is loaded.

It is a function of the study and of what the study names, never of the machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Any

from qkscope.capture.fingerprint import attention_hashes, count_parameters, weights_file_state, weights_fingerprint
from qkscope.capture.load import MISSING, find_value
from qkscope.capture.source import ModelSource
from qkscope.documents.encode import Encoder
from qkscope.documents.tokens import Corpus
from qkscope.layers import LayerFacts
from qkscope.moments.layout import Layout
from qkscope.moments.packing import SCHEMA
from qkscope.moments.sizes import Sizes, predict_sizes, workspace_bytes
from qkscope.results.provenance import CheckpointRecord, environment, numeric_versions
from qkscope.study.rows import choose_heads, row_settings
from qkscope.study.schema import Checkpoint, Study

if TYPE_CHECKING:
    from qkscope.capture.probe import ProbedModel

WIDTHS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # bytes of a parameter
MAX_DUPLICATES = 100  # that a record lists, as [document, the one with the same tokens]


@dataclass(frozen=True)
class Shard:
    """A block of a checkpoint's documents: the unit that is finished or not."""

    number: int
    documents: tuple[int, ...]  # indices into the corpus


@dataclass(frozen=True)
class CheckpointPlan:
    """One checkpoint's work."""

    checkpoint: Checkpoint  # resolved
    source: ModelSource
    config: Any
    tokenizer: Any
    tokenizer_source: ModelSource
    tokenizer_fingerprint: str  # equal for tokenizers that encode alike
    corpus: Corpus
    documents: list[int]  # indices into the corpus
    layout: Layout
    blueprint: Any  # capture.blueprint.Blueprint
    study: Study = field(repr=False)
    duplicates: dict[int, int] = field(default_factory=dict)  # documents left out, and the one with the same tokens

    @property
    def too_short(self) -> int:
        """How many documents were left out for having too few tokens."""
        return len(self.corpus.documents) - len(self.documents) - len(self.duplicates)

    @property
    def uncertain(self) -> int:
        """How many documents' ids are not certain to be those of the whole text."""
        return sum(not self.corpus.documents[index].exact for index in self.documents)

    @property
    def context(self) -> int:
        """Tokens per document."""
        return self.layout.context

    @property
    def tokens(self) -> int:
        """Tokens that will go through the model (a sample sums fewer of them)."""
        return len(self.documents) * self.context

    @property
    def sizes(self) -> Sizes:
        """What the sums will cost."""
        return predict_sizes(self.layout, self.blueprint.probe.layers)

    @property
    def device_bytes(self) -> int:
        """About what a device holds that has the whole model: its weights, all sums, and one batch."""
        own = str(getattr(self.config, "dtype", None)).removeprefix("torch.")
        width = WIDTHS.get(self.study.dtype, WIDTHS.get(own, 4))
        rows, layers = max(1, self.study.batch_tokens // self.context), self.blueprint.probe.layers
        batch = activation_bytes(self.blueprint, layers, self.layout, rows, width)
        return int(self.blueprint.parameters) * width + self.sizes.memory + batch

    @property
    def last_layer(self) -> int | None:
        """The last layer that the study analyzes, if the model has later ones: a pass stops there."""
        layers = self.blueprint.probe.layers
        chosen = max(choose_heads(layers, None, row_settings(self.study).layers))
        return chosen if chosen < max(facts.layer for facts in layers) else None

    def cached(self) -> list[ModelSource]:
        """What of the checkpoint may lie in the Hub cache: its model, which adapters share, and its adapter."""
        adapter = self.source.adapter_source
        return [self.source.without_adapter, *([adapter] if adapter is not None else [])]

    @property
    def is_single_shard(self) -> bool:
        """Whether the checkpoint is a single shard, whose sums are the checkpoint's."""
        return len(self.shards()) == 1

    def shards(self) -> list[Shard]:
        """The documents in blocks: a function of the study alone, never of the machine or the number of workers."""
        size = max(1, self.study.shard_tokens // self.context)
        starts = range(0, len(self.documents), size)
        return [Shard(number, tuple(self.documents[at : at + size])) for number, at in enumerate(starts)]

    def fingerprint(self, shard: Shard | None = None) -> str:
        """A hash of everything that the moments (of one shard) depend on; if it is equal, they are reused."""
        facts = self._facts(shard)
        return f"sha256:{hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()}"

    def _facts(self, shard: Shard | None) -> dict[str, Any]:
        facts = {
            "schema": SCHEMA,
            "model": weights_fingerprint(self.source) or self.source.revision,
            "config": self.checkpoint.config,
            "tokens": self.corpus.tokens_fingerprint(self.context, shard.documents if shard else self.documents),
            "edges": self.layout.edges,
            "groups": self.layout.groups,
            "common_window": self.layout.common,
            "unrotated_every": self.layout.unrotated_every,
            "sample": None if self.layout.rate == 1 else [self.layout.rate, self.layout.seed],
            "stage": self.study.stage,
            "last_layer": self.last_layer,
            "dtype": self.study.dtype,
            "batch_tokens": self.study.batch_tokens,
            "shard_tokens": None if shard else self.study.shard_tokens,
        }
        if self.source.trust_remote_code:
            facts["trust_remote_code"] = True
        if shard:  # parts of one sum must be made by the same versions; a finished sum records its versions
            facts["versions"] = numeric_versions()
        return facts

    def settings(self) -> dict[str, Any]:
        """What the moments depend on, one by one: stored with them, so that a later run can name what changed."""
        seen = (f"{index} {self.corpus.documents[index].digest}" for index in self.documents)
        return {
            **self._facts(None),
            "edges": list(self.layout.edges),
            "context": self.context,
            "buckets": self.study.buckets,
            "documents": f"sha256:{hashlib.sha256(' '.join(seen).encode()).hexdigest()}",
            "tokenizer": self.tokenizer_fingerprint,
            "special_tokens": self.corpus.settings.special_tokens,
            "trust_remote_code": self.source.trust_remote_code,
        }


def activation_bytes(blueprint: Any, layers: Sequence[LayerFacts], layout: Layout, rows: int, width: int) -> int:
    """Roughly what one layer of a forward pass over so many documents holds, and what its sums need besides."""
    weights, tokens = blueprint.weights, rows * layout.context
    widest = max(layers, key=lambda f: (f.q_heads + f.kv_heads) * f.head_dim)
    vectors = (widest.q_heads + 2 * widest.kv_heads) * widest.head_dim
    layer = tokens * width * (3 * weights.hidden + 2 * vectors + 3 * weights.inner)
    # A window or chunk shorter than the context needs a mask of all pairs, as bool and in the model's dtype.
    masked = any(f.attention_window and f.attention_window < layout.context for f in layers)
    mask = rows * layout.context**2 * (1 + width) if masked else 0
    return int(layer + workspace_bytes(layout, widest, tokens, width) + mask)


def checkpoint_provenance(plan: CheckpointPlan, probe: ProbedModel, backbone: Any) -> CheckpointRecord:
    """Everything about one checkpoint's capture; stored inside its moments file, with keys in this order."""
    checkpoint, source, parameter = plan.checkpoint, plan.source, next(backbone.parameters())
    theta, longest = (find_value(plan.config, key) for key in ("rope_theta", "max_position_embeddings"))
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
            "commit": source.revision if source.kind == "hub" else None,
            "base_model": source.location if source.adapter else None,
            "adapter_commit": source.adapter_revision,
            "weights": weights_fingerprint(source),
            "weights_file_state": weights_file_state(source),
            "trust_remote_code": source.trust_remote_code,
            "config_overrides": checkpoint.config or {},
            "tokenizer": checkpoint.tokenizer or checkpoint.model,
            "tokenizer_commit": plan.tokenizer_source.revision if plan.tokenizer_source.kind == "hub" else None,
            "tokenizer_fingerprint": plan.tokenizer_fingerprint,
            "model_type": getattr(plan.config, "model_type", None),
            # layers and how they encode position
            "n_layers": probe.n_layers,
            "layers_without_attention": list(probe.gaps),
            "rope_theta": None if theta is MISSING else theta,
            "max_position_embeddings": None if longest is MISSING else longest,
            # the computation
            "dtype": str(parameter.dtype).removeprefix("torch."),
            "device": str(parameter.device),
            "kernel": getattr(backbone.config, "_attn_implementation", None) or ", ".join(probe.kernels),
            "kernel_functions": list(probe.kernels),
            "stage": plan.study.stage,
            **_documents(plan),
            "layers": [facts.outline() for facts in probe.layers],
            "fingerprint": plan.fingerprint(),
            "settings": plan.settings(),
            "environment": environment(),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
        }
    )


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
