"""The first tokens of a text without tokenizing all of it: those of the whole text, for every kind of tokenizer."""

from functools import cache
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from qkscope.demo.train import save_byte_tokenizer
from qkscope.documents import encode as encoding
from qkscope.documents.encode import Encoder
from qkscope.errors import DocumentError
from test_documents import encode

TEXT = [
    "The quick brown fox's friend didn't jump over 12 lazy dogs, did it? No  it\n\ndid not\nat all. " * 3,
    "中文的文字，没有空格。第二句话、还有更多的字\n新的一行 以及 空格 ü Straße Ελλάδα Привет мир 한국어 문장 " * 3,
    "def f(x):\n    return x+1  # naïve café ﬁne Ａｂ ½ 🙂 e\u0301 x y z\n" * 3,
]
BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LLAMA_3 = rf"{SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{BLANKS}"
GPT_4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{SUFFIX}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{SUFFIX}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{BLANKS}"
)
DEEPSEEK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    + BLANKS
)


def trained(model, trainer, normalizer=None, pre_tokenizer=None, post_processor=None, added=()):
    backend = Tokenizer(model)
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    backend.train_from_iterator(TEXT, trainer)
    backend.add_tokens(list(added))
    if post_processor is not None:
        backend.post_processor = post_processor
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def byte_level(pre_tokenizer, **options):
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    return trained(models.BPE(), trainer, pre_tokenizer=pre_tokenizer, **options)


def split_by(expression, *before, behavior="isolated"):
    parts = [pre_tokenizers.Split(Regex(expression), behavior, invert=behavior == "removed")]
    return pre_tokenizers.Sequence([*before, *parts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def sentencepiece_bpe():
    """As Llama 2: spaces become marks, nothing is split, unknown characters become bytes."""
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    learnt = trained(
        models.BPE(),
        trainers.BpeTrainer(vocab_size=300, show_progress=False),
        pre_tokenizer=pre_tokenizers.Metaspace(),
    )
    vocabulary = learnt.get_vocab()
    for byte in range(256):
        vocabulary.setdefault(f"<0x{byte:02X}>", len(vocabulary))
    merges = [(a, b) for a in vocabulary for b in vocabulary if a + b in vocabulary and len(a + b) < 6]
    backend = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizer
    backend.post_processor = processors.TemplateProcessing(
        "<a> $A <b> <b>", special_tokens=[("<a>", vocabulary["e"]), ("<b>", vocabulary["d"])]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def unigram(pre_tokenizer, normalizer=None):
    trainer = trainers.UnigramTrainer(vocab_size=260, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    return trained(models.Unigram(), trainer, normalizer=normalizer, pre_tokenizer=pre_tokenizer)


def word_piece():
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False)
    return trained(
        models.WordPiece(unk_token="[UNK]"),
        trainer,
        normalizer=normalizers.BertNormalizer(),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
        post_processor=processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1)),
    )


def characters():
    letters = sorted(set("".join(TEXT)))
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate([*letters, "<unk>"])}, [], unk_token="<unk>"))
    backend.normalizer = normalizers.NFKC()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


KINDS = {
    "gpt-2": lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "smollm": lambda: byte_level(
        pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    ),
    "llama-3": lambda: byte_level(split_by(LLAMA_3), normalizer=normalizers.NFC()),
    "llama-3 inverted": lambda: byte_level(split_by(LLAMA_3, behavior="removed")),
    "gpt-4o": lambda: byte_level(split_by(GPT_4O), post_processor=processors.ByteLevel()),
    "deepseek": lambda: byte_level(
        split_by(DEEPSEEK, pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated")), normalizer=normalizers.Sequence([])
    ),
    "bytes": lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)),
    "added tokens": lambda: byte_level(
        pre_tokenizers.ByteLevel(),
        added=[AddedToken("fox", lstrip=True), AddedToken("mir", rstrip=True, single_word=True), "  ", "<|x|>"],
    ),
    "llama-2": sentencepiece_bpe,
    "metaspace unigram": lambda: unigram(pre_tokenizers.Metaspace(), normalizers.NFKC()),
    "unigram, nothing split": lambda: unigram(
        pre_tokenizers.Metaspace(split=False),
        normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]),
    ),
    "wordpiece": word_piece,
    "characters": characters,
    "some words joined by their model": lambda: trained(
        models.BPE(), trainers.BpeTrainer(vocab_size=200, show_progress=False)
    ),
}
UNUSUAL = {
    "another expression": lambda: byte_level(split_by(r"[a-z]+ [a-z]+|.")),
    "an added token with a space": lambda: byte_level(
        pre_tokenizers.ByteLevel(), added=["quick brown", "a\nb", "字，字", "字。字", "字、字"]
    ),
    "dropout": lambda: trained(
        models.BPE(dropout=0.5),
        trainers.BpeTrainer(vocab_size=100, show_progress=False),
        pre_tokenizer=pre_tokenizers.Whitespace(),
    ),
}


