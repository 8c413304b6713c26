"""Options of the loss and of the update, as `conf/train.yaml` names them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from draco.config.checks import number, one_of, whole
from draco.core.errors import ConfigError

__all__ = ["Aggregation", "LossOptions", "UpdateOptions"]

Aggregation = Literal["token_mean", "sequence_mean", "constant_length"]


@dataclass(frozen=True, slots=True)
class LossOptions:
    """The loss of Table 10.

    With L_it the loss of step token t of trajectory i, n_i its step tokens, over the S trajectories of a batch::

        token_mean        Σ_i Σ_t L_it / Σ_i n_i             tokens count alike (the paper)
        sequence_mean     Σ_i (Σ_t L_it / n_i) / S           trajectories count alike
        constant_length   Σ_i Σ_t L_it / (S · C)             tokens count alike in every batch
    """

    kl_coef: float = 0.01  #: k3 against the reference policy; 0 skips the reference pass
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0
    zero_signal: Literal["keep", "drop"] = "keep"  #: groups without signal stay in the denominator and the KL, or not
    aggregation: Aggregation = "token_mean"
    constant_length: int | None = None  #: C, tokens; only `constant_length` reads it
    tis_cap: float | None = None  #: truncated importance weights min(π_trainer/π_engine, cap); None = off

    def __post_init__(self) -> None:
        one_of("loss.zero_signal", self.zero_signal, ("keep", "drop"))
        one_of("loss.aggregation", self.aggregation, get_args(Aggregation))
        whole("loss.constant_length", self.constant_length, 1, optional=self.aggregation != "constant_length")
        number("loss.kl_coef", self.kl_coef, 0)
        number("loss.tis_cap", self.tis_cap, 0, above=True, optional=True)
        number("loss.clip_low", self.clip_low, 0)
        number("loss.clip_high", self.clip_high, 0)
        number("loss.dual_clip", self.dual_clip, 1, above=True, optional=True)
        if self.clip_low >= 1:
            raise ConfigError(f"loss.clip_low is {self.clip_low}; expected a number below 1: a ratio is never negative")

    def token_weight(self, step_tokens: int) -> float:
        """Factor on every token loss of a trajectory with so many step tokens."""
        if self.aggregation == "sequence_mean":
            return 1.0 / step_tokens
        return 1.0 / self.constant_length if self.aggregation == "constant_length" and self.constant_length else 1.0

    def denominator(self, tokens: float, trajectories: float) -> float:
        """What the weighted sum is divided by, once, for the batch of all ranks."""
        return tokens if self.aggregation == "token_mean" else trajectories


@dataclass(frozen=True, slots=True)
class UpdateOptions:
    """How a batch becomes optimizer steps."""

    order: Literal["batch", "arrival"] = "batch"  #: batch: accumulate in batch order, reproducible to the bit
    micro_batch_tokens: int = 8192  #: tokens of one forward pass; a longer trajectory stands alone
    packing: Literal["auto", "off"] = "auto"  #: off: one trajectory a row for every model
    updates_per_batch: int = 1  #: optimizer steps; a batch's groups are split into as many shares
    grad_clip: float = 1.0  #: largest gradient norm; inf = no clipping
    decay_steps: int = 0  #: the learning rate falls linearly to 0 over this many batches; 0 = constant (the paper)
    max_bad_steps: int = 3  #: non-finite steps in a row that stop the run

    def __post_init__(self) -> None:
        one_of("update.order", self.order, ("batch", "arrival"))
        one_of("update.packing", self.packing, ("auto", "off"))
        for name, minimum in (
            ("micro_batch_tokens", 1), ("updates_per_batch", 1), ("max_bad_steps", 1), ("decay_steps", 0),
        ):  # fmt: skip
            whole(f"update.{name}", getattr(self, name), minimum)
        number("update.grad_clip", self.grad_clip, 0, above=True, infinite=True)
        if self.updates_per_batch > 1 and self.order == "arrival":
            raise ConfigError(
                "update.updates_per_batch > 1 needs update.order=batch: the old log-probs of the later shares are "
                "taken before the first step, when every group must be there"
            )

    def lr_factor(self, batches_done: int) -> float:
        """What the learning rate is multiplied by in the batch after so many: 1, or falling from 1 towards 0."""
        return max(0.0, 1.0 - batches_done / self.decay_steps) if self.decay_steps else 1.0
