"""Command lines of scripts: options, and how a script ends."""

from __future__ import annotations

from pathlib import Path

import evaluate_tau
import pytest

from draco.config.arguments import number, parse, run_main, share, split, whole
from draco.core.errors import ConfigError


def test_options_come_in_three_spellings_beside_bare_words() -> None:
    words, given = parse(["runs/a/step=01", "n=3", "--out", "x", "--max-mb=2", "y"], ["n", "out", "max_mb"])
    assert words == ["runs/a/step=01", "y"]
    assert given == {"n": "3", "out": "x", "max_mb": "2"}
    assert parse(["judge.model=m"], [], ["judge."])[1] == {"judge.model": "m"}
    with pytest.raises(ConfigError, match="unknown option m; expected n, out"):
        parse(["m=3"], ["out", "n"])
    with pytest.raises(ConfigError, match="--n needs a value"):
        parse(["--n"], ["n"])


def test_a_script_ends_by_what_its_main_returns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["script.py", "7"])

    def refuses(arguments: list[str]) -> None:
        raise ConfigError(f"not {arguments[0]}")

    for main, status in ((lambda a: int(a[0]), 7), (lambda a: None, None), (refuses, 2)):
        with pytest.raises(SystemExit) as end:
            run_main(main)
        assert end.value.code == status
    assert capsys.readouterr().err == "error: not 7\n"
    with pytest.raises(ZeroDivisionError):  # a fault of ours keeps its traceback
        run_main(lambda a: 1 // 0)
    monkeypatch.setattr("sys.argv", ["script.py", "n=1", "--help"])
    with pytest.raises(SystemExit) as end:
        run_main(lambda a: 1 // 0)
    assert not end.value.code
    assert capsys.readouterr().out == f"{__doc__}\n"


def test_own_options_are_told_from_those_of_the_trainer() -> None:
    given, rest = split(["out=a=b", "judge.model=m", "--tasks=3", "~logger", "+callbacks.x=1"], {"out", "tasks"})
    assert given == {"out": "a=b", "tasks": "3"}
    assert rest == ["judge.model=m", "~logger", "+callbacks.x=1"]
    for word in ("out", "--out", "judge"):
        with pytest.raises(ConfigError, match=f"^{word}: expected key=value; own options are out, tasks$"):
            split([word], {"tasks", "out"})


def test_numbers_are_refused_by_the_name_of_their_option() -> None:
    assert (whole({}, "n", 3), whole({"n": "5"}, "n", 3), number({"x": "0.5"}, "x", 1), number({}, "x", 1)) == (
        3, 5, 0.5, 1,
    )  # fmt: skip
    for text in ("x", "-1", "1.5", "", "²"):
        with pytest.raises(ConfigError, match=rf"^n={text}: expected a whole number from 0$"):
            whole({"n": text}, "n", 3)
    assert (share({}, "s", 0.1), share({"s": "0"}, "s", 0.1), share({"s": "1.0"}, "s", 0.1)) == (0.1, 0.0, 1.0)
    for text in ("x", "-0.1", "1.1", "nan", "inf"):
        with pytest.raises(ConfigError, match=rf"^s={text}: expected a number from 0 to 1$"):
            share({"s": text}, "s", 0.1)
    for text in ("x", "0", "nan", "inf", "-1"):
        with pytest.raises(ConfigError, match=rf"^x={text}: expected a number above 0$"):
            number({"x": text}, "x", 1)


@pytest.mark.parametrize("option", ["n", "max_turns", "tasks"])
def test_a_script_names_the_option_that_is_no_number(option: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match=f"{option}=many: expected a whole number"):
        evaluate_tau.main([f"run={tmp_path}", "checkpoint=base", f"{option}=many"])
