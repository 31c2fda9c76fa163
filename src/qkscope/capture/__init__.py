"""The one stage that knows transformers: load a checkpoint, run its backbone, watch its attention."""
