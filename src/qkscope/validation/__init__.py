"""Raw vectors and the published protocol: what results can be validated against, in the predecessor's own terms.

- `layout`, `scan`, `write`: qk-sniffer's datasets of queries and keys on disk: names and metadata, checks, writing.
- `sampling`: which tokens a sample keeps, and the published rate.
- `kept`: the vectors that a run kept (`run --vectors`), one layer at a time.
- `read`, `tables`: `qk.csv` from any such dataset (`analyze --vectors`).
- `plasticity`, `published`: attention plasticity from sampled pairs of keys (`analyze --plasticity-pairs`).

The first two lines import nothing of the lenses, which read kept vectors; the last two come after them.
"""
