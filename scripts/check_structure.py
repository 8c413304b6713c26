"""What ruff and import-linter do not check: no test module is imported, and no file or function is too long.

python scripts/check_structure.py [--strict]       # --strict: a file or function that is too long is an error too
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_FILE, MAX_FUNCTION = 400, 60  #: lines


def imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module or ''}.{alias.name}") for alias in node.names)


def imports_of_tests(file: Path, tree: ast.Module) -> Iterator[str]:
    """What several test modules need stands in tests/support."""
    modules = {path.stem for path in (ROOT / "tests").rglob("*.py") if path.stem.startswith(("test_", "conftest"))}
    for line, name in imported(tree):
        if modules.intersection(name.split(".")):
            yield f"{file}:{line}: imports the test module {name}; what tests share belongs in tests/support"


def too_long(file: Path, tree: ast.Module, lines: int) -> Iterator[str]:
    if lines > MAX_FILE:
        yield f"{file}: {lines} lines; at most {MAX_FILE}"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION:
                yield f"{file}:{node.lineno}: {node.name} has {length} lines; at most {MAX_FUNCTION}"


def main(arguments: list[str]) -> int:
    errors: list[str] = []
    warnings: list[str] = []
    for folder in ("draco", "callbacks", "scripts", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text, file = path.read_text(encoding="utf-8"), path.relative_to(ROOT)
            tree = ast.parse(text)
            if folder == "tests":
                errors += imports_of_tests(file, tree)
            else:
                warnings += too_long(file, tree, text.count("\n"))
    if "--strict" in arguments:
        errors, warnings = errors + warnings, []
    for kind, found in (("warning", warnings), ("error", errors)):
        print(*(f"{kind}: {line}" for line in found), sep="\n", end="\n" if found else "")
    return bool(errors)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
