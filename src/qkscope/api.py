"""The same in a notebook: capture from a model you already have, analyze, get a pandas table.

moments = qkscope.capture_moments(model, windows)   # windows: token ids of documents
table = qkscope.analyze(moments)                    # one row per layer, head and component

Everything that can be wrong with an argument is a QkscopeError that says what to write instead.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from qkscope.errors import DocumentFailure, InputError, OutOfMemory

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

    from qkscope.ablate.study import AblationTables
    from qkscope.capture.collect import Batch
    from qkscope.documents.encode import Window
    from qkscope.layers import Stage
    from qkscope.moments.layout import Layout
    from qkscope.moments.moments import Moments
    from qkscope.report.results import StudyResults
    from qkscope.study.rows import RowSettings

LONGEST, MOST_BUCKETS, MOST_GROUPS = 2**24, 1024, 256  # as in a study


def capture_moments(
    model: nn.Module,
    windows: Iterable[Sequence[int]],
    *,
    context: int | None = None,
    buckets: int = 16,
    groups: int | None = None,
    common_window: int | None = None,
    attention_rows: int = 8,
    head_types: bool = False,
    stage: Stage = "post_rope",
    batch_size: int = 1,
    progress: Callable[[int], None] | None = None,
) -> Moments:
    """Second moments of every attention head's queries and keys over token windows.

    They are taken as the attention kernel gets them, or with `stage="pre_rope"` before rotation.
    Each window is one document's token ids: a list, an array or a tensor, a row of a 2-D tensor, or a row of what a
    tokenizer returned (whose padding is left out). Longer ones are cut to `context` (by default the longest window's
    length, which then needs them all in memory). Position 0 is summed separately, and so is what lies beyond
    `common_window`: a window at which other moments will be compared with these (by default the whole context).
    `groups` is the number of document groups, for errors: by default 16 if there are at least 32 windows and the sums
    stay below 2 GB, else 8 (also where the number of windows is not known beforehand).
    The attention of `attention_rows` queries per window is evaluated, too (0: none), and with `head_types` that of
    repeated random tokens. `progress` hears the number of tokens of each finished batch.
    """
    from qkscope.capture.collect import collect_moments
    from qkscope.capture.probe import probe_model
    from qkscope.documents.encode import warn_of_copies
    from qkscope.moments.sizes import FEW_GROUPS, default_groups

    require_stage(stage)
    if progress is not None and not callable(progress):
        raise InputError(f"progress should be a function of a number of tokens, not {type(progress).__name__}")
    batch_size = whole_argument("batch_size", batch_size, 1)
    ids, context = _windows(model, windows, context)
    layout = _layout(context, buckets, FEW_GROUPS if groups is None else groups, common_window, stage)
    rows = whole_argument("attention_rows", attention_rows, 0, MOST_BUCKETS)
    layout = replace(layout, rows=rows, repeated=int(bool(head_types) and rows > 0))
    report = progress or (lambda tokens: None)
    try:
        probe = probe_model(model, context=context)
        if groups is None:
            known = next((each for each in (ids, windows) if isinstance(each, Sized)), ())
            layout = replace(layout, groups=default_groups(len(known), [(layout, probe.layers)]))
        return collect_moments(
            model,
            _batches(warn_of_copies(ids, context), layout, batch_size),
            layout,
            probe=probe,
            stage=stage,
            provenance={"stage": stage},
            done=lambda batch: report(batch.tokens),
        )
    except (DocumentFailure, OutOfMemory) as error:
        advice = "give a smaller batch_size or context"
        advice = advice if isinstance(error, OutOfMemory) else "leave that window out"
        raise error.advised(python=advice, command=advice) from error


def require_stage(stage: Any) -> None:
    """Refuse what is no stage of a capture."""
    from qkscope.layers import Stage

    if stage not in get_args(Stage):
        raise InputError(f"stage should be one of {', '.join(map(repr, get_args(Stage)))}, not {stage!r}")


def _windows(model: nn.Module, windows: Any, context: Any) -> tuple[Iterable[Window], int]:
    """The windows as ids that the model has, and how many positions of them are summed."""
    from qkscope.capture.backbone import model_limits
    from qkscope.documents.encode import read_windows

    vocabulary, positions = model_limits(model)
    ids: Iterable[Window] = read_windows(windows, vocabulary)
    if context is None:
        ids = list(ids)
        context = max((len(window) for window in ids), default=0)
        if context < 2:
            raise InputError("capture needs at least one window of two or more tokens")
    context = whole_argument("context", context, 2, LONGEST)
    if positions is not None and context > positions:
        raise InputError(
            f"{context} tokens exceed the model's {positions} positions; give context={positions} to cut windows to "
            "that, or raise max_position_embeddings in the model's config"
        )
    return ids, context


def _layout(context: int, buckets: int, groups: int, common_window: int | None, stage: Stage) -> Layout:
    from qkscope.moments.layout import capture_layout

    buckets = whole_argument("buckets", buckets, 1, MOST_BUCKETS)
    groups = whole_argument("groups", groups, 1, MOST_GROUPS)
    common = None if common_window is None else whole_argument("common_window", common_window, 2, context)
    layout = capture_layout(context, buckets=buckets, groups=groups, common=common)
    return layout if stage == "post_rope" else replace(layout, unrotated_every=0)


def whole_argument(name: str, value: Any, least: int, most: int | None = None) -> int:
    """The value as an int, if it is a whole number within bounds."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < least or (most is not None and number > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise InputError(f"{name} should be a whole number {bounds}, not {str(value)[:40]!r}")
    return number


