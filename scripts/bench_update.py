"""The GRPO update of draco against TRL 1.16 on the same trajectories: python scripts/bench_update.py [--quick]

Both get the same model, adapter, token ids, masks and per-token advantages, and both do the work of one batch:
reference pass (adapter off), policy pass, loss with k3 KL, backward. Neither generates, judges or makes the optimizer
step. The script fails unless loss and gradient norm agree to 1e-5: otherwise times would mean nothing.

TRL runs in its fastest setting on a CPU: float32, its fused chunked LM head (1.16 has no other), sdpa attention, no
gradient checkpointing; `GRPOTrainer` itself gets the inputs that its generation would hand it, padded as it pads. It
takes the whole batch at once or one row at a time, whichever is faster (tried first, printed). draco runs `Worker` as
the trainer does, with as many tokens a pass as TRL's longest row has (at least 1,024).

    tiny    5 layers × 128, 600 words, 24 trajectories of 100–240 tokens      the default run, scaled down
    middle  4 layers × 256, 32,000 words, 8 trajectories of 160–1,200 tokens  the size of the figures in README.md
    head    LM head and log-probs alone, 151,936 × 896                        against its bare matrix products

The share of matrix products and attention is their CPU seconds under the profiler, divided by the CPU seconds of a step
without it. All CPU seconds are of this process with one thread. The two sides take turns within each repeat, and the
median of the ratios counts. Memory is the peak (VmHWM) of a fresh process, above what it held before the step.
Needs: pip install 'draco[bench]'.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("KINETO_LOG_LEVEL", "9")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from draco.core.types import Step, Task, Termination, Trajectory
from draco.policy.attention import pack_attention
from draco.update.gradients import Totals, Worker
from draco.update.logprobs import step_logprobs
from draco.update.options import LossOptions
from draco.update.packing import Row

TOLERANCE = 1e-5
KL = 0.01
LORA: dict[str, Any] = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


@dataclass(frozen=True)
class Size:
    """A model and its trajectories."""

    model: dict[str, Any]
    lengths: tuple[int, ...]  #: tokens of each trajectory
    prompt: int
    tool_share: float  #: of the tokens after the prompt


def _lengths(seed: int, count: int, low: int, high: int) -> tuple[int, ...]:
    """Log-uniform: most trajectories are short, a few are long. The longest is always there."""
    draw = random.Random(seed)
    return (high, *(int(low * (high / low) ** draw.random()) for _ in range(count - 1)))


SIZES = {
    "tiny": Size(
        {"vocab_size": 600, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 5},
        _lengths(0, 24, 100, 240),
        prompt=40,
        tool_share=0.5,
    ),
    "middle": Size(
        {"vocab_size": 32000, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4},
        _lengths(0, 8, 160, 1200),
        prompt=120,
        tool_share=0.6,
    ),
}
#: Rows a pass with which TRL was faster in full runs; --quick uses them untested. None: the whole batch.
QUICK_ROWS: dict[str, int | None] = {"tiny": None, "middle": 1}
HEAD_ROWS, HEAD_WIDTH, HEAD_VOCAB = 512, 896, 151_936


def make_model(size: Size) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(**size.model, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096)
    model: LlamaForCausalLM = cast(Any, LlamaForCausalLM)(config)
    model.requires_grad_(False)
    return model


def randomise(model: torch.nn.Module) -> None:
    """Give both sides the same adapter, which is not the identity: policy and reference must differ."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in sorted(model.named_parameters()):
        if "lora_" in name:
            scale = 0.02 if "lora_B" in name else 0.1
            parameter.data = scale * torch.randn(parameter.shape, generator=generator)


def trajectories(size: Size) -> list[tuple[Trajectory, tuple[float, ...]]]:
    """Turns of an action (a step) and a tool's answer, and an advantage for every step."""
    draw = random.Random(2)
    found = []
    for sample, length in enumerate(size.lengths):
        ids = tuple(draw.randrange(size.model["vocab_size"]) for _ in range(length))
        steps: list[Step] = []
        step_of, position = [-1] * size.prompt, size.prompt
        while position < length:
            action = draw.randint(15, 45)
            stop = min(position + action, length)
            steps.append(Step(len(steps) + 1, (position, stop), "", "", len(steps) + 1))
            step_of += [len(steps) - 1] * (stop - position)
            answer = round(action * size.tool_share / (1 - size.tool_share) * draw.uniform(0.5, 1.5))
            position = min(stop + answer, length)
            step_of += [-1] * (position - stop)
        trajectory = Trajectory(
            Task("t", "", "train", "s"), sample, (), ids, tuple(step_of), tuple(0.0 for _ in ids), tuple(steps),
            Termination.SUBMITTED, size.prompt, 0, 0,
        )  # fmt: skip
        found.append((trajectory, tuple(draw.gauss(0, 1) for _ in steps)))
    return found


