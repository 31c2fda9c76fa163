"""The house rules: stages import only from stages before them, and nothing heavy before it is needed."""

import ast
import functools
import importlib
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path

import pytest

import qkscope

PACKAGE = Path(qkscope.__file__).parent
# The way data flows; whoever is later may import from whoever is earlier. A module can be a stage of its own: lenses
# read the vectors that a run kept, and some tables of `validation` are made with lenses.
STAGES = [
    "data", "_version", "text", "errors", "foreign", "files", "processes", "layers", "kinds", "study", "documents",
    "moments", "capture", "validation", "results", "stats", "words", "draw", "lenses", "tables",
    "validation.tables", "validation.plasticity", "validation.plasticity_table", "page",
    "report", "compare", "share", "join", "run", "ablate", "cost", "demo", "api", "train", "cli", "__init__",
    "__main__",
]  # fmt: skip
MODULES = sorted(PACKAGE.rglob("*.py"))


def stage(dotted: str) -> str:
    """The first part after `qkscope.`, or the first two where they are a stage of their own."""
    parts = dotted.split(".")[1:] or ["__init__"]
    return ".".join(parts[:2]) if ".".join(parts[:2]) in STAGES else parts[0]


@functools.cache
def imported(path: Path) -> list[str]:
    """The modules that a module imports; a relative import is `.`."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append("." if node.level else node.module or "")
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            names += [name for name in inside if name.removeprefix("qkscope.") in STAGES]  # a module that is a stage
    return names


def stage_of(path: Path) -> str:
    return stage(".".join(("qkscope", *path.relative_to(PACKAGE).with_suffix("").parts)))


def later_imports(path: Path) -> list[str]:
    """What a module imports from a later stage, or relatively."""
    own = STAGES.index(stage_of(path))
    return [
        name
        for name in imported(path)
        if name == "." or (name.split(".")[0] == "qkscope" and STAGES.index(stage(name)) > own)
    ]


def test_benchmarks_and_scripts_import_what_the_package_has():
    """Nothing runs them in a test, so a renamed name would be missed."""
    outside = [path for folder in ("benchmarks", "scripts") for path in (PACKAGE.parents[1] / folder).glob("*.py")]
    missing = []
    for path in outside:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "qkscope":
                module = importlib.import_module(node.module)
                names = [alias.name for alias in node.names if not hasattr(module, alias.name)]
                inside = [name for name in names if hasattr(module, "__path__") and find_spec(f"{node.module}.{name}")]
                missing += [f"{path.name}: {node.module}.{name}" for name in names if name not in inside]
    assert len(outside) > 20
    assert not missing


def heavy_imports(path: Path) -> list[str]:
    """The heavy libraries that a module imports outside of the stages that may."""
    homes = {
        "transformers": {"capture", "demo", "train", "cli"},
        "torch": {"capture", "moments", "validation", "ablate", "demo", "api", "train"},
        "matplotlib": {"draw", "lenses", "report", "compare", "join"},
    }
    libraries = {name.split(".")[0] for name in imported(path)}
    return sorted(each for each in libraries & set(homes) if stage_of(path) not in homes[each])


# Stages that loop over the list of lenses.
DRIVERS = ("tables", "page", "report")
LENSES = {room.parent.name for room in PACKAGE.glob("lenses/*/__init__.py")}


def known_lenses(path: Path) -> list[str]:
    """The lenses of which a module imports something, also as `from qkscope.lenses import one`."""
    inside = "qkscope.lenses."
    known = {name.removeprefix(inside).split(".")[0] for name in imported(path) if name.startswith(inside)}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "qkscope.lenses":
            known |= {alias.name for alias in node.names}
    return sorted(known & LENSES)


def violations(rule: Callable[[Path], list[str]], paths: Iterable[Path] = MODULES) -> dict[str, list[str]]:
    """What breaks a rule, by module."""
    return {str(path.relative_to(PACKAGE)): broken for path in paths if (broken := rule(path))}


def test_a_stage_imports_only_from_stages_before_it():
    assert violations(later_imports) == {}


def test_heavy_libraries_stay_in_their_stages():
    assert violations(heavy_imports) == {}


def draws_or_tells_of_one(path: Path) -> bool:
    """Whether a module is a drawing of one lens, or the story that several lenses' measures tell."""
    place = path.relative_to(PACKAGE).as_posix()
    return place.startswith("report/drawings/") or place in ("report/claims.py", "report/summary.py")


def test_a_driver_knows_no_lens_by_name():
    """What it needs of a lens is declared in `lenses/base.py`; what many lenses share lies beside their folders."""
    drivers = [path for path in MODULES if stage_of(path) in DRIVERS]
    assert violations(known_lenses, [path for path in drivers if not draws_or_tells_of_one(path)]) == {}


def test_the_rules_would_notice(tmp_path, monkeypatch):
    assert {stage_of(path) for path in MODULES} <= set(STAGES)
    assert {"score", "rope", "plasticity"} <= LENSES
    assert {"score", "rope"} <= set(known_lenses(PACKAGE / "lenses/__init__.py"))
    assert known_lenses(PACKAGE / "lenses/rope/__init__.py") == ["rope"]
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    bad = tmp_path / "lenses" / "pca.py"
    bad.parent.mkdir()
    bad.write_text(
        "import torch\nimport numpy\nfrom . import x\nfrom qkscope.errors import X\nimport qkscope.report.y\n"
    )
    assert violations(later_imports, [bad]) == {"lenses/pca.py": [".", "qkscope.report.y"]}
    assert violations(heavy_imports, [bad]) == {"lenses/pca.py": ["torch"]}


def loaded_after(code: str) -> set[str]:
    run = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nprint(' '.join(sys.modules))"],
        capture_output=True,
        text=True,
        check=True,
    )
    return {name.split(".")[0] for name in run.stdout.split()}


HEAVY = {"torch", "transformers", "pandas", "matplotlib", "numpy", "pydantic", "rich"}


def test_importing_the_package_loads_nothing_heavy():
    assert not HEAVY & loaded_after("import qkscope")
    assert not HEAVY & loaded_after("import qkscope; dir(qkscope.train)")


def test_help_loads_nothing_heavy():
    code = "from qkscope.cli.main import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass"
    assert not HEAVY & loaded_after(code)


def test_analysis_needs_no_torch():
    code = "import qkscope.lenses.position, qkscope.tables.from_moments, qkscope.moments.file"
    assert not {"torch", "transformers", "matplotlib"} & loaded_after(code)


def test_the_public_surface_is_small_and_there():
    assert len(qkscope.__all__) <= 10
    for name in qkscope.__all__:
        assert getattr(qkscope, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = qkscope.nonsense
