"""Tiny random models of real transformers classes, one per head layout that matters."""

import torch
import transformers

COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny(model_type: str, seed: int = 0, **changes):
    """A causal language model of `model_type` with random weights."""
    config = transformers.AutoConfig.for_model(model_type, **{**COMMON, **changes})
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def tokens(rows: int = 2, length: int = 48, seed: int = 0, vocabulary: int = 128) -> torch.Tensor:
    return torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))
