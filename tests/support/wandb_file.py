"""Records of an offline file of W&B: a LevelDB log of protobuf messages, whose reader W&B does not publish."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK, _HEADER, _WHOLE, _LAST = 32768, 7, 1, 4  # bytes, bytes, record types


def records(file: Path) -> Iterator[Any]:
    """Every record, in order."""
    from wandb.proto.wandb_internal_pb2 import Record

    content = file.read_bytes()
    assert content[:4] == b":W&B"
    at, parts = _HEADER, b""
    while at + _HEADER <= len(content):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:
            at += left
            continue
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        parts += content[at + _HEADER : at + _HEADER + size]
        at += _HEADER + size
        if kind in (_WHOLE, _LAST):
            record = Record()
            record.ParseFromString(parts)
            yield record
            parts = b""
