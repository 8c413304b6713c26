"""Progress in the terminal: a live bar, or a line every few steps in a log file."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from draco.module import GRPOModule

__all__ = ["StepProgress"]


class StepProgress(Callback):
    """A progress bar over batches with the main metrics.

    Args:
        every: steps between lines, if the output is not a terminal.
    """

    def __init__(self, every: int = 10) -> None:
        self.every = every
        self.console = Console(stderr=True)
        self._progress: Progress | None = None

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        if not self.console.is_terminal or not trainer.is_global_zero:
            return
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
            console=self.console,
        )
        loader: Any = trainer.train_dataloader
        self._task = self._progress.add_task("", total=loader.steps, completed=loader.position, figures="")
        self._progress.start()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert isinstance(pl_module, GRPOModule)
        assert pl_module.record is not None
        if not trainer.is_global_zero:
            return
        line = describe(pl_module.record.metrics)
        if self._progress is not None:
            self._progress.update(self._task, completed=pl_module.batches_done, figures=line)
        elif pl_module.batches_done % self.every == 0 or pl_module.batches_done == 1:
            self.console.print(f"step {pl_module.batches_done}  {line}", highlight=False, soft_wrap=True)

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        self._stop()


def describe(metrics: dict[str, float]) -> str:
    """The main metrics of a step in one line, as far as the setting has them."""
    parts = [
        ("reward", "reward/mean", "{:+.2f}"),
        ("rubric pass", "rubric/pass_rate", "{:.0%}"),
        ("inert", "credit/inert_verdicts", "{:.0%}"),
        ("turns", "rollout/turns", "{:.1f}"),
        ("kl", "update/kl", "{:.3f}"),
        ("grad", "update/grad_norm", "{:.2f}"),
        ("s", "time/step_s", "{:.1f}"),
    ]
    return "  ".join(f"{label} {form.format(metrics[key])}" for label, key, form in parts if key in metrics)
