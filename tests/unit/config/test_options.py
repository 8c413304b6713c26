"""Single options: what is accepted, and that everything else is one line with the name and what was expected."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Gt, Le
from omegaconf import OmegaConf
from pydantic import AllowInfNan

from callbacks.credit.step import StepLevelCredit
from callbacks.credit.uniform import UniformCredit
from draco.config.options import Count, NonNegative, PositiveOrInf, Share, check_option, checked
from draco.core.errors import ConfigError

Ten = Annotated[int, Ge(0), Le(10)]
UpToTwo = Annotated[float, Gt(0), Le(2), AllowInfNan(False)]


@pytest.mark.parametrize("value", [0, 3, 10])
def test_integers_in_range_are_taken(value: int) -> None:
    check_option("x", value, Ten)


@pytest.mark.parametrize("value", [-1, 11, 2.5, 3.0, "3", "", True, None, math.nan, [1]])
def test_what_is_no_integer_in_range_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^x is .*; expected an integer from 0 to 10$"):
        check_option("x", value, Ten)


@pytest.mark.parametrize("value", [0.5, 1, 1e-9, 2.0])
def test_numbers_in_range_are_taken(value: float) -> None:
    check_option("x", value, UpToTwo)


@pytest.mark.parametrize("value", [0, -1, 2.01, "1", True, None, math.nan, math.inf])
def test_what_is_no_number_in_range_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^x is .*; expected a number > 0 and ≤ 2$"):
        check_option("x", value, UpToTwo)


def test_null_and_infinity_only_where_allowed() -> None:
    check_option("x", None, Count | None)
    check_option("x", None, NonNegative | None)
    check_option("x", math.inf, PositiveOrInf)
    with pytest.raises(ConfigError, match="expected an integer ≥ 1, or null"):
        check_option("x", 0, Count | None)
    with pytest.raises(ConfigError, match="x is nan"):
        check_option("x", math.nan, PositiveOrInf)
    with pytest.raises(ConfigError, match="x is nan"):
        check_option("x", math.nan, Share)


@pytest.mark.parametrize("value", ["no", 0, 1, None])
def test_a_switch_is_true_or_false(value: Any) -> None:
    check_option("x", False, bool)
    with pytest.raises(ConfigError, match="expected true or false"):
        check_option("x", value, bool)


def test_names_are_listed() -> None:
    check_option("x", "a", Literal["a", "b", "c"])
    with pytest.raises(ConfigError, match=r"^x is 'd'; expected a, b or c$"):
        check_option("x", "d", Literal["a", "b", "c"])


@pytest.mark.parametrize("value", ["ab", 3, None])
def test_a_text_is_no_list(value: Any) -> None:
    check_option("x", ["a"], Sequence[str])
    check_option("x", OmegaConf.create(["a"]), Sequence[str])
    with pytest.raises(ConfigError, match=r"expected a list, as in 'x=\[A, B\]'; \[\] is none"):
        check_option("x", value, Sequence[str])


def test_a_class_checks_its_options_by_their_annotations() -> None:
    @checked("part", other="elsewhere.other")
    @dataclass(frozen=True, slots=True)
    class Part:
        size: Count = 1
        other: bool = True
        made: object = None  # no option: anything goes

    assert Part(3, made=7).size == 3
    with pytest.raises(ConfigError, match=r"^part\.size is 0; expected an integer ≥ 1$"):
        Part(0)
    with pytest.raises(ConfigError, match=r"^elsewhere\.other is 'no'; expected true or false$"):
        Part(other="no")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unknown"):
        Part(unknown=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"std": "pop"}, r"advantage\.std is 'pop'; expected sample or population"),
        ({"epsilon": -1}, r"advantage\.epsilon is -1; expected a number ≥ 0"),
        ({"normalize": "no"}, r"advantage\.normalize is 'no'"),
    ],
)
def test_credit_stages_refuse_bad_options_when_they_are_built(options: dict[str, Any], message: str) -> None:
    for stage in (UniformCredit, StepLevelCredit):
        with pytest.raises(ConfigError, match=message):
            stage(**options)


def test_unanimous_is_checked_when_the_stage_is_built() -> None:
    with pytest.raises(ConfigError, match=r"credit\.unanimous is 'foo'; expected equal_totals or uniform"):
        StepLevelCredit(unanimous="foo")  # type: ignore[arg-type]
