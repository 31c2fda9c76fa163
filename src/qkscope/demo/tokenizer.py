"""A tokenizer whose tokens are bytes: token id = byte value, nothing added, nothing merged.

It is byte-level BPE without merges, saved in transformers' own format, so that the demo's checkpoints go
through the same AutoTokenizer as any other model.
"""

from __future__ import annotations

from pathlib import Path

VOCABULARY = 256


def byte_symbols() -> list[str]:
    """The printable character that byte-level BPE writes for each byte: itself, or one from 256 upwards."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(VOCABULARY) if byte not in set(printable)]
    stands_for = {byte: chr(byte) for byte in printable} | {byte: chr(VOCABULARY + i) for i, byte in enumerate(others)}
    return [stands_for[byte] for byte in range(VOCABULARY)]


def save_byte_tokenizer(folder: Path) -> None:
    """Write the tokenizer's files into `folder`, where AutoTokenizer finds them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    # use_regex would cut the text into words first, which is of no use without merges.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False).save_pretrained(folder)
