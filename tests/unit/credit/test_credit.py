"""Step credit (Eq. 4–7): the paper's golden cases, its seven properties P1–P7, a brute-force reference, every edge.

Each property test goes red when the code breaks its property; golden and brute-force tests catch the rest.
"""

from __future__ import annotations

import doctest
import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import draco.credit.redistribution
from draco.credit.redistribution import Reason, StepCredit, redistribute, uniform

Citations = list[tuple[int, list[int]]]


def totals(credit: StepCredit, tokens: list[int]) -> list[float]:
    """n_j · a_j of every step."""
    return [n * a for n, a in zip(tokens, credit.per_token, strict=True)]


# --- golden cases -----------------------------------------------------------------------------------------------------


def test_golden_e5_equal_weights_equalise_totals() -> None:
    credit = redistribute(1.0, [(1, [1, 2])], [2, 4])
    assert credit.qualities == (1.0, 1.0)
    assert credit.per_token == (1.5, 0.75)
    assert totals(credit, [2, 4]) == [3.0, 3.0]
    assert credit.reason is Reason.UNANIMOUS


def test_golden_e5_half_weight_on_the_shorter_step() -> None:
    credit = redistribute(1.0, [(1, [1, 2]), (-1, [1])], [2, 4])
    assert credit.qualities == (0.5, 1.0)
    assert credit.per_token == pytest.approx((1.0, 1.0), rel=1e-14)
    assert totals(credit, [2, 4]) == pytest.approx([2.0, 4.0], rel=1e-14)
    assert credit.reason is Reason.CREDITED


E6 = [(-1, [4, 6]), (-1, [5, 6]), (-1, [3, 4, 5]), (1, [5]), (1, [1, 2, 3, 4, 5, 6])]


def test_golden_e6_to_the_printed_digits() -> None:
    tokens = [40, 40, 30, 50, 30, 60, 60]
    credit = redistribute(1.0, E6, tokens)
    assert [round(q, 4) for q in credit.qualities] == [1, 1, 0.5, 0.3333, 0.5, 0.3333, 0.6111]
    assert round(sum(credit.qualities), 3) == 4.278  # the weights of a winner
    assert [round(a, 3) for a in credit.per_token] == [1.812, 1.812, 1.208, 0.483, 1.208, 0.403, 0.738]
    assert [round(t, 2) for t in totals(credit, tokens)] == [72.47, 72.47, 36.23, 24.16, 36.23, 24.16, 44.29]
    assert sum(totals(credit, tokens)) == pytest.approx(310, rel=1e-14)
    assert credit.reason is Reason.CREDITED


# --- random trajectories ----------------------------------------------------------------------------------------------

advantages = st.floats(-5, 5).filter(lambda a: abs(a) > 1e-6)
winners = st.floats(1e-6, 5)


@st.composite
def trajectories(draw: st.DrawFn, min_steps: int = 1) -> tuple[Citations, list[int]]:
    """Citations (some outside 1..M, some duplicate, some not applicable) and step lengths."""
    steps = draw(st.integers(min_steps, 8))
    numbers = st.lists(st.integers(0, steps + 1), max_size=5)
    citations = draw(st.lists(st.tuples(st.sampled_from([-1, 0, 1, 1]), numbers), max_size=8))
    tokens = draw(st.lists(st.integers(1, 400), min_size=steps, max_size=steps))
    return citations, tokens


def flipped(citations: Citations) -> Citations:
    """Every pass a fail and the other way round: Q becomes 1 − Q."""
    return [(-score, numbers) for score, numbers in citations]


# --- the seven properties ---------------------------------------------------------------------------------------------


@given(advantages, trajectories())
def test_p1_conservation(advantage: float, trajectory: tuple[Citations, list[int]]) -> None:
    """Σ n_j a_j = A · N, whatever the reason."""
    citations, tokens = trajectory
    credit = redistribute(advantage, citations, tokens)
    spent = math.fsum(n * a for n, a in zip(tokens, credit.per_token, strict=True))
    assert spent == pytest.approx(advantage * sum(tokens), rel=1e-12)


