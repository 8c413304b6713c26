"""report.html in headless Chromium: clicks, keys, hover, both widths, light and dark, hostile text, a large run."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.browser import Browser, find_chromium
from support.factory import group
from support.small_run import HOSTILE, credit_of, rollout, write_run

from draco.core.types import Task
from draco.run.archive import write_step
from draco.run.numbers import archive_numbers
from draco.study.page import render_page, write_page
from draco.study.runs import open_run


@pytest.fixture
def page(tmp_path: Path) -> Path:
    run = write_run(tmp_path / "run")
    write_page(open_run(run), archive_numbers(run))
    return run / "report.html"


def test_hostile_text_is_nowhere_in_the_file_as_text(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "onerror" not in text
    assert "hacked" not in text
    assert not re.search(r"(?:src|href)=[\"']https?:", text)
    assert "default-src 'none'" in text


def test_the_same_archive_gives_the_same_page(page: Path) -> None:
    run = open_run(page.parent)
    again = render_page(run, archive_numbers(run.path), max_mb=64, max_text=4000)
    assert again == page.read_text(encoding="utf-8")


def test_a_page_that_is_too_large_is_thinned_and_says_so(page: Path) -> None:
    archive = page.parent / "archive"
    for step in range(2, 8):
        shutil.copytree(archive / "step=000000", archive / f"step={step:06d}")
    run = open_run(page.parent)
    full = render_page(run, [], max_mb=64, max_text=4000)
    assert len(re.findall(r'id="g\d+-0"', full)) == 8
    size = sum(len(b) for b in re.findall(r'id="g\d+-0">([^<]*)<', full))
    thin = render_page(run, [], max_mb=size / 2.5 / 1e6, max_text=4000)
    assert re.findall(r'id="g(\d+)-0"', thin) == ["0", "3", "6", "7"]
    (index,) = re.findall(r'id="index">([^<]*)<', thin)
    assert "4 of 8 steps are in this page" in gzip.decompress(base64.b64decode(index)).decode()


# -- in a browser --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if find_chromium() is None:
        pytest.skip("no Chromium; `make test-report` installs it")
    started = Browser(tmp_path_factory.mktemp("profile"))
    yield started
    started.close()


def opened(browser: Browser, page: Path, **how: object) -> None:
    browser.errors.clear()
    browser.requests.clear()
    browser.open(page, **how)  # type: ignore[arg-type]
    browser.until("document.querySelectorAll('.step').length || !document.getElementById('fault').hidden")


def clean(browser: Browser, page: Path) -> None:
    """No error, no request but the file itself, no hostile text that ran, no sideways scrolling of the page."""
    assert browser.errors == []
    assert {r for r in browser.requests if not r.startswith("data:")} == {page.resolve().as_uri()}
    assert browser.run("document.getElementById('fault').hidden") is True
    assert browser.run("window.hacked") is None
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert browser.run("document.documentElement.scrollWidth <= window.innerWidth") is True


def keep(browser: Browser, name: str) -> None:
    """Screenshots are kept where REPORT_SCREENSHOTS says."""
    if folder := os.environ.get("REPORT_SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        browser.screenshot(Path(folder) / f"{name}.png")


DETAIL = "document.getElementById('detail').textContent"


@pytest.mark.report
def test_click_through(browser: Browser, page: Path) -> None:
    opened(browser, page)
    assert browser.run("document.querySelectorAll('.rollout').length") == 3
    assert "R = 1.000" in browser.run("document.querySelector('.rollout').textContent")
    assert HOSTILE in browser.run(
        "(() => { document.querySelector('#opening summary').click();"
        " return document.getElementById('opening').textContent; })()"
    )
    # Rollout 0 (A = 1, N = 8): step 1 is cited by two passes, step 3 by nothing.
    browser.run('document.querySelector(\'.step[data-rollout="0"][data-step="0"]\').click()')
    text = browser.run(DETAIL)
    for part in ("n_j = 2 tokens, N = 8, A = +1.000", "Q_j = p/(p+f) = 2/(2+0) = 1.000",
                 "w_j = Q_j = 1.000", "Σ w = 3.000",
                 "n_j·a_j = +2.67, 33.3% of A·N = +8.00", HOSTILE, "criterion A", "criterion B"):  # fmt: skip
        assert part in text
    browser.run("document.getElementById('show-tokens').click()")
    assert browser.run("document.querySelectorAll('#tokens span').length") == 2
    # A loser cited by one fail: Q = 0, w = 1.
    browser.run("document.querySelector('.step[data-rollout=\"2\"]').click()")
    assert "A = −1.000" in browser.run(DETAIL)
    assert "single_step" in browser.run(DETAIL)
    browser.run("document.querySelector('#calls button').click()")
    assert '"score": 1' in browser.run("document.getElementById('calls').textContent")
    assert "3 calls, $1.0000" in browser.run("document.getElementById('calls').textContent")
    keep(browser, "1280-light")
    browser.run("document.getElementById('step-on').click()")
    browser.until("document.getElementById('position').textContent.includes('training step 2')")
    assert "no signal" in browser.run("document.getElementById('rollouts').textContent")
    assert "not in the group" in browser.run("document.getElementById('rollouts').textContent")
    assert "environment_error" in browser.run("document.getElementById('rollouts').textContent")
    assert "at least $0.0000 (a model has no known price)" in browser.run(
        "document.getElementById('calls').textContent"
    )
    clean(browser, page)


@pytest.mark.report
def test_hovering_lights_what_belongs_together(browser: Browser, page: Path) -> None:
    opened(browser, page)
    lit = "[...document.querySelectorAll('.step.lit')].map((s) => s.dataset.rollout + '/' + s.dataset.step)"
    browser.hover('#matrix tr[data-criterion="1"] th')
    assert browser.run(lit) == ["0/0", "0/1", "1/0", "1/1", "2/0"]  # criterion B cites these
    browser.hover('.step[data-rollout="1"][data-step="1"]')
    text = browser.run(DETAIL)
    assert "Q_j = p/(p+f) = 1/(1+1) = 0.500" in text
    assert "✗ fail" in text
    assert "✓ pass" in text
    clean(browser, page)


@pytest.mark.report
def test_rewards_shares_and_results_are_shown(browser: Browser, page: Path) -> None:
    (page.parent / "summary.json").write_text(
        json.dumps({"setting": "dynamic+step", "base_success": 0.25, "final_success": 0.75, "judge_calls": 4,
                    "judge_cost_usd": None, "inert_share": 0.5}), encoding="utf-8"
    )  # fmt: skip
    write_page(open_run(page.parent), archive_numbers(page.parent))
    opened(browser, page)
    tiles = browser.run("[...document.querySelectorAll('.tile')].map((t) => t.textContent)")
    assert tiles == ["25.0% → 75.0%tasks solved (TGC), before → after", "50.0%inert: verdicts unanimous",
                     "4judge calls, price unknown"]  # fmt: skip
    # Surviving verdicts of rollouts 0, 1, 2: + +, − +, n.a. −.
    rows = browser.run("[...document.querySelectorAll('#matrix tfoot tr')].map((r) => r.textContent)")
    assert rows[0].endswith("2✓ 0✗1✓ 1✗0✓ 1✗")
    assert rows[1].endswith("1.0000.000−1.000")
    # No step of this group has more or less than an equal share.
    assert browser.run("[...document.querySelectorAll('.share')].every((s) => s.textContent === '')") is True
    # An opened step stays when the mouse passes over another, until it is closed.
    browser.run("document.querySelector('.step[data-rollout=\"0\"]').click()")
    browser.hover('.step[data-rollout="1"][data-step="1"]')
    assert "Rollout 1, step 1" in browser.run(DETAIL)
    browser.run("document.querySelector('#detail .close').click()")
    assert "Why the credit is as it is" in browser.run(DETAIL)
    assert browser.run("document.querySelectorAll('[aria-expanded=true]').length") == 0
    # A curve tells the value under the pointer.
    browser.hover("#curve-grid .curve svg")
    assert "step 1 0" in browser.run("document.querySelector('#curve-grid figcaption').textContent")
    clean(browser, page)


@pytest.mark.report
def test_a_log_that_was_judged_without_training_says_so(browser: Browser, page: Path) -> None:
    run = page.parent
    config = json.loads((run / "config.yaml").read_text(encoding="utf-8"))
    (run / "config.yaml").write_text(json.dumps(config | {"steps": 0}), encoding="utf-8")
    for name in ("summary.json", "evaluation_before.json", "evaluation_after.json"):
        (run / name).unlink()
    write_page(open_run(run), archive_numbers(run))
    opened(browser, page)
    tiles = browser.run("[...document.querySelectorAll('.tile')].map((t) => t.textContent)")
    # Members 3 + 2 of 3 + 3 rollouts; passes 6 and fails 2 + 2; inert 2 and 2.
    assert tiles == ["5 of 6trajectories judged", "60.0%rubric passed", "80.0%inert: verdicts unanimous"]
    assert browser.run("document.getElementById('position').textContent").startswith("batch 1, task 1")
    clean(browser, page)


@pytest.mark.report
def test_steps_with_more_or_less_than_an_equal_share_are_marked(browser: Browser, page: Path) -> None:
    opened(browser, page)
    marks = browser.run(
        "(() => { const steps = [[2, 3], [4, 1.5], [2, 3]].map(([n, total]) => ({act: 'x', n, a: total / n}));"
        " const r = {sample: 0, end: 'submitted', reason: 'credited', r: 1, A: 7.5 / 8, steps};"
        " return [...rollout(r, 0, 3).querySelectorAll('.share')].map((s) => s.textContent); })()"
    )
    assert marks == ["▲", "▼", "▲"]  # 3, 1.5 and 3 of 7.5: an equal share is 2.5
    clean(browser, page)


@pytest.mark.report
def test_keys(browser: Browser, page: Path) -> None:
    opened(browser, page)
    where = "(() => { const d = document.activeElement.dataset; return d.rollout + '/' + d.step; })()"
    browser.press("ArrowDown")
    assert browser.run(where) == "0/0"
    browser.press("ArrowDown")
    browser.press("ArrowRight")
    assert browser.run(where) == "1/1"
    browser.press("ArrowRight")
    assert browser.run(where) == "2/0"  # it has one step
    browser.press("t")
    assert browser.run("document.querySelectorAll('#tokens span').length") == 3
    browser.press("m")
    assert browser.run("document.activeElement.closest('#matrix') !== null") is True
    browser.press("ArrowRight")
    browser.press("ArrowDown")
    assert browser.run("document.activeElement.getAttribute('aria-label')").endswith("rollout 1: pass")
    browser.press(".")
    browser.until("document.getElementById('position').textContent.includes('training step 2')")
    browser.press(",")
    browser.until("document.getElementById('position').textContent.includes('training step 1')")
    clean(browser, page)


@pytest.mark.report
@pytest.mark.parametrize(("width", "dark"), [(1280, True), (400, False), (400, True)])
def test_widths_and_schemes(browser: Browser, page: Path, width: int, dark: bool) -> None:
    opened(browser, page, width=width, dark=dark)
    colours = browser.run(
        "(() => { const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]; })()"
    )
    ink, paper = (sum(map(int, re.findall(r"\d+", c)[:3])) for c in colours)
    assert (paper < 150 < 600 < ink) if dark else (ink < 150 < 600 < paper)
    first = browser.run("document.querySelector('.rollout').getBoundingClientRect().width")
    assert 0.7 * min(width, 400) < first if width == 400 else first >= 140
    keep(browser, f"{width}-{'dark' if dark else 'light'}")
    clean(browser, page)


@pytest.mark.report
def test_a_hundred_steps_of_96_rollouts_can_be_walked_through(browser: Browser, tmp_path: Path) -> None:
    run = write_run(tmp_path / "large")
    for path in (run / "archive").iterdir():
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    # One real step, linked a hundred times: the page holds 100 × 16 blocks all the same.
    groups, credits = [], []
    for g in range(16):
        task = Task(f"task{g}", "do it", "train", "s")
        members = [rollout(task, s, (3,) * 12) for s in range(6)]
        groups.append(group(members, g, 0))
        credits.append(credit_of(0, group(members[:3], g, 0)))
    write_step(run, 0, groups, credits)
    content = open_run(run)
    text = render_page(content, archive_numbers(run), max_mb=64, max_text=4000)
    blocks = re.findall(r'<script type="text/plain" id="g0-\d+">.*?</script>', text, re.DOTALL)
    assert len(blocks) == 16
    many = "\n".join(b.replace('id="g0-', f'id="g{s}-') for s in range(1, 100) for b in blocks)
    heads = run / "report.html"
    heads.write_text(text.replace(blocks[0], many + "\n" + blocks[0], 1), encoding="utf-8")
    opened(browser, heads)
    browser.run(
        "(async () => { const i = await decode('index');"
        " state.index.steps = Array.from({length: 100}, (_, s) => ({step: s, groups: i.steps[0].groups})); })()"
    )
    for step in (50, 99, 3):
        browser.run(f"go({step}, 7)")
        assert browser.run("document.querySelectorAll('.step').length") == 72
    clean(browser, heads)
