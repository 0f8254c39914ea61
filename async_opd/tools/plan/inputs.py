"""Makes the setting to simulate from a config and its ``plan`` section, or lists the problems."""

from __future__ import annotations

from async_opd.checks.memory_fit import fewest_ranks, this_machine
from async_opd.config.device_defaults import engine_sizes
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.plan import PlanConfig
from async_opd.core.errors import ConfigError, Problem
from async_opd.models.hub import with_cached
from async_opd.models.model_files import ModelError
from async_opd.tools.plan.setting import Lengths, RolloutPoolSpec, Setting, TeacherPoolSpec
from rollouter.slots import first_limit

MOST = 1 << 14
"""Replicas of a pool, ranks, or rollouts of a prompt, that are simulated."""


def setting_of(config: RunConfig, plan: PlanConfig, where: str, gpus: int | None = None) -> Setting:
    """The setting of this config at these speeds.

    ConfigError if the speeds are incomplete or ``gpus`` too few; ``where`` is the speeds' file.
    """
    least = least_ranks(config)
    problems = [*_problems(config, plan, where), *_too_few(config, gpus, least)]
    problems += _too_many(config, gpus or 0)
    if problems:
        raise ConfigError(problems)
    rollout, shares = config.rollout, _shares(config, plan)
    slots = slots_of(config)
    return Setting(
        steps=config.train.steps,
        batch_size=config.train.batch_size,
        sync_steps=config.async_.sync_steps,
        staleness_threshold=config.async_.staleness_threshold,
        lengths=Lengths(plan.response_tokens, plan.response_sigma, config.rollout.max_tokens),
        prompt_tokens=plan.prompt_tokens,
        rollout=RolloutPoolSpec(
            replicas=rollout.min_replicas,
            gpus=rollout.tensor_parallel,
            speed=plan.rollout,
            slots=slots,
            in_flight=first_limit(rollout.concurrency, slots),  # as if the KV cache were large
            n=rollout.n,
        ),
        teachers=tuple(
            TeacherPoolSpec(
                name, one.min_replicas, one.gpus, plan.teachers[name], one.batch_size, shares[name]
            )
            for name, one in config.teachers.items()
        ),
        train=plan.train,
        ranks=config.train.ranks,
        on_sync=config.async_.on_sync,
        rolling=config.sync.rolling,
        max_version_lag=config.async_.lag_to("requeue"),
        whole_groups=config.reward is not None,
        queue_samples=config.queue.max_samples,
        evaluation_every=_evaluation_every(config),
        evaluation_s=plan.evaluation_s,
        outside_s=plan.outside_s,
        least_ranks=least,
    )


def _evaluation_every(config: RunConfig) -> int:
    """Versions between two evaluations on the rollout replicas, which begin after a sync here."""
    steps = (
        0 if config.eval.min_replicas or not config.data.eval else config.steps_between(config.eval)
    )
    return max(round(steps / config.async_.sync_steps), 1) if steps else 0


def least_ranks(config: RunConfig) -> int:
    """Ranks that hold the student; 1 where the memory of GPUs or the student's size is unknown."""
    if config.cluster.device == "cpu":
        return 1
    machine = this_machine(config, "cuda")
    try:
        return (machine.total and fewest_ranks(with_cached(config, [])[0], machine)) or 1
    except ModelError:
        return 1


def slots_of(config: RunConfig) -> int:
    """Requests that an engine of the student runs at the same time.

    ``auto`` is that of GPUs, unless the config's device is a CPU: a plan may be made on a machine
    that has none. The config of a run's directory has the number.
    """
    device = "cpu" if config.cluster.device == "cpu" else "cuda"
    return engine_sizes(config.rollout.engine, device).max_num_seqs


def required_plan(config: RunConfig, where: str) -> PlanConfig:
    """The config's ``plan`` section. Raises ConfigError if there is none."""
    if config.plan is None:
        remedy = (
            "async_opd plan RUN_DIR takes them from a run that has made some steps on the same "
            "hardware, and prints them as this section"
        )
        message = "is missing: a prediction needs the speeds of the engines and the trainer"
        raise ConfigError.of("plan", message, remedy, where)
    return config.plan


def _shares(config: RunConfig, plan: PlanConfig) -> dict[str, float]:
    """The configured shares; the other teachers share the rest evenly. They add up to 1."""
    given = {name: plan.teachers[name].share for name in config.teachers}
    left = 1 - sum(share for share in given.values() if share is not None)
    open_ = sum(share is None for share in given.values())
    shares = {name: left / open_ if share is None else share for name, share in given.items()}
    total = sum(shares.values())
    return {name: share / total for name, share in shares.items()}


def _too_few(config: RunConfig, gpus: int | None, least_ranks: int) -> list[Problem]:
    """The problem that ``gpus`` are fewer than one replica of each pool and the trainer need."""
    needs = {"rollout": config.rollout.tensor_parallel}
    needs |= {f"teacher {name}": t.gpus for name, t in config.teachers.items()}
    needs["train"] = least_ranks
    least = sum(needs.values())
    if gpus is None or gpus >= least:
        return []
    parts = ", ".join(f"{pool} {count}" for pool, count in needs.items())
    message = f"found {gpus}, expected at least {least}: {parts}"
    return [Problem("command line", "--gpus", message, f"for example {least}")]


def _too_many(config: RunConfig, gpus: int) -> list[Problem]:
    """Counts that no machine has, each of which takes memory in a simulation."""
    counts = {
        "--gpus": gpus,
        "rollout.replicas": config.rollout.min_replicas,
        "rollout.n": config.rollout.n,
        "train.ranks": config.train.ranks,
    }
    counts |= {f"teachers.{name}.replicas": t.min_replicas for name, t in config.teachers.items()}
    return [
        Problem("plan", key, f"found {count}, expected at most {MOST}", "plan a smaller cluster")
        for key, count in counts.items()
        if count > MOST
    ]


def _problems(config: RunConfig, plan: PlanConfig, where: str) -> list[Problem]:
    problems = []
    hosts: dict[str, str | None] = {"rollout": config.rollout.host}
    hosts |= {f"teachers.{name}": teacher.host for name, teacher in config.teachers.items()}
    for pool, host in hosts.items():
        if host is not None:
            message = "this pool is colocated, and the planner simulates no time sharing of GPUs"
            remedy = (
                "plan it as dedicated: that is the upper bound, with its GPUs beside the others"
            )
            problems.append(Problem(where, f"{pool}.placement", message, remedy))
    for name in config.teachers:
        if name not in plan.teachers:
            remedy = "add at least tokens_per_s"
            problems.append(Problem(where, f"plan.teachers.{name}", "is missing", remedy))
    for name in plan.teachers:
        if name not in config.teachers:
            message = f"there is no such teacher, only {', '.join(config.teachers)}"
            problems.append(Problem(where, f"plan.teachers.{name}", message, "remove it"))
    if plan.rollout.step_s + plan.rollout.step_s_per_request == 0:
        message = "found 0, and step_s_per_request is 0 too: an engine step takes time"
        problems.append(Problem(where, "plan.rollout.step_s", message, "measure it"))
    shares = [teacher.share for teacher in plan.teachers.values()]
    given = sum(share for share in shares if share is not None)
    wrong = given > 1 + 1e-6 or (None not in shares and given < 1 - 1e-6)
    if wrong or (None in shares and given > 1 - 1e-6):
        message = f"the shares add up to {given:g}, expected 1 in all"
        problems.append(Problem(where, "plan.teachers", message, "give the shares of all prompts"))
    return problems
