"""CONTRIBUTING.md: its code works, in a copy of the packages, and what it names exists."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
PACKAGES = ("async_opd", "rollouter", "teachers", "trainer")
PLACE = re.compile(
    r"# (?P<file>[\w/]+\.(py|yaml))(, (?P<how>before|after|instead of) `(?P<line>.*)`)?$"
)


def blocks() -> list[tuple[re.Match[str], str]]:
    """The places that the blocks of code name in their first line, and the code below it."""
    found = []
    for block in re.findall(r"```(?:python|yaml)\n(.*?)```", TEXT, flags=re.DOTALL):
        first, _, code = block.partition("\n")
        place = PLACE.match(first)
        assert place is not None, first
        found.append((place, code))
    return found


def apply(root: Path) -> None:
    """Makes the changes of all blocks."""
    for place, code in blocks():
        file, how = root / place["file"], place["how"]
        if how is None:
            assert not file.exists()
            file.write_text(code)
            continue
        text, start = file.read_text(), place["line"]
        (line,) = (one for one in text.splitlines(keepends=True) if one.startswith(start))
        changed = {"before": code + line, "after": line + code, "instead of": code}[how]
        file.write_text(text.replace(line, changed))


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the packages with all four changes."""
    root = tmp_path_factory.mktemp("changed")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    apply(root)
    return root


def runs(root: Path, code: str) -> None:
    """In a process that imports the changed packages. Fails with what the process said."""
    environment = {**os.environ, "PYTHONPATH": f"{root}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
    check = f"import async_opd; assert async_opd.__file__.startswith({str(root)!r})\n"
    done = subprocess.run(
        [sys.executable, "-c", check + code],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=root,
        env=environment,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_transport_is_chosen_by_the_config_and_sends_weights(changed: Path) -> None:
    runs(
        changed,
        """
import threading, torch
from async_opd.config.sections.sync import SyncConfig
from rollouter.transports import chosen, transport
from trainer.publisher import Publisher

module = transport(chosen(SyncConfig(backend="tcp").backend, "cpu"))
weights = [("a", torch.randn(3, 5)), ("b", torch.randn(7, dtype=torch.bfloat16))]
publisher = Publisher(lambda: iter(weights), lambda: module.sender("127.0.0.1", 30.0, 64))
at, got = publisher.open(0, 2), []
joining = threading.Thread(target=lambda: got.append(module.receiver(at, 1)))
joining.start(); publisher.connect(0); joining.join()
sizes = publisher.snapshot().sizes
publisher.send(0)
assert got[0].receive(sizes[0], 30.0).view(torch.float32).equal(weights[0][1].view(-1))
assert got[0].receive(sizes[1], 30.0).view(torch.bfloat16).equal(weights[1][1])
""",
    )


@pytest.mark.slow
def test_the_source_is_read_by_a_config_that_names_it(changed: Path) -> None:
    runs(
        changed,
        """
from async_opd.checks.preflight import preflight
from async_opd.data.prompts import PromptStream
from tests.checks.inputs import config

train = "data.train=[{kind: squares}, {kind: squares, subject: reverse}]"
inputs = preflight(config(train), "c.yaml", 0)
assert inputs.problems == []
stream = PromptStream(inputs.train, [1, 1], lambda text: [len(text)], lambda name: name, seed=0)
assert {prompt.data_source for prompt in stream.next(10)} == {"sort", "reverse"}
""",
    )


@pytest.mark.slow
def test_the_loss_and_its_gradient_are_those_of_autograd(changed: Path) -> None:
    runs(
        changed,
        """
import torch
from tests.checks.inputs import config
from tests.trainer.oracle import case, gradients, outcomes, run
from trainer.losses import build_objective

for tail in ("bucket", "ignore", "renormalize"):
    loss = config(f"loss={{kind: total_variation, tail: {tail}}}").loss
    x = case()
    log_p, log_q = outcomes(x, tail, x.logits)
    expected = (log_p.exp() - log_q.exp()).abs().sum() / 2
    ours, metrics = run(build_objective(loss), x)
    assert torch.allclose(ours, expected, atol=1e-12), (ours, expected)
    assert torch.allclose(*gradients(ours, expected, by=x.logits), atol=1e-12)
""",
    )


@pytest.mark.slow
def test_the_loss_refuses_a_floor_that_it_would_not_use(changed: Path) -> None:
    runs(
        changed,
        """
import pytest
from pydantic import TypeAdapter, ValidationError
from async_opd.config.sections.loss import Divergence

with pytest.raises(ValidationError, match="total_variation needs no teacher_floor"):
    TypeAdapter(Divergence).validate_python({"kind": "total_variation", "teacher_floor": -10.0})
""",
    )


@pytest.mark.slow
def test_the_metric_is_in_the_report_of_a_step(changed: Path) -> None:
    runs(
        changed,
        """
from tests.trainer.test_batch_metrics import SIZES, learner, samples

metrics = learner().train_batch(samples()).metrics
assert metrics["train/max_response_tokens"] == max(SIZES)
""",
    )


def test_the_dashboard_the_report_and_the_live_view_have_the_charts_of_the_metric(
    changed: Path,
) -> None:
    runs(
        changed,
        """
from async_opd.observability.metric_catalogue import live_values, panels, plots

key = "train/max_response_tokens"
assert [one.title for one in panels() if key in one.keys] == ["Response length"]
assert "Longest response" in [one.title for one in plots("learning") if one.y == "tokens"]
assert live_values()[key].name == "longest response"
""",
    )


@pytest.mark.slow
def test_the_changed_packages_pass_the_linters(changed: Path) -> None:
    for command in (["ruff", "check"], ["ruff", "format", "--check"]):
        shutil.copy(ROOT / "pyproject.toml", changed)
        done = subprocess.run(
            [sys.executable, "-m", *command, "."], capture_output=True, text=True, cwd=changed
        )
        assert done.returncode == 0, done.stdout


def test_every_file_and_test_that_is_named_exists() -> None:
    named = set(
        re.findall(r"`((?:async_opd|rollouter|teachers|trainer|tests|docs)/[\w/]+\.py)", TEXT)
    )
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
    assert len(named) > 10
    tests = "".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    for name in set(re.findall(r"`((?:test_\w+|through_another_transport))`", TEXT)):
        assert f"def {name}(" in tests, name
