"""Every number of the demo, with its reason, and the ten checkpoints that follow from them.

The phases copy the published study in small: stage 1 with four checkpoints, stages 2 and 3 with one each, two
long-context phases with two each. Steps, contexts and learning rates are chosen for two minutes on two cores.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Literal

from qkscope.errors import InputError

RECIPE = 1  # raise when the code makes other checkpoints from the same settings
BUCKETS = 16  # a study sums by sixteenths of the context, so contexts have to divide by it

Mix = Literal["broad", "core"]


@dataclass(frozen=True)
class PhaseSettings:
    """One phase of training: its data, context, learning rate, and checkpoints."""

    prefix: str  # of the checkpoint names: stage1, lc-128-to-512
    label: str  # of the labels: S1, LC1
    title: str  # the phase as tables and figures name it
    context: int
    rope_theta: float
    steps: tuple[int, ...]  # where a checkpoint is saved, counted from where the optimizer started
    sequences: int  # per step
    peak_lr: float
    end_lr: float  # reached in a straight line at the last step of the phase
    warmup: int = 0
    mix: Mix = "core"
    new_optimizer: bool = False  # forget the moments of the gradients, and count steps from zero


@dataclass(frozen=True)
class DemoCheckpoint:
    """One of the ten: its name, its place in the study, and the config it is saved with."""

    name: str
    label: str
    phase: PhaseSettings
    step: int


# The thetas are those of the published study. With 16 dimensions per head and these contexts they have a second
# virtue: the 4th of the 8 RoPE planes rotates by about 2, 2 and 3 radians over the context, before and after each
# change, so a head that had learned to use it for distance can go on doing so.
_stage = partial(
    PhaseSettings,
    context=128,  # three lines of code: enough to learn from, and a short context costs little
    rope_theta=50_000.0,
    sequences=8,  # 1024 tokens a step: many small steps learn more in two minutes than few large ones
    peak_lr=3e-3,  # ten times that of a large model, usual for one this narrow
    end_lr=3e-3,  # warm up, stay, and decay in stage 3, as the published model was trained
)
_long = partial(
    PhaseSettings,
    steps=(10, 40),  # one soon after the change, one when the model has settled
    peak_lr=1e-3,  # a third of the peak: adapt, do not start over
    end_lr=2e-4,
    warmup=5,  # a fresh AdamW takes its largest steps first
    new_optimizer=True,
)
PHASES = (
    # The first checkpoint: letters are learned and words are not.
    _stage("stage1", "S1", "stage 1", steps=(40, 120, 220, 320), warmup=30, mix="broad", new_optimizer=True),
    _stage("stage2", "S2", "stage 2", steps=(380,)),  # only the data change
    _stage("stage3", "S3", "stage 3", steps=(440,), end_lr=3e-4),
    # 2048 tokens a step: fewer sequences would make the gradient too noisy
    _long("lc-128-to-512", "LC1", "LC 128→512", context=512, rope_theta=2_000_000.0, sequences=4),
    _long("lc-512-to-1024", "LC2", "LC 512→1024", context=1024, rope_theta=5_000_000.0, sequences=2),
)


@dataclass(frozen=True)
class DemoSettings:
    """The model, its training and its documents. The same settings make the same checkpoints on one machine."""

    seed: int = 0  # of the weights and of the order of the training text
    layers: int = 8  # two NoPE layers, one of them with RoPE layers above it
    hidden_size: int = 128  # 1.5 million weights: the most that learns something in two minutes
    mlp_size: int = 384  # three times hidden, SmolLM3's gated form
    query_heads: int = 8  # 64 heads in all: shares move in steps of 1.6 %
    kv_heads: int = 2  # grouped 4 to 1 as in SmolLM3-3B
    nope_interval: int = 4  # every 4th layer has no RoPE, as in SmolLM3
    init_std: float = 0.06  # the default 0.02 is for width 2048; this narrow, attention would start too flat
    weight_decay: float = 0.1  # the usual value; on matrices only
    betas: tuple[float, float] = (0.9, 0.95)  # a short memory, for short training
    clip_norm: float = 1.0  # the usual guard against a rare bad batch
    documents: int = 48  # 6 144 tokens at the shortest context, 49 152 at the longest
    split_seed: int = 0  # which sources are held out; not `seed`, so that seeds compare on the same documents
    phases: tuple[PhaseSettings, ...] = field(default=PHASES)

    def __post_init__(self) -> None:
        # RoPE rotates dimensions in pairs, and each KV head serves equally many query heads.
        head_dim, rest = divmod(self.hidden_size, self.query_heads)
        if rest or head_dim % 2 or self.query_heads % self.kv_heads:
            raise InputError("demo: hidden_size, query_heads and kv_heads do not divide into equal, even heads")
        if not self.phases or self.documents < 1:
            raise InputError("demo: needs at least one phase and one document")
        for phase in self.phases:
            where, steps = f"demo phase {phase.title!r}", phase.steps
            if phase.context % BUCKETS:
                raise InputError(f"{where}: context {phase.context} is not a multiple of {BUCKETS}")
            if not steps or steps[0] < 1 or list(steps) != sorted(set(steps)):
                raise InputError(f"{where}: steps {steps} should be positive and rising")

    @property
    def longest_context(self) -> int:
        """What every document has to fill."""
        return max(phase.context for phase in self.phases)

    @property
    def total_steps(self) -> int:
        """Optimizer steps over all phases, for a progress bar."""
        return sum(stop - start for _, start, stop in self.spans())

    @property
    def fingerprint(self) -> str:
        """Sixteen hex digits that change when any number does."""
        text = json.dumps({"recipe": RECIPE, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def spans(self) -> Iterator[tuple[PhaseSettings, int, int]]:
        """Each phase with its first and last step, counted from where its optimizer started."""
        start = 0
        for phase in self.phases:
            start = 0 if phase.new_optimizer else start
            yield phase, start, phase.steps[-1]
            start = phase.steps[-1]

    def checkpoints(self) -> list[DemoCheckpoint]:
        """The checkpoints in the order in which training reaches them."""
        return [
            DemoCheckpoint(name=f"{phase.prefix}-step-{step}", label=f"{phase.label}-{step}", phase=phase, step=step)
            for phase in self.phases
            for step in phase.steps
        ]

    def scaled(self, factor: float) -> DemoSettings:
        """The same demo with `factor` times the steps: 0.25 for a glance, 4 for a better model."""
        if not (math.isfinite(factor) and factor > 0):
            raise InputError(f"demo: cannot scale the number of steps by {factor}; give a positive number")
        phases: list[PhaseSettings] = []
        for phase in self.phases:
            steps = [0] if phase.new_optimizer or not phases else [phases[-1].steps[-1]]
            for step in phase.steps:
                steps.append(max(steps[-1] + 1, round(step * factor)))  # never two checkpoints at one step
            phases.append(replace(phase, steps=tuple(steps[1:]), warmup=round(phase.warmup * factor)))
        return replace(self, phases=tuple(phases))


@dataclass(frozen=True)
class DemoProgress:
    """How far training is, after each step; the command line draws it."""

    step: int
    total_steps: int
    phase: str
    checkpoint: str  # the one that training is on the way to
    loss: float  # of this step's batch, in nats per byte
    tokens_per_second: float  # since training started, saving included
