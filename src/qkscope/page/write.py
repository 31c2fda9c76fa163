"""`report.html`: everything the page knows, put together and written as one file.

Browsers do not load modules from disk, so the modules of `static/` become one module script: each, after those that it
imports, a function that is called at once and returns its exports. Comment lines and indentation are left out. Modules
keep three rules, which are checked: an import is one statement `import { a, b } from "./other.js";`, an export stands
before a declaration, and no text between backticks or comment between /* and */ goes on in the next line.

The policy in the head allows exactly this script and this style, by their hashes, and no request to anywhere.
"""

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from qkscope.files import write_text
from qkscope.lenses.registry import registered
from qkscope.lenses.views import Results
from qkscope.page.about import about_study, commands, facts, legend
from qkscope.page.arrays import add_tables
from qkscope.page.detail import add_details
from qkscope.page.errors import add_changes, add_errors, add_replicates, add_windows
from qkscope.page.lens_data import add_lenses, add_mean_errors, kept_columns, lens_tables
from qkscope.page.pack import Pack, squeeze
from qkscope.results.folder import PROVENANCE_JSON, REPORT_HTML, results_file
from qkscope.results.mapped import drop_page_cache
from qkscope.text import PathShortener
from qkscope.words.blocks import AnyBlock, to_page

ENTRY = "main.js"
_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([a-z_]+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?function|const|class) (\w+)", re.MULTILINE)
_COMMENT = re.compile(r"^\s*//.*$", re.MULTILINE)
_STYLE_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_STRAY = re.compile(r"^\s*(?:import|export)\b", re.MULTILINE)
# What could end a script element or be read as markup, and the two line ends that JSON allows and old scripts do not.
_UNSAFE = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


@dataclass(frozen=True)
class PageCard:
    """A card, and the figure that it belongs to."""

    figure: str
    blocks: Sequence[AnyBlock]


def page_html(tables: Results, summary: Mapping[str, Any], cards: Sequence[PageCard], out: Path | None = None) -> str:
    """The page as text; `summary` is what the first screen states."""
    results, lenses = tables.files, registered()
    pack, later = Pack(), Pack()
    grid, data = add_tables(pack, results)
    drop_page_cache()
    large = data["precision"] == "float32"
    add_errors(pack, grid, tables, large=large)
    drop_page_cache()
    of_lenses = lens_tables(tables)
    kept = kept_columns(grid, lenses, of_lenses, large=large)
    blocks = {card.figure: to_page(card.blocks) for card in cards}
    about = {
        **about_study(tables),
        **legend(),
        "enough": add_windows(pack, grid, tables.own, data["windows"]),
        # examples: single heads that show how to read the numbers
        "summary": {**summary, "examples": [e for each in lenses if each.examples for e in each.examples(tables.own)]},
        "facts": facts(tables),
        "cards": [{"figure": name, "title": card_title(name, shown)} for name, shown in blocks.items()],
        "commands": commands(results, out),
        "data": data,
    }
    kind = tables.own.study.kind
    shown_lenses = add_lenses(pack, grid, lenses, of_lenses, set(blocks), large=large, kept=kept, kind=kind)
    long: dict[str, Any] = {"lenses": shown_lenses}
    for view in (view for lens in lenses for view in lens.own_views):
        if view.name in about or view.name in long:
            raise ValueError(f"the page has something else under the name of the view {view.name!r}")
        long[view.name] = view.data(tables)
    drop_page_cache()
    add_mean_errors(pack, grid, lenses, tables)
    add_replicates(pack, grid, tables)
    data["changes"], data["columnsAt"] = add_changes(pack, grid, tables), kept
    data["detail"] = add_details(later, grid, of_lenses)
    shared = PathShortener().value(results.provenance.to_json(), PROVENANCE_JSON)
    later.add_text("provenance", json.dumps(shared, indent=1, ensure_ascii=False))
    later.add_text("cards", json.dumps(list(blocks.values()), ensure_ascii=False))
    about["long"] = squeeze(long)
    data["arrays"], data["later"] = squeeze(pack.index), squeeze(later.index)
    return assemble(about, pack.text(), later.text())


def card_title(figure: str, blocks: Sequence[Mapping[str, Any]]) -> str:
    """The first heading of a card."""
    first = next((block for block in blocks if block["kind"] == "heading"), None)
    return figure if first is None else "".join(text for _, text in first["runs"])


def write_page(tables: Results, summary: Mapping[str, Any], cards: Sequence[PageCard], out: Path | None = None) -> Path:
    """Write `report.html` into the results folder, or into another."""
    path = results_file(out or tables.files.writable_folder, REPORT_HTML)
    write_text(path, page_html(tables, summary, cards, out))
    return path


# --- one file ---------------------------------------------------------------------------------------


def static(name: str) -> str:
    """A file of the page as it is in the package."""
    return resources.files("qkscope.page").joinpath("static", name).read_text(encoding="utf-8")


def modules() -> list[str]:
    """The names of all modules that the page needs, each after those it imports."""
    order: list[str] = []

    def visit(name: str, path: list[str]) -> None:
        if name in path:
            raise ValueError(f"modules import each other in a circle: {' > '.join([*path, name])}")
        if name not in order:
            for _, other in _IMPORT.findall(static(name)):
                visit(f"{other}.js", [*path, name])
            order.append(name)

    visit(ENTRY, [])
    return order


def script() -> str:
    """All modules as one."""
    text = "\n".join(_as_function(name, static(name)) for name in modules())
    if "</script" in text.lower() or "<!--" in text:
        raise ValueError("a module contains text that would end its script element")
    return text


def _as_function(name: str, body: str) -> str:
    exported = [match[2] for match in _EXPORT.finditer(body)]
    body = _EXPORT.sub(r"\1 \2", _IMPORT.sub(r"const {\1} = module_\2;", body))
    if _STRAY.search(body):
        raise ValueError(f"{name}: an import or export that the page cannot put in line")
    body = without_indentation(_COMMENT.sub("", body))
    for line in body.splitlines():
        if line.count("`") % 2 or ("/*" in line and "*/" not in line):
            raise ValueError(f"{name}: text or a comment that goes on in the next line, which the page cannot shorten")
    variable = f"module_{name.removesuffix('.js')}"
    return f"const {variable} = (() => {{\n{body}\nreturn {{ {', '.join(exported)} }};\n}})();\n"


def without_indentation(text: str) -> str:
    """Lines without indentation, empty ones left out: a tenth of what the page would carry."""
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())


def style() -> str:
    """The style without comments."""
    return without_indentation(_STYLE_COMMENT.sub("", static("page.css")))


def safe_json(value: Any) -> str:
    """JSON that stays JSON inside a script element, whatever the names in it are."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).translate(_UNSAFE)


def page_policy() -> str:
    """The policy of the page that this version writes: our own script and style, and pictures made by the page."""
    hashes = [hashlib.sha256(f"\n{text}".encode()).digest() for text in (script(), style())]
    code, look = (f"'sha256-{base64.b64encode(each).decode('ascii')}'" for each in hashes)
    return (
        f"default-src 'none'; script-src {code}; style-src {look}; img-src data: blob:; base-uri 'none'; "
        "form-action 'none'"
    )


def assemble(about: dict[str, Any], packed: str, later: str = "") -> str:
    """The page; `later` is what it unpacks when it is first needed."""
    filled = {
        "policy": page_policy(),
        "style": f"\n{style()}",
        "about": safe_json(about),
        "pack": packed,
        "later": later,
        "script": f"\n{script()}",
    }
    # One pass, so that text that looks like a placeholder stays text.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: filled[match[1]], static("page.html"))
