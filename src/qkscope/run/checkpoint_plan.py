"""What is to be captured of one checkpoint, and in which shards: known before a weight is loaded.

It is a function of the study and of what the study names, never of the machine.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from qkscope.capture.fingerprint import weights_fingerprint
from qkscope.capture.source import ModelSource
from qkscope.documents.tokens import Corpus, group_of
from qkscope.kinds import Architecture
from qkscope.moments.layout import Layout
from qkscope.moments.packing import SCHEMA
from qkscope.moments.sizes import Sizes, predict_sizes
from qkscope.results.environment import numeric_versions
from qkscope.study.heads import choose_heads, layer_choice
from qkscope.study.schema import Checkpoint, Study


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
    def alike(self) -> int:
        """How many documents have the same tokens as another within this context, and differ only later."""
        known = self.corpus.documents
        return len(self.documents) - len({known[index].prefixes[self.context] for index in self.documents})

    @property
    def uncertain(self) -> int:
        """How many documents' ids are not certain to be those of the whole text."""
        return sum(not self.corpus.documents[index].exact for index in self.documents)

    @property
    def filled_groups(self) -> set[int]:
        """The document groups that have documents."""
        return {group_of(index, self.layout.groups) for index in self.documents}

    @property
    def trust_remote_code(self) -> bool:
        """Whether Python code that comes with the checkpoint may run: a command line flag, never a study key."""
        return self.source.trust_remote_code

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
    def last_layer(self) -> int | None:
        """The last layer that the study analyzes, if the model has later ones: a pass stops there."""
        layers = self.blueprint.probe.layers
        chosen = max(choose_heads(layers, None, layer_choice(self.study)))
        return chosen if chosen < max(facts.layer for facts in layers) else None

    @property
    def architecture(self) -> Architecture:
        """Model type, layers, heads and widths."""
        probe = self.blueprint.probe
        return Architecture.of_layers(getattr(self.config, "model_type", None), probe.n_layers, probe.layers)

    @property
    def commit(self) -> str | None:
        """The Hub commit that the revision stands for."""
        return self.source.revision if self.source.kind == "hub" else None

    def cached(self) -> list[ModelSource]:
        """What of the checkpoint may lie in the Hub cache: its model, which adapters share, and its adapter."""
        adapter = self.source.adapter_source
        return [self.source.without_adapter, *([adapter] if adapter is not None else [])]

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
            "model": weights_fingerprint(self.source) or self.commit,
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
        if self.trust_remote_code:
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
            "trust_remote_code": self.trust_remote_code,
        }
