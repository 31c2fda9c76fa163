"""What a caller can choose about a capture, beyond the study itself. No choice here changes a number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qkscope.validation.layout import VectorSample


@dataclass(frozen=True)
class Placement:
    """How many workers there are, and where. None leaves a choice to the engine."""

    workers: int | None = None
    address: str | None = None  # of a cluster
    cpus_per_worker: float | None = None
    gpus_per_worker: float | None = None


@dataclass(frozen=True)
class CaptureOptions:
    """What a capture does besides summing, and where it runs."""

    only: Sequence[str] = ()  # names of checkpoints; all by default
    evict: bool = False  # delete a checkpoint's files from the Hub cache once its moments are safe
    trust_remote_code: bool = False  # allow Python code that comes with a checkpoint to run
    vectors: VectorSample | None = None  # keep a sample of raw vectors in the predecessor's layout
    skip_bad_documents: bool = False  # leave out documents that make the model fail; this is recorded
    overwrite: bool = False  # replace finished moments that were made with other settings
    skip_bad_checkpoints: bool = False  # leave out checkpoints that cannot be measured; this is recorded
    engine: str = "local"
    placement: Placement = Placement()

    @property
    def runs_here(self) -> bool:
        """Whether this machine does the work."""
        return self.engine == "local"
