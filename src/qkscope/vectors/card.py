"""The README of a dataset of vectors: `configs` that make every head loadable by name, and what the columns mean."""

from __future__ import annotations

from collections.abc import Iterable

from qkscope.vectors.layout import HeadName
from qkscope.vectors.sample import VectorSampler

BODY = """# Query and key vectors

{heads} heads' queries and keys as attention multiplies them, written by qkscope. Each token was kept with
probability {rate} (seed {seed}), the same tokens for all heads of a layer, up to position {context}.

| column | what it is |
|---|---|
| `bucket` | which of {buckets} intervals of positions the token is in |
| `example_id` | the document's index in the corpus |
| `position` | the token's position in its document, from 0 |
| `vector` | float32, the head's query (`q`) or key (`k`) |
| `sliding_window` | tokens that the layer's attention sees; null if all |

```python
datasets.load_dataset("path/of/this/folder", "{first}", split="train")
```
"""


def vectors_card(names: Iterable[HeadName], sampler: VectorSampler) -> str:
    """README.md with one Hub configuration per head folder."""
    heads = sorted(names)
    lines = ["---", "configs:"]
    for name in heads:
        lines += [
            f"- config_name: {name.folder}",
            "  data_files:",
            "  - split: train",
            f"    path: {name.folder}/*.parquet",
        ]
    layout = sampler.layout
    body = BODY.format(
        heads=sum(name.kind == "q" for name in heads),
        rate=sampler.words,
        seed=sampler.seed,
        context=layout.context - 1,
        buckets=layout.buckets,
        first=heads[0].folder,
    )
    return "\n".join([*lines, "---", "", body])
