"""One HTML file from the template, the style, the modules and the data.

Browsers do not load modules from disk, so the modules of `static/` are put one after the other, in the order in which
they import each other, into one module script: each becomes a function that is called at once and returns what it
exports. Lines that are comments, and the spaces before others, stay in the package. This works because every module
keeps three rules, which are checked: an import is one statement `import { a, b } from "./other.js";`, an export stands
before a declaration, and no text between backticks or comment between /* and */ goes on in the next line.

The policy in the head allows exactly this script and this style, by their hashes, and no request to anywhere.
"""

import base64
import hashlib
import json
import re
from importlib import resources
from typing import Any

ENTRY = "main.js"
_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([a-z_]+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?function|const|class) (\w+)", re.MULTILINE)
_COMMENT = re.compile(r"^\s*//.*$", re.MULTILINE)
_STYLE_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_STRAY = re.compile(r"^\s*(?:import|export)\b", re.MULTILINE)
# What could end a script element or be read as markup, and the two line ends that JSON allows and old scripts do not.
_UNSAFE = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def static(name: str) -> str:
    """A file of the page as it is in the package."""
    return resources.files("qkscope.page").joinpath("static", name).read_text(encoding="utf-8")


def modules() -> list[str]:
    """The names of all modules that the page needs, each after those it imports."""
    order: list[str] = []
    _visit(ENTRY, order, [])
    return order


def _visit(name: str, order: list[str], path: list[str]) -> None:
    if name in path:
        raise ValueError(f"modules import each other in a circle: {' > '.join([*path, name])}")
    if name not in order:
        for _, other in _IMPORT.findall(static(name)):
            _visit(f"{other}.js", order, [*path, name])
        order.append(name)


def script() -> str:
    """All modules as one."""
    text = "\n".join(_as_function(name, static(name)) for name in modules())
    if "</script" in text.lower() or "<!--" in text:
        raise ValueError("a module contains text that would end its script element")
    return text


def _as_function(name: str, body: str) -> str:
    exported = [match[2] for match in _EXPORT.finditer(body)]
    body = _IMPORT.sub(r"const {\1} = module_\2;", body)
    body = _EXPORT.sub(r"\1 \2", body)
    if _STRAY.search(body):
        raise ValueError(f"{name}: an import or export that the page cannot put in line")
    variable = f"module_{name.removesuffix('.js')}"
    return f"const {variable} = (() => {{\n{shipped(name, body)}\nreturn {{ {', '.join(exported)} }};\n}})();\n"


def shipped(name: str, code: str) -> str:
    """A module without the lines that are comments and without indentation: a tenth of what the page would carry."""
    lines = [line.strip() for line in _COMMENT.sub("", code).splitlines()]
    for line in lines:
        if line.count("`") % 2 or ("/*" in line and "*/" not in line):
            raise ValueError(f"{name}: text or a comment that goes on in the next line, which the page cannot shorten")
    return "\n".join(line for line in lines if line)


def shipped_style(style: str) -> str:
    """The style without comments and indentation."""
    lines = [line.strip() for line in _STYLE_COMMENT.sub("", style).splitlines()]
    return "\n".join(line for line in lines if line)


def safe_json(value: Any) -> str:
    """JSON that stays JSON inside a script element, whatever the names in it are."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).translate(_UNSAFE)


def digest(text: str) -> str:
    """The hash by which the policy knows an inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}'"


def policy(code: str, style: str) -> str:
    """Nothing is allowed but our own script and style, and pictures made by the page itself."""
    return (
        f"default-src 'none'; script-src {digest(code)}; style-src {digest(style)}; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def page_policy() -> str:
    """The policy of the page that this version writes."""
    return policy(*_code_and_style())


def _code_and_style() -> tuple[str, str]:
    return f"\n{script()}", f"\n{shipped_style(static('page.css'))}"


def assemble(about: dict[str, Any], packed: str, later: str = "") -> str:
    """The page; `later` is what it unpacks when it is first needed."""
    code, style = _code_and_style()
    filled = {
        "policy": policy(code, style),
        "style": style,
        "about": safe_json(about),
        "pack": packed,
        "later": later,
        "script": code,
    }
    # One pass, so that text that looks like a placeholder stays text.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: filled[match[1]], static("page.html"))