@given(advantages, st.lists(st.integers(1, 400), min_size=2, max_size=8), st.integers(1, 4), st.integers(0, 4))
def test_p2_unanimous_steps_have_equal_totals(advantage: float, tokens: list[int], passes: int, fails: int) -> None:
    """All weights equal and positive: a_j = A·N/(n_j·M), which is not the flat A; uncited steps included."""
    steps = len(tokens)
    cited = list(range(1, steps))  # the last step takes the mean
    citations = [(1, cited)] * passes + [(-1, cited)] * fails
    assume(passes > 0 if advantage > 0 else fails > 0)
    credit = redistribute(advantage, citations, tokens)
    assert credit.reason is Reason.UNANIMOUS
    share = advantage * sum(tokens) / steps
    assert totals(credit, tokens) == pytest.approx([share] * steps, rel=1e-12)
    assert credit.per_token == pytest.approx([share / n for n in tokens], rel=1e-12)


@given(advantages, trajectories())
def test_p3_sign_is_preserved(advantage: float, trajectory: tuple[Citations, list[int]]) -> None:
    """No token gets credit against the trajectory's sign."""
    credit = redistribute(advantage, *trajectory)
    assert all(a * advantage >= 0 for a in credit.per_token)


@given(advantages, trajectories(min_steps=2))
def test_p4_shares_are_monotone_in_quality(advantage: float, trajectory: tuple[Citations, list[int]]) -> None:
    """A winner's share of credit rises with Q_j, a loser's share of blame with 1 − Q_j: strictly, where Q differs."""
    citations, tokens = trajectory
    credit = redistribute(advantage, citations, tokens)
    assume(credit.reason is Reason.CREDITED)
    mass = advantage * sum(tokens)
    shares = [total / mass for total in totals(credit, tokens)]
    for q_a, s_a in zip(credit.qualities, shares, strict=True):
        for q_b, s_b in zip(credit.qualities, shares, strict=True):
            if q_a > q_b:
                assert s_a > s_b if advantage > 0 else s_a < s_b


@given(advantages, trajectories(min_steps=2), st.data())
def test_p5_shares_do_not_depend_on_lengths(
    advantage: float, trajectory: tuple[Citations, list[int]], data: st.DataObject
) -> None:
    """n_j a_j / (A N) is the same for any other step lengths."""
    citations, tokens = trajectory
    others = data.draw(st.lists(st.integers(1, 400), min_size=len(tokens), max_size=len(tokens)))
    credit, other = redistribute(advantage, citations, tokens), redistribute(advantage, citations, others)
    assume(credit.reason in (Reason.CREDITED, Reason.UNANIMOUS))
    shares = [n * a / (advantage * sum(tokens)) for n, a in zip(tokens, credit.per_token, strict=True)]
    other_shares = [n * a / (advantage * sum(others)) for n, a in zip(others, other.per_token, strict=True)]
    assert shares == pytest.approx(other_shares, rel=1e-12, abs=1e-15)


@given(advantages, trajectories(), st.floats(1e-3, 1e3))
def test_p6_linear_in_the_advantage(advantage: float, trajectory: tuple[Citations, list[int]], scale: float) -> None:
    """Scaling A scales every a_j: credit does not depend on the scale of rewards."""
    base = redistribute(advantage, *trajectory).per_token
    scaled = redistribute(scale * advantage, *trajectory).per_token
    assert scaled == pytest.approx([scale * a for a in base], rel=1e-12)


@given(winners, trajectories())
@example(1.0, ([(1, [1, 2]), (-1, [1])], [2, 4, 6]))
def test_p7_a_loser_at_q_mirrors_a_winner_at_one_minus_q(
    advantage: float, trajectory: tuple[Citations, list[int]]
) -> None:
    """−A with Q and A with 1 − Q get opposite credit."""
    citations, tokens = trajectory
    winner = redistribute(advantage, flipped(citations), tokens)
    loser = redistribute(-advantage, citations, tokens)
    assert loser.per_token == pytest.approx([-a for a in winner.per_token], rel=1e-12, abs=1e-15)
    assert loser.reason is winner.reason


