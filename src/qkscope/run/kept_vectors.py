"""Vectors that an earlier run kept: whether they are what this run would keep."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from qkscope.errors import InputError
from qkscope.run.plan import CheckpointPlan
from qkscope.run.runner import VectorSample
from qkscope.vectors.layout import has_token_texts, stored_sample


def is_sample_of(sample: Path, plan: CheckpointPlan, wanted: VectorSample | None, holds: bool) -> bool:
    """Whether vectors that lie there are of these settings, and what is wanted now, if anything is."""
    if not holds or wanted is None:
        return holds
    sampler = wanted.sampler(plan.layout)
    same = stored_sample(sample) == (sampler.rate, sampler.seed, sampler.per_doubling)
    return same and (not wanted.tokens or has_token_texts(sample))


def require_same_sample(sample: Path, plan: CheckpointPlan, wanted: VectorSample, holds: bool) -> None:
    """Refuse vectors that an earlier run kept of something else: they must not pass for this run's."""
    if is_sample_of(sample, plan, wanted, holds):
        return
    without = is_sample_of(sample, plan, replace(wanted, tokens=False), holds)
    what = "vectors without the texts of their tokens" if without else "vectors of another run or rate"
    raise InputError(f"{sample} holds {what}").advised(
        python="remove it, use `overwrite`, or choose another `out`",
        command="remove it, give --overwrite, or another --out",
    )
