"""What an ablation costs before it runs: passes, tokens and FLOPs, from shapes alone.

An edited pass begins at the first edited layer; layers before it are not run again. Then comes the language-model head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qkscope.ablate.work import AblationSettings, CheckpointAblation, Unit, head_name, spread_documents
from qkscope.cost import Cluster, attended_pairs
from qkscope.run.checkpoint_plan import CheckpointPlan
from qkscope.run.plan import Plan


@dataclass(frozen=True)
class AblationCost:
    """Of one or several checkpoints."""

    passes: int  # of documents, whole or from some layer on
    tokens: int  # that go through the model or its later part
    flops: float

    def hours(self, cluster: Cluster) -> float:
        """Of one device that computes all of it."""
        return self.flops / (cluster.flops * cluster.utilization) / 3600


def ablation_cost(works: Sequence[CheckpointAblation]) -> AblationCost:
    """The passes without edits, those with, and the explicit attention of edited heads."""
    passes = sum(work.passes for work in works)
    tokens = sum(work.passes * work.tokens for work in works)
    return AblationCost(passes, tokens, sum(_flops(work) for work in works))


def every_head_alone(plan: Plan) -> list[CheckpointAblation]:
    """What `qkscope ablate STUDY` does without further options, of a study that has not been run yet."""
    settings = AblationSettings()
    return [
        CheckpointAblation(
            each, _every_head(each), spread_documents(each, settings.documents), each.context, settings
        )
        for each in plan.checkpoints
    ]  # fmt: skip


def _every_head(plan: CheckpointPlan) -> tuple[Unit, ...]:
    heads = [(facts.layer, head) for facts in plan.blueprint.probe.layers for head in range(facts.q_heads)]
    return tuple(Unit(head_name(head), "head", (head,)) for head in heads)


def _flops(work: CheckpointAblation) -> float:
    times = len(work.documents) * work.variants
    layers = {facts.layer: facts for facts in work.plan.blueprint.probe.layers}
    # Scores and their product with the values, of all pairs, masked or not.
    explicit = {layer: 4.0 * facts.head_dim * work.tokens * work.tokens for layer, facts in layers.items()}
    edited: float = sum(
        pass_flops(work.plan, work.tokens, min(layer for layer, _ in unit.heads))
        + sum(explicit[layer] for layer, _ in unit.heads)
        for unit in work.units
    )
    return float(times * (pass_flops(work.plan, work.tokens) + len(work.settings.edits) * edited))


def pass_flops(plan: CheckpointPlan, tokens: int, first: int = 0) -> float:
    """FLOPs of one document through the layers from `first` on, and through the language-model head."""
    probe, weights = plan.blueprint.probe, plan.blueprint.weights
    share = (probe.n_layers - first) / probe.n_layers
    matrices = 2.0 * tokens * (share * weights.active + weights.embedding)
    later = [facts for facts in probe.layers if facts.layer >= first]
    attention: float = sum(4.0 * f.q_heads * f.head_dim * attended_pairs(tokens, f) for f in later)
    return float(matrices + attention)
