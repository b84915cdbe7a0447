"""The mixer on its own."""

from unittest import mock

import pytest
import torch
from transformers import DynamicCache

from modeling_gma import GMAAttention, GMAConfig, GMAModel
from modeling_gma.attention import QUERY_BIAS, GMAOutputGate, _GatedSum
from modeling_gma.diagnostics import half_life
from modeling_gma.mixture import GaussianMixture


@pytest.fixture
def mixer(tiny_config):
    return GMAModel(tiny_config()).layers[0].mixer.eval()


def test_cross_attention_reads_all_of_the_other_sequence(mixer):
    x, y = torch.randn(2, 7, 32), torch.randn(2, 13, 32)
    output, weights, (read, write) = mixer(x, key_value_states=y, output_attentions=True, output_responsibilities=True)
    assert output.shape == (2, 7, 32) and weights.shape == (2, 4, 7, 13)
    assert read.shape == (2, 4, 7, 6) and write.shape == (2, 4, 13, 6)
    assert (weights > 0).all()
    value = mixer.v_proj(y).unflatten(-1, (4, -1)).transpose(1, 2)
    expected = mixer.o_proj((weights @ value).transpose(1, 2).flatten(2))
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    order = torch.randperm(13)
    torch.testing.assert_close(mixer(x, key_value_states=y[:, order])[0], output, rtol=1e-4, atol=1e-5)


def test_cross_attention_ignores_masked_keys(mixer):
    x, y = torch.randn(2, 7, 32), torch.randn(2, 13, 32)
    mask = torch.arange(13).expand(2, -1) < torch.tensor([[13], [9]])
    output, *_ = mixer(x, key_value_states=y, attention_mask=mask)
    torch.testing.assert_close(output[1:], mixer(x[1:], key_value_states=y[1:, :9])[0], rtol=1e-4, atol=1e-5)


def test_cross_attention_keeps_no_cache(mixer, tiny_config):
    x = torch.randn(2, 7, 32)
    with pytest.raises(ValueError, match="`key_value_states` goes with neither"):
        mixer(x, key_value_states=x, past_key_values=DynamicCache(config=tiny_config()))


@pytest.mark.parametrize(
    "changes", [{"routing_dim": 5, "value_dim": 7}, {"attention_bias": False}, {"hidden_size": 30}]
)
def test_shapes_of_its_own(changes, tiny_config):
    config = tiny_config(**({"routing_dim": 8, "value_dim": 8} | changes))
    mixer = GMAModel(config).layers[0].mixer
    x = torch.randn(2, 9, config.hidden_size)
    assert mixer(x)[0].shape == x.shape
    assert (mixer.q_proj.bias is None) == (not config.attention_bias)


def test_direction_can_be_chosen_by_the_call(mixer):
    x = torch.randn(1, 9, 32)
    changed = x.clone()
    changed[:, -1] += 1
    assert torch.equal(mixer(x)[0][:, :-1], mixer(changed)[0][:, :-1])
    assert not torch.equal(mixer(x, is_causal=False)[0][:, :-1], mixer(changed, is_causal=False)[0][:, :-1])


@torch.no_grad()
def test_a_mixer_alone_counts_what_its_cache_has_seen(mixer, tiny_config):
    cache = DynamicCache(config=tiny_config())
    x = torch.randn(2, 12, 32)
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[0, :3] = False
    pieces = [
        mixer(x[:, :8], attention_mask=mask, past_key_values=cache)[0],
        mixer(x[:, 8:], past_key_values=cache)[0],
    ]
    whole = torch.cat([mask, torch.ones(2, 4, dtype=torch.bool)], dim=1)
    expected = mixer(x, attention_mask=whole)[0]
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, rtol=1e-4, atol=1e-5)
    assert cache.layers[0].conv_states[0].squeeze(-1).tolist() == [[12, 9], [12, 12]]


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_forget_gates_begin_apart(heads, tiny_config):
    mixer = GMAModel(tiny_config(forget_gate=True, num_attention_heads=heads)).layers[0].mixer
    log_decay = mixer.forget_gate(torch.zeros(1, 5, 32))
    assert log_decay.shape == (1, heads, 5)
    found = half_life(log_decay)[0, :, 0]
    assert found[-1].round() == 280
    if heads > 1:
        assert 2 < found[0] < 2.5
    assert (found.diff() > 0).all()


