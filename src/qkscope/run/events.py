"""What a run reports while it runs; `run/progress.py` shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qkscope.run.checkpoint_plan import CheckpointPlan
    from qkscope.run.plan import Plan
    from qkscope.run.shards import CheckpointState


class Events:
    """Called by a run. This class does nothing; subclasses override what they handle."""

    def surveying(self, documents: int) -> None:
        """So many documents have been read and tokenized."""

    def planned(self, plan: Plan) -> None:
        """Everything is checked; the run is about to begin."""

    def examined(self, state: CheckpointState) -> None:
        """What earlier runs left of a checkpoint; called for all checkpoints before any work begins."""

    def remarked(self, remark: str, plans: Sequence[CheckpointPlan]) -> None:
        """How the finished moments of these checkpoints, which are used, differ from what would be made now."""

    def started(self, plan: CheckpointPlan) -> None:
        """Work on the checkpoint begins: its weights are about to be loaded."""

    def advanced(self, plan: CheckpointPlan, documents: int, tokens: int) -> None:
        """So many more documents and tokens went through the checkpoint (negative: a shard starts again)."""

    def noted(self, message: str) -> None:
        """Something the user should know."""

    def finished(self, plan: CheckpointPlan, seconds: float) -> None:
        """The checkpoint's moments are safe on disk."""

    def left_out(self, plan: CheckpointPlan, reason: str) -> None:
        """The checkpoint cannot be measured; the run goes on without it."""

    def evicted(self, plan: CheckpointPlan, freed: int) -> None:
        """The checkpoint's files left the Hub cache; so many bytes are free again."""

    def wrote(self, path: str) -> None:
        """A result file is in place."""
