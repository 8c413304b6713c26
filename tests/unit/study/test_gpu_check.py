"""scripts/gpu_check.sh at toy sizes: the path that runs unattended on a GPU."""

from __future__ import annotations

import json

import gpu_check
import pytest
import torch


def test_the_measurements_are_one_object(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "")  # put back afterwards
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert gpu_check.main(["--dry"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [u["tokens"] for u in found["update"]] == [64, 128, 256]
    assert all(u["tokens_per_s"] > 0 for u in found["update"])
    ways = {m["layout"]: m for m in found["packed_vs_padded"]}
    assert set(ways) == {"packed", "one by one", "padded"}
    assert ways["packed"]["padding_share"] == 0
    # Lengths of 64, 32, 21, 16 and 8 in rows of 64.
    assert ways["padded"]["padding_share"] == pytest.approx(1 - 141 / 320, abs=1e-3)
    assert found["world_of_one"]["ok"]
    assert found["adapter_round_trip"]["ok"]
    assert not found["skipped"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_runs_without(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == 2
    said = capsys.readouterr()
    assert "--dry" in said.err
    assert not said.out
