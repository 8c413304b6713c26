"""Appended lines survive a kill."""

from __future__ import annotations

from pathlib import Path

import pytest

from draco.core import files
from draco.core.errors import ConfigError


@pytest.mark.parametrize("cut", [b"", b"{", b'{"b": 2}'])
def test_a_cut_line_is_left_out_and_cut_off_before_more_is_appended(tmp_path: Path, cut: bytes) -> None:
    file = tmp_path / "folder" / "x.jsonl"
    assert files.read_lines(file) == []
    files.mend_lines(file)
    files.append_line(file, {"a": "\u2028"})
    file.write_bytes(file.read_bytes() + cut)
    assert files.read_lines(file) == [{"a": "\u2028"}]
    files.mend_lines(file)
    files.append_line(file, [3])
    assert files.read_lines(file) == [{"a": "\u2028"}, [3]]


def test_a_whole_line_that_is_no_json_is_named(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"a": 1}\n{"b"\n[3]\n')
    with pytest.raises(ConfigError, match=r"x.jsonl, line 2 is not JSON"):
        files.read_lines(file)
