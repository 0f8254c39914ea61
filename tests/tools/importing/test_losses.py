"""The objective that a file is mapped to is the original's, on the same logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from async_opd.config.load import load_config
from async_opd.config.run_config import RunConfig
from async_opd.tools.importing.command import imported
from tests.tools.importing.oracles.make_oracles import FORMULAS, K
from tests.trainer.oracle import DOUBLE, Case, run
from trainer.losses import build_objective
from trainer.losses.base import Tokens

HERE = Path(__file__).parent
ORACLES: dict[str, Any] = json.loads((HERE / "oracles" / "oracles.json").read_text())
VERL = "distillation.distillation_loss"
ESTIMATED = ("verl_policy_gradient", "prime_rl", "multi_sample_policy_gradient")
"""Policy gradients: a surrogate is differentiated, whose value means nothing."""


def verl(mode: str) -> str:
    """The YAML of a run of verl with this loss, supervised and without clamps."""
    loss = f"{{loss_mode: {mode}, topk: {K}, use_policy_gradient: false, use_task_rewards: false}}"
    return f"actor_rollout_ref: {{model: {{path: s}}}}\ndistillation: {{distillation_loss: {loss}}}"


def trl(settings: str) -> str:
    return f"model_name_or_path: s\nteacher_model_name_or_path: t\n{settings}"


def asyncopd(mode: str) -> str:
    return f"model: {{path: s}}\nteacher: {{path: t}}\nalgorithm: {{opd: {{kl_loss_mode: {mode}}}}}"


def nemo_rl(kind: str, weight: float = 0.5) -> str:
    mixed = f"mixed_kl_weight: {weight}"
    loss = f"loss_fn: {{kl_type: {kind}, {mixed}, zero_outside_topk: false}}"
    return f"policy: {{model_name: s}}\nteacher: {{model_name: t}}\n{loss}"


FILES = [
    ("verl_policy_gradient", "verl_qwen3_8b.sh"),
    ("verl_policy_gradient", "verl_gsm8k.sh"),
    ("verl_policy_gradient", "verl_mopd.sh"),
    ("reverse_student_topk", "verl_reverse_kl.sh"),
    ("forward_topk_tail", "trl_async.py"),
    ("trl_gkd_half", "trl_gold.sh"),
    ("prime_rl", "prime_rl_opd.toml"),
    ("prime_rl", "prime_rl_lora.toml"),
    ("prime_rl", "prime_rl_self.toml"),
    ("prime_rl", "prime_rl_tau.toml"),
    ("forward_topk", "asyncopd_gsm8k.yaml"),
    ("multi_sample_policy_gradient", "asyncopd_mc64.yaml"),
    ("reverse_student_topk", "asyncopd_reverse_topk.yaml"),
    ("multi_sample_forward", "asyncopd_dense_forward.yaml"),
    ("nemo_rl_reverse", "nemo_rl_noncolocated.yaml"),
    ("nemo_rl_reverse", "nemo_rl_long.yaml"),
    ("nemo_rl_mixed", "nemo_rl_math.yaml"),
    ("trl_reverse_sampled", "trl_distillation_lora.sh"),
]
TEXTS = [
    ("verl_k2", verl("k2")),
    ("verl_k2", verl("mse")),
    ("verl_k3", verl("k3")),
    ("verl_k3", verl("low_var_kl")),
    ("verl_abs", verl("abs")),
    ("forward_topk", verl("forward_kl_topk")),
    ("forward_topk_tail", verl("forward_kl_topk_tail")),
    ("reverse_student_topk", verl("reverse_kl_topk")),
    ("trl_gkd_0", trl("lmbda: 1.0\nbeta: 0.0")),
    ("trl_gkd_1", trl("lmbda: 1.0\nbeta: 1.0")),
    ("trl_reverse_tail", trl(f"beta: 1.0\nloss_top_k: {K}")),
    ("trl_reverse_scaled", trl(f"beta: 1.0\nloss_top_k: {K}\nloss_add_tail: false")),
    ("reverse_topk", asyncopd("reverse_kl")),
    ("multi_sample_forward", asyncopd("multi_sample_forward_kl")),
    ("nemo_rl_forward", nemo_rl("forward")),
    ("nemo_rl_mixed_30", nemo_rl("mixed", 0.3)),
]


def config_of(path: Path, folder: Path) -> RunConfig:
    """The config that a file is imported as."""
    target = folder / "imported.yaml"
    target.write_text(imported(path)[1].replace("${DATA_PATH}", "data"))
    return load_config(target)


def case_of(config: RunConfig, stale: bool) -> Case:
    """The fixed logits, with the scores that the config's objective takes."""
    student = torch.tensor(ORACLES["student"], dtype=DOUBLE)
    log_p = torch.tensor(ORACLES["teacher"], dtype=DOUBLE).log_softmax(-1)
    targets = torch.tensor(ORACLES["sampled"])
    support = getattr(config.loss, "support", "teacher_topk")
    ids = (student if support == "student_topk" else log_p).topk(K).indices
    tokens = Tokens(
        targets=targets,
        rollout_logprobs=torch.tensor(ORACLES["stale" if stale else "log_mu"], dtype=DOUBLE),
        weights=torch.full((len(targets),), config.loss.weight / len(targets), dtype=DOUBLE),
        teacher_logprobs=log_p.gather(-1, targets[:, None])[:, 0],
        teacher_ids=ids,
        teacher_topk_logprobs=log_p.gather(-1, ids),
        teacher_rest_logprobs=log_p.scatter(-1, ids, -torch.inf).logsumexp(-1),
    )
    case = Case(student.requires_grad_(), log_p, tokens)
    return case.states() if support == "full_vocab" else case


def check(name: str, config: RunConfig) -> None:
    case = case_of(config, stale=name == "prime_rl")
    objective = build_objective(config.loss, None, config.rollout.temperature)
    loss, _ = run(objective, case)
    (gradient,) = torch.autograd.grad(loss, case.logits)
    expected = ORACLES["losses"][name]
    torch.testing.assert_close(
        gradient, torch.tensor(expected["gradient"], dtype=DOUBLE), atol=1e-5, rtol=0
    )
    if name not in ESTIMATED:
        assert loss.item() == pytest.approx(expected["value"], abs=1e-5)


@pytest.mark.parametrize(("name", "file"), FILES)
def test_the_mapped_objective_of_a_public_config_is_the_originals(
    name: str, file: str, tmp_path: Path
) -> None:
    check(name, config_of(HERE / "fixtures" / file, tmp_path))


@pytest.mark.parametrize(("name", "text"), TEXTS)
def test_the_mapped_objective_of_every_mode_is_the_originals(
    name: str, text: str, tmp_path: Path
) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text(text)
    check(name, config_of(file, tmp_path))


def test_every_oracle_is_compared_with() -> None:
    assert {name for name, _ in [*FILES, *TEXTS]} == set(FORMULAS) == set(ORACLES["losses"])
