"""Options of the loss and of the update, as `conf/train.yaml` names them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt
from pydantic import AllowInfNan

from draco.config.options import Count, Index, NonNegative, Positive, PositiveOrInf, check_option, checked
from draco.core.errors import ConfigError

__all__ = ["LossOptions", "UpdateOptions"]


@checked("loss")
@dataclass(frozen=True, slots=True)
class LossOptions:
    """The loss of Table 10.

    With L_it the loss of step token t of trajectory i, n_i its step tokens, over the S trajectories of a batch::

        token_mean        Σ_i Σ_t L_it / Σ_i n_i             tokens count alike (the paper)
        sequence_mean     Σ_i (Σ_t L_it / n_i) / S           trajectories count alike
        constant_length   Σ_i Σ_t L_it / (S · C)             tokens count alike in every batch
    """

    kl_coef: NonNegative = 0.01  #: k3 against the reference policy; 0 skips the reference pass
    clip_low: Annotated[float, Ge(0), Lt(1)] = 0.2  #: below 1, for a ratio is never negative
    clip_high: NonNegative = 0.2
    dual_clip: Annotated[float, Gt(1), AllowInfNan(False)] | None = 3.0
    zero_signal: Literal["keep", "drop"] = "keep"  #: groups without signal stay in the denominator and the KL, or not
    aggregation: Literal["token_mean", "sequence_mean", "constant_length"] = "token_mean"
    constant_length: Count | None = None  #: C, tokens; only `constant_length` reads it
    tis_cap: Positive | None = None  #: truncated importance weights min(π_trainer/π_engine, cap); None = off

    def __post_init__(self) -> None:
        if self.aggregation == "constant_length":
            check_option("loss.constant_length", self.constant_length, Count)

    def token_weight(self, step_tokens: int) -> float:
        """Factor on every token loss of a trajectory with so many step tokens."""
        if self.aggregation == "sequence_mean":
            return 1.0 / step_tokens
        return 1.0 / self.constant_length if self.aggregation == "constant_length" and self.constant_length else 1.0

    def denominator(self, tokens: float, trajectories: float) -> float:
        """What the weighted sum is divided by, once, for the batch of all ranks."""
        return tokens if self.aggregation == "token_mean" else trajectories


@checked("update")
@dataclass(frozen=True, slots=True)
class UpdateOptions:
    """How a batch becomes optimizer steps."""

    order: Literal["batch", "arrival"] = "batch"  #: batch: accumulate in batch order, reproducible to the bit
    micro_batch_tokens: Count = 8192  #: tokens of one forward pass; a longer trajectory stands alone
    packing: Literal["auto", "off"] = "auto"  #: off: one trajectory a row for every model
    updates_per_batch: Count = 1  #: optimizer steps; a batch's groups are split into as many shares
    grad_clip: PositiveOrInf = 1.0  #: largest gradient norm; inf = no clipping
    decay_steps: Index = 0  #: the learning rate falls linearly to 0 over this many batches; 0 = constant (the paper)
    max_bad_steps: Count = 3  #: non-finite steps in a row that stop the run

    def __post_init__(self) -> None:
        if self.updates_per_batch > 1 and self.order == "arrival":
            raise ConfigError(
                "update.updates_per_batch > 1 needs update.order=batch: the old log-probs of the later shares are "
                "taken before the first step, when every group must be there"
            )

    def lr_factor(self, batches_done: int) -> float:
        """What the learning rate is multiplied by in the batch after so many: 1, or falling from 1 towards 0."""
        return max(0.0, 1.0 - batches_done / self.decay_steps) if self.decay_steps else 1.0
