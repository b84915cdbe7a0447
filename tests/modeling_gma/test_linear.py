"""`Linear` is `nn.Linear`, also where it takes its own way."""

from unittest import mock

import pytest
import torch
from torch import nn

from modeling_gma.linear import FEWEST_WEIGHTS, MOST_ROWS, Linear


SHAPES = [(1, 1), (1, 2), (3, 1), (2, 4)]
SIZES = [(256, 200), (256, 201), (512, 997)]


def equal_layers(inputs, outputs, bias=True):
    torch.manual_seed(0)
    ours, plain = Linear(inputs, outputs, bias=bias), nn.Linear(inputs, outputs, bias=bias)
    plain.load_state_dict(ours.state_dict())
    return ours, plain


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("inputs, outputs", SIZES)
@pytest.mark.parametrize("shape", [(), *SHAPES])
def test_as_nn_linear(shape, inputs, outputs, bias):
    ours, plain = equal_layers(inputs, outputs, bias)
    assert ours.weight.numel() >= FEWEST_WEIGHTS
    x = torch.randn(*shape, inputs)
    with torch.no_grad(), mock.patch("torch.bmm", wraps=torch.bmm) as bmm:
        output = ours(x)
        assert bmm.called
        torch.testing.assert_close(output, plain(x))
    assert output.is_contiguous()


def test_transposed_input():
    ours, plain = equal_layers(256, 200)
    with torch.no_grad():
        x = torch.randn(256, 3).mT
        torch.testing.assert_close(ours(x), plain(x))


PLAIN = [
    ("many rows", torch.randn(MOST_ROWS + 1, 256), {}),
    ("no rows", torch.randn(0, 256), {}),
    ("bfloat16", torch.randn(1, 256, dtype=torch.bfloat16), {"dtype": torch.bfloat16}),
    ("float64", torch.randn(1, 256, dtype=torch.float64), {"dtype": torch.float64}),
]


@pytest.mark.parametrize("name, x, kwargs", PLAIN, ids=lambda x: x if isinstance(x, str) else "")
def test_otherwise_bit_for_bit(name, x, kwargs):
    ours, plain = (layer.to(**kwargs) if kwargs else layer for layer in equal_layers(256, 200))
    with torch.no_grad():
        assert torch.equal(ours(x), plain(x))


def test_with_gradients_and_autocast_and_compile():
    ours, plain = equal_layers(256, 200)
    x = torch.randn(1, 256)
    assert torch.equal(ours(x), plain(x)) and ours(x).requires_grad
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert ours(x).dtype == torch.bfloat16 and torch.equal(ours(x), plain(x))
    with torch.no_grad():
        compiled = torch.compile(ours, backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), plain(x))


def test_wrong_width_is_refused_as_ever():
    ours, _ = equal_layers(256, 200)
    with torch.no_grad(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        ours(torch.randn(1, 128))
