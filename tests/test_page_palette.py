"""Colors of the page: categories differ for every reader, on light and on dark paper."""

import pytest

from colour_vision import VISIONS, ciede2000, lab, least_difference, linear
from qkscope.draw.palette import BLUE, CAUSE_COLOURS, RED
from qkscope.page.about import CATEGORY_COLOURS, DARK_CATEGORY_COLOURS, DIVERGING, LEAST_DIFFERENCE, SERIES

PAPERS = {"light": CATEGORY_COLOURS, "dark": DARK_CATEGORY_COLOURS}
DARK_PAPER = "#161b22"


def luminance(colour):
    """Relative luminance (WCAG)."""
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear(colour), strict=True))


def contrast(one, other):
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def named(colours):
    return {name: colour for name, colour in colours.items() if name != "undefined"}


def test_the_difference_of_colours_is_that_of_the_published_pairs():
    """Pairs 1, 9 and 34 of Sharma, Wu and Dalal (2005)."""
    assert ciede2000((50.0, 2.6772, -79.7751), (50.0, 0.0, -82.7485)) == pytest.approx(2.0425, abs=1e-4)
    assert ciede2000((50.0, 2.49, -0.001), (50.0, -2.49, 0.0009)) == pytest.approx(7.1792, abs=1e-4)
    assert ciede2000((2.0776, 0.0795, -1.135), (0.9033, -0.0636, -0.5514)) == pytest.approx(0.9082, abs=1e-4)


@pytest.mark.parametrize("paper", PAPERS)
@pytest.mark.parametrize("vision", VISIONS)
def test_categories_can_be_told_apart(vision, paper):
    difference, one, other = least_difference(named(PAPERS[paper]), vision)
    assert difference >= LEAST_DIFFERENCE, f"{one} and {other} differ by {difference:.1f}"


@pytest.mark.parametrize("paper", PAPERS)
@pytest.mark.parametrize("vision", VISIONS)
def test_no_category_looks_like_queries_or_keys(vision, paper):
    for name, colour in PAPERS[paper].items():
        for reserved in (BLUE, RED):
            assert ciede2000(lab(colour, vision), lab(reserved, vision)) > 9, name


@pytest.mark.parametrize(("paper", "background"), [("light", "#ffffff"), ("dark", DARK_PAPER)])
def test_mixed_stands_back(paper, background):
    """Of all categories, `mixed` has the least contrast with the paper, and the others have enough of it."""
    contrasts = {name: contrast(colour, background) for name, colour in named(PAPERS[paper]).items()}
    assert min(contrasts, key=contrasts.get) == "mixed"
    assert contrasts["mixed"] > 1.5
    if paper == "dark":
        assert min(value for name, value in contrasts.items() if name != "mixed") > 3


@pytest.mark.parametrize("vision", VISIONS)
def test_signs_and_parts_can_be_told_apart(vision):
    low, middle, high = DIVERGING[1], DIVERGING[4], DIVERGING[7]
    assert ciede2000(lab(low, vision), lab(high, vision)) > 20
    assert min(ciede2000(lab(end, vision), lab(middle, vision)) for end in (low, high)) > 20
    assert least_difference(dict(enumerate(SERIES)), vision)[0] > 9
    assert least_difference(CAUSE_COLOURS, vision)[0] > 9
