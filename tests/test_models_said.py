"""What is said and drawn of models and of seeds, by every lens: no word of training, no entry singled out."""

import re

import numpy as np
import pandas as pd
import pytest
from matplotlib.text import Text

from entry_worlds import ENTRIES, results_of, tables_of
from lens_worlds import tables_of as checkpoints
from qkscope.lenses.registry import registered
from qkscope.lenses.views import build_tables
from qkscope.report.lead import lead
from qkscope.report.write import page_cards, write_report
from qkscope.results.read import load_results
from qkscope.words.blocks import plain, to_markdown
from reports import drawing

KINDS = ("models", "seeds")
LABELS = {kind: [label for _, label, *_ in entries] for kind, entries in ENTRIES.items()}
ANY_LABEL = "|".join(sorted({label for labels in LABELS.values() for label in labels}))
# What may be said of the stages of one run only. "At" an entry is a moment; "in" it is a thing with heads.
OF_TRAINING = (
    r"\btraining|\btrained\b|checkpoint|emerge|turnover|lasting|\bearlier (?!key|bucket)|"
    r"\b(grows?|growth|shrinks?|widens|narrows|tightens)\b(?! with (the window|position|the square root))|"
    r"(?<!Thin )(?<!Dashed )\blines are means|as lines\b|(?<!position )(?<!PC0 )→|\blines join|over time|"
    rf"\bat ({ANY_LABEL})\b|\bfrom ({ANY_LABEL}) to ({ANY_LABEL})|"
    r"\bat (all )?\d+ (of \d+ )?(models|seeds)|\bat (any|every|each) (model|seed)\b(?!')"
)
TRAINING = re.compile(OF_TRAINING, re.IGNORECASE)


def without_code(markdown):
    return re.sub(r"`[^`]*`", "", markdown)


def found_in(text, where):
    """Every place where a text speaks of training, with its surroundings."""
    return [f"{where}: {text[max(0, f.start() - 60) : f.end() + 40]!r}" for f in TRAINING.finditer(text)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_card_of_any_lens_speaks_of_training(kind):
    tables = tables_of(kind)
    cards = page_cards(tables)
    drawn = {card.figure for card in cards}
    without = [lens.name for lens in registered() if lens.figures and not drawn & {f.name for f in lens.figures}]
    assert set(without) <= {"ablation", "runs", "across_models"}  # they need another command, steps, or models
    found = [line for card in cards for line in found_in(without_code(to_markdown(card.blocks)), card.figure)]
    assert found == []
    assert found_in(" ".join(lead(tables)), "lead") == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_card_of_any_lens_speaks_of_the_last_entry_alone(kind):
    """In a list of models or seeds the last is no more than that: what is said of it is said of each.

    It may be the one that has most of something.
    """
    found = []
    for card in (each for each in page_cards(tables_of(kind)) if not each.common):
        alone = dict.fromkeys(LABELS[kind], 0)
        for text in (plain(block.text) for block in card.blocks if block.kind != "heading"):
            named = [label for label in LABELS[kind] if re.search(rf"\b{label}\b", text)]
            if len(named) == 1 and not re.search(rf"\bmost\b[^.]* in {named[0]}", text):
                alone[named[0]] += 1
        if alone[LABELS[kind][-1]] and not all(alone.values()):
            found.append(f"{card.figure}: paragraphs about one entry alone: {alone}")
    assert found == []


@pytest.fixture(scope="module", params=KINDS)
def written(request, tmp_path_factory):
    """The page of a study of models, or of seeds."""
    folder = tmp_path_factory.mktemp(request.param)
    write_report(results_of(request.param), figures=False, out=folder)
    return folder / "report.html"


# Everything that a reader sees or hears: text, names of controls, titles of what is drawn.
SPOKEN = """() => {
  document.querySelectorAll('pre').forEach((node) => node.remove());  // files as they are
  const said = [document.body.innerText];
  for (const name of ['aria-label', 'aria-description', 'aria-valuetext', 'title', 'placeholder'])
    document.querySelectorAll(`[${name}]`).forEach((node) => said.push(node.getAttribute(name)));
  document.querySelectorAll('svg text, svg title, svg desc, option').forEach((node) => said.push(node.textContent));
  return said;
}"""


@pytest.mark.slow
def test_nothing_on_the_page_speaks_of_training(visit, written):
    with visit(written, "#head=1.1") as page:
        page.evaluate("document.querySelectorAll('details').forEach((node) => { node.open = true; })")
        page.wait_for_timeout(500)
        for view in page.locator("section, details, figure").all():
            if view.is_visible():
                view.scroll_into_view_if_needed()
        said = page.evaluate(SPOKEN)
    found = {line for text in said for line in found_in(text, "page")}
    assert sorted(found) == []


@pytest.mark.slow
def test_dots_of_the_first_screen_have_the_names_of_their_entries(visit, written, request):
    """They have no order that would say which is which. A name that is too long for its place keeps both ends."""
    with visit(written) as page:
        for chart in page.locator(".finding svg").all():
            texts = chart.locator("text").all_text_contents()
            labels = LABELS[request.node.callspec.params["written"]]
            shown = [text for text in texts if any(fits(text, label) for label in labels)]
            assert len(shown) == len(labels), texts


def fits(text, label):
    start, cut, end = text.partition("…")
    return text == label or bool(cut and start and label.startswith(start) and label.endswith(end))


# --- figures ----------------------------------------------------------------------------------------


def words_in(figure):
    """Everything that is written in a drawing."""
    return " ".join(text.get_text() for text in figure.findobj(Text))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["profile", "score_heads", "score_map", "rope_kernel", "rotation_planes"])
