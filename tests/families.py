"""Tiny random models of real transformers classes: one per family, with what is known of its layers by hand."""

from dataclasses import dataclass, field
from typing import Any

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


@dataclass(frozen=True)
class Layer:
    """What a person expects of one layer, from the family's paper or modeling file."""

    rotated: int = 16  # coordinates of a head that RoPE turns
    q: int = 4
    k: int = 2
    width: int = 16
    attention: str = "full"
    window: int | None = None


@dataclass(frozen=True)
class Family:
    """One row of the matrix. `layers` is by hand; None stands for a layer that never calls attention."""

    name: str
    kind: str  # transformers' model type
    layers: list[Layer | None] = field(default_factory=lambda: [FULL] * 4)
    changes: dict[str, Any] = field(default_factory=dict)
    kernel: str = "sdpa"
    causal: bool = True
    pre_rope: bool = True
    positions: str = "rope"  # or "learned"
    borrowed: tuple[int, ...] = ()  # layers that use an earlier layer's keys
    score_scale: float | None = None  # None: 1 / sqrt(width), as most families have it
    note: str = ""

    def config(self, **changes) -> Any:
        return transformers.AutoConfig.for_model(self.kind, **{**COMMON, **self.changes, **changes})

    def build(self, seed: int = 0, **changes) -> Any:
        """The backbone with random weights, its norms included."""
        config = self.config(**changes)
        torch.manual_seed(seed)
        if self.kind == "mllama_text_model":  # the one text part that transformers' AutoModel does not know
            model = transformers.MllamaTextModel(config)
        else:
            model = transformers.AutoModel.from_config(config)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "norm" in name and "weight" in name:
                torch.nn.init.normal_(parameter, mean=0.7, std=0.2)
        return model.eval()


FULL, NOPE = Layer(), Layer(rotated=0)
SLIDING, CHUNKED = Layer(attention="sliding", window=16), Layer(attention="chunked", window=16)
MHA, QUARTER, HALF = Layer(k=4), Layer(rotated=4), Layer(rotated=8)
MLA = Layer(k=4, width=24, rotated=8)

WINDOW = {"sliding_window": 16}
WIDTH = {"head_dim": 16}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
ALTERNATING = ["sliding_attention", "full_attention"] * 2
THREE_TO_ONE = ["sliding_attention"] * 3 + ["full_attention"]
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 2,
}
GEMMA4 = {
    **WIDTH,
    **WINDOW,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 128,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
}
WIDE = Layer(width=32)  # Gemma 4's full-attention layers have wider heads, half of each rotated