# --- brute force ------------------------------------------------------------------------------------------------------


def brute_force(advantage: float, citations: Citations, tokens: list[int]) -> list[float]:
    """Credit of every single token in exact fractions, straight from the definitions, without sharing code."""
    steps = len(tokens)
    step_of = [j for j, n in enumerate(tokens, start=1) for _ in range(n)]
    verdicts: dict[int, list[int]] = {j: [] for j in range(1, steps + 1)}
    for score, numbers in citations:
        for j in range(1, steps + 1):
            if score != 0 and j in numbers:
                verdicts[j].append(score)
    quality = {j: Fraction(v.count(1), len(v)) for j, v in verdicts.items() if v}
    flat = [advantage for _ in step_of]
    if not quality or steps == 1:
        return flat
    mean = sum(quality.values(), Fraction(0)) / len(quality)
    weight = {j: quality.get(j, mean) for j in verdicts}
    if advantage < 0:
        weight = {j: 1 - w for j, w in weight.items()}
    if sum(weight.values()) == 0:
        return flat
    credit = {
        j: Fraction(advantage) * len(step_of) * weight[j] / (step_of.count(j) * sum(weight.values())) for j in verdicts
    }
    return [float(credit[j]) for j in step_of]


@settings(max_examples=400)
@given(st.one_of(advantages, st.just(0.0)), trajectories())
def test_agrees_with_brute_force_on_every_token(advantage: float, trajectory: tuple[Citations, list[int]]) -> None:
    citations, tokens = trajectory
    per_token = redistribute(advantage, citations, tokens).per_token
    ours = [a for a, n in zip(per_token, tokens, strict=True) for _ in range(n)]
    assert ours == pytest.approx(brute_force(advantage, citations, tokens), rel=1e-12, abs=1e-15)


# --- edge cases, each with its counted reason -------------------------------------------------------------------------


def test_no_criteria_is_uniform() -> None:
    credit = redistribute(0.7, [], [3, 5])
    assert credit.reason is Reason.NO_CRITERIA
    assert credit.per_token == (0.7, 0.7)
    assert credit.qualities == ()


@pytest.mark.parametrize("citations", [[(1, [])], [(0, [1, 2])], [(-1, [9])]])
def test_uncited_is_uniform(citations: Citations) -> None:
    credit = redistribute(-0.7, citations, [3, 5])
    assert credit.reason is Reason.UNCITED
    assert credit.per_token == (-0.7, -0.7)
    assert credit.qualities == ()


def test_single_step_keeps_the_advantage() -> None:
    credit = redistribute(0.3, [(1, [1]), (-1, [1])], [7])
    assert credit.reason is Reason.SINGLE_STEP
    assert credit.per_token == (0.3,)
    assert credit.qualities == (0.5,)


@pytest.mark.parametrize(("advantage", "score"), [(0.5, -1), (-0.5, 1)])
def test_collapsed_is_uniform(advantage: float, score: int) -> None:
    """A winner whose citing verdicts all fail; a loser whose citing verdicts all pass."""
    credit = redistribute(advantage, [(score, [1]), (score, [2])], [3, 5, 2])
    assert credit.reason is Reason.COLLAPSED
    assert credit.per_token == (advantage,) * 3


def test_unanimous_can_be_uniform_by_choice() -> None:
    credit = redistribute(1.0, [(1, [1])], [2, 4], unanimous="uniform")
    assert credit.reason is Reason.UNANIMOUS
    assert credit.per_token == (1.0, 1.0)
    assert credit.qualities == (1.0, 1.0)


def test_zero_advantage_gives_zero_credit_and_keeps_its_reason() -> None:
    credit = redistribute(0.0, [(1, [1]), (-1, [2])], [2, 4])
    assert credit.per_token == (0.0, 0.0)
    assert credit.qualities == (1.0, 0.0)
    assert credit.reason is Reason.CREDITED