def demo():
    with TemporaryDirectory() as folder:
        save_byte_tokenizer(Path(folder))
        return AutoTokenizer.from_pretrained(folder)


@cache
def made(kind):
    return {**KINDS, **UNUSUAL, "demo": demo}[kind]()


pieces = st.sampled_from(
    [*"abexyzÜé字文한ЖΩ019 \n\n\t.,'’-_/，。、！🙂ﬁ½Ａ\u0301\u00a0\u3000▁Ġ", "  ", " \n", "'s", "'ll", "\r\n",
     "fox", " the ", "word", "mir", "<|x|>", "quick brown", "a" * 40, "字" * 30, "🙂" * 9, "The quick brown fox's",
     "e\u0301", "👩\u200d👩\u200d👧", "İ", "ς"]
)  # fmt: skip
texts = st.lists(pieces, max_size=120).map("".join) | st.text(max_size=200) | st.sampled_from(TEXT)


@pytest.mark.parametrize("special_tokens", ["default", "none"])
@pytest.mark.parametrize("kind", [*KINDS, *(kind for kind in UNUSUAL if kind != "dropout")])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(texts, min_size=1, max_size=4).map(" ".join), st.integers(1, 40))
def test_the_first_tokens_are_those_of_the_whole_text(kind, special_tokens, text, needed):
    tokenizer = made(kind)
    text = f"{text} {text[::-1]} " * 8  # longer than what is tokenized first
    whole = encode(tokenizer, text, special_tokens)
    assert Encoder(tokenizer, special_tokens).first(text, needed) == whole[:needed]


@pytest.mark.parametrize("kind", ["wordpiece", "llama-2"])
def test_tokens_added_at_the_end_are_never_taken_for_the_text(kind):
    """A word is one token here or many, so that some prefix ends just where the needed tokens do."""
    for word in ("q" * 130, "and then"):
        text = f"{word} " * 60
        whole = encode(made(kind), text, "default")
        for needed in range(1, 50):
            assert Encoder(made(kind), "default").first(text, needed) == whole[:needed]


@pytest.mark.parametrize("kind", KINDS)
def test_these_tokenizers_do_not_read_on(kind):
    """What is far behind the needed tokens is not even looked at: there it would make the tokenizer fail."""

    class Fails:
        bos_token_id = None

        def __getattr__(self, name):
            return getattr(made(kind), name)

        def __call__(self, text, **options):
            assert len(text) < 5000
            return made(kind)(text, **options)

    text = "Plain words that follow one another " * 10_000
    assert Encoder(Fails(), "none").first(text, 64) == encode(made(kind), text[:5000], "none")[:64]


def test_a_tokenizer_whose_first_tokens_depend_on_the_end_of_a_text_gets_all_of_it():
    class Own(PreTrainedTokenizerFast):
        def _encode_plus(self, text, *args, **kwargs):
            return super()._encode_plus(text[::-1], *args, **kwargs)

    own, text = Own(tokenizer_object=made("gpt-2").backend_tokenizer), "".join(f"{n} " for n in range(5000))
    assert Encoder(own, "none").start(text, 4) == (encode(own, text, "none")[:4], True)


def test_a_tokenizer_that_panics_names_the_document_and_itself():
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate("xy")}, []))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"(x+x+)+y"), "isolated")
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, name_or_path="org/evil")
    with pytest.raises(DocumentError, match=r"a\.txt: the tokenizer org/evil fails on it \(LibraryPanic: "):
        Encoder(tokenizer, "none").first("x" * 5000, 8, "a.txt")


def test_other_errors_of_a_tokenizer_are_told_alike():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="?")))
    with pytest.raises(DocumentError, match=r"b\.txt: the tokenizer \w+ fails on it \(Exception: WordLevel error"):
        Encoder(tokenizer, "none").first("b", 8, "b.txt")


# -- bounds --------------------------------------------------------------------------------------------------


