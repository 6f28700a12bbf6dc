"""Products of matrices on a CPU beside PyTorch's own, values and gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from spmdflow.cpu import product as products
from spmdflow.cpu.product import (
    multiply_in_type_of_weights,
    product,
    transposed_product,
    use_onednn_products,
    write_transposed_product,
)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 5, 7), (513, 64, 172), (2600, 512, 64)])
@pytest.mark.parametrize("turned", [False, True])
def test_product_of_float32_is_that_of_float64_rounded(
    sizes: tuple[int, int, int], turned: bool
) -> None:
    rows, inner, columns = sizes
    left = draw(rows, inner)
    right = draw(inner, columns)
    if turned:  # strides of the transposed
        left = left.T.contiguous().T
        right = right.T.contiguous().T

    assert_close(
        product(left, right).double(), left.double() @ right.double(), rtol=1e-5, atol=2e-4
    )
    assert torch.equal(product(left, right), product(left, right))


def test_other_precisions_are_left_to_pytorch_bit_by_bit() -> None:
    left = draw(9, 33, dtype=torch.float64)
    right = draw(33, 5, dtype=torch.float64)

    assert torch.equal(product(left, right), left @ right)


@pytest.mark.parametrize("sizes", [(1, 33, 5), (130, 96, 40), (1500, 64, 172)])
def test_product_of_bfloat16_is_summed_in_float32_and_rounded_once(
    sizes: tuple[int, int, int],
) -> None:
    rows, inner, columns = sizes
    left = draw(rows, inner, dtype=torch.bfloat16)
    right = draw(inner, columns, dtype=torch.bfloat16)
    exact = left.double() @ right.double()

    found = product(left, right)
    turned = transposed_product(left, draw(rows, 7, dtype=torch.bfloat16))

    assert found.dtype == turned.dtype == torch.bfloat16
    # half a unit in the last of 8 bits, and twice that where the sum is next to a boundary
    assert_close(found.double(), exact, rtol=2**-8, atol=1e-5)
    assert torch.equal(found[:1], product(left[:1], right)), "a row alone has the same bits"


def test_sums_over_many_rows_in_bfloat16_do_not_lose_the_later_rows() -> None:
    left = torch.ones(9000, 8, dtype=torch.bfloat16)
    right = torch.ones(9000, 16, dtype=torch.bfloat16)

    assert_close(
        transposed_product(left, right).float(), torch.full((8, 16), 9000.0), rtol=2**-8, atol=0
    )


def test_layer_with_bfloat16_weights_takes_and_returns_float32() -> None:
    exact = nn.Linear(96, 48)
    ours = copy.deepcopy(exact).bfloat16()
    exact.load_state_dict(ours.state_dict())
    use_onednn_products(ours)
    x = draw(300, 96)
    slopes = draw(300, 48)
    found = []
    for layer in (exact, ours):
        given = x.clone().requires_grad_()
        out = layer(given)
        (out * slopes).sum().backward()
        found.append([out, given.grad, layer.weight.grad, layer.bias.grad])

    assert [each.dtype for each in found[1]] == [torch.float32] * 2 + [torch.bfloat16] * 2
    for expected, got in zip(*found, strict=True):
        error = (got.float() - expected).norm() / expected.norm()
        assert error < 2**-7, "the rounding of both operands and of the result"


def test_products_of_nothing_are_empty_or_zero() -> None:
    assert product(draw(0, 4), draw(4, 3)).shape == (0, 3)
    assert torch.equal(product(draw(2, 0), draw(0, 3)), torch.zeros(2, 3))


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch without oneDNN")
def test_onednn_is_what_multiplies_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.profiler.profile() as profile:
        product(draw(128, 16), draw(16, 4))

    assert "mkldnn::_linear_pointwise" in {event.key for event in profile.key_averages()}
    monkeypatch.setattr(products, "_has_onednn", lambda: False)
    left = draw(128, 16)
    right = draw(16, 4)
    assert torch.equal(product(left, right), left @ right)


@pytest.mark.parametrize("rows", [0, 5, 256, 1300, 2700])
def test_products_over_rows_are_those_of_float64_rounded(rows: int) -> None:
    left = draw(rows, 7)
    right = draw(rows, 30)

    expected = left.double().T @ right.double()
    assert_close(transposed_product(left, right).double(), expected, rtol=1e-5, atol=2e-4)
    written = torch.full((9, 30), float("nan"))
    write_transposed_product(left, right, written[1:8])
    assert torch.equal(written[1:8], transposed_product(left, right))
    assert written[::8].isnan().all(), "nothing else is written"


@pytest.mark.parametrize("sizes", [(5, 7, 30), (300, 200, 96), (1300, 96, 200)])
def test_gradients_of_weights_are_the_same_whichever_library_multiplies(
    sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, inner, columns = sizes
    layer = nn.Linear(inner, columns)
    use_onednn_products(layer)
    x = draw(rows, inner)
    slopes = draw(rows, columns)
    found = []
    for has_mkl in (False, True):
        monkeypatch.setattr(products, "_has_mkl_and_intel", lambda has_mkl=has_mkl: has_mkl)
        layer.weight.grad = None
        (layer(x) * slopes).sum().backward()
        found.append(layer.weight.grad)

    exact = (slopes.double().T @ x.double()).float()
    for gradient in found:
        assert_close(gradient, exact, rtol=1e-5, atol=2e-4)


def test_onednn_sees_few_shapes_however_many_numbers_of_rows_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes = set()
    stock = products._multiply_with_onednn

    def counted(left: Tensor, right: Tensor) -> Tensor:
        shapes.add((left.shape, left.stride(), right.shape, right.stride()))
        return stock(left, right)

    monkeypatch.setattr(products, "_multiply_with_onednn", counted)
    monkeypatch.setattr(products, "_has_mkl_and_intel", lambda: False)
    narrow = draw(16, 8)
    wide = draw(8, 16)
    for rows in range(1, 8192, 97):
        product(draw(rows, 16), narrow)
        transposed_product(draw(rows, 8), draw(rows, 16))
    most = 1 + 16 + 8 + 8  # 8, up to 256, up to 512, up to 1024
    assert len(shapes) <= 2 * most
    for rows in range(1, 8192, 97):
        product(draw(rows, 8), wide)
    assert len(shapes) <= 3 * most + 3 * 8  # eight from one power of two to the next


@pytest.mark.parametrize("columns", [40, 200])
def test_a_row_has_the_same_bits_among_any_others(columns: int) -> None:
    left = draw(2600, 96)
    right = draw(96, columns)
    whole = product(left, right)

    for rows in (1, 7, 9, 31, 32, 100, 129, 1299, 2599):
        chosen = torch.randperm(len(left))[:rows]
        assert torch.equal(product(left[chosen], right), whole[chosen])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sizes", [(48, 96), (96, 48)])
def test_linear_layers_have_pytorchs_values_and_gradients(
    sizes: tuple[int, int], bias: bool
) -> None:
    theirs = nn.Sequential(nn.Linear(*sizes, bias=bias), nn.Tanh(), nn.Linear(sizes[1], 3))
    ours = copy.deepcopy(theirs)
    use_onednn_products(ours)
    x = draw(2, 650, sizes[0])
    weights = draw(2, 650, 3)
    found = []
    for model in (theirs, ours):
        given = x.clone().requires_grad_()
        out = model(given)
        (out * weights).sum().backward()
        found.append([out, given.grad, *(parameter.grad for parameter in model.parameters())])

    assert list(ours.state_dict()) == list(theirs.state_dict())
    for expected, got in zip(*found, strict=True):
        assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_frozen_layers_get_no_gradient() -> None:
    layer = nn.Linear(4, 3)
    layer.weight.requires_grad_(False)
    use_onednn_products(layer)
    x = draw(5, 4).requires_grad_()
    layer(x).sum().backward()

    assert layer.weight.grad is None
    assert layer.bias.grad is not None and x.grad is not None


def test_one_vector_goes_through_a_linear_layer_as_through_pytorchs() -> None:
    theirs = nn.Linear(6, 3)
    ours = copy.deepcopy(theirs)
    use_onednn_products(ours)
    vector = draw(6)

    found = ours(vector)

    assert found.shape == (3,)
    assert_close(found, theirs(vector))


def test_gradient_of_a_linear_layers_gradient_is_refused_also_beside_another_term() -> None:
    layer = nn.Linear(6, 3)
    use_onednn_products(layer)
    x = draw(5, 6).requires_grad_()
    (slope,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)

    with pytest.raises(RuntimeError, match="differentiate twice"):
        (slope.square().sum() + layer(x).sum()).backward()


def test_first_derivatives_are_the_same_where_a_graph_of_them_is_asked_for() -> None:
    layer = nn.Linear(6, 3)
    use_onednn_products(layer)
    x = draw(5, 6).requires_grad_()
    of = (x, layer.weight, layer.bias)

    plain = torch.autograd.grad(layer(x).sum(), of)
    with_graph = torch.autograd.grad(layer(x).sum(), of, create_graph=True)

    for expected, found in zip(plain, with_graph, strict=True):
        assert torch.equal(found, expected)


class Router(nn.Module):
    """Scores of experts, by a matrix of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 8))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        scores = nn.functional.linear(hidden, self.weight)
        return scores, scores.topk(2).indices


def test_parts_with_a_matrix_get_bfloat16_and_return_float32() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.LayerNorm(8), Router()).bfloat16()
    multiply_in_type_of_weights(module)
    x = torch.randn(3, 8, requires_grad=True)

    normal = module[0](x)
    scores, experts = module[1](normal)
    scores.sum().backward()

    expected = nn.functional.linear(normal.bfloat16(), module[1].weight)
    assert normal.dtype == scores.dtype == torch.float32 and experts.dtype == torch.int64
    assert torch.equal(scores, expected.float())
    exact = nn.functional.layer_norm(x, (8,), module[0].weight.float(), module[0].bias.float())
    assert torch.equal(normal, exact)
    assert x.grad is not None and x.grad.dtype == torch.float32


def test_parts_in_float32_are_left_as_they_are() -> None:
    torch.manual_seed(0)
    router = Router()
    x = torch.randn(3, 8)
    expected = router(x)[0]
    multiply_in_type_of_weights(router)

    assert torch.equal(router(x)[0], expected)
