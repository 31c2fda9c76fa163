"""The same in a notebook: capture from a model you already have, analyze, get a pandas table.

moments = qkscope.capture_moments(model, windows)   # windows: token ids of documents
table = qkscope.analyze(moments)                    # one row per layer, head and component
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkscope.errors import InputError

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

    from qkscope.layers import Stage
    from qkscope.moments.collect import Batch
    from qkscope.moments.moments import Moments


def capture_moments(
    model: nn.Module,
    windows: Iterable[Sequence[int]],
    *,
    context: int | None = None,
    buckets: int = 16,
    groups: int = 8,
    skip_positions: int = 0,
    stage: Stage = "post_rope",
    batch_size: int = 1,
    progress: Callable[[int], None] | None = None,
) -> Moments:
    """Second moments of every attention head's queries and keys over token windows.

    They are taken as the attention kernel gets them, or with `stage="pre_rope"` before rotation.
    Each window is one document's token ids; longer ones are cut to `context` (by default the longest window's
    length, which then needs them all in memory). `progress` hears the number of tokens of each finished batch.
    """
    from qkscope.moments.collect import collect_moments
    from qkscope.moments.layout import Layout, bucket_edges

    if context is None:
        windows = list(windows)
        context = max((len(window) for window in windows), default=0)
    if context < 2:
        raise InputError("capturing needs at least one window of two tokens or more")
    layout = Layout(bucket_edges(context, buckets), groups, skip_positions)
    report = progress or (lambda tokens: None)
    batches = _batches(windows, context, groups, batch_size)
    return collect_moments(
        model, batches, layout, stage=stage, provenance={"stage": stage}, done=lambda batch: report(batch.tokens)
    )


def _batches(windows: Iterable[Sequence[int]], context: int, groups: int, size: int) -> Iterator[Batch]:
    from qkscope.moments.collect import make_batch

    def batch_of(held: list[tuple[int, Sequence[int]]]) -> Batch:
        numbers = [number for number, _ in held]
        names = [f"window {number}" for number in numbers]
        return make_batch([window for _, window in held], [number % groups for number in numbers], names, numbers)

    held: list[tuple[int, Sequence[int]]] = []
    for index, window in enumerate(windows):
        if len(window) == 0:
            raise InputError(f"window {index} is empty")
        held.append((index, window[:context]))
        if len(held) == size:
            yield batch_of(held)
            held = []
    if held:
        yield batch_of(held)


def token_windows(
    tokenizer: Any, texts: Iterable[str], context: int, special_tokens: str = "default"
) -> list[list[int]]:
    """The first `context` tokens of each text that has so many; shorter texts are left out."""
    from qkscope.documents.encode import Encoder

    encoder = Encoder(tokenizer, special_tokens)
    encoded = (encoder.first(text, context, f"text {number}") for number, text in enumerate(texts))
    return [ids for ids in encoded if len(ids) == context]


def analyze(
    moments: Moments | Path | str,
    *,
    model: str = "model",
    window: int | None = None,
    components: int = 10,
    sample: int | None = None,
    seed: int = 0,
) -> pd.DataFrame:
    """The table of method section 2 from moments (or a moments file): r_q, r_k, explained variance per component."""
    from qkscope.analysis.heads import HeadSample
    from qkscope.analysis.qk_table import qk_table
    from qkscope.moments.moments import Moments

    loaded = moments if isinstance(moments, Moments) else Moments.load(moments)
    heads = None if sample is None else HeadSample(sample, seed)
    return qk_table(loaded, model=model, window=window, components=components, heads=heads)
