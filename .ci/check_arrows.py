"""The rules of the house that no linter knows, read off the source alone: `check_arrows.py [ROOT]`.

* Arrows between the folders point one way (ARROWS). The modules in the root may import every folder; only
  cli/, `__init__` and `__main__` may import the modules in the root.
* Imports of the package's own modules are relative.
* A backend's SDK is imported inside the function that needs it, or under `if TYPE_CHECKING`.
* No `print` and no `assert` in the package, and no module over MAX_LINES.
"""

import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

PACKAGE = "quantmark"
ARROWS = ("cli", "reports", "checks", "annotators", "configs", "observers")  # each may import those after it
IMPORT_ROOT = ("__init__", "__main__")  # modules in the root that may import other modules in the root
LATE = ("coremltools", "ethosu", "executorch", "sklearn", "tosa", "tosa_reference_model", "tosa_serializer")
MAX_LINES = 500

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
TYPING_ONLY = ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def findings(root: Path) -> Iterator[str]:
    """Yield every breach below `root`, as `path:line: what is wrong`."""
    if not (root / "__init__.py").is_file():
        yield f"{root}: holds no package"
    for package in sorted(root.glob("*/__init__.py")):
        if package.parent.name not in ARROWS:
            yield f"{package.relative_to(root)}:1: a folder that no arrow leads to"
    modules = list(root.glob("*.py"))
    for folder in ARROWS:
        modules += (root / folder).rglob("*.py")
    for module in sorted(modules):
        path = module.relative_to(root)
        source = module.read_text(encoding="utf-8")
        for line, breach in _breaches(ast.parse(source, filename=str(module)), path):
            yield f"{path}:{line}: {breach}"
        if (lines := len(source.splitlines())) > MAX_LINES:
            yield f"{path}:{lines}: over {MAX_LINES} lines"


def _breaches(tree: ast.Module, path: Path) -> Iterator[tuple[int, str]]:
    for node, late in _walk([tree], late=False):
        if not isinstance(node, ast.stmt | ast.expr):
            continue
        breaches: list[str | None] = []
        if isinstance(node, ast.Import):
            breaches = [_absolute_breach(alias.name, late=late) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            breaches = [_absolute_breach(node.module or "", late=late)]
        elif isinstance(node, ast.ImportFrom):
            breaches = [_relative_breach(target, path) for target in _targets(node, path)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            breaches = ["prints: return it, or hand it to reports/"]
        elif isinstance(node, ast.Assert):
            breaches = ["asserts: raise a named error"]
        yield from ((node.lineno, breach) for breach in breaches if breach)


def _walk(nodes: Iterable[ast.AST], *, late: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Yield all nodes, and whether importing the module leaves them unexecuted (`late`)."""
    for node in nodes:
        yield node, late
        if isinstance(node, ast.If) and ast.unparse(node.test) in TYPING_ONLY:
            yield from _walk(node.body, late=True)
            yield from _walk(node.orelse, late=late)
        else:
            yield from _walk(ast.iter_child_nodes(node), late=late or isinstance(node, FUNCTIONS))


def _absolute_breach(module: str, *, late: bool) -> str | None:
    top = module.partition(".")[0]
    if top in (PACKAGE, *ARROWS):
        return f"imports {module} absolutely"
    if top in LATE and not late:
        return f"imports {top} at module level"
    return None


def _targets(node: ast.ImportFrom, path: Path) -> Iterator[str]:
    """Yield what a relative import names, seen from the root; empty where it lies above the root."""
    home = path.parent.parts
    up = node.level - 1
    base = [*home[: len(home) - up], *(node.module or "").split(".")]
    for alias in node.names:
        yield ".".join(filter(None, [*base, alias.name])) if up <= len(home) else ""


def _relative_breach(target: str, path: Path) -> str | None:
    if not target:
        return "imports from above the package"
    importer = path.parts[0] if len(path.parts) > 1 else ""
    imported = target.partition(".")[0]
    if imported not in ARROWS:
        allowed = importer == "cli" or (not importer and path.stem in IMPORT_ROOT)
        return None if allowed else f"imports {target} from the root"
    if importer and ARROWS.index(importer) > ARROWS.index(imported):
        return f"{importer}/ imports {imported}/ against the arrow"
    return None


def main() -> int:
    """Print the findings and return the exit code."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent
    found = list(findings(root))
    print("\n".join(found) if found else "The arrows point one way.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
