"""The study of real models: findings claim what exceeds two errors and nothing else; its tokenizer reads and writes."""

import struct
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import findings
import study as real_study

pytestmark = pytest.mark.slow


class Told(findings.Study):
    """A study whose numbers are given: (file, column, model) to (mean, error)."""

    def __init__(self, corpus, numbers, entries):
        self.corpus, self.numbers, self._entries = corpus, numbers, entries

    def number(self, file, column, model, *, common=False):
        return self.numbers.get((column, model), (float("nan"), float("nan")))

    @property
    def entries(self):
        return self._entries

    def window(self, model, *, common=False):
        return 256 if common else 1024


def entry(name):
    from qkscope.results.entries import Entry

    return Entry(name, name.upper())


def test_a_claim_counts_only_what_exceeds_two_errors():
    models = (entry("a"), entry("b"), entry("c"))
    numbers = {("r_a_gap", "a"): (0.3, 0.1), ("r_a_gap", "b"): (-0.3, 0.1), ("r_a_gap", "c"): (0.1, 0.06)}
    said = findings.claims([Told("speeches", numbers, models)]).splitlines()[2]
    assert "so in 1 of 3, the contrary in 1 (B on speeches), within two errors of 0 in 1" in said
    assert "cannot be looked at here" in findings.claims([Told("speeches", {}, models)])


def test_an_error_that_is_not_known_proves_nothing():
    assert not findings.sure((5.0, float("nan")))
    assert not findings.apart((1.0, 0.1), (5.0, float("nan")))
    assert findings.apart((1.0, 0.1), (1.3, 0.1))
    assert not findings.apart((1.0, 0.1), (1.25, 0.1))  # 0.25 is below 2 x 0.141


def test_corpora_differ_where_numbers_do():
    models = (entry("a"),)
    one = Told("speeches", {("r_q", "a"): (0.5, 0.01), ("r_k", "a"): (0.5, 0.1)}, models)
    other = Told("code", {("r_q", "a"): (0.6, 0.01), ("r_k", "a"): (0.6, 0.1)}, models)
    said = findings.texts([one, other])
    assert "1 of 2 numbers differ between speeches and code by more than two errors: r_q of A" in said


def test_llama2_tokenizers_merge_in_the_order_of_their_pieces():
    """Pieces by rank: `▁ab` comes before `bc`, so that `abc` is `▁ab` + `c` and not `▁a` + `bc`."""
    specials = [b"<unk>", b"\n<s>\n", b"\n</s>\n"] + [f"<0x{i:02X}>".encode() for i in range(256)]
    pieces = [b" a", b" ab", b"bc", b" ", b"a", b"b", b"c"]
    pieces += [f"filler{i}".encode() for i in range(32000 - len(specials) - len(pieces))]
    data = struct.pack("<i", 12) + b"".join(struct.pack("<fi", 0.0, len(p)) + p for p in specials + pieces)
    made = real_study.llama2c_tokenizer(data)
    assert made.convert_ids_to_tokens(made("abc", add_special_tokens=False)["input_ids"]) == ["▁ab", "c"]
    ids = made("abc é", add_special_tokens=False)["input_ids"]
    assert made.decode(ids) == "abc é"  # é is two bytes
    with pytest.raises(SystemExit, match="not 32000"):
        real_study.llama2c_tokenizer(data[:1000])
