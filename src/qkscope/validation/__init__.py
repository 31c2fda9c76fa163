"""Raw vectors and the published protocol: what results can be validated against, in the predecessor's own terms.

`layout`, `scan` and `write` are qk-sniffer's datasets of queries and keys on disk, for lenses and runs. `tables` makes
`qk.csv` of any such dataset, `plasticity_table` estimates plasticity from sampled pairs of keys.
"""
