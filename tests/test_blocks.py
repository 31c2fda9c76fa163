"""Cards are blocks: whatever a name contains, Markdown and page show it as text, and a list stays a list."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from qkscope.words.blocks import (
    Code,
    Listing,
    OwnWords,
    Strong,
    TableBlock,
    bullet,
    heading,
    markdown_text,
    page_runs,
    paragraph,
    to_markdown,
    to_page,
)

GITHUB = MarkdownIt("commonmark").enable(["table", "strikethrough"])
LINE = st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zl", "Zp"]), max_size=60)


def tokens(markdown):
    """(kind, text) of every inline token of a document."""
    return [(part.type, part.content) for token in GITHUB.parse(markdown) for part in token.children or []]


@given(LINE)
def test_a_name_is_text_in_markdown(name):
    found = tokens(to_markdown([paragraph("at ", name, " it rises")]))
    assert {kind for kind, _ in found} <= {"text", "text_special"}
    shown = "".join(text for _, text in found)
    assert " ".join(shown.split()) == " ".join(f"at {name} it rises".split())


@given(LINE)
def test_a_paragraph_that_begins_with_a_name_is_a_paragraph(name):
    kinds = [token.type for token in GITHUB.parse(to_markdown([paragraph(name, " x")]))]
    assert kinds == ["paragraph_open", "inline", "paragraph_close"]


@pytest.mark.parametrize("text", ["0.512", "3. x", "12) x", "7.", "- x", "# x", "> x", "| x"])
def test_what_a_paragraph_begins_with_is_shown_as_it_is(text):
    kinds = [token.type for token in GITHUB.parse(to_markdown([paragraph(text)]))]
    assert kinds == ["paragraph_open", "inline", "paragraph_close"]
    assert "".join(shown for _, shown in tokens(to_markdown([paragraph(text)]))) == text


@given(LINE.filter(bool))
def test_code_is_one_span_whatever_backticks_it_has(text):
    found = tokens(to_markdown([paragraph("x ", Code(text), " y")]))
    spans = [content for kind, content in found if kind == "code_inline"]
    assert len(spans) == 1
    if text.strip():
        assert spans[0].strip() == " ".join(text.split())


@given(LINE)
def test_the_page_gets_the_text_itself(name):
    runs = page_runs(["a ", Strong(name), Code(name)])
    assert "".join(text for _, text in runs) == f"a {name}{name}"
    assert {kind for kind, _ in runs} <= {"text", "strong", "code"}


@given(LINE, LINE)
def test_a_cell_is_text_in_its_own_column(one, two):
    markdown = to_markdown([paragraph("before"), TableBlock(("a", two), [(one, [Code("x"), two]), (two, "")])])
    parsed = GITHUB.parse(markdown)
    assert [token.type for token in parsed].count("td_open") == 4
    cells = [token for token in parsed if token.type == "inline"][1:]
    shown = ["".join(part.content for part in cell.children if part.type != "code_inline") for cell in cells]
    assert [" ".join(text.split()) for text in shown] == [
        " ".join(text.split()) for text in ("a", two, one, two, two, "")
    ]


def test_a_table_and_a_listing_by_hand():
    blocks = [
        bullet("first"),
        TableBlock(("r_q", "what"), [(["−0.5 ", Strong("(null)")], [Code("a|b")]), ("0.512", "")]),
        Listing("python", ("x = 1", "", "y = 2")),
        bullet("first again"),
        paragraph(OwnWords("p < 0.05")),
    ]
    assert to_markdown(blocks) == (
        "- first\n\n| r\\_q | what |\n|---|---|\n| −0.5 **(null)** | `a\\|b` |\n| 0.512 |  |\n\n"
        "```python\nx = 1\n\ny = 2\n```\n\n- first again\n\np < 0.05\n"
    )
    assert to_page(blocks)[1:3] == [
        {
            "kind": "table",
            "titles": [[["text", "r_q"]], [["text", "what"]]],
            "rows": [[[["text", "−0.5 "], ["strong", "(null)"]], [["code", "a|b"]]], [[["text", "0.512"]], []]],
        },
        {"kind": "listing", "language": "python", "lines": ["x = 1", "", "y = 2"]},
    ]
    assert to_page(blocks)[-1] == {"kind": "paragraph", "runs": [["text", "p < 0.05"]]}


def test_links_that_nobody_asked_for_are_broken():
    assert markdown_text("http://x.y a@b.c www.z.org") == "http\\://x.y a\\@b.c www\\.z.org"


def test_a_document_by_hand():
    blocks = [
        heading(1, "T: r_q"),
        paragraph("One ", Strong("bold"), " ", Code("a_b"), " line."),
        bullet(Strong("M"), ": x"),
        bullet("p: q", level=1),
        bullet("y"),
        paragraph("- no item"),
        bullet("z < 3"),
    ]
    assert to_markdown(blocks) == (
        "# T: r\\_q\n\nOne **bold** `a_b` line.\n\n- **M**: x\n   - p: q\n- y\n\n\\- no item\n\n- z \\< 3\n"
    )
    assert to_page(blocks) == [
        {"kind": "heading", "level": 1, "runs": [["text", "T: r_q"]]},
        {
            "kind": "paragraph",
            "runs": [["text", "One "], ["strong", "bold"], ["text", " "], ["code", "a_b"], ["text", " line."]],
        },
        {"kind": "item", "level": 0, "runs": [["strong", "M"], ["text", ": x"]]},
        {"kind": "item", "level": 1, "runs": [["text", "p: q"]]},
        {"kind": "item", "level": 0, "runs": [["text", "y"]]},
        {"kind": "paragraph", "runs": [["text", "- no item"]]},
        {"kind": "item", "level": 0, "runs": [["text", "z < 3"]]},
    ]
