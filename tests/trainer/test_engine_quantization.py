"""The student's matrices as a quantized engine has them: numbers, scales, and of which tensors.

That vLLM computes the same bits: tests/contracts/test_quantization.py.
"""

from __future__ import annotations

import pytest
import torch

from trainer.student import quantization
from trainer.student.quantization import channels, parts_of


def matrix(rows: int, columns: int) -> torch.Tensor:
    """Rows of very different sizes, bfloat16."""
    drawn = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    return (drawn * torch.logspace(-3, 3, rows)[:, None]).bfloat16()


def test_each_row_has_its_own_scale() -> None:
    given = matrix(7, 64)
    numbers, scales = channels(given)
    assert (numbers.dtype, numbers.shape) == (torch.float8_e4m3fn, given.shape)
    assert (scales.dtype, scales.shape) == (torch.float32, (7, 1))
    assert torch.equal(numbers.float().abs().amax(1), torch.full((7,), 448.0))
    largest = given.float().abs().amax(1, keepdim=True)
    error = (numbers.float() * scales - given.float()).abs()
    assert bool((error <= largest / 448 * 16).all())  # half of the step of the largest numbers


def test_a_row_of_zeros_stays_zero() -> None:
    numbers, scales = channels(torch.zeros(1, 4, dtype=torch.bfloat16))
    assert numbers.float().tolist() == [[0.0] * 4]
    assert bool((scales > 0).all())


def test_the_parts_in_which_a_matrix_is_quantized_do_not_matter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers, scales = channels(matrix(7, 64))
    monkeypatch.setattr(quantization, "PART_ENTRIES", 130)
    again, same = channels(matrix(7, 64))
    assert torch.equal(numbers.float(), again.float())
    assert torch.equal(scales, same)


def test_rows_do_not_depend_on_the_matrix_that_they_are_joined_to() -> None:
    given = matrix(6, 64)
    apart = [channels(part) for part in given.split(2)]
    numbers, scales = channels(given)
    assert torch.equal(numbers.float(), torch.cat([part.float() for part, _ in apart]))
    assert torch.equal(scales, torch.cat([part for _, part in apart]))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.embed_tokens.weight", (4, 2)),
        ("lm_head.weight", (4, 2)),
        ("model.layers.0.input_layernorm.weight", (4,)),
        ("model.layers.0.mlp.experts.down_proj", (2, 4, 2)),
    ],
)
def test_what_engines_keep_whole_has_no_parts(name: str, shape: tuple[int, ...]) -> None:
    assert list(parts_of(name, torch.ones(shape))) == []


def test_a_matrix_of_a_layer_has_numbers_and_scales_under_its_name() -> None:
    found = dict(parts_of("model.layers.0.mlp.up_proj.weight", matrix(4, 2)))
    assert list(found) == [
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.mlp.up_proj.weight_scale",
    ]
