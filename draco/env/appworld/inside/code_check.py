"""Checks the syntax tree of an agent's code before any of it runs. Standard library alone.

This is the first of two barriers, and its refusals tell the agent why. The second, `sandbox`, does not depend on it.
Refused are imports outside a list, names that lead to files, code or the interpreter, dunder attributes, attributes
that return modules or frames, and access to an attribute by a computed name.
"""

from __future__ import annotations

import ast

__all__ = ["MODULES", "refusal"]

#: what an agent may import
MODULES = frozenset({
    "array", "bisect", "calendar", "collections", "contextlib", "copy", "dataclasses", "datetime", "decimal",
    "difflib", "enum", "fractions", "functools", "heapq", "itertools", "json", "math", "numbers", "operator",
    "pendulum", "pprint", "random", "re", "statistics", "string", "textwrap", "time", "typing", "unicodedata",
    "uuid",
})  # fmt: skip
_NAMES = frozenset({
    "ApiCollection", "Requester", "requester", "open", "exec", "eval", "compile", "globals", "locals", "vars",
    "breakpoint", "input", "exit", "quit", "get_ipython", "builtins", "memoryview", "help", "copyright", "credits",
    "license", "In", "Out",
})  # fmt: skip
_ATTRIBUTES = frozenset({
    "os", "sys", "posix", "subprocess", "socket", "pathlib", "importlib", "builtins", "codecs", "io", "ctypes",
    "shutil", "gc", "inspect", "signal", "threading", "modules", "linecache", "tokenize", "warnings", "weakref",
    "types", "ast", "dis", "attrgetter", "methodcaller", "mro", "tb_frame", "tb_next", "f_back", "f_globals",
    "f_locals", "f_builtins", "f_code", "gi_frame", "gi_code", "cr_frame", "cr_code", "ag_frame", "ag_code",
    "func_globals", "get_ipython", "run_cell", "run_line_magic", "run_cell_magic",
})  # fmt: skip
_BY_NAME = frozenset(("getattr", "setattr", "delattr"))
#: underscore attributes that agents write and that lead nowhere
_HARMLESS = frozenset(("__init__", "__name__", "_asdict", "_replace"))


def refusal(code: str) -> str:
    """Why `code` must not run; empty if it may. Code that does not parse is left to the engine, which says so."""
    try:
        tree = ast.parse(code.strip())
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        # The engine parses again and names the line; what is too deep or too large to parse is refused here.
        return "" if isinstance(error, SyntaxError | ValueError) else "the code is nested too deeply"
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        reason = _reason(node)
        if isinstance(node, ast.Name) and node.id in _BY_NAME and id(node) not in called:
            reason = f"'{node.id}' may only be called"  # under another name it could read any attribute
        if reason:
            line = getattr(node, "lineno", 0)
            return f"{reason} (line {line})" if line else reason
    return ""


def _reason(node: ast.AST) -> str:
    match node:
        case ast.Import(names=names):
            return next((_module(n.name) for n in names if _module(n.name)), "")
        case ast.ImportFrom(module=module, names=names, level=level):
            if level or not module:
                return "relative imports are not allowed"
            return _module(module) or next((r for n in names if (r := _attribute(n.name))), "")
        case ast.Name(id=name):
            if name in _NAMES or (_dunder(name) and name != "__name__"):
                return f"the name '{name}' is not allowed"
        case ast.Attribute(attr=attr):
            return _attribute(attr)
        case ast.MatchClass(kwd_attrs=attrs):
            return next((r for a in attrs if (r := _attribute(a))), "")
        case ast.Call(func=ast.Name(id=name), args=args) if name in _BY_NAME:
            if len(args) < 2 or not isinstance(args[1], ast.Constant) or not isinstance(args[1].value, str):
                return f"'{name}' needs a literal attribute name"
            return _attribute(args[1].value)
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            if name in ("apis", "print"):
                return f"'{name}' must not be redefined"
        case ast.Global(names=names) | ast.Nonlocal(names=names):
            return next((f"the name '{n}' is not allowed" for n in names if n in _NAMES or _dunder(n)), "")
    return ""


def _dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _module(name: str) -> str:
    parts = name.split(".")
    if parts[0] in MODULES and not any(_attribute(p) for p in parts[1:]):
        return ""
    return f"importing '{name}' is not allowed; available: {', '.join(sorted(MODULES))}"


def _attribute(name: str) -> str:
    if name in _ATTRIBUTES or (name.startswith("_") and name not in _HARMLESS):
        return f"the attribute '{name}' is not allowed"
    return ""
