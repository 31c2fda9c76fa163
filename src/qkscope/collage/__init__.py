"""Pictures of single heads: the kept sample of queries and keys along two axes of the head."""