@pytest.mark.parametrize("kind", KINDS)
def test_figures_of_single_heads_show_some_of_every_entry(kind, name):
    written = words_in(drawing(tables_of(kind), name))
    assert [label for label in LABELS[kind] if label not in written] == []


@pytest.mark.slow
def test_sliding_layers_have_a_mark_of_their_own_against_rope_alone():
    figure = drawing(tables_of("models"), "rope_alone")
    panels = [{c.get_gid(): len(c.get_offsets()) for c in axes.collections if "r_q" in (c.get_gid() or "")}
              for axes in figure.axes[:3]]  # fmt: skip
    counts = [{gid: n for gid, n in panel.items() if n and "error" not in gid} for panel in panels]
    assert counts == [
        {"r_q rotary": 4, "r_q rotary limited": 12},
        {"r_q rotary": 12, "r_q still": 4},
        {"r_q rotary": 16},
    ]
    assert "sliding or chunked layers" in [text.get_text() for text in figure.legends[0].get_texts()]
    assert "sliding" not in words_in(drawing(checkpoints(), "rope_alone"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["layer_heatmap_rq", "layer_heatmap_rk"])
def test_models_of_different_contexts_have_depth_maps_at_the_common_window(name):
    figure = drawing(tables_of("models"), name, common=True)
    assert "at a Common Window" in words_in(figure)
    assert drawing(checkpoints(), name, common=True) is None


# --- kinds of layers --------------------------------------------------------------------------------


@pytest.mark.slow
def test_cards_of_means_over_all_heads_say_that_kinds_of_layers_are_pooled():
    pooled = "Heads of all kinds of layers are taken together here (rotary, full; rotary, sliding 16; NoPE, full); the"
    told = {card.figure for card in page_cards(tables_of("models")) if pooled in to_markdown(card.blocks)}
    assert told >= {"measures", "concordance", "taxonomy_evolution"}


@pytest.mark.slow
def test_claims_say_which_kind_of_layers_they_are_about():
    claims = tables_of("models").own.table("claims").set_index(["claim", "model"])["population"]
    assert claims["rope_structure", "gemma-x"] == "rotary, sliding 16 layers"
    assert claims["rope_structure", "llama-t"] == "all heads"
    assert "rotary, full" in claims["nope_less", "smol-3"]


@pytest.mark.parametrize(
    ("kinds", "found"),
    [
        ({"rotary": "full", "nope": "full"}, True),
        ({"rotary": "sliding", "nope": "full"}, False),  # a difference might come from how far layers see
        ({"rotary": "sliding", "nope": "sliding"}, True),
    ],
)
def test_nope_layers_are_compared_with_rotary_ones_that_see_as_far(tmp_path, kinds, found):
    rng = np.random.default_rng(0)
    heads = [
        {"model": "one", "layer": 4 * i + layer, "head": head, "pc": 0, "explained_variance": 0.3, "r_q": r, "r_k": 0.1}
        | {"rotary": rotary, "attention": attention, "attention_window": 16 if attention == "sliding" else None}
        for i, (rotary, attention) in enumerate(kinds.items())
        for layer, head in np.ndindex(4, 4)
        for r in [0.8 - 0.6 * i + rng.normal(0, 0.02)]
    ]
    pd.DataFrame(heads).to_csv(tmp_path / "qk.csv", index=False)
    claims = build_tables(load_results(tmp_path)).own.table("claims").set_index("claim")
    assert np.isfinite(claims.loc["nope_less", "value"]) == found
    assert claims.loc["nope_less", "verdict"] == "undecided"  # these results have no errors over documents
    assert ("see equally much" in claims.loc["nope_less", "why"]) == (not found)