@pytest.mark.parametrize("is_causal", [True, False])
def test_output_gate_scales_what_heads_bring_and_the_own_value(is_causal, tiny_config):
    plain = GMAAttention(tiny_config(is_causal=is_causal))
    gated = GMAAttention(tiny_config(is_causal=is_causal, output_gate=True))
    gated.load_state_dict(plain.state_dict(), strict=False)
    x, seen = torch.randn(2, 9, 32), []
    for mixer in (plain, gated):
        mixer.o_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        mixer(x)
    factor = torch.nn.functional.silu(x @ gated.output_gate.proj.weight.T)
    torch.testing.assert_close(seen[1], seen[0] * factor)  # at the start
    torch.nn.init.normal_(gated.output_gate.own_norm)
    gated(x)
    torch.testing.assert_close(seen[2], (seen[0] + gated.output_gate.own_norm * gated.v_proj(x)) * factor)


def test_cross_attention_through_an_output_gate_has_no_own_value(tiny_config):
    mixer = GMAAttention(tiny_config(is_causal=False, output_gate=True))
    x, y = torch.randn(2, 5, 32), torch.randn(2, 5, 32)
    before, _, _ = mixer(x, key_value_states=y)
    torch.nn.init.normal_(mixer.output_gate.own_norm)
    torch.testing.assert_close(mixer(x, key_value_states=y)[0], before)


def test_output_gate_keeps_what_goes_in_and_has_gradients():
    gate = GMAOutputGate(6, 8).double()
    torch.nn.init.normal_(gate.own_norm)
    gate.proj.requires_grad_(False)
    output, x, value = (torch.randn(2, 5, size, dtype=torch.float64, requires_grad=True) for size in (8, 6, 8))
    assert torch.autograd.gradcheck(gate, (output, x, value))
    assert torch.autograd.gradcheck(lambda own: _GatedSum.apply(output, value, own, output), (gate.own_norm,))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        gate(output, x, value)
    assert sum(tensor.shape == (2, 5, 8) for tensor in kept) == 3  # two of which are kept anyway


def test_score_weights_are_kept_with_the_state_they_belong_to(tiny_config):
    """Single tokens take them from the cache; a new cache, and several tokens at a time, look at the mixture again."""
    mixer = GMAAttention(tiny_config(), layer_idx=0).eval()
    x = torch.randn(2, 9, 32)

    def steps(cache):
        return torch.cat([mixer(x[:, i : i + 1], past_key_values=cache)[0] for i in range(9)], dim=1)

    with torch.no_grad():
        cache = DynamicCache(config=mixer.config)
        torch.testing.assert_close(steps(cache), mixer(x)[0])
        assert cache.layers[0].mixture_weights.shape == (4, 2 * 8 + 1, 6)
        with mock.patch.object(GaussianMixture, "forward", side_effect=AssertionError("not kept")):
            mixer(x[:, :1], past_key_values=cache)
        # By way of `data`, of which PyTorch keeps no record.
        mixer.mixture_norm.mu.data.mul_(-2.0)
        torch.testing.assert_close(steps(DynamicCache(config=mixer.config)), mixer(x)[0])
        before = cache.layers[0].mixture_weights
        mixer(x, past_key_values=cache)
        assert not torch.equal(cache.layers[0].mixture_weights, before)
    mixer(x[:, :1], past_key_values=DynamicCache(config=mixer.config))[0].sum().backward()
    assert mixer.mixture_norm.mu.grad.abs().sum() > 0


def test_queries_begin_away_from_zero_where_memory_does_not_fade():
    sizes = {
        "vocab_size": 20,
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_components": 8,
    }

    def queries(**fields):
        mixer = GMAModel(GMAConfig(**sizes, **fields)).layers[0].mixer
        return mixer.q_proj.bias.view(4, 16), mixer.k_proj.bias

    query, key = queries()
    routing_std = 0.02 * 64**0.5
    assert 0.7 < query.std() / (QUERY_BIAS * routing_std) < 1.3 and query.mean(1).unique().numel() == 4
    assert not key.any()
    assert not queries(forget_gate=True)[0].any() and not queries(is_causal=False)[0].any()
    local, mixed = queries(layer_types=["hybrid_sliding"])[0].split(2)
    assert not local.any() and mixed.all()
    GMAModel(GMAConfig(**sizes, attention_bias=False))
