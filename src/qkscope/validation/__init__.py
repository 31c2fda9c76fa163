"""Raw vectors and the published protocol: what results can be validated against, in the predecessor's own terms.

On disk, imported by lenses and by a run:
- `layout`, `scan`, `write`: qk-sniffer's datasets of queries and keys: names and metadata, checks, writing.
- `sampling`: which tokens a sample keeps, and the published rate.
- `kept`: the vectors that a run kept (`run --vectors`), one layer at a time.

With lenses, imported by commands:
- `read`, `tables`: `qk.csv` from any such dataset (`analyze --vectors`).
- `plasticity`, `published`, `plasticity_table`: plasticity from sampled pairs of keys (`analyze --plasticity-pairs`).
"""