class Ours:
    """draco's worker; of the policy it needs the model, the device, the version and the reference switch."""

    version = 0  #: that of the trajectories

    def __init__(self, size: Size) -> None:
        self.model = get_peft_model(make_model(size), LoraConfig(**LORA))
        randomise(self.model)
        self.rows = [Row(t, a) for t, a in trajectories(size)]
        self.device = torch.device("cpu")
        packed = pack_attention(self.model)
        self.worker = Worker(
            cast(Any, self), LossOptions(kl_coef=KL, dual_clip=None), temperature=1.0, packed=packed,
            max_tokens=max(1024, *size.lengths),  # of one pass: about what TRL's longest row holds
            backward=torch.autograd.backward,
        )  # fmt: skip
        self.totals = Totals()

    @contextmanager
    def reference(self) -> Iterator[None]:
        with self.model.disable_adapter():
            yield

    def step(self) -> tuple[float, float]:
        """Loss and gradient norm of one batch."""
        self.model.zero_grad()
        self.totals = self.worker.accumulate(self.rows)
        tokens = self.totals.sums["tokens"]
        return self.totals.sums["loss"] / tokens, _norm(self.model) / tokens


class Trl:
    """TRL's trainer, given a batch that its generation could have made."""

    def __init__(self, size: Size, rows_per_pass: int | None = None) -> None:
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast

        trl: Any = import_module("trl")  # of the bench extra; not there when types are checked
        datasets: Any = import_module("datasets")
        tokenizer = cast(Any, PreTrainedTokenizerFast)(
            tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1}, unk_token="<pad>")),
            pad_token="<pad>", eos_token="<end>",
        )  # fmt: skip
        data = trajectories(size)
        self.rows_per_pass = rows_per_pass or len(data)
        config = trl.GRPOConfig(
            output_dir=tempfile.mkdtemp(), report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False,
            beta=KL, loss_type="bnpo", per_device_train_batch_size=len(data), num_generations=len(data),
            temperature=1.0, max_completion_length=max(size.lengths), disable_tqdm=True,
            use_bias_correction_kl=False,  # its default multiplies KL by the ratio, which is another gradient
        )  # fmt: skip
        self.trainer = trl.GRPOTrainer(
            make_model(size), reward_funcs=lambda completions, **_: [0.0] * len(completions), args=config,
            train_dataset=datasets.Dataset.from_list([{"prompt": "x"}]), processing_class=tokenizer,
            peft_config=LoraConfig(**LORA),
        )  # fmt: skip
        self.model: Any = self.trainer.model
        randomise(self.model)
        self.model.train()
        self.trainer.current_gradient_accumulation_steps = 1
        width = max(size.lengths) - size.prompt
        prompts, completions, masks, tools, advantages = [], [], [], [], []
        for t, a in data:
            n = len(t.token_ids) - size.prompt
            pad = [0] * (width - n)
            steps = t.step_of[size.prompt :]
            prompts.append(list(t.token_ids[: size.prompt]))
            completions.append([*t.token_ids[size.prompt :], *pad])
            masks.append([1] * n + pad)
            tools.append([int(j >= 0) for j in steps] + pad)
            advantages.append([a[j] if j >= 0 else 0.0 for j in steps] + [0.0] * len(pad))
        self.inputs = {
            "prompt_ids": torch.tensor(prompts),
            "prompt_mask": torch.ones(len(data), size.prompt, dtype=torch.int64),
            "completion_ids": torch.tensor(completions),
            "completion_mask": torch.tensor(masks),
            "tool_mask": torch.tensor(tools),
            "advantages": torch.tensor(advantages),
        }
        self.tokens = float((self.inputs["completion_mask"] * self.inputs["tool_mask"]).sum())

    def step(self) -> tuple[float, float]:
        """As `GRPOTrainer` does it: reference log-probs under no_grad, then `compute_loss`, then backward."""
        self.model.zero_grad()
        loss = 0.0
        count = len(self.inputs["prompt_ids"])
        for start in range(0, count, self.rows_per_pass):
            part = {k: v[start : start + self.rows_per_pass] for k, v in self.inputs.items()}
            ids = torch.cat([part["prompt_ids"], part["completion_ids"]], 1)
            mask = torch.cat([part["prompt_mask"], part["completion_mask"]], 1)
            with torch.no_grad(), self.model.disable_adapter():
                reference, _, _ = self.trainer._get_per_token_logps_and_entropies(
                    self.model, ids, mask, part["completion_ids"].size(1)
                )
            value = self.trainer.compute_loss(self.model, part | {"ref_per_token_logps": reference})
            share = float((part["completion_mask"] * part["tool_mask"]).sum()) / self.tokens
            (value * share).backward()
            loss += float(value) * share
        return loss, _norm(self.model)


