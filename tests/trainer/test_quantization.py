"""The student's matrices as a quantized engine has them, and weights rounded at the sender."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from async_opd.weight_sync.layout import experts_apart, experts_together
from trainer.student import quantization
from trainer.student.quantization import GRIDS, channels, fake_quantized, parts_of, rounded


def uneven(rows: int, columns: int) -> torch.Tensor:
    """Rows of very different sizes, bfloat16."""
    drawn = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    return (drawn * torch.logspace(-3, 3, rows)[:, None]).bfloat16()


def test_each_row_has_its_own_scale() -> None:
    given = uneven(7, 64)
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
    numbers, scales = channels(uneven(7, 64))
    monkeypatch.setattr(quantization, "PART_ENTRIES", 130)
    again, same = channels(uneven(7, 64))
    assert torch.equal(numbers.float(), again.float())
    assert torch.equal(scales, same)


def test_rows_do_not_depend_on_the_matrix_that_they_are_joined_to() -> None:
    given = uneven(6, 64)
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
    found = dict(parts_of("model.layers.0.mlp.up_proj.weight", uneven(4, 2)))
    assert list(found) == [
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.mlp.up_proj.weight_scale",
    ]


ROW = "model.layers.0.mlp.up_proj.weight"


def matrix(rows: int = 8, columns: int = 64) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("scheme", "levels"), [("int4_group32", 15), ("int2_group32", 3)])
def test_a_group_of_integers_has_so_many_levels(scheme: str, levels: int) -> None:
    found = rounded(matrix(4, 4096), GRIDS[scheme])  # type: ignore[index]
    counts = [len(group.unique()) for group in found.view(-1, 32)]
    assert max(counts) <= levels
    assert len(found[0].unique()) > levels, "groups have separate scales"


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_integers_are_at_most_half_a_step_away(bits: int) -> None:
    scheme = {8: "int8_per_channel", 4: "int4_group32", 2: "int2_group32"}[bits]
    grid = GRIDS[scheme]  # type: ignore[index]
    given = matrix()
    groups = given.view(-1, grid.columns or 64)
    step = groups.abs().amax(1, keepdim=True) / grid.largest
    error = (rounded(given, grid).view_as(groups) - groups).abs()
    assert (error <= step / 2 * (1 + 1e-5)).all()


def test_float8_has_three_bits_after_the_point() -> None:
    given = matrix()
    found = rounded(given, GRIDS["fp8_per_tensor"])
    scale = given.abs().max() / 448
    normal = (given / scale).abs() > 2**-6
    relative = ((found - given) / given).abs()[normal]
    assert relative.max() <= 2**-4 * (1 + 1e-5)
    assert torch.equal(found, (given / scale).to(torch.float8_e4m3fn).float() * scale)


FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@pytest.mark.parametrize("scheme", ["mxfp4", "nvfp4"])
def test_float4_is_the_nearest_of_its_sixteen_numbers(scheme: str) -> None:
    grid = GRIDS[scheme]  # type: ignore[index]
    groups = matrix().double().view(-1, grid.columns or 64)
    peaks = groups.abs().amax(1, keepdim=True)
    scale = 2 ** (peaks / 6).log2().ceil()
    if scheme == "nvfp4":
        whole = peaks.max() / (6 * 448)
        scale = (peaks / 6 / whole).to(torch.float8_e4m3fn).double() * whole
    numbers = torch.tensor([*FLOAT4, *(-one for one in FLOAT4)], dtype=torch.float64)
    distance = (groups[..., None] / scale[..., None] - numbers).abs()
    nearest = numbers[distance.argmin(-1)] * scale
    found = rounded(matrix(), grid).double().view_as(groups)
    torch.testing.assert_close(found, nearest, rtol=1e-6, atol=0)


@pytest.mark.parametrize("scheme", ["mxfp8", "mxfp4"])
def test_a_scale_that_is_a_power_of_two_moves_no_entry_of_few_bits(scheme: str) -> None:
    given = torch.tensor([FLOAT4 * 4]) * 2.0**-9
    assert torch.equal(rounded(given, GRIDS[scheme]), given)  # type: ignore[index]


def test_a_block_of_float8_has_its_own_scale() -> None:
    given = torch.cat([matrix(128, 128), matrix(128, 128) * 1e-6])
    block = rounded(given, GRIDS["fp8_per_block"])[128:]
    assert torch.equal(block, rounded(given[128:], GRIDS["fp8_per_tensor"]))


@pytest.mark.parametrize("scheme", sorted(set(GRIDS) - {"nvfp4"}))
def test_groups_at_an_edge_are_smaller(scheme: str) -> None:
    grid, given = GRIDS[scheme], matrix(130, 150)  # type: ignore[index]
    found = rounded(given, grid)
    assert found.shape == given.shape
    columns = min(grid.columns or 150, 150)
    rows = min(grid.rows or 130, 130)
    last = slice(130 - 130 % rows if 130 % rows else 0, None)
    edge = slice(150 - 150 % columns if 150 % columns else 0, None)
    assert torch.equal(found[last, edge], rounded(given[last, edge].contiguous(), grid))


@pytest.mark.parametrize("scheme", GRIDS)
def test_rounding_again_changes_nothing_but_the_last_bit(scheme: str) -> None:
    once = rounded(matrix(), GRIDS[scheme])  # type: ignore[index]
    torch.testing.assert_close(rounded(once, GRIDS[scheme]), once)  # type: ignore[index]


@pytest.mark.parametrize("scheme", GRIDS)
def test_zeros_stay_zeros(scheme: str) -> None:
    grid = GRIDS[scheme]  # type: ignore[index]
    assert torch.equal(rounded(torch.zeros(4, 64), grid), torch.zeros(4, 64))


def test_the_dtype_is_that_of_the_engines() -> None:
    assert rounded(matrix().bfloat16(), GRIDS["int4_group32"]).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.0.mlp.gate.weight",
        "model.visual.blocks.0.attn.qkv.weight",
    ],
)
def test_matrices_that_engines_do_not_quantize_are_sent_as_they_are(name: str) -> None:
    given = matrix()
    ((_, sent),) = fake_quantized(iter([(name, given)]), "int2_group32")
    assert sent is given


def test_matrices_of_layers_are_rounded_and_vectors_are_not() -> None:
    vector = torch.rand(64)
    sent = dict(
        fake_quantized(iter([(ROW, matrix()), ("model.norm.weight", vector)]), "int2_group32")
    )
    assert torch.equal(sent[ROW], rounded(matrix(), GRIDS["int2_group32"]))
    assert sent["model.norm.weight"] is vector


def test_the_feed_forward_gate_of_a_layer_is_no_router() -> None:
    name = "model.layers.0.mlp.gate_proj.weight"
    sent = dict(fake_quantized(iter([(name, matrix())]), "int2_group32"))
    assert not torch.equal(sent[name], matrix())


@pytest.mark.parametrize("scheme", GRIDS)
def test_experts_that_are_sent_together_are_rounded_as_each_matrix_by_itself(scheme: Any) -> None:
    names = [f"mlp.experts.0.{kind}_proj.weight" for kind in ("gate", "up")]
    together = [(experts_together(names), torch.randn(3, 2 * 40, 48))]
    apart = dict(fake_quantized(experts_apart(together), scheme))
    found = dict(experts_apart(fake_quantized(iter(together), scheme)))
    assert found.keys() == apart.keys()
    assert all(torch.equal(found[name], apart[name]) for name in apart)
