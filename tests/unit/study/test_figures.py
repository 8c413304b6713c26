"""How figures are drawn, and the statistics behind them."""

from __future__ import annotations

from pathlib import Path

import pytest

from draco.judge.agreement import agreement
from draco.study.curves import over_seeds
from draco.study.figures import Figure, Panel, Series, _apart, _broken, _colours, _smoothed, write_figure
from draco.study.statistics import mean_std, paired_bootstrap, task_means


def test_a_line_is_broken_where_a_point_is_missing() -> None:
    xs, ys = _broken((1.0, 2.0, 5.0, 6.0), (0.1, 0.2, 0.5, 0.6), 1.0)
    assert xs == [1.0, 2.0, 3.5, 5.0, 6.0]
    assert ys[2] != ys[2]


def test_a_moving_average_takes_no_point_from_beyond_a_gap() -> None:
    assert _smoothed((1.0, 2.0, 3.0, 9.0), (0.0, 0.3, 0.6, 1.0), 3) == pytest.approx([0.15, 0.3, 0.45, 1.0])
    assert _smoothed((1.0, 2.0), (0.2, 0.8), 1) == [0.2, 0.8]


def test_names_at_the_ends_of_lines_keep_apart_and_in_order() -> None:
    assert _apart([0.1, 0.5, 0.52, 0.9], 0.1, 1.0) == pytest.approx([0.1, 0.5, 0.6, 0.9])
    assert _apart([0.95, 0.97, 0.98], 0.1, 1.0) == pytest.approx([0.8, 0.9, 1.0])


def test_a_setting_has_one_colour_in_every_figure() -> None:
    few, many = _colours({"dynamic+step", "mine"}), _colours({"static+uniform", "base", "dynamic+step", "mine", "b"})
    assert few["dynamic+step"] == many["dynamic+step"]
    assert len(set(many.values())) == 5


def test_points_of_a_scatter_are_all_named_and_seen(tmp_path: Path) -> None:
    """Names beside the points lay on each other; a cheap policy and a dear model left no room between points."""
    pytest.importorskip("matplotlib", reason="matplotlib comes with the extra `report`")
    names = ["base", "static+step", "dynamic+step", "openai/a", "other/b", "third/c"]
    series = tuple(Series(n, (0.01 * (i > 2) + 1e-4,), (0.7,)) for i, n in enumerate(names))
    for count in (1, len(names)):
        write_figure(Figure("f", "t", "USD", "TGC", (Panel("p", series[:count], "scatter"),)), tmp_path, png=False)
        drawn = (tmp_path / "f.svg").read_text(encoding="utf-8")
        assert all(drawn.count(f">{n}<") == 1 for n in names[:count])
    assert ">0.001<" in drawn  # a decade: the axis is logarithmic
    assert len(set(_colours(set(names)).values())) == len(names)


def test_means_over_seeds_at_points_that_only_one_has() -> None:
    mean = over_seeds("a", [{1.0: 0.0, 2.0: 1.0}, {1.0: 1.0}])
    assert (mean.x, mean.y, mean.low, mean.high) == ((1.0, 2.0), (0.5, 1.0), (0.0, 1.0), (1.0, 1.0))


def test_spread() -> None:
    spread = mean_std([1.0, None, 3.0])
    assert spread is not None
    assert (spread.mean, spread.std, spread.missing) == (2.0, pytest.approx(2**0.5), 1)
    assert mean_std([None]) is None
    alone = mean_std([1.0])
    assert alone is not None
    assert alone.std is None


def test_paired_bootstrap_pairs() -> None:
    a = {f"t{i}": float(i % 2) for i in range(40)}
    better = paired_bootstrap(a, dict.fromkeys(a, 1.0))
    assert better.mean == 0.5
    assert 0.3 < better.low < 0.5 < better.high < 0.7
    # The same run twice: no noise at all, which two unpaired samples would have.
    same = paired_bootstrap(a, dict(a))
    assert (same.mean, same.low, same.high) == (0.0, 0.0, 0.0)
    lost = paired_bootstrap(a, {**a, "extra": 1.0})
    assert (lost.tasks, lost.only_one) == (40, 1)
    with pytest.raises(ValueError, match="at least one task"):
        paired_bootstrap({"a": 1.0}, {"b": 1.0})


def test_a_task_with_an_unknown_success_has_no_mean() -> None:
    records = [{"task_id": "a", "success": True}, {"task_id": "a", "success": False}, {"task_id": "b", "success": None}]
    assert task_means(records) == {"a": 0.5}


def test_agreement_by_hand() -> None:
    # 4 pass–pass, 1 pass–fail, 2 fail–fail, 3 fail–pass: p_o = .6; pass shares .5 and .7.
    found = agreement([(1, 1)] * 4 + [(1, -1)] + [(-1, -1)] * 2 + [(-1, 1)] * 3)
    assert found.agreement == pytest.approx(0.6)
    assert found.all_pass_baseline == 0.5
    assert (found.false_pass, found.false_fail) == (0.6, 0.2)
    assert found.kappa == pytest.approx((0.6 - 0.5) / 0.5)  # chance .5·.7 + .5·.3
    assert found.ac1 == pytest.approx((0.6 - 0.48) / 0.52)  # 2·.6·.4
    assert agreement([]).kappa is None
    assert agreement([(1, 1)] * 3).kappa is None  # one category: chance agreement is 1
    with pytest.raises(ValueError, match="scores"):
        agreement([(1, 2)])