def bounded(monkeypatch, characters, per_token):
    """A small bound, so that short texts are beyond it."""
    monkeypatch.setattr(encoding, "FEWEST_TOKENIZED", characters)
    monkeypatch.setattr(encoding, "MOST_CHARACTERS", per_token)


@pytest.mark.parametrize("kind", ["demo", "gpt-2", "llama-3", "llama-2", "unigram, nothing split", "wordpiece"])
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    text=st.lists(texts | st.text("ab字 ", max_size=300), min_size=1, max_size=6).map(" ".join),
    needed=st.integers(1, 60),
    characters=st.integers(16, 200),
    special_tokens=st.sampled_from(["default", "none"]),
)
def test_beyond_the_bound_ids_are_those_of_the_whole_text_or_follow_the_stated_rule(
    monkeypatch, kind, text, needed, characters, special_tokens
):
    bounded(monkeypatch, characters, 1)  # so near that the last tokens depend on where the text is cut
    tokenizer = made(kind)
    limit = max(characters, needed)
    ids, exact = Encoder(tokenizer, special_tokens).start(text, needed)
    whole = encode(tokenizer, text, special_tokens)
    if len(text) <= limit:
        assert (ids, exact) == (whole[:needed], True)
        return
    beginning = text[:limit]
    one, other = (
        encode(tokenizer, part, special_tokens)[:needed] for part in (beginning, beginning[: -(len(beginning) // 8)])
    )
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    assert ids == [each for each, _ in alike]
    assert exact == (len(ids) == needed)


@pytest.mark.parametrize("kind", [*KINDS, "another expression", "demo"])
def test_a_text_that_nothing_splits_has_the_ids_of_the_whole(monkeypatch, kind):
    """Ids that the rule accepts without proof: here they are right."""
    bounded(monkeypatch, 1000, 10)
    tokenizer = made(kind)
    for unit in ("x", "ab", "字", " ", "\n", "-", "0"):
        text = unit * 5000
        ids, _ = Encoder(tokenizer, "none").start(text, 64)
        whole = encode(tokenizer, text, "none")
        assert ids == whole[: len(ids)], unit
        if len(whole) >= 64 * 10:  # a token is short, so that the bound has enough of them
            assert len(ids) == 64, unit


class Counting:
    """Counts the characters that reach a tokenizer."""

    bos_token_id = None

    def __init__(self, tokenizer):
        self.tokenizer, self.characters = tokenizer, []

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def __call__(self, text, **options):
        self.characters.append(len(text))
        return self.tokenizer(text, **options)


@pytest.mark.parametrize("kind", ["gpt-2", "llama-2", "another expression", "demo"])
@pytest.mark.parametrize("text", ["x" * 300_000, "xyz" * 100_000 + " and then other words" * 100])
def test_no_text_is_tokenized_beyond_the_bound(monkeypatch, kind, text):
    bounded(monkeypatch, 5000, 32)
    counting = Counting(made(kind))
    assert len(Encoder(counting, "none").first(text, 128)) == 128
    assert max(counting.characters) <= 5000


def test_little_of_a_long_text_is_tokenized():
    counting = Counting(made("gpt-2"))
    text = "one line without an end " * 1_000_000
    assert Encoder(counting, "none").start(text, 256) == (encode(made("gpt-2"), text[:9000], "none")[:256], True)
    assert sum(counting.characters) < 10_000


@pytest.mark.parametrize("kind", ["gpt-2", "llama-3", "another expression"])
@pytest.mark.parametrize("text", ["Plain words that follow one another " * 300, "x" * 4000])
def test_a_long_text_begins_with_the_bos_token_that_the_tokenizer_has(monkeypatch, kind, text):
    """Compared with the tokenizer itself, which adds BOS to the whole text."""
    bounded(monkeypatch, 2000, 10)
    backend = Tokenizer.from_str(made(kind).backend_tokenizer.to_str())
    backend.add_special_tokens(["<s>", "</s>"])
    around = [(name, backend.token_to_id(name)) for name in ("<s>", "</s>")]
    plain = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    backend.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=around)
    adding = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    expected = adding(text)["input_ids"]
    assert expected[0] == plain.bos_token_id
    for needed in (1, 2, 64):
        assert Encoder(adding, "default").first(text, needed) == expected[:needed]
        assert Encoder(plain, "bos").first(text, needed) == expected[:needed]
        assert Encoder(adding, "none").first(text, needed) == expected[1 : needed + 1]
