"""What a run tells while it runs. The command line draws it; a notebook may ignore it."""

from __future__ import annotations

from qkscope.pipeline.plan import CheckpointPlan, Plan


class Events:
    """Called by the pipeline as it goes. This one says nothing; others override what they want to hear of."""

    def surveying(self, documents: int) -> None:
        """So many documents have been read and measured."""

    def planned(self, plan: Plan) -> None:
        """Everything that can be known before a forward pass is known."""

    def reused(self, plan: CheckpointPlan) -> None:
        """The checkpoint's moments are on disk already and still hold."""

    def replacing(self, plan: CheckpointPlan, reason: str) -> None:
        """Moments are there but cannot be used again, and why; they will be replaced."""

    def resumed(self, plan: CheckpointPlan, shards: int, documents: int) -> None:
        """So many shards (and documents) of the checkpoint are there from an earlier run."""

    def started(self, plan: CheckpointPlan) -> None:
        """The checkpoint's weights are about to be loaded."""

    def advanced(self, documents: int, tokens: int) -> None:
        """So many more documents and tokens went through the model."""

    def finished(self, plan: CheckpointPlan, seconds: float) -> None:
        """The checkpoint's moments are safe on disk."""

    def evicted(self, plan: CheckpointPlan, freed: int) -> None:
        """The checkpoint's files left the Hub cache; so many bytes are free again."""

    def wrote(self, path: str) -> None:
        """A result file is in place."""
