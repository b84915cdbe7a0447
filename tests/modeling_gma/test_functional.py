"""The public functions: what the paper says follows from its equations, precision, and refusals."""

import inspect
import math

import pytest
import torch

from modeling_gma import (
    gaussian_mixture_attention,
    gaussian_mixture_attention_weights,
    gaussian_responsibilities,
    reference,
)


def mixture(heads=2, components=5, d_r=3, dtype=torch.float64):
    means = torch.randn(heads, components, d_r, dtype=dtype)
    variances = torch.randn(heads, components, d_r, dtype=dtype).exp()
    log_priors = torch.randn(heads, components, dtype=dtype).log_softmax(-1)
    return means, variances, log_priors


def tokens(batch=2, heads=2, length=12, d_r=3, d_v=4, dtype=torch.float64):
    return tuple(torch.randn(batch, heads, length, d, dtype=dtype) for d in (d_r, d_r, d_v))


def test_signature():
    parameters = inspect.signature(gaussian_mixture_attention).parameters
    defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    assert list(parameters)[:6] == ["query", "key", "value", "means", "variances", "log_priors"]
    assert defaults == {
        "is_causal": False,
        "key_mask": None,
        "cu_seqlens": None,
        "log_decay": None,
        "initial_state": None,
        "eps": 1e-6,
        "backend": None,
    }
    assert list(inspect.signature(gaussian_responsibilities).parameters) == ["x", "means", "variances", "log_priors"]


def test_backends_by_name():
    args = (*tokens(), *mixture())
    default, _ = gaussian_mixture_attention(*args, is_causal=True)
    for backend in ("chunked", "reference"):
        output, _ = gaussian_mixture_attention(*args, is_causal=True, backend=backend)
        torch.testing.assert_close(output, default, rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match=r"`backend` must be one of \['chunked', 'reference'\].*'fast'"):
        gaussian_mixture_attention(*args, backend="fast")


@pytest.mark.parametrize("is_causal", [False, True])
def test_induced_weights(is_causal):
    """A is non-negative, its rows sum to one up to eps, it gives the output, and its rank is at most K."""
    query, key, value = tokens(length=40)
    parameters = mixture(components=5)
    options = {"is_causal": is_causal, "key_mask": torch.rand(2, 40) > 0.2}
    options["key_mask"][:, 0] = True
    weights = gaussian_mixture_attention_weights(query, key, *parameters, **options, eps=1e-12)
    output, _ = gaussian_mixture_attention(query, key, value, *parameters, **options, eps=1e-12)
    assert (weights >= 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 40, dtype=torch.float64), rtol=0, atol=1e-6)
    torch.testing.assert_close(weights @ value, output, rtol=1e-10, atol=1e-10)
    if is_causal:
        assert (weights.triu(1) == 0).all()
    else:
        assert (torch.linalg.matrix_rank(weights, rtol=1e-9) <= 5).all()


def test_induced_weights_with_decay_packing_and_state():
    query, key, value = tokens(batch=1, length=20)
    parameters = mixture()
    options = {
        "is_causal": True,
        "cu_seqlens": torch.tensor([0, 7, 20]),
        "log_decay": -torch.rand(1, 2, 20, dtype=torch.float64),
        "initial_state": torch.rand(1, 2, 5, 5, dtype=torch.float64),
    }
    weights = gaussian_mixture_attention_weights(query, key, *parameters, **options)
    output, _ = gaussian_mixture_attention(query, key, value, *parameters, **options)
    assert (weights[..., 7:, :7] == 0).all()
    torch.testing.assert_close((weights @ value)[:, :, 7:], output[:, :, 7:], rtol=1e-10, atol=1e-10)
    assert (weights[..., :7, :].sum(-1) < 1).all()


