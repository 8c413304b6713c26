"""The matrix: tiny models of many families, each as a run trains it, against transformers and PEFT alone.

A row with a verdict of its own is a decision: if one changes, docs/models.md changes with it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.families import FAMILIES, save
from support.matrix import measure

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in (  # of the reference
        ".*torch.jit.script.*:DeprecationWarning",
        "The following (rank|alpha)_pattern keys",
        ".*base_model_name_or_path` was renamed",
        "fan_in_fan_out is set to",
        "You have passed exclude_modules",
    )
]

UNPACKED = (
    "stablelm", "nemotron", "gptj", "gpt_neo", "bloom", "mpt", "falcon", "falcon alibi",  # attention of their own
    "qwen2_moe", "phimoe", "gpt_oss", "llama4",  # masks and sinks that packed attention does not know
    "qwen3_next", "qwen3_5", "lfm2", "falcon_h1", "jamba",  # layers with a state
)  # fmt: skip
REFUSED = {
    "gemma2": "final_logit_softcapping=30.0",
    "granite": "logits_scaling=4.0",
    "cohere": "logit_scale=0.25",
    "minicpm3": "logits_scaling=0.125",
    "recurrent_gemma": "logits_soft_cap=30.0",
    "llama dynamic": "the update differs from plain transformers and PEFT",
    "phi3 longrope": "the update differs from plain transformers and PEFT",
    "doge": "the in-process engine differs from plain rows",
    "minimax": "the in-process engine differs from plain rows (ValueError: MiniMax uses cache of its own",
    "mamba2": "the in-process engine differs from plain rows",
    "bamba": "the in-process engine differs from plain rows",
    "llava": "could not be loaded: Unrecognized configuration class",
    "qwen2_5_vl": "could not be loaded: Unrecognized configuration class",
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_trains_as_it_is_served_or_is_refused(name: str, tmp_path: Path) -> None:
    found = measure(save(tmp_path / "model", name))
    if name in REFUSED:
        assert found.kind == "refused"
        assert REFUSED[name] in found.reason
        assert "\n" not in found.reason
        return
    assert found.kind == ("unpacked" if name in UNPACKED else "packed"), found.reason
    assert found.logprobs <= 1e-5
    assert found.gradients <= 1e-5
    assert found.engine <= 1e-5


def test_the_table_has_no_row_too_many() -> None:
    assert {*UNPACKED, *REFUSED} <= FAMILIES.keys()
    assert len(FAMILIES) >= 25
