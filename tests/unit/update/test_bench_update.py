"""Our half of scripts/bench_update.py; TRL, the other half, is in no test environment."""

from __future__ import annotations

import subprocess
import sys

from support import ROOT

SCRIPTS = ROOT / "scripts"

#: in a process of its own, for the script sets variables of the environment
STEP = """
import bench_update as bench
model = bench.SIZES["tiny"].model | {"num_hidden_layers": 1}
ours = bench.Ours(bench.Size(model, (24, 40), prompt=8, tool_share=0.5))
(loss, norm), (again, norm_again) = ours.step(), ours.step()
assert norm > 0
assert abs(again - loss) < 1e-6 and abs(norm_again - norm) < 1e-6 * norm
assert ours.totals.sums["model_tokens"] == ours.totals.sums["computed_tokens"] > 0
print("made two steps")
"""


def test_our_half_makes_a_step_and_reads_loss_gradient_and_padding() -> None:
    done = subprocess.run([sys.executable, "-c", STEP], cwd=SCRIPTS, capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.returncode) == ("made two steps\n", 0), done.stderr
