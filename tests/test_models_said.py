"""What is said and drawn of models and of seeds, by every lens: no word of training, no entry singled out."""

import re

import pytest

from entry_worlds import ENTRIES, results_of, tables_of
from qkscope.lenses.registry import registered
from qkscope.report.lead import lead
from qkscope.report.write import page_cards, write_report
from qkscope.words.blocks import plain, to_markdown

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
    assert without == ["runs", "ablation"]  # they need several runs of steps, or another command
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
