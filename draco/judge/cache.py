"""The judge's database of one rank: replies that a resume need not pay for again, and what every attempt cost.

    runs/NAME/judge/rank=0000.sqlite        WAL; each rank writes its own and reads all, whatever the number of ranks

    replies   key → the usable reply of one call, compressed
    attempts  what every request cost, also in steps that were cut off; the archive holds complete steps only
    served    which model the provider said it was

WAL needs a file system of this machine for one database's processes; ranks on other machines never write the same one.
Nothing here holds a key of the provider: texts arrive redacted, and of a prompt only its hash is kept.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sqlite3
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from draco.core.errors import ConfigError
from draco.core.files import create_once
from draco.core.llm.money import Usage
from draco.core.llm.transport import Reply
from draco.judge.records import CallRecord

__all__ = ["Spent", "Store", "Stored", "key_of"]

_TABLES = """
CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply BLOB NOT NULL, facts TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS attempts (
  at REAL, step INTEGER, phase TEXT, task_id TEXT, sample INTEGER, attempt INTEGER, model TEXT, served_model TEXT,
  prompt_version TEXT, prompt_hash TEXT, outcome TEXT, error TEXT, tokens_in INTEGER, tokens_out INTEGER,
  tokens_cached INTEGER, cost_usd REAL, latency_s REAL);
CREATE TABLE IF NOT EXISTS served (model TEXT, served_model TEXT, fingerprint TEXT, at REAL,
  PRIMARY KEY (model, served_model, fingerprint));
"""
_COLUMNS = (
    "step", "phase", "task_id", "sample", "attempt", "model", "served_model", "prompt_version", "prompt_hash",
    "outcome", "error", "tokens_in", "tokens_out", "tokens_cached", "cost_usd", "latency_s",
)  # fmt: skip
#: of a reply, beside its text and its tokens
_FACTS = ("served_model", "fingerprint", "cost_usd", "latency_s", "estimated")


@dataclass(frozen=True, slots=True)
class Stored:
    """A usable reply as it came."""

    reply: Reply
    model: str  #: that was asked: a fallback's name where one answered
    outcome: str  #: ok | repaired


class Spent(NamedTuple):
    """Sums over all attempts of all ranks."""

    usd: float
    tokens: int
    attempts: int
    unpriced: int


def key_of(parameters: Mapping[str, Any], prompt_hash: str, seed: int, step: int, sample: int, repeat: int) -> str:
    """Key of one call's reply: the same call, of the same run, at the same place.

    Step and sample are in it, so that equal prompts of two rollouts or of two steps are two questions, as they are
    without a cache.

    Args:
        parameters: model and whatever else decides its reply.
        repeat: 0-based, where one prompt is asked several times.
    """
    content = json.dumps([dict(parameters), prompt_hash, seed, step, sample, repeat], sort_keys=True, default=str)
    return hashlib.sha256(content.encode(errors="surrogatepass")).hexdigest()


class Store:
    """One rank's database, and those of the others to read.

    Args:
        folder: made if missing.
        rank: whose database is written.

    Raises:
        ConfigError: the database cannot be opened.
    """

    def __init__(self, folder: Path, rank: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"rank={rank:04d}.sqlite"
        create_once(self.path, lambda made: _open(made).close())  # complete before other ranks can find it
        self._own = _open(self.path)
        self._others = [_open(p) for p in sorted(folder.glob("rank=*.sqlite")) if p != self.path]

    def get(self, key: str) -> Stored | None:
        """The reply of a call that was made before, by any rank."""
        for database in (self._own, *self._others):
            row = database.execute("SELECT reply, facts FROM replies WHERE key = ?", (key,)).fetchone()
            if row is not None:
                facts = json.loads(row[1])
                model, outcome = facts.pop("model"), facts.pop("outcome")
                usage = Usage(*(facts.pop(f.name) for f in dataclasses.fields(Usage)))
                text = zlib.decompress(row[0]).decode(errors="surrogatepass")
                return Stored(Reply(text, truncated=False, usage=usage, **facts), model, outcome)
        return None

    def put(self, key: str, stored: Stored) -> None:
        """Keep a usable reply; the first one of a key stays."""
        reply = stored.reply
        facts = {name: getattr(reply, name) for name in _FACTS} | dataclasses.asdict(reply.usage)
        facts |= {"model": stored.model, "outcome": stored.outcome}
        blob = zlib.compress(reply.text.encode(errors="surrogatepass"), 6)
        self._own.execute("INSERT OR IGNORE INTO replies VALUES (?, ?, ?)", (key, blob, json.dumps(facts)))

    def log(self, record: CallRecord) -> None:
        """Keep what an attempt cost."""
        values = [getattr(record, name) for name in _COLUMNS]
        marks = ", ".join("?" * (len(values) + 1))
        self._own.execute(f"INSERT INTO attempts (at, {', '.join(_COLUMNS)}) VALUES ({marks})", (time.time(), *values))

    def spent(self) -> Spent:
        """What all ranks and all processes of this run have spent."""
        sums = "TOTAL(cost_usd), TOTAL(tokens_in + tokens_out), COUNT(*), COUNT(*) - COUNT(cost_usd)"
        rows = [database.execute(f"SELECT {sums} FROM attempts").fetchone() for database in (self._own, *self._others)]
        usd, *counts = (sum(column) for column in zip(*rows, strict=True))
        return Spent(float(usd), *map(int, counts))

    def served(self, model: str) -> list[tuple[str, str]]:
        """(served model, fingerprint) that this rank has seen for a configured model, oldest first."""
        query = "SELECT served_model, fingerprint FROM served WHERE model = ? ORDER BY at"
        return [(str(a), str(b)) for a, b in self._own.execute(query, (model,))]

    def add_served(self, model: str, served_model: str, fingerprint: str) -> None:
        """Remember what answered."""
        row = (model, served_model, fingerprint, time.time())
        self._own.execute("INSERT OR IGNORE INTO served VALUES (?, ?, ?, ?)", row)

    def close(self) -> None:
        """Close all databases. Safe to call twice."""
        for database in (self._own, *self._others):
            database.close()


def _open(path: Path) -> sqlite3.Connection:
    try:
        # Used by the judge's event loop alone, which may be another thread than the one that opened it.
        database = sqlite3.connect(path, timeout=30.0, isolation_level=None, check_same_thread=False)
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=NORMAL")  # a power cut may cost the last replies, never the database
        database.executescript(_TABLES)
    except sqlite3.Error as error:
        raise ConfigError(
            f"the judge's database {path} cannot be used ({error}); move it away (its replies will be paid for again), "
            "or set judge.cache=off"
        ) from error
    return database