def _batches(windows: Iterable[Window], layout: Layout, size: int) -> Iterator[Batch]:
    """Window i is in group i mod the number of groups."""
    from qkscope.capture.collect import make_batch

    numbered = enumerate(windows)
    while held := list(islice(numbered, size)):
        numbers, ids = [number for number, _ in held], [window[: layout.context] for _, window in held]
        groups = [number % layout.groups for number in numbers]
        yield make_batch(ids, groups, [f"window {number}" for number in numbers], numbers)


def token_windows(
    tokenizer: Any, texts: Iterable[str], context: int, special_tokens: str = "default"
) -> list[list[int]]:
    """The first `context` tokens of each text that has so many; shorter texts are left out.

    Texts with the same first tokens give one window, with a warning: copies would make standard errors too small.
    """
    from qkscope.documents.encode import Encoder, distinct_windows

    context = whole_argument("context", context, 2, LONGEST)
    if special_tokens not in ("default", "none", "bos"):
        raise InputError(f"special_tokens should be 'default', 'none' or 'bos', not {special_tokens!r}")
    if not callable(tokenizer):
        raise InputError(f"{type(tokenizer).__name__} is not a tokenizer; load one with AutoTokenizer.from_pretrained")
    if isinstance(texts, str | bytes):
        raise InputError("texts is a single text; put it in a list: [text]")
    if not isinstance(texts, Iterable):
        raise InputError(f"texts should be a list of texts, not {type(texts).__name__}")
    encoder = Encoder(tokenizer, special_tokens)
    encoded = []
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise InputError(f"text {number} is {type(text).__name__}, not str")
        encoded.append(encoder.first(text, context, f"text {number}"))
    windows = distinct_windows([ids for ids in encoded if len(ids) == context])
    if not windows:
        most = max(map(len, encoded), default=0)
        raise InputError(
            f"no text has {context:,} tokens: the longest of {len(encoded):,} has {most:,}; give longer texts or a "
            "smaller context"
            if encoded
            else "texts is empty; give at least one text"
        )
    return windows


def analyze(
    moments: Moments | Path | str,
    lens: str | None = None,
    *,
    model: str = "model",
    window: int | None = None,
    skip_positions: int = 0,
    components: int = 10,
    sample: int | None = None,
    seed: int = 0,
) -> pd.DataFrame:
    """The measures of a lens from moments (or a moments file), with standard errors: one row per head and window.

    Without `lens`, the table of method section 2: r_q, r_k, explained variance per component. `window` takes the first
    so many positions, `skip_positions` leaves out the first: 1 for attention sinks. Both must be edges of the moments'
    buckets (`moments.layout.edges`).
    """
    from qkscope.lenses.position import qk_table
    from qkscope.moments.moments import Moments
    from qkscope.study.rows import HeadSample, RowSettings

    if not isinstance(moments, Moments | PathLike | str):
        raise InputError(f"analyze takes moments or the path of a moments file, not {type(moments).__name__}")
    if not isinstance(model, str):
        raise InputError(f"model is the name for the table's first column, a str, not {type(model).__name__}")
    components = whole_argument("components", components, 1)
    if window is not None:
        window = whole_argument("window", window, 1)
    skip = whole_argument("skip_positions", skip_positions, 0)
    heads = None
    if sample is not None:
        heads = HeadSample(whole_argument("sample", sample, 1), whole_argument("seed", seed, -(2**63)))
    loaded = moments if isinstance(moments, Moments) else Moments.load(moments)
    if lens is None:
        return qk_table(loaded, model=model, window=window, components=components, heads=heads, skip=skip)
    return _lens_table(loaded, lens, RowSettings(own=window, components=components, heads=heads, skip=skip), model)


def _lens_table(moments: Moments, name: str, settings: RowSettings, model: str) -> pd.DataFrame:
    """The rows per head of a lens, or those of its first table where it has none of that kind."""
    from qkscope.lenses.registry import registered
    from qkscope.lenses.rows import checkpoint_rows
    from qkscope.results.schema import HEADS
    from qkscope.text import closest

    by_name = {each.name: [table for table in each.tables if table.rows is not None] for each in registered()}
    known = [each for each, tables in by_name.items() if tables]
    if name not in known:
        raise InputError(f"there is no lens {name!r} that moments are enough for{closest(name, known)}")
    rows = checkpoint_rows(moments, by_name[name], settings, model=model)
    return rows[HEADS if HEADS in rows else next(iter(rows))]