@pytest.mark.parametrize(
    ("citations", "tokens", "reason"),
    [
        ([], [4], Reason.NO_CRITERIA),  # before uncited and single_step
        ([(1, [])], [4], Reason.UNCITED),  # before single_step
        ([(-1, [1])], [4], Reason.SINGLE_STEP),  # before collapsed
        ([(1, [1])], [4], Reason.SINGLE_STEP),  # before unanimous
        ([(-1, [1])], [4, 4], Reason.COLLAPSED),  # equal weights, all zero: before unanimous
        ([(1, [1])], [4, 4], Reason.UNANIMOUS),
    ],
)
def test_precedence_of_reasons(citations: Citations, tokens: list[int], reason: Reason) -> None:
    assert redistribute(1.0, citations, tokens).reason is reason


def test_uncited_steps_take_the_mean_of_cited_steps_each_counted_once() -> None:
    # Step 1 is cited by two criteria and step 2 by one: the mean is over steps, (1 + 0) / 2, not over citations.
    credit = redistribute(1.0, [(1, [1]), (1, [1]), (-1, [2])], [1, 1, 1])
    assert credit.qualities == (1.0, 0.0, 0.5)


def test_citations_outside_the_steps_and_repeats_count_for_nothing() -> None:
    clean = redistribute(1.0, [(1, [1]), (-1, [2])], [2, 4])
    messy = redistribute(1.0, [(1, [1, 1, 0, 1]), (-1, [2, 3, -1]), (0, [1, 1, 9])], [2, 4])
    assert messy == clean


def test_two_criteria_that_cite_one_step_both_count() -> None:
    assert redistribute(1.0, [(1, [1]), (1, [1]), (-1, [1])], [2, 4]).qualities[0] == pytest.approx(2 / 3)


def test_one_third_is_level_however_it_arises() -> None:
    """1/3, 2/6 and a mean of thirds are one quality: no rounding turns a unanimous rollout into a credited one."""
    thirds = [(1, [1, 2]), (-1, [1, 2]), (-1, [1, 2]), (1, [2]), (-1, [2]), (-1, [2])]
    assert redistribute(1.0, thirds, [3, 5, 7]).reason is Reason.UNANIMOUS


def test_uniform_rule() -> None:
    credit = uniform(-0.4, [2, 5])
    assert credit.per_token == (-0.4, -0.4)
    assert credit.reason is Reason.UNIFORM


@pytest.mark.parametrize(
    ("advantage", "citations", "tokens", "message"),
    [
        (1.0, [], [], "at least one step"),
        (1.0, [], [3, 0], "at least one token"),
        (1.0, [], [3, -1], "at least one token"),
        (1.0, [(2, [1])], [3], "score of -1, 0 or 1, got 2"),
        (math.nan, [], [3], "finite advantage"),
        (math.inf, [], [3], "finite advantage"),
    ],
)
def test_bad_input_is_refused(advantage: float, citations: Citations, tokens: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        redistribute(advantage, citations, tokens)


def test_unknown_unanimous_is_refused() -> None:
    with pytest.raises(ValueError, match="'equal_totals' or 'uniform'"):
        redistribute(1.0, [], [3], unanimous="flat")  # type: ignore[arg-type]


def test_integers_give_floats() -> None:
    credit = redistribute(1, [], [2])
    assert isinstance(credit.per_token[0], float)


def test_docstring_examples() -> None:
    result = doctest.testmod(draco.credit.redistribution)
    assert (result.failed, result.attempted) == (0, 3)


@pytest.mark.parametrize(
    ("citations", "tokens", "message"),
    [
        ([(1, [1.5])], [2, 4], "cited steps as integers"),
        ([(1, 3)], [2, 4], r"\(score, steps\) pairs"),
        ([1], [2, 4], r"\(score, steps\) pairs"),
        ([(1, [1])], [1.5, 2], "step_tokens as integers"),
    ],
)
def test_input_of_another_kind_is_named(citations: Any, tokens: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        redistribute(1.0, citations, tokens)


def test_a_product_beyond_floats_is_refused() -> None:
    with pytest.raises(ValueError, match="finite A · N"):
        redistribute(1e308, [(1, [1])], [20, 2])
