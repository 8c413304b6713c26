"""What `draco completion` offers at every place of a command line."""

from __future__ import annotations

import pytest

from draco.core.errors import ConfigError
from draco.study.verbs import VERBS
from draco.study.verbs.completion import SCRIPTS, candidates, main


def test_verbs_first() -> None:
    assert candidates([]) == candidates([""]) == sorted(["--help", *VERBS])
    assert candidates(["rep"]) == ["replay", "report"]
    assert candidates(["nope", ""]) == []


@pytest.mark.parametrize(
    ("typed", "some", "none"),
    [
        (["report", ""], ["png=", "window=", "--help"], ["env=", "RUN="]),
        (["report", "x", "window=3", "wi"], [], ["window="]),
        (["judge", ""], ["judge=", "rubric=", "judge.", "batch="], ["steps=", "env=", "limits."]),
        (["author", ""], ["out=", "env=", "policy=", "limits.", "seed="], ["hydra."]),
        (["plan", "m"], ["mfu="], ["gpus="]),
        (["train", ""], ["steps=", "rubric=", "experiment=", "eval."], ["_target_="]),
        (["train", "optimizer."], ["optimizer.lr="], ["optimizer._target_="]),
    ],
)
def test_options_and_what_is_passed_on(typed: list[str], some: list[str], none: list[str]) -> None:
    found = candidates(typed)
    assert set(some) <= set(found)
    assert not set(none) & set(found)


def test_values() -> None:
    assert candidates(["report", "x", "png="]) == ["png=false", "png=true"]
    assert candidates(["rescore", "x", "rubric="]) == ["rubric=static"]
    assert candidates(["replay", "x", "judge="]) == ["judge=litellm", "judge=scripted"]
    assert candidates(["train", "credit="]) == ["credit=step", "credit=uniform"]
    assert "env.isolation=" in candidates(["train", "env=appworld", "env.i"])  # keys of the group that was chosen
    assert candidates(["train", "env=nope", "env.i"]) == []


def test_a_script_for_each_shell(capsys: pytest.CaptureFixture[str]) -> None:
    for shell in SCRIPTS:
        main([shell])
        assert "draco" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"^no completion for basch; did you mean bash\? expected bash, zsh or fish$"):
        main(["basch"])
