"""A fork server that only pretends: speaks the protocol of inside/server.py and does what the code it is sent says.

ok TEXT · long N · slow · die SIGNAL · hangup · garbage · engine · complete · fail
"""

from __future__ import annotations

import json
import signal
import socket
import sys
from typing import Any


def answer(message: dict[str, Any], episodes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    op, name = message["op"], message.get("experiment", "")
    if op == "open":
        if message["task"] == "nothere_1":
            return {"error": {"kind": "unknown_task", "message": "task 'nothere_1' is not in the data"}}
        if message["task"] == "slow_1":
            return {"error": {"kind": "deadline", "message": "open passed its deadline"}}
        episodes[name] = {"task": message["task"], "completed": False, "failed": False, "codes": []}
        return {"ok": {}}
    if op == "evaluate":
        return {"ok": {"success": True, "num_tests": 1, "passes": [], "failures": [], "difficulty": 1}}
    if op == "ping":
        return {"ok": {"children": len(episodes)}}
    if name not in episodes:
        return {"error": {"kind": "unknown_episode", "message": "no such episode"}}
    episode = episodes[name]
    if op == "close":
        del episodes[name]
        return {"ok": {}}
    if op == "state":
        return {"ok": {"task": episode["task"], "dbs": {"changes": {}, "hashes": ",".join(episode["codes"])}}}
    return execute(message["code"], episode)


def execute(code: str, episode: dict[str, Any]) -> dict[str, Any]:
    word, _, rest = code.partition(" ")
    episode["codes"].append(code)
    if word == "slow":
        return {"error": {"kind": "deadline", "message": "killed"}}
    if word == "die":
        return {"error": {"kind": "died", "message": rest, "signal": int(signal.Signals[rest])}}
    if word == "engine":
        return {"error": {"kind": "engine", "message": "sqlite is on fire"}}
    if word == "garbage":
        return {"what": "is this"}
    if word in ("complete", "fail"):
        episode["completed"], episode["failed"] = True, word == "fail"
    output = "line\n" * int(rest) if word == "long" else f"ran {rest}"
    status = {"completed": episode["completed"], "failed": episode["failed"]}
    return {"ok": {"output": output, "mistake": "", "engine_s": 0.0, **status}}


def main() -> None:
    sock = socket.socket(fileno=int(sys.argv[1]))
    stream = sock.makefile("rwb")
    options = json.loads(sys.argv[2])

    def send(message: dict[str, Any]) -> None:
        stream.write(json.dumps(message).encode() + b"\n")
        stream.flush()

    if options["max_output"] == 1:
        print("ImportError: no appworld here", file=sys.stderr)
        sys.exit(1)
    send({"id": 0, "ok": {"tasks": 1}})
    episodes: dict[str, dict[str, Any]] = {}
    for line in stream:
        message = json.loads(line)
        if message.get("code") == "hangup":
            return
        reply = answer(message, episodes)
        if message.get("task") != "silent_1":
            send({"id": message["id"], **reply})


if __name__ == "__main__":
    main()
