"""Study files: which checkpoints, which documents, what to measure. Strict YAML in, typed settings out."""