def _norm(model: torch.nn.Module) -> float:
    return float(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm())


# --- measuring ---


def clocked(function: Callable[[], Any]) -> tuple[float, float]:
    """CPU and wall seconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    function()
    return time.process_time() - cpu, time.perf_counter() - wall


def fastest_trl(size: Size) -> Trl:
    """With the whole batch or one row a pass, whichever takes fewer CPU seconds."""
    found = [(clocked(trl.step)[0], trl) for trl in (Trl(size, None), Trl(size, 1))]
    print(f"  trl, rows a pass → CPU s: {', '.join(f'{trl.rows_per_pass}: {s:.2f}' for s, trl in found)}")
    return min(found, key=lambda pair: pair[0])[1]


def matmul_share(step: Callable[[], Any], repeats: int) -> float:
    """Share of matrix products and attention in a step's CPU seconds; the median over repeats.

    Each repeat pairs a step without the profiler (the denominator) with one under it, because the speed of a machine
    drifts. The profiler's clock also counts while another process has the core; the ratio of CPU to wall seconds of the
    profiled step corrects that.
    """
    heavy = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm", "aten::_addmm_activation")
    found = []
    for _ in range(repeats):
        plain, _wall = clocked(step)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            cpu, wall = clocked(step)
        seconds = sum(
            event.self_cpu_time_total
            for event in profile.key_averages()
            if event.key in heavy or event.key.startswith("aten::_scaled_dot_product")
        )
        found.append(min(cpu / wall, 1.0) * seconds / 1e6 / plain)
    return float(statistics.median(found))


def compare(name: str, repeats: int, quick: bool) -> dict[str, float]:
    """Agreement, then paired times, of one size. Raises SystemExit when the two disagree."""
    size = SIZES[name]
    print(f"{name}: {len(size.lengths)} trajectories, {sum(size.lengths)} tokens, longest {max(size.lengths)}")
    ours, trl = Ours(size), Trl(size, QUICK_ROWS[name]) if quick else fastest_trl(size)
    (loss, norm), (trl_loss, trl_norm) = ours.step(), trl.step()
    errors = {"loss_rel_error": abs(loss / trl_loss - 1), "grad_rel_error": abs(norm / trl_norm - 1)}
    print(f"  loss {loss:.8f} and {trl_loss:.8f}, gradient norm {norm:.8f} and {trl_norm:.8f}")
    if max(errors.values()) > TOLERANCE:
        raise SystemExit(f"draco and TRL disagree by more than {TOLERANCE}: {errors}")
    pairs = [(*clocked(ours.step), *clocked(trl.step)) for _ in range(repeats)]
    cpu_s, wall_s, trl_cpu_s, trl_wall_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    result = {
        "cpu_ratio": statistics.median(p[2] / p[0] for p in pairs),
        "wall_ratio": statistics.median(p[3] / p[1] for p in pairs),
        "cpu_s": cpu_s,
        "trl_cpu_s": trl_cpu_s,
        "matmul_share": matmul_share(ours.step, max(repeats, 3)),
        "trl_matmul_share": float("nan") if quick else matmul_share(trl.step, 1),
        "trl_rows": 1 if trl.rows_per_pass == 1 else 0,
        "padding_share": 1 - ours.totals.sums["model_tokens"] / ours.totals.sums["computed_tokens"],
        **errors,
    }
    print(f"  draco CPU s {cpu_s:.3f}, wall s {wall_s:.3f}; trl CPU s {trl_cpu_s:.3f}, wall s {trl_wall_s:.3f}; ratios "
          f"{result['cpu_ratio']:.2f} and {result['wall_ratio']:.2f}; matmul + attention "
          f"{result['matmul_share']:.1%} and {result['trl_matmul_share']:.1%}")  # fmt: skip
    return result


def head_over_gemm(repeats: int) -> float:
    """CPU time of log-probs with gradient over that of the two matrix products that they cannot do without."""
    torch.manual_seed(0)
    hidden = torch.randn(HEAD_ROWS, HEAD_WIDTH, requires_grad=True)
    weight = torch.randn(HEAD_VOCAB, HEAD_WIDTH) * 0.03
    targets = torch.randint(HEAD_VOCAB, (HEAD_ROWS,))
    logits, back = torch.empty(HEAD_ROWS, HEAD_VOCAB), torch.empty(HEAD_ROWS, HEAD_WIDTH)
    rows = hidden.detach()

    def bare() -> None:
        torch.mm(rows, weight.T, out=logits)
        torch.mm(logits, weight, out=back)

    def head() -> None:
        logprobs, _ = step_logprobs(hidden, weight, targets)
        torch.autograd.grad(logprobs.sum(), hidden)

    bare()
    head()
    pairs = [(clocked(head)[0], clocked(bare)[0]) for _ in range(repeats)]
    ratio = statistics.median(h / b for h, b in pairs)
    print(f"head: {HEAD_ROWS} tokens, {HEAD_VOCAB} × {HEAD_WIDTH}")
    print(f"  log-probs with gradient {statistics.median(p[0] for p in pairs):.3f} s, bare products "
          f"{statistics.median(p[1] for p in pairs):.3f} s, ratio {ratio:.3f}")  # fmt: skip
    return ratio


def extra_memory(kind: str, size: str) -> float:
    """Peak MiB of one step above what the process held before it; to be called in a fresh process."""
    torch.set_num_threads(1)
    made: Ours | Trl = Ours(SIZES[size]) if kind == "draco" else Trl(SIZES[size], int(kind.removeprefix("trl")) or None)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM to what is resident now
    before = _status("VmRSS")
    made.step()
    return (_status("VmHWM") - before) / 1024


def _status(field: str) -> float:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field):
            return float(line.split()[1])
    raise SystemExit(f"/proc/self/status has no {field}: memory is measured on Linux alone")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one repeat, TRL as found before; about a quiet minute")
    parser.add_argument("--repeats", type=int, default=5, help="paired repeats (default 5)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    repeats = 1 if options.quick else options.repeats
    tiny, middle = (compare(name, repeats, options.quick) for name in ("tiny", "middle"))
    head = head_over_gemm(repeats)
    timed = f"trl{int(middle['trl_rows'])}"
    kinds = ("draco", timed) if options.quick else ("draco", "trl0", "trl1")
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as fresh:
        held = {kind: fresh.apply(extra_memory, (kind, "middle")) for kind in kinds}
    theirs = held.pop(timed)  # in the setting that was timed
    others = "".join(f", {kind} {value:.0f}" for kind, value in held.items() if kind != "draco")
    print(f"memory above the resident set, MiB: draco {held['draco']:.0f}, {timed} {theirs:.0f}{others}"
          " (trl1: one row a pass, trl0: the whole batch)")  # fmt: skip
    result = {
        **{k: middle[k] for k in ("cpu_ratio", "wall_ratio", "cpu_s", "trl_cpu_s")},
        "tiny_cpu_ratio": tiny["cpu_ratio"],
        "memory_ratio": held["draco"] / theirs,
        **{k: middle[k] for k in ("matmul_share", "trl_matmul_share")},
        "head_over_gemm": head,
        "padding_share": middle["padding_share"],
        **{k: max(tiny[k], middle[k]) for k in ("loss_rel_error", "grad_rel_error")},
    }
    print(json.dumps({k: float(f"{v:.4g}") if v == v else None for k, v in result.items()}))


if __name__ == "__main__":
    main()
