"""What the entries of a study are to each other: checkpoints of one training run, seeds of one architecture, or
different models.

Only the checkpoints of one run have an order and the same heads: a line may join them, and head 3 of one is head 3 of
the next. Seeds share an architecture and nothing else; models not even that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from qkscope.errors import InputError
from qkscope.layers import LayerFacts

StudyKind = Literal["checkpoints", "seeds", "models"]
KINDS: tuple[StudyKind, ...] = ("checkpoints", "seeds", "models")
CHECKPOINTS, SEEDS, MODELS = KINDS

NOUNS: dict[StudyKind, str] = {"checkpoints": "checkpoint", "seeds": "seed", "models": "model"}
_READ_AS: dict[StudyKind, str] = {
    "checkpoints": "checkpoints of one training run, in this order",
    "seeds": "seeds of one architecture",
    "models": "different models",
}


class Architecture(NamedTuple):
    """What must be equal for two entries to have the same heads; None where nothing is recorded."""

    model_type: str | None
    n_layers: int | None
    heads: tuple[tuple[int, int, int, int], ...] | None  # layer, query heads, key heads, width

    @property
    def words(self) -> str:
        """Model type, layers and heads, as far as they are recorded."""
        layers = f"{self.n_layers} layers" if self.n_layers is not None else ""
        heads = sorted({each[1:] for each in self.heads or ()})
        shapes = " or ".join(f"{q} query and {k} key heads of width {wide}" for q, k, wide in heads[:2])
        parts = [self.model_type or "", layers, f"{shapes} …" if len(heads) > 2 else shapes]
        return ", ".join(part for part in parts if part) or "architecture not recorded"

    @classmethod
    def of_layers(cls, model_type: object, n_layers: object, layers: Iterable[LayerFacts]) -> Architecture:
        """The architecture of a model whose layers are known."""
        return cls(
            model_type if isinstance(model_type, str) else None,
            n_layers if isinstance(n_layers, int) and not isinstance(n_layers, bool) else None,
            tuple(sorted((f.layer, f.q_heads, f.kv_heads, f.head_dim) for f in layers)) or None,
        )

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Architecture:
        """The architecture that a checkpoint's provenance records, as far as it does."""
        layers = record.get("layers")
        try:
            facts = [LayerFacts.from_json(entry) for entry in layers] if isinstance(layers, list) else []
        except (TypeError, ValueError):
            facts = []
        return cls.of_layers(record.get("model_type"), record.get("n_layers"), facts)


def differ(architectures: Sequence[Architecture], *, with_type: bool = True) -> bool:
    """Whether two of them differ in something that both record."""
    fields = ("model_type", "n_layers", "heads") if with_type else ("n_layers", "heads")
    return any(len({getattr(a, name) for a in architectures} - {None}) > 1 for name in fields)


def kind_of(runs: Sequence[str | None]) -> StudyKind:
    """The kind of entries if none is given: seeds if they name several runs, else checkpoints of one run.

    What their layers look like decides nothing: `require_kind` refuses entries that cannot be checkpoints or seeds.
    """
    return SEEDS if len(set(runs)) > 1 else CHECKPOINTS


def require_kind(kind: StudyKind | None, entries: Sequence[tuple[str, Architecture]]) -> None:
    """Refuse different architectures as checkpoints of one run, or as seeds: they share no heads."""
    if kind == MODELS or not entries:
        return
    name, first = entries[0]
    for other_name, other in entries[1:]:
        if not differ([first, other], with_type=kind is None):
            continue
        between = f"{name!r} ({first.words}) and {other_name!r} ({other.words})"
        if kind is None:
            raise InputError(
                f"{between} are of different architectures, and nothing says what the entries are to each other"
            ).advised(
                command="write `kind: models` in the study, or give --kind models to analyze",
                python='write `kind: models` in the study, or kind="models"',
            )
        raise InputError(f"kind: {kind}, but {between} differ in their layers, heads or widths; use `kind: models`")


def kind_sentence(kind: StudyKind, entries: int, stated: bool) -> str:
    """How a study's entries are read, why, and what decides."""
    if entries == 1:
        return "one entry: nothing is compared"
    if stated:
        return f"the {entries} entries are read as {_READ_AS[kind]}, as `kind: {kind}` says"
    if kind == SEEDS:
        return f"the {entries} entries are read as {_READ_AS[kind]}, because they are of several runs"
    read = f"the {entries} entries are read as {_READ_AS[kind]}, because nothing says otherwise"
    return f"{read}; `kind: seeds` or `kind: models` in the study (or --kind of analyze) would"