def test_score_gradients_of_the_paper():
    """Against the paper's d s/d mu, d s/d omega and d L/d alpha, delta being the gradient of the scores."""
    heads, components, d_r, length, floor = 1, 4, 3, 6, 1e-4
    x = torch.randn(1, heads, length, d_r, dtype=torch.float64)
    mu, omega = (torch.randn(heads, components, d_r, dtype=torch.float64).requires_grad_() for _ in range(2))
    alpha = torch.randn(heads, components, dtype=torch.float64).requires_grad_()
    variances = torch.nn.functional.softplus(omega) + floor
    gamma = gaussian_responsibilities(x, mu, variances, alpha.log_softmax(-1))
    upstream = torch.randn_like(gamma)
    (gamma * upstream).sum().backward()

    with torch.no_grad():
        delta = gamma * (upstream - (gamma * upstream).sum(-1, keepdim=True))  # (1, H, N, K)
        torch.testing.assert_close(
            delta.sum(-1), torch.zeros(1, heads, length, dtype=torch.float64), atol=1e-12, rtol=0
        )
        offset = x.unsqueeze(-2) - mu.unsqueeze(-3)  # (1, H, N, K, d_r)
        by_mu = offset / variances.unsqueeze(-3)
        by_omega = (
            (offset.square() / variances.unsqueeze(-3) - 1)
            / (2 * variances.unsqueeze(-3))
            * omega.sigmoid().unsqueeze(-3)
        )
        torch.testing.assert_close(mu.grad, (delta.unsqueeze(-1) * by_mu).sum((0, 2)), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(omega.grad, (delta.unsqueeze(-1) * by_omega).sum((0, 2)), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(alpha.grad, delta.sum((0, 2)), rtol=1e-10, atol=1e-12)


def test_score_map_is_lipschitz():
    """||J_s|| <= sqrt(K) R / eps_sigma for ||x - mu_k|| <= R and variances of at least eps_sigma."""
    heads, components, d_r = 1, 6, 4
    means, _, log_priors = mixture(heads, components, d_r)
    for floor in (0.05, 0.5):
        variances = floor + torch.rand(heads, components, d_r, dtype=torch.float64)
        for _ in range(20):
            x = torch.randn(1, 1, 1, d_r, dtype=torch.float64)
            radius = (x[0, 0] - means[0]).norm(dim=-1).max()
            bound = math.sqrt(components) * radius / floor
            # The softmax behind the scores does not stretch.
            for function in (reference.scores, gaussian_responsibilities):
                jacobian = torch.autograd.functional.jacobian(
                    lambda x, f=function, v=variances: f(x, means, v, log_priors), x
                ).view(components, d_r)
                assert torch.linalg.matrix_norm(jacobian, 2) <= bound


def test_state_knows_its_length():
    query, key, value = tokens(length=50)
    mask = torch.rand(2, 50) > 0.3
    _, state = gaussian_mixture_attention(query, key, value, *mixture(), is_causal=True, key_mask=mask)
    torch.testing.assert_close(state[..., -1].sum(-1), mask.sum(-1).double()[:, None].expand(2, 2))


def test_fully_masked_rows_give_zero():
    for is_causal in (False, True):
        output, state = gaussian_mixture_attention(
            *tokens(), *mixture(), is_causal=is_causal, key_mask=torch.zeros(2, 12, dtype=torch.bool)
        )
        assert (output == 0).all() and (state == 0).all()


def test_reading_a_state_without_writing():
    query, key, value = tokens()
    parameters = mixture()
    expected, state = gaussian_mixture_attention(query, key, value, *parameters)
    output, same = gaussian_mixture_attention(query, key[:, :, :0], value[:, :, :0], *parameters, initial_state=state)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(same, state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_precision(dtype):
    args = tuple(x.to(dtype) for x in (*tokens(length=30), *mixture()))
    output, state = gaussian_mixture_attention(*args, is_causal=True)
    wide = torch.promote_types(dtype, torch.float32)
    assert output.dtype == dtype and state.dtype == wide
    assert gaussian_responsibilities(args[0], *args[3:]).dtype == wide
    expected, _ = reference.attention(*(x.double() for x in args), is_causal=True)
    resolution = max(torch.finfo(dtype).eps, 1e-10)
    assert (output - expected).abs().max() <= 4 * resolution * expected.abs().max()


def test_autocast_changes_nothing():
    args = (*tokens(dtype=torch.float32), *mixture(dtype=torch.float32))
    plain, plain_state = gaussian_mixture_attention(*args, is_causal=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast, cast_state = gaussian_mixture_attention(*args, is_causal=True)
        gamma = gaussian_responsibilities(args[0], *args[3:])
    assert torch.equal(gamma, gaussian_responsibilities(args[0], *args[3:]))
    assert torch.equal(plain, cast) and torch.equal(plain_state, cast_state)


REFUSALS = {
    "values that are integers": ({"value": torch.zeros(2, 2, 12, 4, dtype=torch.long)}, "must be floats.*int64"),
    "variances of zero": ({"variances": (2, 5, 3)}, "`variances` must be above 0, got 0.0"),
    "no eps": ({"eps": 0.0}, "`eps` must be above 0"),
    "causal with another length": (
        {"is_causal": True, "key": (2, 2, 9, 3), "value": (2, 2, 9, 4)},
        "N_q = 12 and N_k = 9",
    ),
    "key of another width": ({"key": (2, 2, 12, 2)}, "`key` must be"),
    "value of another length": ({"value": (2, 2, 11, 4)}, "their length"),
    "no components": ({"means": (2, 0, 3), "variances": (2, 0, 3), "log_priors": (2, 0)}, "at least one component"),
    "variances of another shape": ({"variances": (2, 4, 3)}, "`variances` must be shaped like `means`"),
    "mask that is not bool": ({"key_mask": torch.ones(2, 12)}, "`key_mask` must be a bool tensor.*float32"),
    "mask of another shape": ({"key_mask": torch.ones(2, 11, dtype=torch.bool)}, r"\(2, 12\).*\(2, 11\)"),
    "packing two rows": ({"cu_seqlens": torch.tensor([0, 12])}, "one row"),
    "decay without direction": ({"log_decay": (2, 2, 12)}, "needs is_causal=True"),
    "decay that grows": ({"is_causal": True, "log_decay": torch.ones(2, 2, 12)}, "at most 0, got 1.0"),
    "decay of another shape": ({"is_causal": True, "log_decay": (2, 12)}, "`log_decay` must be"),
    "state of another shape": ({"initial_state": (2, 2, 5, 4)}, r"`initial_state` must be \(2, 2, 5, 5\)"),
    "state too narrow": (
        {"initial_state": torch.zeros(2, 2, 5, 5, dtype=torch.bfloat16)},
        "float32 or wider.*bfloat16",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_name_argument_and_value(name):
    changes, message = REFUSALS[name]
    arguments = dict(zip(("query", "key", "value"), tokens())) | dict(
        zip(("means", "variances", "log_priors"), mixture())
    )
    arguments |= {k: torch.zeros(v) if isinstance(v, tuple) else v for k, v in changes.items()}
    with pytest.raises(ValueError, match=message):
        gaussian_mixture_attention(**arguments)


@pytest.mark.parametrize("bounds", [[0, 5], [1, 12], [0, 7, 5, 12], [0, 0, 12], [0, 12, 12]])
def test_boundaries_must_cover_the_row(bounds):
    with pytest.raises(ValueError, match="must rise from 0 to the length 12"):
        gaussian_mixture_attention(*tokens(batch=1), *mixture(), cu_seqlens=torch.tensor(bounds))
