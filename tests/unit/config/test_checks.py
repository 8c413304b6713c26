"""Single options: what is accepted, and that everything else is one line with the name and what was expected."""

from __future__ import annotations

import math
from typing import Any

import pytest

from callbacks.credit.step import StepLevelCredit
from callbacks.credit.uniform import UniformCredit
from draco.config.checks import number, one_of, switch, whole
from draco.core.errors import ConfigError


@pytest.mark.parametrize("value", [0, 3, 10])
def test_whole_takes_integers_in_range(value: int) -> None:
    whole("x", value, 0, 10)


@pytest.mark.parametrize("value", [-1, 11, 2.5, 3.0, "3", "", True, None, math.nan, [1]])
def test_whole_refuses_the_rest(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^x is .*; expected an integer from 0 to 10$"):
        whole("x", value, 0, 10)


@pytest.mark.parametrize("value", [0.5, 1, 1e-9, 2.0])
def test_number_takes_numbers_in_range(value: float) -> None:
    number("x", value, 0, 2, above=True)


@pytest.mark.parametrize("value", [0, -1, 2.01, "1", True, None, math.nan, math.inf])
def test_number_refuses_the_rest(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^x is .*; expected a number > 0 and ≤ 2$"):
        number("x", value, 0, 2, above=True)


def test_null_and_infinity_only_where_allowed() -> None:
    whole("x", None, 1, optional=True)
    number("x", None, 1, optional=True)
    number("x", math.inf, 0, infinite=True)
    with pytest.raises(ConfigError, match="expected an integer ≥ 1, or null"):
        whole("x", 0, 1, optional=True)
    with pytest.raises(ConfigError, match="x is nan"):
        number("x", math.nan, 0, infinite=True)


@pytest.mark.parametrize("value", ["no", 0, None])
def test_a_switch_is_true_or_false(value: Any) -> None:
    switch("x", False)
    with pytest.raises(ConfigError, match="expected true or false"):
        switch("x", value)


def test_names_are_listed() -> None:
    one_of("x", "a", ("a", "b", "c"))
    with pytest.raises(ConfigError, match=r"^x is 'd'; expected a, b or c$"):
        one_of("x", "d", ("a", "b", "c"))


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
