"""The objects that a configuration builds, and the life cycle of its stages (`draco.stages`)."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from hydra.errors import InstantiationException
from lightning.pytorch.callbacks import Callback
from omegaconf import DictConfig

from draco.config.compose import instantiate, instantiate_group
from draco.config.options import check_option
from draco.config.rules import LearningRate
from draco.core.distributed import main_only
from draco.core.errors import ConfigError
from draco.env.base import Environment, Evaluator
from draco.judge.transcript import read_secret
from draco.module import GRPOModule
from draco.rollout.engines.base import Engine
from draco.run.loader import EvalLoader, TaskLoader, select_tasks
from draco.stages import RunContext, Stages

__all__ = ["Parts", "build", "check_optimizer"]

log = logging.getLogger("draco")


@dataclass(slots=True)
class Parts:
    """The objects of a run."""

    config: DictConfig
    environment: Environment
    evaluator: Evaluator | None
    engine: Engine
    module: GRPOModule
    stages: Stages
    others: list[Callback] = field(default_factory=list)  #: Lightning callbacks beside the stages

    @property
    def callbacks(self) -> list[Callback]:
        """For Lightning: the stages first."""
        return [*self.stages, *self.others]

    # --- life cycle of the stages, in this order --------------------------------------------------------------------

    def open(self, folder: Path) -> None:
        """Tell every stage about the run.

        Args:
            folder: of the run; the secret of the transcript delimiters is created there.
        """
        context = RunContext(
            folder=folder,
            seed=self.config.seed,
            temperature=self.config.temperature,
            caveats=self.environment.caveats,
            secret=main_only(lambda: read_secret(folder / "transcript_secret")),
            needs_citations=self.stages.credit.needs_citations,
            engine=self.engine,
            next_batch=self.module.next_batch,
        )
        for stage in self.stages:
            stage.open(context)

    def check(self) -> None:
        """Find what cannot work, on rank 0, before anything large is loaded."""
        for stage in self.stages:
            main_only(stage.check)

    def ready(self) -> None:
        """The weights are loaded: start servers and everything else that needs the policy."""
        for stage in self.stages:
            stage.ready(self.module.policy)

    def close(self) -> None:
        """Release everything."""
        for stage in self.stages:
            stage.close()
        if self.evaluator is not None:
            self.evaluator.close()

    # --- tasks ------------------------------------------------------------------------------------------------------

    def load_tasks(self) -> tuple[TaskLoader, EvalLoader]:
        """Loaders of training and held-out tasks. The policy must be loaded, for its tokenizer.

        Raises:
            ConfigError: see `select_tasks` and `TaskLoader`.
        """
        config = self.config
        select = partial(
            select_tasks, self.environment, self.module.policy, max_prompt=config.limits.max_prompt_tokens,
            max_response=config.limits.max_response_tokens, may_outgrow=bool(config.resume),
        )  # fmt: skip
        loader = TaskLoader(
            select(config.env.train_split, None),
            steps=config.steps,
            tasks_per_step=config.tasks_per_step,
            group_size=config.group_size,
            seed=config.seed,
            temperature=config.temperature,
        )
        held_out = select(config.eval.split, config.eval.tasks)
        return loader, EvalLoader(held_out, n=config.eval.n, temperature=config.eval.temperature)


def build(config: DictConfig, *, sharded: bool = False) -> Parts:
    """Instantiate environment, stages and module; no weights are loaded yet.

    Args:
        config: of the run.
        sharded: the trainer's strategy shards the policy's weights.

    Raises:
        ConfigError: an object refuses its options.
        StageError: a stage is missing or present twice.
    """
    environment: Environment = instantiate(config.env.environment)
    evaluator: Evaluator | None = instantiate(config.env.get("evaluator"))
    # Not instantiated as one node: Hydra would turn the limits into a configuration node, which is slow to read.
    engine: Engine = instantiate(config.engine)
    rollout = instantiate(config.rollout, _partial_=True)(
        environment=environment, engine=engine, limits=instantiate(config.limits)
    )
    parts = [rollout, instantiate_group(config.get("rubric")), instantiate_group(config.get("credit"))]
    others = [instantiate(c) for c in config.callbacks.values() if c]
    stages = Stages.of([*parts, *others])
    if stages.credit.needs_citations and not stages.rubric.gives_citations:
        log.warning(
            "credit=%s needs cited steps, which rubric=%s does not give: every trajectory keeps its uniform advantage",
            config.credit.name, config.rubric.name,
        )  # fmt: skip
    module = GRPOModule(
        policy=instantiate(config.policy, _partial_=True, **({"sharded": True} if sharded else {})),
        optimizer=instantiate(config.optimizer),
        stages=stages,
        loss=instantiate(config.loss),
        update=instantiate(config["update"]),
        temperature=config.temperature,
        evaluator=evaluator,
        gather_for_rollouts=sharded and config.distributed.gather_for_rollouts,
    )
    return Parts(config, environment, evaluator, engine, module, stages, others)


def check_optimizer(module: GRPOModule) -> None:
    """Build the optimizer once, so that wrong options are found now and not after an evaluation.

    Raises:
        ConfigError: the optimizer refuses its options, or the learning rate is out of range.
    """
    try:
        optimizer = module.configure_optimizers()
    except (TypeError, ValueError, InstantiationException) as error:
        raise ConfigError(f"the optimizer refuses its options: {' '.join(str(error).split())}") from error
    for group in optimizer.param_groups:
        check_option("optimizer.lr", group["lr"], LearningRate)
