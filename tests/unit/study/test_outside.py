"""Trajectories of others: what `draco judge` reads, judges and replays, and rollouts scored on a fixed set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.hash_judge import judge_server
from support.small_run import write_run

from draco.core.errors import ConfigError
from draco.run.archive import read_calls, read_table
from draco.study.curves import all_figures
from draco.study.judgements import read_groups
from draco.study.outside import judge_by_labels, read_groups_of
from draco.study.runs import open_run
from draco.study.verbs import judge as judge_verb
from draco.study.verbs import replay, report, rescore


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


CALL = {"id": "1", "type": "function", "function": {"name": "search", "arguments": '{"q": "x"}'}}


def chat(*texts: str | None) -> list[dict[str, Any]]:
    """A conversation; None is a tool call and its result."""
    out: list[dict[str, Any]] = [{"role": "system", "content": "s"}, {"role": "user", "content": "find x"}]
    for text in texts:
        if text is None:
            out += [{"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "found"}]
        else:
            out.append({"role": "assistant", "content": text})
    return out


def labelled(task: int, sample: int, labels: dict[str, int], final: int) -> dict[str, Any]:
    messages = chat(*[None] * (len(labels) - 1), "the end")
    return {
        "query_index": task,
        "sample_index": sample,
        "messages": messages,
        "step_labels": labels,
        "final_label": final,
    }


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path


def test_a_label_that_is_no_number_is_refused(tmp_path: Path) -> None:
    rows = [labelled(0, s, {}, final) for s, final in enumerate((1, False))]
    with pytest.raises(ConfigError, match=r"line 2: field 'final_label': expected −1, 0 or 1, got False"):
        read_groups_of(write(tmp_path / "x.jsonl", rows))


def test_chat_messages_become_steps(tmp_path: Path) -> None:
    row = {"task_id": "a", "messages": [*chat(None, "two words"), {"role": "user", "content": "thanks"}]}
    row["messages"][2]["usage"] = {"completion_tokens": 17}
    (group,) = read_groups_of(write(tmp_path / "f.jsonl", [row, row])).groups
    first, second = group.trajectories
    assert (first.sample, second.sample) == (0, 1)
    assert [(s.action, s.observation) for s in first.steps] == [
        ('search({"q": "x"})', "found"),
        ("two words", "(user) thanks"),
    ]
    assert first.step_tokens == (17, 2)
    assert first.task.instruction == "find x"


def test_every_malformed_row_is_named_and_nothing_is_judged(tmp_path: Path) -> None:
    good = {"task_id": "a", "messages": chat("x")}
    rows = [
        good, {"messages": chat("x")}, {"task_id": "a", "messages": "x"},
        {"task_id": "a", "messages": [{"content": "x"}]},
        {"task_id": "a", "messages": chat()}, 3, {**good, "sample": 0},
        {"task_id": "a", "messages": [{"role": "assistant", "content": 5}]},
    ]  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        read_groups_of(write(tmp_path / "f.jsonl", rows))
    text = str(caught.value)
    assert "7 malformed rows" in text
    for part in (
        "line 2: field 'task_id'", "line 3: field 'messages'", "line 4: field messages[0].role",
        "line 5: field 'messages': no assistant",
        "line 6: expected an object", "line 7: field 'sample': task 'a' has a trajectory 0",
        "line 8: field messages[0].content",
    ):  # fmt: skip
        assert part in text
    (tmp_path / "g.jsonl").write_text('{"task_id": 1}\n{oops\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="line 2: no JSON"):
        read_groups_of(tmp_path / "g.jsonl")


def test_the_shape_of_a_file_is_named_where_it_is_unknown_or_incomplete(tmp_path: Path) -> None:
    unknown = write(tmp_path / "w.jsonl", [{"history": [], "mistake_step": "0"}])
    with pytest.raises(ConfigError, match=r"no row has a known shape.*line 1 has history, mistake_step"):
        read_groups_of(unknown)
    predictions = write(tmp_path / "p.jsonl", [{"query_index": 0, "sample_index": 1, "step_labels": {"2": 1}}])
    with pytest.raises(ConfigError, match="line 1: field 'messages': expected a list of messages, got NoneType"):
        read_groups_of(predictions)
    (tmp_path / "t.json").write_text(json.dumps([{"task_id": 1, "traj": chat("a")}] * 2), encoding="utf-8")
    assert read_groups_of(tmp_path / "t.json").form == "tau_bench"  # results without a trial number


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"reward": float("nan")}, "field 'reward': expected a finite number, got nan"),
        ({"reward_info": [1]}, "field 'reward_info': expected an object, got list"),
        ({"messages": []}, "field 'messages': is empty"),
        ({"sample": True}, "field 'sample': expected a number from 0, got True"),
        ({"messages": [{"role": "assistant", "content": ["a", 3]}]}, r"messages\[0\].content\[0\]: expected an object"),
    ],
)
def test_a_faulty_field_is_named_beside_a_line_that_is_no_json(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    file = write(tmp_path / "f.jsonl", [{"task_id": "a", "messages": chat("x"), **change}])
    file.write_text(file.read_text(encoding="utf-8") + "{oops\n" * 30, encoding="utf-8")
    with pytest.raises(ConfigError, match=said) as caught:
        read_groups_of(file)
    assert "31 malformed rows" in str(caught.value)
    assert "line 2: no JSON" in str(caught.value)
    assert str(caught.value).endswith("… and 11 more")


def test_lines_end_at_line_feeds_alone_and_encodings_are_told_apart(tmp_path: Path) -> None:
    rows = [{"task_id": "a", "messages": chat("one\u2028two\u0085three")}] * 2
    text = "\r\n".join(json.dumps(r, ensure_ascii=False) for r in rows)
    file = tmp_path / "f.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + text.encode())
    (group,) = read_groups_of(file).groups
    assert group.trajectories[1].steps[0].action == "one\u2028two\u0085three"
    file.write_bytes(text.encode("utf-16"))
    with pytest.raises(ConfigError, match="no UTF-8 text"):
        read_groups_of(file)
    file.write_text('{"simulations": 5}', encoding="utf-8")
    with pytest.raises(ConfigError, match="field 'simulations': expected a list, got int"):
        read_groups_of(file)


def test_an_end_that_the_log_does_not_state_is_a_gap_in_f3(tmp_path: Path) -> None:
    rows = [labelled(0, s, {"2": 1 - 2 * s}, 1 - 2 * s) for s in range(2)]
    out, file = tmp_path / "out", write(tmp_path / "f.jsonl", rows)
    judge_verb.main([f"input={file}", "judge=labels", f"out={out}"])
    assert read_table(out, "trajectories")["termination"].to_pylist() == ["unknown"] * 2
    assert read_groups(out, 0)[0].trajectories[0].termination == "unknown"

    def f3() -> Any:
        return next(f for f in all_figures([open_run(out)]) if f.name == "F3_terminations")

    assert (f3().panels[0].series, f3().panels[0].gap) == ((), "its log does not say how trajectories ended")
    rows[0]["termination_reason"] = "agent_stop"
    judge_verb.main([f"input={write(file, rows)}", "judge=labels", f"out={out}", "overwrite=true"])
    assert [(s.label, s.y) for s in f3().panels[0].series] == [("submitted", (1.0,))]
    assert "1 rollouts whose log does not say" in f3().note


def test_wrong_options_are_one_line_before_anything_is_made(tmp_path: Path, run: Path) -> None:
    rows = [{"task_id": "a", "messages": chat("x")}] * 2
    file, out = write(tmp_path / "f.jsonl", rows), tmp_path / "o"
    with pytest.raises(ConfigError, match="no step_labels, final_label or reward"):
        judge_verb.main([f"input={file}", "judge=labels", f"out={out}"])
    with pytest.raises(ConfigError, match=r"judge\.model is missing"):
        judge_verb.main([f"input={file}", "judge=litellm", f"out={out}"])
    write(file, [labelled(0, s, {"2": 1}, 1) for s in range(2)])
    for batch in ("0", "x"):
        with pytest.raises(ConfigError, match=f"batch is '?{batch}'?; expected an integer ≥ 1"):
            judge_verb.main([f"input={file}", "judge=labels", f"out={out}", f"batch={batch}"])
    assert not out.exists()
    with pytest.raises(ConfigError, match="choose another out=, or overwrite=true"):
        judge_verb.main([f"input={file}", "judge=labels", f"out={run}"])
    for every in ("0", "x"):
        for verb in (rescore, replay):
            with pytest.raises(ConfigError, match=f"every is '?{every}'?; expected an integer ≥ 1"):
                verb.main([str(run), f"every={every}"])
    for text in ("x", "0", "nan"):
        with pytest.raises(ConfigError, match=f"max_mb is '?{text}'?; expected a number > 0"):
            report.main([str(run), f"max_mb={text}"])
    assert not (run / "tables").exists()


def test_tau_results_of_both_shapes(tmp_path: Path) -> None:
    old = [{"task_id": 0, "trial": t, "reward": float(t), "traj": chat(None, "bye")} for t in (0, 1)]
    (tmp_path / "old.json").write_text(json.dumps(old), encoding="utf-8")
    found = read_groups_of(tmp_path / "old.json")
    assert (found.form, dict(found.final_labels)) == ("tau_bench", {("0", 0): -1, ("0", 1): 1})
    simulations = [
        {"task_id": "task_001", "trial": 0, "messages": chat("a"), "reward_info": {"reward": 1.0},
         "termination_reason": "user_stop"},
        {"task_id": "task_001", "trial": 1, "messages": chat("a"), "reward_info": None,
         "termination_reason": "infrastructure_error"},
    ]  # fmt: skip
    (tmp_path / "new.json").write_text(json.dumps({"simulations": simulations}), encoding="utf-8")
    (group,) = read_groups_of(tmp_path / "new.json").groups
    assert [t.termination.quarantined for t in group.trajectories] == [False, True]


def test_labels_as_verdicts(tmp_path: Path) -> None:
    rows = [
        labelled(0, 0, {"2": 1, "4": -1, "6": 1}, -1),
        labelled(0, 1, {"2": 1, "4": 0, "6": 1}, 1),
        labelled(1, 0, {"2": 1}, 1),
    ]
    judged, alone = judge_by_labels(read_groups_of(write(tmp_path / "f.jsonl", rows)))
    assert [c.title for c in judged.criteria] == [
        "Reaches the right result",
        "Step 1 is sound",
        "Step 2 is sound",
        "Step 3 is sound",
    ]
    assert judged.dropped == (False, True, False, True)
    assert judged.rewards == (-1.0, 1.0)  # result and step 2 fail; result passes, step 2 is n.a.
    assert judged.verdicts[2][0].steps == (2,)
    assert alone.group.trajectories == ()
    assert alone.failures[0].reason == "1 member(s) left, a group needs 2"
    with pytest.raises(ConfigError, match="no step_labels, final_label or reward"):
        list(judge_by_labels(read_groups_of(write(tmp_path / "g.jsonl", [{"task_id": 1, "messages": chat("x")}]))))


def test_a_labelled_file_becomes_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [labelled(t, s, {"2": 1, "4": -1 if s else 1, "6": 1}, -1 if s else 1) for t in range(3) for s in range(2)]
    out = tmp_path / "out"
    file = write(tmp_path / "f.jsonl", rows)
    judge_verb.main([f"input={file}", "judge=labels", f"out={out}", "batch=2"])
    assert "6 trajectories in 3 groups; 6 judged, 0 not" in capsys.readouterr().out
    assert read_table(out, "credits").num_rows == 6
    loser = next(r for r in read_table(out, "credits", [0]).to_pylist() if r["sample"] == 1)
    # The loser's only surviving citation is the failed step 2: Q = 0 there, so that every weight is 1.
    assert (loser["reward"], loser["reason"]) == (-1.0, "unanimous")
    assert replay.main([str(out)]) == 0
    assert (out / "report.html").stat().st_size > 10_000
    with pytest.raises(ConfigError, match="exists and is not empty"):
        judge_verb.main([f"input={file}", "judge=labels", f"out={out}"])


def test_a_judge_behind_http_judges_a_log_and_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"task_id": t, "messages": chat(None, f"answer {t}{s}")} for t in ("a", "b") for s in range(3)]
    out = tmp_path / "out"
    file = write(tmp_path / "f.jsonl", rows)
    with judge_server() as address:
        judge = ["judge.model=hosted_vllm/one", f"judge.api_base={address}", "judge.concurrency=2"]
        judge_verb.main([f"input={file}", "judge=litellm", *judge, f"out={out}", "caveats=The index is old."])
        assert "6 trajectories in 2 groups; 6 judged, 0 not" in capsys.readouterr().out
        assert replay.main([str(out)]) == 0
        calls = read_calls(out)
        assert "The index is old." in calls[0]["messages"][0][1]
        assert {c["phase"] for c in calls} >= {"propose_task", "propose_rollout", "merge", "score"}
        # The same judge again, to the letter: it agrees with itself.
        replay.main([str(out), "judge=litellm", *judge])
        (summary,) = out.glob("judge_replay/*/summary.json")
        content = json.loads(summary.read_text(encoding="utf-8"))
        assert (content["all"]["model_recall"], content["matcher"]) == (None, None)
        capsys.readouterr()
        replay.main([str(out), "judge=litellm", *judge, "phases=attribute"])
        assert "cited steps" in capsys.readouterr().out
        content = json.loads(summary.read_text(encoding="utf-8"))
        assert (content["all"]["cited_recall"], content["all"]["cited_precision"]) == (1.0, 1.0)
        # A model says which criteria are the same: one pair a merge, of two criteria on either side.
        matcher = [a.replace("judge.", "matcher.") for a in judge]
        replay.main([str(out), "judge=litellm", *judge, "matcher=litellm", *matcher])
        assert "matcher: asked 2, kept 0, failed 0" in capsys.readouterr().out
        replay.main([str(out), "judge=litellm", *judge, "matcher=litellm", *matcher])
        assert "matcher: asked 0, kept 2, failed 0" in capsys.readouterr().out
    content = json.loads(summary.read_text(encoding="utf-8"))
    assert (content["all"]["model_recall"], content["all"]["model_precision"]) == (0.5, 0.5)
    assert content["all"]["agreement"] == 1.0
    assert content["all"]["pairs"] == 12
    assert (content["all"]["recall"], content["all"]["precision"]) == (1.0, 1.0)


def test_tasks_that_ran_once_are_no_fault_of_the_judge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"task_id": t, "messages": chat(None, f"answer {t}")} for t in ("a", "a", "b", "c", "d")]
    out, file = tmp_path / "out", write(tmp_path / "f.jsonl", rows)
    with judge_server() as address:
        judge = ["judge=litellm", "judge.model=hosted_vllm/one", f"judge.api_base={address}"]
        judge_verb.main([f"input={file}", *judge, f"out={out}"])
        printed = capsys.readouterr().out
        assert "5 trajectories in 4 groups; 2 judged, 3 not" in printed
        assert "3 tasks have one trajectory" in printed
        assert {c["task_id"] for c in read_calls(out)} == {"a"}  # nobody is asked about what cannot be compared
        reasons = [r["reason"] for r in read_table(out, "failures").to_pylist()]
        assert reasons == ["1 member(s) left, a group needs 2"] * 3
        with pytest.raises(ConfigError, match=r"no task has two usable trajectories \(2 in 2 tasks\)"):
            judge_verb.main([f"input={write(tmp_path / 'g.jsonl', rows[2:4])}", *judge, f"out={tmp_path / 'n'}"])
    assert not (tmp_path / "n").exists()


def test_rollouts_are_scored_again_on_a_fixed_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"task_id": t, "messages": chat(None, f"answer {t}{s}")} for t in ("a", "b") for s in range(3)]
    out, file = tmp_path / "out", write(tmp_path / "f.jsonl", rows)
    fixed = tmp_path / "fixed.yaml"
    entries = [f"- {{title: 'Is good {i}', description: d, evaluator_instruction: e}}" for i in range(3)]
    fixed.write_text("criteria:\n" + "\n".join(entries) + "\n", encoding="utf-8")
    with judge_server() as address:
        judge = ["judge=litellm", "judge.model=hosted_vllm/one", f"judge.api_base={address}"]
        judge_verb.main([f"input={file}", *judge, f"out={out}", "batch=1"])
        rescore.main([str(out), "rubric=static", f"criteria={fixed}", *judge])
        assert "rescored/fixed: 6 calls" in capsys.readouterr().out
        rescore.main([str(out), "rubric=static", f"criteria={fixed}", *judge])
        assert "rescored/fixed: 0 calls" in capsys.readouterr().out  # finished steps are kept
    verdicts = read_table(out / "rescored" / "fixed", "verdicts").to_pylist()
    assert len(verdicts) == 6 * 3
    (figure,) = [f for f in all_figures([open_run(out)]) if f.name == "F4_pass_rate"]
    (dotted,) = [s for s in figure.panels[0].series if s.dotted]
    assert dotted.label == "dynamic+step (rollouts re-scored: fixed)"
    by_hand = [[v["score"] == 1 for v in verdicts if v["step"] == step] for step in (0, 1)]
    assert dotted.y == tuple(sum(passed) / 9 for passed in by_hand)


def test_scores_of_other_criteria_or_of_another_judge_are_not_taken_for_finished(tmp_path: Path) -> None:
    rows = [{"task_id": "a", "messages": chat(None, f"answer {s}")} for s in range(3)]
    out, file, fixed = tmp_path / "out", write(tmp_path / "f.jsonl", rows), tmp_path / "fixed.yaml"
    entry = "- {title: Is %s, description: d, evaluator_instruction: e}\n"
    fixed.write_text("criteria:\n" + entry % "good", encoding="utf-8")
    with judge_server() as address:
        judge = ["judge=litellm", "judge.model=hosted_vllm/one", f"judge.api_base={address}"]
        judge_verb.main([f"input={file}", *judge, f"out={out}"])
        again = [str(out), f"criteria={fixed}", *judge]
        rescore.main(again)
        rescore.main([*again, "judge.concurrency=1"])  # how calls are carried changes no score
        with pytest.raises(
            ConfigError, match=r"fixed were made with judge.model=hosted_vllm/one, judge.temperature=0.1\."
        ):
            rescore.main([*again, "judge.model=hosted_vllm/two", "judge.temperature=0.5"])
        fixed.write_text("criteria:\n" + entry % "better", encoding="utf-8")
        with pytest.raises(ConfigError, match=r"fixed were made with other criteria\. Rename"):
            rescore.main(again)
        made = out / "rescored" / "fixed" / "made_of.json"
        assert address not in made.read_text(encoding="utf-8")
        made.unlink()
        with pytest.raises(ConfigError, match=r"no made_of\.json"):
            rescore.main(again)
        (out / "rescored" / "fixed").rename(out / "rescored" / "old")
        rescore.main(again)
    (figure,) = [f for f in all_figures([open_run(out)]) if f.name == "F4_pass_rate"]
    assert sorted(s.label.rpartition(" ")[2] for s in figure.panels[0].series if s.dotted) == ["fixed)", "old)"]


def test_the_scripted_judge_is_refused_for_foreign_logs(tmp_path: Path) -> None:
    file = write(tmp_path / "f.jsonl", [{"task_id": "a", "messages": chat("x")}] * 2)
    with pytest.raises(ConfigError, match="judge=litellm"):
        judge_verb.main([f"input={file}", f"out={tmp_path / 'o'}"])
    assert not (tmp_path / "o").exists()