FAMILIES = [
    Family("Llama", "llama"),
    Family("OLMo 2", "olmo2", note="norm over all heads, before RoPE"),
    Family("Qwen2", "qwen2"),
    Family(
        "Qwen2, windows on late layers",
        "qwen2",
        [FULL, FULL, SLIDING, SLIDING],
        {**WINDOW, "use_sliding_window": True, "max_window_layers": 2},
    ),
    Family("Qwen3", "qwen3", changes=WIDTH, note="norm per head, before RoPE"),
    Family("Qwen3-MoE", "qwen3_moe", changes={**WIDTH, **EXPERTS}, note="norm per head, before RoPE"),
    Family("SmolLM3", "smollm3", [FULL, FULL, FULL, NOPE], note="every fourth layer without RoPE"),
    Family("Mistral", "mistral", [SLIDING] * 4, WINDOW),
    Family("Ministral", "ministral", [SLIDING, FULL, SLIDING, FULL], {**WINDOW, **WIDTH, "layer_types": ALTERNATING}),
    Family(
        "Ministral 3",
        "ministral3",
        changes={**WIDTH, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}},
        note="query factor grows with position; YaRN scale in cos and sin",
    ),
    Family(
        "Gemma 2",
        "gemma2",
        [SLIDING, FULL, SLIDING, FULL],
        {**WIDTH, **WINDOW},
        kernel="eager",
        score_scale=1 / 16,  # 1 / sqrt(query_pre_attn_scalar), which is 256
        note="scores are soft-capped inside the kernel",
    ),
    Family(
        "Gemma 3 text",
        "gemma3_text",
        [SLIDING, SLIDING, SLIDING, FULL],
        {**WIDTH, **WINDOW, "layer_types": THREE_TO_ONE},
        score_scale=1 / 16,  # 1 / sqrt(query_pre_attn_scalar), which is 256
        note="one RoPE base per layer type; norm per head",
    ),
    Family("Phi-3", "phi3", [SLIDING] * 4, WINDOW, note="packed projection"),
    Family(
        "Phi-3, partial rotary",
        "phi3",
        [Layer(rotated=8, attention="sliding", window=16)] * 4,
        {**WINDOW, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
        note="packed projection",
    ),
    Family("GPT-NeoX (Pythia)", "gpt_neox", [Layer(k=4, rotated=4)] * 4, note="packed projection"),
    Family("Cohere2", "cohere2", [SLIDING, SLIDING, SLIDING, NOPE], WINDOW),
    Family("GLM-4", "glm4", [HALF] * 4, WIDTH),
    Family(
        "Mllama text",
        "mllama_text_model",
        [FULL, None, FULL, None],
        {"cross_attention_layers": [1, 3], "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        note="cross-attention layers skipped without an image",
    ),
    Family("DeepSeek-V3", "deepseek_v3", [MLA] * 4, DEEPSEEK, note="values are narrower than queries and keys"),
    Family(
        "GPT-OSS",
        "gpt_oss",
        [SLIDING, FULL, SLIDING, FULL],
        {**WIDTH, **WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1, "rope_parameters": YARN},
        kernel="eager",
        note="attention sinks inside the kernel; YaRN scale in cos and sin",
    ),
    Family(
        "Llama 4 text",
        "llama4_text",
        [CHUNKED, CHUNKED, CHUNKED, NOPE],
        {**WIDTH, "num_local_experts": 2, "attention_chunk_size": 16, "intermediate_size_mlp": 96, "floor_scale": 16},
        note="norm after RoPE; NoPE query factor grows with position",
    ),
    Family(
        "ModernBERT",
        "modernbert",
        [MHA, Layer(k=4, attention="sliding", window=9), Layer(k=4, attention="sliding", window=9), MHA],
        {"local_attention": 16},
        causal=False,
        note="both directions: a window of 9 is 8 tokens to each side",
    ),
    Family(
        "GPT-2",
        "gpt2",
        [Layer(k=4, rotated=0)] * 4,
        {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 128},
        pre_rope=False,
        positions="learned",
        note="learned positions",
    ),
    Family("nomic-bert", "nomic_bert", [MHA] * 4, causal=False, note="both directions; layers numbered by call order"),
    Family(
        "Gemma 4 text",
        "gemma4_text",
        [SLIDING, SLIDING, SLIDING, WIDE],
        {**GEMMA4, "layer_types": THREE_TO_ONE},
        score_scale=1.0,  # the norm per head does it
        note="full layers have wider, partly rotated heads; norm per head",
    ),
    Family(
        "Gemma 4 text, shared keys",
        "gemma4_text",
        [SLIDING, WIDE, SLIDING, WIDE],
        {**GEMMA4, "layer_types": ALTERNATING, "num_kv_shared_layers": 2},
        borrowed=(2, 3),
        score_scale=1.0,  # the norm per head does it
        note="layers 2 and 3 use the keys of layers 0 and 1; norm per head",
    ),
    Family(
        "Gemma 3n text, shared keys",
        "gemma3n_text",
        [SLIDING, FULL, SLIDING, FULL],
        {
            **WIDTH,
            **WINDOW,
            "layer_types": ALTERNATING,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 128,
        },
        borrowed=(2, 3),
        score_scale=1.0,  # the norm per head does it
        note="layers 2 and 3 use the keys of layers 0 and 1; norm per head",
    ),
    Family(
        "Qwen3-Next",
        "qwen3_next",
        [None, None, None, QUARTER],
        {
            **WIDTH,
            **EXPERTS,
            "shared_expert_intermediate_size": 32,
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        note="linear-attention layers have no queries and keys",
    ),
    Family("DiffLlama", "diffllama", note="two kernel calls per layer, counted once"),
    Family(
        "DeepSeek-V3.2",
        "deepseek_v32",
        [MLA] * 4,
        {**DEEPSEEK, "index_topk": 64, "index_n_heads": 2, "index_head_dim": 16},
        note="an indexer chooses the keys each query sees",
    ),
    Family("OLMo", "olmo"),
    Family("OLMo 3", "olmo3", [SLIDING, SLIDING, SLIDING, FULL], WINDOW, note="norm as in OLMo 2"),
    Family("OLMoE", "olmoe", changes=EXPERTS, note="norm as in OLMo 2"),
    Family("StableLM", "stablelm", [QUARTER] * 4),
    Family("Phi", "phi", [HALF] * 4),
    Family("StarCoder2", "starcoder2", [SLIDING] * 4, WINDOW),
    Family(
        "Apertus",
        "apertus",
        changes={"rope_parameters": {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
        note="norm per head, before RoPE",
    ),
    Family("Granite", "granite", score_scale=1.0),
    Family(
        "EXAONE 4",
        "exaone4",
        [SLIDING, SLIDING, SLIDING, NOPE],
        {**WINDOW, "sliding_window_pattern": 4},
        note="full layers without RoPE; norm per head",
    ),
    Family(
        "ModernBERT decoder",
        "modernbert-decoder",
        [MHA, Layer(k=4, attention="sliding", window=8), Layer(k=4, attention="sliding", window=8), MHA],
        {"local_attention": 16},
    ),
    Family("Doge", "doge", changes={"num_experts": 2}, note="has its own attention interface"),
]

# Families whose modeling code computes attention itself: nothing asks for a kernel, so nothing can be seen.
REFUSED = {
    "Falcon": Family("Falcon", "falcon"),
    "GPT-J": Family("GPT-J", "gptj", changes={"rotary_dim": 8}),
}
