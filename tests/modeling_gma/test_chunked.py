"""The chunked path against the paper's equations: outputs, states and gradients."""

import itertools
import math
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from modeling_gma import chunked, gaussian_mixture_attention, gaussian_responsibilities, reference


NAMES = ("query", "key", "value", "means", "variances", "log_priors", "log_decay", "initial_state")


def make_inputs(
    batch=2,
    heads=2,
    n_q=20,
    n_k=None,
    components=5,
    d_r=3,
    d_v=4,
    decay=False,
    state=False,
    dtype=torch.float64,
    seed=0,
    log_variance_std=1.0,
):
    """Tensors by name, in the order of NAMES, all requiring gradients."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    n_k = n_q if n_k is None else n_k
    tensors = {
        "query": normal(batch, heads, n_q, d_r),
        "key": normal(batch, heads, n_k, d_r),
        "value": normal(batch, heads, n_k, d_v),
        "means": normal(heads, components, d_r),
        "variances": normal(heads, components, d_r).mul(log_variance_std).exp(),
        "log_priors": normal(heads, components).log_softmax(-1),
        "log_decay": -normal(batch, heads, n_k).exp() if decay else None,
        "initial_state": None,
    }
    if state:
        mass = normal(batch, heads, components, 1).exp()
        tensors["initial_state"] = torch.cat([normal(batch, heads, components, d_v) * mass, mass], dim=-1)
    return {name: None if x is None else x.to(dtype).requires_grad_() for name, x in tensors.items()}


def run(attention, inputs, **options):
    """Output, state and the gradient of every input, for a loss that weighs everything differently."""
    inputs = {name: None if x is None else x.detach().clone().requires_grad_() for name, x in inputs.items()}
    output, state = attention(**inputs, **options)
    weights = [torch.linspace(-1, 2, x.numel(), dtype=x.dtype).view_as(x) for x in (output, state)]
    loss = (output * weights[0]).sum() + (state * weights[1]).sum()
    loss.backward()
    gradients = {name: x.grad for name, x in inputs.items() if x is not None}
    return {"output": output.detach(), "state": state.detach(), **gradients}


def assert_agree(inputs, chunk_size, slack=0.0, float32=True, **options):
    """In float64 to 1e-10; computed in float32, to 1e-5 of each tensor's norm, or of `slack` if that is larger."""
    expected = run(reference.attention, inputs, **options)
    actual = run(chunked.attention, inputs, chunk_size=chunk_size, **options)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
    # What runs under torch.compile, which leaves tiles and recomputation to the compiler.
    with mock.patch("torch.compiler.is_compiling", return_value=True):
        traced = run(chunked.attention, inputs, chunk_size=chunk_size, **options)
    for name, value in expected.items():
        torch.testing.assert_close(traced[name], value, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
    if not float32:
        return
    single = {name: None if x is None else x.float() for name, x in inputs.items()}
    actual = run(chunked.attention, single, chunk_size=chunk_size, **options)
    for name, value in expected.items():
        error = (actual[name].double() - value).norm()
        assert error <= 1e-5 * max(value.norm(), slack), f"{name}: {error} for {value.norm()} in float32"


def make_mask(kind, batch, length):
    mask = torch.ones(batch, length, dtype=torch.bool)
    third = length // 3
    if kind == "left":
        mask[0, :third] = False
    elif kind == "right":
        mask[-1, length - third :] = False
    elif kind == "inside":
        mask[:, third : 2 * third] = False
    elif kind == "row":
        mask[0] = False
    elif kind == "all":
        mask[:] = False
    return mask


@st.composite
def cases(draw):
    kind = draw(st.sampled_from(["causal", "bidirectional", "cross", "packed causal", "packed bidirectional"]))
    packed = kind.startswith("packed")
    causal = kind.endswith("causal")
    batch = 1 if packed else draw(st.integers(1, 3))
    n_k = draw(st.integers(1, 45))
    n_q = draw(st.integers(1, 45)) if kind == "cross" else n_k
    sizes = {
        "batch": batch,
        "heads": draw(st.integers(1, 3)),
        "n_q": n_q,
        "n_k": n_k,
        "components": draw(st.integers(1, 7)),
        "d_r": draw(st.integers(1, 5)),
        "d_v": draw(st.integers(1, 5)),
        "decay": causal and draw(st.booleans()),
        "state": draw(st.booleans()),
        "seed": draw(st.integers(0, 1000)),
    }
    options = {"is_causal": causal}
    mask = draw(st.sampled_from([None, "none", "left", "right", "inside", "row", "all"]))
    if mask is not None:
        options["key_mask"] = make_mask(mask, batch, n_k)
    if packed:
        cuts = draw(st.lists(st.integers(0, n_k), max_size=6))
        options["cu_seqlens"] = torch.tensor(sorted({0, *cuts, n_k}))
    return sizes, options, draw(st.integers(1, 20))


@settings(max_examples=400)
@given(cases())
@example(({"batch": 1, "n_q": 1}, {"is_causal": True}, 8))
@example(({"n_q": 17, "components": 1}, {"is_causal": True}, 8))
@example(({"n_q": 16}, {"is_causal": True}, 16))
@example(({"n_q": 33, "decay": True, "state": True}, {"is_causal": True}, 16))
@example(({"n_q": 7, "n_k": 29}, {"is_causal": False}, 8))
def test_agrees_with_reference(case):
    sizes, options, chunk_size = case
    assert_agree(make_inputs(**sizes), chunk_size, float32=False, **options)
    # In float32, slack for gradients that are nothing but a cancelled remainder, as with a single key; and variances
    # less far apart: the gradient of a small one is the difference of sums over x^2, x and 1, and loses digits.
    assert_agree(make_inputs(**sizes, log_variance_std=0.5), chunk_size, slack=1.0, **options)


@pytest.mark.parametrize("seed", range(20))
def test_float32_needs_no_slack_on_ordinary_sequences(seed):
    is_causal = bool(seed % 2)
    inputs = make_inputs(
        n_q=20 + 3 * seed, components=2 + seed % 15, d_r=2 + seed % 13, decay=is_causal, state=True, seed=seed
    )
    assert_agree(inputs, 16, is_causal=is_causal)


@pytest.mark.parametrize("chunk_size", [5, 64, 2000])
@pytest.mark.parametrize("is_causal", [False, True])
def test_chunks_of_any_size(chunk_size, is_causal):
    """Longer than a stretch, too, whether packed or not."""
    inputs = make_inputs(batch=1, heads=1, n_q=1100, components=3, d_r=2, d_v=2, state=True)
    cu_seqlens = torch.tensor([0, 3, 600, 601, 1100])
    assert_agree(inputs, chunk_size, is_causal=is_causal, cu_seqlens=cu_seqlens, float32=False)
    if is_causal:
        assert_agree(inputs, chunk_size, is_causal=True, float32=False)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_backward_under_autocast_is_not_narrowed(is_causal, packed):
    inputs = make_inputs(batch=1, n_q=40, decay=is_causal, dtype=torch.float32)
    options = {"is_causal": is_causal, "cu_seqlens": torch.tensor([0, 9, 40]) if packed else None}
    expected = run(gaussian_mixture_attention, inputs, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = run(gaussian_mixture_attention, inputs, **options)
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


@pytest.mark.parametrize("length", [1, 63, 64, 65, 300])
@pytest.mark.parametrize("decay", [False, True])
def test_agrees_with_reference_at_default_chunk(length, decay):
    inputs = make_inputs(batch=1, heads=1, n_q=length, components=9, d_r=8, d_v=6, decay=decay, state=True)
    assert_agree(inputs, chunked.CHUNK_SIZE, is_causal=True)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("stretch", [4, 10_000])
def test_gradcheck(is_causal, stretch, monkeypatch):
    monkeypatch.setattr(chunked, "STRETCH", stretch)
    inputs = make_inputs(batch=1, heads=2, n_q=7, components=3, d_r=2, d_v=2, decay=is_causal, state=True)
    mask = make_mask("inside", 1, 7)

    def function(*tensors):
        named = dict(zip(NAMES, tensors))
        if not is_causal:
            named["log_decay"] = None
        return chunked.attention(**named, is_causal=is_causal, key_mask=mask, chunk_size=3)

    tensors = [x if x is not None else torch.zeros(1, dtype=torch.float64) for x in inputs.values()]
    assert torch.autograd.gradcheck(function, tensors)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("state", [False, True])
def test_tiles_and_stretches_change_nothing(packed, is_causal, state, monkeypatch):
    """Few heads and few tokens at a time, with the state carried from stretch to stretch."""
    inputs = make_inputs(batch=1 if packed else 3, heads=3, n_q=50, decay=is_causal, state=state)
    options = {"is_causal": is_causal, "key_mask": make_mask("inside", 1 if packed else 3, 50)}
    if packed:
        options["cu_seqlens"] = torch.tensor([0, 7, 33, 50])
    for stretch, tile in ((4, 1), (16, 400), (48, 10_000)):
        monkeypatch.setattr(chunked, "STRETCH", stretch)
        monkeypatch.setattr(chunked, "TILE", tile)
        assert_agree(inputs, 8, **options)


def test_total_forgetting():
    inputs = make_inputs(n_q=20, decay=True, state=True)
    with torch.no_grad():
        inputs["log_decay"][:, :, [0, 5, 6, 13]] = -math.inf
    actual = run(chunked.attention, inputs, is_causal=True, chunk_size=8)
    expected = run(reference.attention, inputs, is_causal=True)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def test_continuing_equals_whole():
    inputs = make_inputs(n_q=37, decay=True)
    output, state = chunked.attention(**inputs, is_causal=True, chunk_size=8)
    inputs.pop("initial_state")
    pieces, carried = [], None
    for piece in (slice(0, 5), slice(5, 6), slice(6, 30), slice(30, 37)):
        tokens = {
            name: x[:, :, piece] if name in ("query", "key", "value", "log_decay") else x for name, x in inputs.items()
        }
        out, carried = chunked.attention(**tokens, is_causal=True, initial_state=carried, chunk_size=8)
        pieces.append(out)
    torch.testing.assert_close(torch.cat(pieces, dim=2), output, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(carried, state, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 257, 1000])
def test_prefix_is_bit_identical(length, dtype):
    inputs = make_inputs(batch=1, n_q=length, components=16, d_r=8, d_v=8, decay=True, dtype=dtype)
    before, _ = chunked.attention(**inputs, is_causal=True, chunk_size=64)
    for j in {0, length // 2, length - 1}:
        changed = dict(inputs)
        for name in ("query", "key", "value", "log_decay"):
            changed[name] = inputs[name].detach().clone()
            changed[name][:, :, j:] = changed[name][:, :, j:] * 3 - 1 if name != "log_decay" else -7.0
        after, _ = chunked.attention(**changed, is_causal=True, chunk_size=64)
        assert torch.equal(before[:, :, :j], after[:, :, :j])
        assert not torch.equal(before[:, :, j], after[:, :, j])


@pytest.mark.parametrize("is_causal", [False, True])
def test_masked_keys_get_exactly_zero_gradient_and_may_be_nan(is_causal):
    inputs = make_inputs(n_q=20, decay=is_causal)
    mask = make_mask("left", 2, 20) & make_mask("inside", 2, 20)
    clean = run(chunked.attention, inputs, is_causal=is_causal, key_mask=mask, chunk_size=8)
    for name in ("key", "value"):
        assert (clean[name][~mask[:, None, :, None].expand_as(clean[name])] == 0).all()
    if is_causal:
        assert (clean["log_decay"][~mask[:, None].expand_as(clean["log_decay"])] == 0).all()
    with torch.no_grad():
        for name in ("key", "value"):
            inputs[name].masked_fill_(~mask[:, None, :, None], math.nan)
    dirty = run(chunked.attention, inputs, is_causal=is_causal, key_mask=mask, chunk_size=8)
    for name, value in clean.items():
        assert torch.equal(value, dirty[name]), name


def test_packed_equals_separate():
    inputs = make_inputs(batch=1, n_q=40)
    bounds = [0, 3, 20, 21, 40]
    for is_causal in (False, True):
        packed = run(
            chunked.attention,
            inputs,
            is_causal=is_causal,
            cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
            chunk_size=8,
        )
        assert packed["state"].shape == (1, 2, 5, 5)
        for start, end in itertools.pairwise(bounds):
            piece = {n: x[:, :, start:end] if n in ("query", "key", "value") else x for n, x in inputs.items()}
            output, state = chunked.attention(**piece, is_causal=is_causal, chunk_size=8)
            torch.testing.assert_close(packed["output"][:, :, start:end], output, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(packed["state"], state, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("decay", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_forms_no_large_tensor(is_causal, decay, packed, largest_tensor):
    length, components, d_v, chunk_size = 2048, 32, 16, 64
    inputs = make_inputs(
        batch=1,
        heads=1,
        n_q=length,
        components=components,
        d_r=8,
        d_v=d_v,
        decay=decay and is_causal,
        dtype=torch.float32,
    )
    with largest_tensor:
        run(
            chunked.attention,
            inputs,
            is_causal=is_causal,
            cu_seqlens=torch.arange(0, length + 1, 128) if packed else None,
            chunk_size=chunk_size,
        )
    assert largest_tensor.numel <= length * max(chunk_size, components, 2 * 8, d_v + 1)
    assert largest_tensor.numel < min(length * components * d_v, length * length) / 4


@pytest.mark.parametrize("variance", [1e-4, 0.03, 1.0])
def test_responsibilities_are_never_subnormal(variance):
    x, means = 3 * torch.randn(1, 2, 200, 16), 3 * torch.randn(2, 32, 16)
    gamma = gaussian_responsibilities(x, means, torch.full_like(means, variance), torch.zeros(2, 32).log_softmax(-1))
    positive = gamma[gamma > 0]
    assert (positive > 1e-18).all()
    torch.testing.assert_close(gamma.sum(-1), torch.ones(1, 2, 200))


def test_a_shared_offset_costs_no_precision():
    """Routing vectors and means far from the origin: the x^2 that all components share must not swamp the scores."""
    x, means = torch.randn(1, 1, 50, 16) + 300, torch.randn(1, 8, 16) + 300
    variances, log_priors = torch.full_like(means, 2.0), torch.zeros(1, 8).log_softmax(-1)
    expected = reference.responsibilities(*(t.double() for t in (x, means, variances, log_priors)))
    actual = gaussian_responsibilities(x, means, variances, log_priors)
    assert (actual - expected).abs().max() < 1e-3
    naive = (x @ (means / variances).mT - (x.square() @ (0.5 / variances).mT)) - (means.square() / variances).sum(
        -1
    ) / 2
    assert (naive.softmax(-1) - expected).abs().max() > (actual - expected).abs().max()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["huge vectors", "variances at the floor", "one component", "all"])
def test_extremes_stay_finite(is_causal, dtype, case):
    inputs = make_inputs(n_q=50, components=16, d_r=8, d_v=8, dtype=torch.float32)
    inputs = {name: None if x is None else x.detach() for name, x in inputs.items()}
    if case in ("huge vectors", "all"):
        for name in ("query", "key"):
            inputs[name] = inputs[name] * 1e4
    if case in ("variances at the floor", "all"):
        inputs["variances"] = torch.full_like(inputs["variances"], 1e-4)
    if case in ("one component", "all"):
        inputs["log_priors"] = torch.tensor([0.0] + [-1e4] * 15).expand(2, 16)
    for name in ("query", "key", "value"):
        inputs[name] = inputs[name].to(dtype)
    inputs = {name: None if x is None else x.clone().requires_grad_() for name, x in inputs.items()}
    output, state = gaussian_mixture_attention(**inputs, is_causal=is_causal)
    (output.float().square().sum() + state.sum()).backward()
    assert output.dtype == dtype and state.dtype == torch.float32
    assert output.isfinite().all() and state.isfinite().all()
    for name, x in inputs.items():
        assert x is None or x.grad.isfinite().all(), name
    torch.testing.assert_close(state[..., -1].sum(-1), torch.full((2, 2), 50.0))


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_a_number_stays_visible(name, bad):
    """It reaches every output that depends on it across chunks, and none of the chunks before."""
    inputs = make_inputs(batch=2, n_q=24)
    with torch.no_grad():
        inputs[name][0, 0, 12] = bad
    output, state = chunked.attention(**inputs, is_causal=True, chunk_size=8)
    assert not output[0, 0, 12].isfinite().any()
    assert output[0, 0, :8].isfinite().all() and output[1].isfinite().all() and output[0, 1].isfinite().all()
    if name != "query":
        assert not output[0, 0, 12:].isfinite().any()
        assert not state[0, 0].isfinite().all()


@pytest.mark.parametrize("is_causal", [False, True])
def test_bfloat16_is_rounded_at_the_ends_alone(is_causal):
    """Outputs and gradients are what float64 makes of the same inputs to about one part in 2^7; those of decays, sums
    over tokens that nearly cancel, to one in 2^6."""
    inputs = make_inputs(n_q=40, components=8, d_r=8, d_v=8, decay=is_causal)
    narrow = {name: None if x is None else x.detach().float() for name, x in inputs.items()}
    for name in ("query", "key", "value"):
        narrow[name] = narrow[name].bfloat16()
    exact = {name: None if x is None else x.double() for name, x in narrow.items()}
    actual = run(chunked.attention, narrow, is_causal=is_causal, chunk_size=16)
    expected = run(reference.attention, exact, is_causal=is_causal)
    assert actual["output"].dtype == actual["query"].dtype == torch.bfloat16
    for name, value in expected.items():
        error = (actual[name].double() - value).norm() / value.norm()
        # Inputs are the same, but outputs, their gradients and what becomes of these are rounded once each.
        assert error < (4 if name == "log_decay" else 2) * 2**-8, f"{name}: {error}"


@pytest.mark.parametrize("is_causal", [False, True])
def test_no_tokens(is_causal):
    inputs = make_inputs(n_q=0, state=True)
    result = run(chunked.attention, inputs, is_causal=is_causal, chunk_size=8)
    assert result["output"].shape == (2, 2, 0, 4)
    assert torch.equal(result["state"], inputs["initial_state"])
    assert (result["means"] == 0).all()
