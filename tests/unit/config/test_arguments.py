"""Command lines: options of a command, and how a command ends."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from draco.cli import run
from draco.config.arguments import Command, end, needed, option, passed_on, prices_of, words
from draco.config.options import Count, NonNegative, Positive, Share
from draco.core.errors import ConfigError, JudgeCallError
from draco.core.llm.money import Prices
from draco.study.verbs import VERBS, evaluate_tau, verb


@dataclass(frozen=True, kw_only=True)
class Options:
    run: tuple[Path, ...] = words("folders")
    n: Count = option(1, "how many")
    x: Positive | None = option(None, "a number", shown="no limit")
    share: Share = option(0.05, "a share")
    flag: bool = option(True, "a flag")
    kind: Literal["a", "b"] = option("a", "a choice")
    cold: NonNegative | None | Literal["default"] = option("default", "a number, null, or neither")
    parts: tuple[str, ...] = option(("p",), "names")
    name: str | None = option(None, "a text")
    prices: Prices | None = option(None, "two numbers", read=prices_of)
    passed: tuple[str, ...] = passed_on("of the judge", "judge.", "rubric")


COMMAND = Command("draco try", "try it", Options, "More of it.", ("draco try runs/A n=2",))


def test_options_by_name_beside_bare_words() -> None:
    given = COMMAND.parse(
        ["runs/a/step=01", "n=3", "x=.5", "flag=False", "kind=b", "parts=a,b", "name=7", "y", "prices=1,4",
         "judge.model=m=1", "rubric=static", "share=1", "cold=null"]
    )  # fmt: skip
    assert given == Options(
        run=(Path("runs/a/step=01"), Path("y")), n=3, x=0.5, flag=False, kind="b", parts=("a", "b"), name="7",
        prices=Prices(1.0, 4.0), passed=("judge.model=m=1", "rubric=static"), share=1, cold=None,
    )  # fmt: skip
    assert COMMAND.parse(["run=runs/a=1"]) == Options(run=(Path("runs/a=1"),))
    assert COMMAND.parse(["x", "x=null"]).x is None
    assert COMMAND.parse(["x"]).cold == "default"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["y", "nn=3"], "unknown option nn; did you mean n? Options of draco try: cold, flag, kind, n, name, parts,"),
        (["y", "judge=m"], "unknown option judge; options of draco try: "),
        (["y", "--n"], "--n: expected key=value; "),
        (["y", "--n=3"], "--n=3: expected key=value; did you mean n? "),
        (["n=3"], "no run is given: draco try runs/A n=2"),
        (["y", "n="], "n is ''; expected an integer ≥ 1"),
        (["y", "n=0"], "n is 0; expected an integer ≥ 1"),
        (["y", "n=1.5"], "n is 1.5; expected an integer ≥ 1"),
        (["y", "n=²"], "n is '²'; expected an integer ≥ 1"),
        (["y", "n=1_0"], "n is '1_0'; expected an integer ≥ 1"),
        (["y", "n=true"], "n is True; expected an integer ≥ 1"),
        (["y", "share=nan"], "share is nan; expected a number ≥ 0 and ≤ 1"),
        (["y", "share=1.1"], "share is 1.1; expected a number ≥ 0 and ≤ 1"),
        (["y", "x=0"], "x is 0; expected a number > 0, or null"),
        (["y", "x=inf"], "x is inf; expected a number > 0, or null"),
        (["y", "flag=1"], "flag is 1; expected true or false"),
        (["y", "kind=c"], "kind is 'c'; expected a or b"),
        (["y", "prices=free"], "prices=free: expected READ,WRITTEN"),
    ],
)
def test_what_does_not_fit_is_named_with_what_exists(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        COMMAND.parse(arguments)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@dataclass(frozen=True, kw_only=True)
class Training:
    out: Path = needed("where it goes")
    tasks: Count | None = option(None, "how many")
    config: tuple[str, ...] = passed_on("the configuration")


def test_own_options_are_told_from_those_of_the_configuration() -> None:
    command = Command("draco try", "try it", Training)
    given = command.parse(["out=a=b", "judge.model=m", "tasks=3", "~logger", "+callbacks.x=1", "env@x=desk"])
    assert (given.out, given.tasks) == (Path("a=b"), 3)
    assert given.config == ("judge.model=m", "~logger", "+callbacks.x=1", "env@x=desk")
    for word in ("out", "--out", "judge"):
        with pytest.raises(ConfigError, match=rf"^{word}: expected key=value; .*ptions of draco try: out, tasks;"):
            command.parse([word])
    with pytest.raises(ConfigError, match=r"^out=VALUE is missing: where it goes$"):
        command.parse(["tasks=3"])
    with (
        pytest.raises(ConfigError, match=r"Valid choices: env; did you mean tasks\? Options of draco try: out,"),
        command.beside_the_configuration(),
    ):
        raise ConfigError("Could not override 'taskss': no such option; Valid choices: env")


def test_one_word_is_enough_where_a_command_takes_one() -> None:
    @dataclass(frozen=True, kw_only=True)
    class One:
        run: Path | None = words("a folder", optional=True)

    command = Command("draco one", "one", One)
    assert command.parse([]).run is None
    assert command.parse(["a"]).run == Path("a")
    with pytest.raises(ConfigError, match=r"^b: draco one takes one run"):
        command.parse(["a", "b"])


def test_help_says_every_option_with_its_default() -> None:
    said = COMMAND.help()
    assert said.startswith("draco try RUN key=value …\n\nTry it.\n\nMore of it.\n\nOptions:\n")
    for line in (
        "    RUN               folders\n", "    n                 how many (default: 1)\n",
        "    x                 a number (default: no limit)\n", "    share             a share (default: 0.05)\n",
        "    flag              a flag (default: true)\n", "    parts             names (default: p)\n",
        "    name              a text (default: not set)\n", "    judge.KEY, rubric of the judge\n",
    ):  # fmt: skip
        assert line in said
    assert said.endswith("Examples:\n    draco try runs/A n=2")


def test_a_script_ends_by_what_its_main_returns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["script.py", "7"])

    def refuses(arguments: list[str]) -> None:
        raise ConfigError(f"not [{arguments[0]}]")

    def stopped(arguments: list[str]) -> None:
        raise JudgeCallError("the judge is gone")

    def interrupted(arguments: list[str]) -> None:
        raise KeyboardInterrupt

    for main, status in ((lambda a: int(a[0]), 7), (lambda a: None, 0), (refuses, 2), (stopped, 3), (interrupted, 130)):
        with pytest.raises(SystemExit) as caught:
            end(main)
        assert caught.value.code == status
    assert capsys.readouterr().err == "error: not [7]\nerror: the judge is gone\ninterrupted\n"
    with pytest.raises(ZeroDivisionError):  # a fault of ours keeps its traceback
        end(lambda a: 1 // 0)
    monkeypatch.setattr("sys.argv", ["script.py", "n=1", "--help"])
    with pytest.raises(SystemExit) as caught:
        end(lambda a: 1 // 0, COMMAND)
    assert not caught.value.code
    assert capsys.readouterr().out == f"{COMMAND.help()}\n"


# -- draco itself --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_draco_lists_its_verbs(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = [line.split()[0] for line in lines if line.startswith("    ")]
    assert listed == list(VERBS)
    assert all(len(line) <= 120 for line in lines)


@pytest.mark.parametrize("name", [v for v in VERBS if v != "train"])
def test_every_verb_explains_itself_with_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--help", "-h"):
        assert run([name, "n=1", flag]) == 0
        said = capsys.readouterr().out
        assert said.startswith(f"draco {name}")
        assert len(verb(name).COMMAND.examples) in (2, 3)
        assert all(f"    {example}" in said for example in verb(name).COMMAND.examples)
        assert max(map(len, said.splitlines())) <= 120


def test_examples_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    for name in VERBS:
        command: Command[Any] = verb(name).COMMAND
        for example in command.examples:
            said = example.partition("#")[0].removeprefix('eval "$(').partition(")")[0].partition(">")[0].split()
            assert said[:2] == ["draco", name]
            command = evaluate_tau.COMMAND if "env=tau_banking" in said else command
            command.parse(said[2:])


def test_an_unknown_verb_is_one_line_with_what_exists(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["evalute"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: draco has no verb 'evalute'; did you mean evaluate? Verbs: train, evaluate, ")
    assert said.count("\n") == 1
    assert run(["steps=3"]) == 2
    assert "did you mean draco train steps=3?" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--help"], ["report", "--help"], ["evaluate", "--help"], ["nope"]])
def test_nothing_heavy_loads_for_help(words: list[str]) -> None:
    code = (
        "import sys; from draco.cli import run; run(sys.argv[1:]);"
        "print([m for m in ('torch', 'hydra', 'lightning', 'pyarrow', 'litellm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", ["n", "max_turns", "tasks", "port"])
def test_a_verb_names_the_option_that_is_no_number(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match=f"^{name} is 'many'; expected an integer ≥ 1"):
        evaluate_tau.main([f"run={tmp_path}", "checkpoint=base", f"{name}=many"])