def load(source: Path | str | Moments | Mapping[str, Moments]) -> StudyResults:
    """Results with `.heads()`, `.means()`, `.changes()`, `.table()`, `.figure()`, `.card()`, `.summary()`, `.page()`.

    `source` is a results folder, an archive (.zip), a moments file, moments, or several by name,
    `{"step 100": first, "step 200": second}`, in the order of training.
    """
    from qkscope.report.results import load

    return load(source)


def load_results(source: Path | str | Moments | Mapping[str, Moments]) -> StudyResults:
    """What `load` was called in 0.2."""
    return load(source)


def ablate_heads(
    model: nn.Module,
    windows: Iterable[Sequence[int]],
    *,
    edits: Sequence[str] = ("kernel", "zero"),
    heads: Sequence[str] = (),
    top: int | None = None,
    by: str = "r_q",
    together: bool = False,
    controls: int = 4,
    match_dose: bool = False,
    groups: int = 8,
    needle: Sequence[float] = (),
    attention: bool = False,
    tokenizer: Any = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> AblationTables:
    """Take position away from heads of a language model in memory and measure the loss of every token of each window.

    `edits` and outcomes are those of `qkscope ablate`; `heads` are names (`L5H3`), categories or `all`, `top` the n
    with the largest `by`, a column of `analyze`. `together` edits them as one group, against `controls` groups of other
    heads: as many per layer, or with `match_dose` those from which the edit `kernel` removes as much. What an edit
    takes away comes from the other windows: window i is in group i mod `groups`, of which there must be at least four.
    A needle needs the `tokenizer`. `progress` gets how many passes over a window under an edit are done, and of how
    many.
    """
    from qkscope.ablate.study import ablate_windows
    from qkscope.ablate.work import AblationSettings, HeadChoice
    from qkscope.lenses.categories import classify

    for name, words in (("edits", edits), ("heads", heads)):
        if isinstance(words, str):  # a sequence, too: of letters
            raise InputError(f"{name} is a single word; put it in a list: [{words!r}]")
    if needle and tokenizer is None:
        raise InputError("a needle is text: also give the model's tokenizer")
    top, seed = None if top is None else whole_argument("top", top, 1), whole_argument("seed", seed, 0)
    choice = HeadChoice(tuple(heads), top, by, together, whole_argument("controls", controls, 1), seed, match_dose)
    settings = AblationSettings(tuple(edits), choice, seed=seed, needle=tuple(needle), attention=attention)
    ids, context = _windows(model, windows, None)
    read: list[Any] = list(ids)
    moments = capture_moments(model, read, context=context, groups=whole_argument("groups", groups, 1, MOST_GROUPS))
    table = analyze(moments, components=1)
    table = table.assign(category=classify(table["r_q"], table["r_k"]))
    return ablate_windows(model, read, moments, table, settings, tokenizer, progress)


def predict(
    moments: Path | str,
    *,
    window: int | None = None,
    rope_theta: float | None = None,
    model: str = "model",
    skip_positions: int = 0,
) -> pd.DataFrame:
    """The rotated-mean prediction for every head: r_q_rope, r_k_rope and category_rope, with errors over documents.

    `moments` is a moments file, or a results folder, whose checkpoints are all predicted, next to the measured r_q, r_k
    and category at their native context. `window` may be any number of positions, run or not (by default those of the
    moments), `rope_theta` another base than the model's, where its measured angles are those of one base.
    """
    from qkscope.lenses.rope.extrapolate import PredictionRequest, extrapolate, head_rows, predict_folder, with_base
    from qkscope.moments.file import PreRopeFile

    if not isinstance(moments, PathLike | str):
        raise InputError(f"predict takes the path of a moments file or results folder, not {type(moments).__name__}")
    if rope_theta is not None and not (isinstance(rope_theta, int | float) and 1 < rope_theta < 1e30):
        raise InputError(f"rope_theta should be a number above 1, not {str(rope_theta)[:40]!r}")
    window = None if window is None else whole_argument("window", window, 2, LONGEST)
    skip = whole_argument("skip_positions", skip_positions, 0)
    if Path(moments).is_dir():
        request = PredictionRequest(window, None if rope_theta is None else {None: float(rope_theta)})
        return head_rows(predict_folder(Path(moments), (), request, skip or None))
    file = PreRopeFile(Path(moments))
    rotation = None if rope_theta is None else with_base(file, {None: float(rope_theta)}, str(moments))
    return extrapolate(file, name=model, window=window, rotation=rotation, skip=skip).heads
