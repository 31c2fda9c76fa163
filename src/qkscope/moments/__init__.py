"""Sums instead of vectors: second moments of queries and keys that add over batches, shards and machines."""
