"""Citations of the paper: only what stands there, under its own numbers, where a reader outside can look it up."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
#: the paper's sections, appendices and equations, arXiv 2609.04094
SECTIONS = {
    "1", "2", "3", "3.1", "3.2", "3.3", "4", "4.1", "4.1.1", "4.1.2", "4.1.3", "4.2", "4.3", "4.4", "5", "6", "7",
}  # fmt: skip
APPENDICES = {"A", "A.1", "A.2", "B", "B.1", "B.1.1", "B.1.2", "B.1.3", "B.2", "B.3", "C", "D", "E", "F"}
APPENDICES |= {f"E.{n}" for n in range(1, 10)}
FILES = [
    file
    for folder in ("draco", "callbacks", "conf", "docs")
    for file in sorted((ROOT / folder).rglob("*"))
    if file.suffix in {".py", ".md", ".yaml", ".js", ".html"} and "__pycache__" not in file.parts
] + [ROOT / "README.md"]


def wrong(text: str) -> list[str]:
    """Citations in a text that lead nowhere."""
    found = re.findall(r"method §\d*", text)
    found += [f"Eq. {n}" for n in re.findall(r"\bEqs?\. \(?(\d+)", text) if not 1 <= int(n) <= 17]
    found += [f"Section {n}" for n in re.findall(r"\bSection (\d+(?:\.\d+)*)", text) if n not in SECTIONS]
    found += [f"Appendix {a}" for a in re.findall(r"\bAppendix ([A-Z](?:\.\d+)*)", text) if a not in APPENDICES]
    return found + [f"Table {n}" for n in re.findall(r"\bTable (\d+)", text) if not 1 <= int(n) <= 10]


def test_citations_lead_somewhere() -> None:
    assert len(FILES) > 150
    bad = {str(f.relative_to(ROOT)): w for f in FILES if (w := wrong(f.read_text(encoding="utf-8")))}
    assert not bad


@pytest.mark.parametrize("text", ["see method §4", "Eq. 18", "Section 4.5", "Appendix G", "Appendix E.10", "Table 11"])
def test_what_leads_nowhere_is_found(text: str) -> None:
    assert wrong(text)
    assert not wrong("Eq. 7, Eq. (12), Section 4.1.3, Appendix E.9, Table 10")
