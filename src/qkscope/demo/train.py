"""Training: one SmolLM3, phase after phase, handing over the model wherever a checkpoint is due.

Plain AdamW in float32 (bfloat16 is slow or broken on many CPUs). A phase with a new context or theta gets a new
model with the old weights, so the config that is saved is the one that was trained with. Random numbers come
from the settings' seed alone, and the caller's are left as they were.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, SmolLM3Config, SmolLM3ForCausalLM
from transformers.utils import logging as transformers_logging

from qkscope.demo.corpus import DemoCorpus
from qkscope.demo.settings import DemoCheckpoint, DemoProgress, DemoSettings, PhaseSettings
from qkscope.errors import QkscopeError

VOCABULARY = 256  # bytes

SaveCheckpoint = Callable[[DemoCheckpoint, Any], None]
ReportProgress = Callable[[DemoProgress], None]


def train(
    settings: DemoSettings, corpus: DemoCorpus, save: SaveCheckpoint, progress: ReportProgress | None = None
) -> None:
    """Train through all phases; `save` gets each checkpoint's plan and the model, `progress` each step."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = SmolLM3ForCausalLM(model_config(settings, settings.phases[0]))
    steps, tokens, started = 0, 0, time.perf_counter()
    draw = np.random.default_rng(settings.seed)
    optimizer = make_optimizer(model, settings)
    for phase, start, stop in settings.spans():
        if phase.new_optimizer:
            model = with_phase_config(model, settings, phase)
            optimizer = make_optimizer(model, settings)
        text = np.frombuffer(corpus.training_bytes(phase.mix), dtype=np.uint8)
        due = [plan for plan in settings.checkpoints() if plan.phase == phase]
        for step in range(start + 1, stop + 1):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(phase, step, start, stop)
            loss = training_step(model, optimizer, sample_batch(text, phase, draw), settings.clip_norm)
            steps, tokens = steps + 1, tokens + phase.sequences * phase.context
            if progress is not None:
                speed = tokens / (time.perf_counter() - started)
                progress(DemoProgress(steps, settings.total_steps, phase.title, due[0].name, loss, speed))
            if step == due[0].step:
                save(due.pop(0), model)


def model_config(settings: DemoSettings, phase: PhaseSettings) -> SmolLM3Config:
    """The model at a phase's context and theta."""
    return SmolLM3Config(
        vocab_size=VOCABULARY,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.mlp_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.query_heads,
        num_key_value_heads=settings.kv_heads,
        no_rope_layer_interval=settings.nope_interval,
        max_position_embeddings=phase.context,
        rope_parameters={"rope_type": "default", "rope_theta": phase.rope_theta},
        initializer_range=settings.init_std,
        use_cache=False,
        # All 256 ids are bytes: none is left for a special token.
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )


def with_phase_config(model: Any, settings: DemoSettings, phase: PhaseSettings) -> Any:
    """The same weights under the phase's config: the rotary tables are recomputed."""
    with torch.random.fork_rng(devices=[]):  # weights are drawn only to be replaced
        longer = SmolLM3ForCausalLM(model_config(settings, phase))
    longer.load_state_dict(model.state_dict())
    return longer


def make_optimizer(model: Any, settings: DemoSettings) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only: norm gains have no reason to shrink."""
    weights = list(model.parameters())
    groups = [
        {"params": [weight for weight in weights if weight.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [weight for weight in weights if weight.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=settings.betas, fused=True)  # fused: one pass over the weights


def learning_rate(phase: PhaseSettings, step: int, start: int, stop: int) -> float:
    """The phase's straight line from peak to end, below it during warmup. Steps count from 1."""
    done = (step - start) / (stop - start)
    planned = phase.peak_lr + (phase.end_lr - phase.peak_lr) * done
    return planned * min(1.0, (step - start) / max(phase.warmup, 1))


def sample_batch(text: NDArray[np.uint8], phase: PhaseSettings, draw: np.random.Generator) -> torch.Tensor:
    """Windows from anywhere in the text: (sequences, context) token ids."""
    starts = draw.integers(0, len(text) - phase.context + 1, size=phase.sequences)
    windows = np.stack([text[start : start + phase.context] for start in starts])
    return torch.from_numpy(windows.astype(np.int64))


def training_step(model: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, clip_norm: float) -> float:
    """One step on one batch; the loss before it, in nats per byte."""
    optimizer.zero_grad(set_to_none=True)
    loss = model(input_ids=tokens, labels=tokens).loss
    value = float(loss.detach())
    if not np.isfinite(value):
        raise QkscopeError(f"demo: training diverged (loss {value}); try another seed")
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    optimizer.step()
    return value


def save_checkpoint(model: Any, folder: Path) -> None:
    """Weights as safetensors, config and tokenizer: what AutoModel and AutoTokenizer expect."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # a bar for every file, across the one that the command line draws
    try:
        model.save_pretrained(folder)
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
    for weights in folder.glob("*.safetensors"):  # which the library makes readable for their owner alone
        shutil.copymode(folder / "config.json", weights)
    save_byte_tokenizer(folder)


def save_byte_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose tokens are bytes (token id = byte value) into `folder`, where AutoTokenizer finds it.

    It is byte-level BPE without merges, in transformers' own format, so the demo's checkpoints load like any other.
    """
    # The character that byte-level BPE writes for each byte: itself if it is printable, else one from 256 upwards.
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(VOCABULARY, 2 * VOCABULARY))
    symbols = [chr(byte if byte in printable else next(others)) for byte in range(VOCABULARY)]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: byte for byte, symbol in enumerate(symbols)}, merges=[]))
    # use_regex would cut the text into words first, which is of no use without merges.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False).save_pretrained(folder)
