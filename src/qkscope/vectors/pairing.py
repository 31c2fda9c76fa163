"""Which key head each query head reads, when only folders of heads are known.

Grouped-query attention reads key head `h // g`. The group size g is given, or written in the files (qkscope's own),
or inferred, and inference is careful: either every layer shows heads 0 … n-1 and 0 … m-1 with one and the same n / m
(a whole model), or the heads are a sample with exactly the keys they need and no other g comes near. Everything else
is refused: a wrong g pairs queries with foreign keys and still gives plausible numbers.
"""

from __future__ import annotations

from collections.abc import Mapping

from qkscope.vectors.errors import VectorsError
from qkscope.vectors.layout import HeadName, VectorFolders

MARGIN = 3  # head folders by which any other group size must fail: one or two could be lost files
GIVE = "give group_size, the model's query heads divided by its key heads"

GroupSize = int | Mapping[int, int]  # for all layers, or per layer


def infer_group_size(folders: VectorFolders) -> int:
    """The one group size that explains the folders; VectorsError where there is none, or more than one."""
    heads = {layer: (folders.heads(layer, "q"), folders.heads(layer, "k")) for layer in folders.layers()}
    for layer, (queries, keys) in heads.items():
        if not keys:
            raise VectorsError(
                f"{folders.root}: layer {layer} has queries ({HeadName(layer, queries[0], 'q').folder}) but no keys; "
                "add its key heads, or remove its query heads"
            )
    whole = {_whole_ratio(queries, keys) for queries, keys in heads.values()}
    if len(whole) == 1 and (ratio := whole.pop()) is not None:
        return ratio
    widest = max(queries[-1] for queries, _ in heads.values()) + 1
    wrong = {size: sum(_mismatches(*each, size) for each in heads.values()) for size in range(1, widest + 1)}
    best = min(wrong, key=lambda size: (wrong[size], size))
    if wrong[best]:
        raise _no_size_fits(folders, heads)
    rivals = [size for size in wrong if wrong[size] < MARGIN and not _same_pairs(heads, best, size)]
    if rivals:
        raise VectorsError(
            f"{folders.root}: these heads are a sample that fits a group size of {best}, but {rivals[0]} is too close "
            f"to rule out; {GIVE}"
        )
    return best


def _whole_ratio(queries: tuple[int, ...], keys: tuple[int, ...]) -> int | None:
    """Query heads per key head of a layer that has all of both; None if it cannot be a whole layer."""
    if queries != tuple(range(len(queries))) or keys != tuple(range(len(keys))) or len(queries) % len(keys):
        return None
    return len(queries) // len(keys)


def _mismatches(queries: tuple[int, ...], keys: tuple[int, ...], size: int) -> int:
    """Key heads that are needed and missing, or there and not needed."""
    return len({head // size for head in queries} ^ set(keys))


def _same_pairs(heads: Mapping[int, tuple[tuple[int, ...], tuple[int, ...]]], one: int, two: int) -> bool:
    return all(head // one == head // two for queries, _ in heads.values() for head in queries)


def _no_size_fits(folders: VectorFolders, heads: Mapping[int, tuple[tuple[int, ...], tuple[int, ...]]]) -> VectorsError:
    """Name the first key head that is missing under the group size most layers agree with."""
    agree: dict[int, int] = {}
    for queries, keys in heads.values():
        ratio = _whole_ratio(queries, keys)
        if ratio is not None:
            agree[ratio] = agree.get(ratio, 0) + 1
    counts = f"{sum(len(q) for q, _ in heads.values())} query and {sum(len(k) for _, k in heads.values())} key heads"
    general = f"{folders.root}: its {counts} fit no single group size"
    if agree:
        usual = max(sorted(agree), key=lambda ratio: agree[ratio])
        for layer, (queries, keys) in heads.items():
            lost = [head for head in queries if head // usual not in keys]
            if lost:
                return VectorsError(
                    f"{general}: {agree[usual]} of {len(heads)} layers have {usual} query heads per key head, but then "
                    f"{HeadName(layer, lost[0], 'q').folder} has no key partner: "
                    f"{HeadName(layer, lost[0] // usual, 'k').folder} is missing; add it, or {GIVE}"
                )
    return VectorsError(f"{general}; key heads are missing, or the heads are a sample: {GIVE}")


def pair_heads(folders: VectorFolders, size: GroupSize) -> tuple[dict[int, dict[int, int]], list[HeadName]]:
    """Per layer the key head of each query head, and the key heads that no query reads."""
    pairs: dict[int, dict[int, int]] = {}
    lost: list[tuple[HeadName, HeadName]] = []
    for layer in folders.layers():
        group = size_of_layer(size, layer)
        pairs[layer] = {head: head // group for head in folders.heads(layer, "q")}
        keys = set(folders.heads(layer, "k"))
        lost += [
            (HeadName(layer, head, "q"), HeadName(layer, key, "k"))
            for head, key in pairs[layer].items()
            if key not in keys
        ]
    if lost:
        query, key = lost[0]
        more = f" (and {len(lost) - 1} more query heads have none)" if len(lost) > 1 else ""
        raise VectorsError(
            f"{folders.root}: query head {query.folder} has no key partner: {key.folder} is missing{more}; add the key "
            "heads, remove the query heads, or correct group_size"
        )
    read = {HeadName(layer, key, "k") for layer, of in pairs.items() for key in of.values()}
    return pairs, [name for name in folders.files if name.kind == "k" and name not in read]


def size_of_layer(size: GroupSize, layer: int) -> int:
    """A layer's group size, checked."""
    group = size if isinstance(size, int) else size.get(layer)
    if group is None:
        raise VectorsError(f"group_size has no entry for layer {layer}")
    if group < 1:
        raise VectorsError(f"group_size should be at least 1, not {group}")
    return group
