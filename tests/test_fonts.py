"""Labels in any script: drawn where a font has them, never as silent boxes."""

import warnings

import pytest
from matplotlib.font_manager import fontManager, get_font

from qkscope.draw import style
from qkscope.draw.style import RC, plain
from qkscope.errors import QkscopeWarning


@pytest.fixture
def only_own(monkeypatch):
    """A machine with no fonts but matplotlib's."""
    monkeypatch.setattr(style, "families", lambda: (style.OWN_FONT,))


def test_a_character_that_no_font_has_is_written_as_its_number_and_named(only_own):
    with pytest.warns(QkscopeWarning, match=r"no font on this machine has 中文 of 'step 中文'.*Noto Sans CJK"):
        assert plain("step 中文") == "step [U+4E2D][U+6587]"
    with pytest.warns(QkscopeWarning, match="🚀"):
        assert plain("🚀 $5") == r"[U+1F680] \$5"


def test_what_the_own_font_has_is_left_alone(only_own):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plain("1K é ∞ Ж α → …") == "1K é ∞ Ж α → …"


def test_every_family_that_is_used_is_installed_and_the_own_one_comes_first():
    there = {entry.name for entry in fontManager.ttflist}
    assert RC["font.family"][0] == style.OWN_FONT
    assert set(RC["font.family"]) <= there


def test_a_font_of_the_machine_stands_in(monkeypatch):
    """STIXGeneral ships with matplotlib, has characters that DejaVu Sans lacks, and serves as the other font here."""
    path = next(entry.fname for entry in fontManager.ttflist if entry.name == "STIXGeneral")
    others = set(get_font(path).get_charmap()) - own_characters()
    extra = next(chr(c) for c in sorted(others) if chr(c).isprintable())
    monkeypatch.setattr(style, "families", lambda: (style.OWN_FONT, "STIXGeneral"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plain(f"a {extra}") == f"a {extra}"


def own_characters():
    fonts = [e for e in fontManager.ttflist if e.name == style.OWN_FONT]
    path = next(e.fname for e in fonts if e.weight == 400 and e.style == "normal")
    return set(get_font(path).get_charmap())
