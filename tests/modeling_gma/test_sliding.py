"""Attention within a window, and layers that have it."""

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from modeling_gma import GMAAttention, GMAForCausalLM, GMAForMaskedLM, GMAModel, reference, sliding
from modeling_gma.attention import cached_count
from modeling_gma.diagnostics import mixture_health
from modeling_gma.sliding import rotary_positions, rotate, windowed_attention, windowed_attention_weights


KINDS = {
    "hybrid": ["hybrid_sliding"] * 2,
    "local": ["sliding_attention"] * 2,
    "mixed": ["linear_attention", "sliding_attention"],
    "all": ["sliding_attention", "linear_attention", "hybrid_sliding"],
}


@pytest.fixture(params=KINDS)
def make_config(request, tiny_config):
    """A function that makes a tiny config of each kind of layers, without learned positions."""
    kinds = KINDS[request.param]
    fields = {"layer_types": kinds, "num_hidden_layers": len(kinds), "sliding_window": 5, "eos_token_id": None}
    fields |= {"position_embedding_type": "none", "num_local_heads": 1}
    return lambda **changes: tiny_config(**(fields | changes))


def make_tokens(batch=2, length=21):
    return torch.randint(3, 99, (batch, length))


def make_inputs(batch, length, total, value_dim=4, dtype=torch.float64):
    shapes = (length, 4), (total, 4), (total, value_dim)
    return [torch.randn(batch, 2, *shape, dtype=dtype, requires_grad=True) for shape in shapes]


def random_case(seed):
    """Inputs and options of any kind: direction, window, padding, packing, tokens before the first query."""
    pick = torch.Generator().manual_seed(seed)

    def number(low, high):
        return int(torch.randint(low, high, (), generator=pick))

    is_causal, is_packed = bool(number(0, 2)), number(0, 4) == 0
    length, batch = number(1, 40), 1 if is_packed else number(1, 4)
    total = length + (number(0, 12) if is_causal and not is_packed else 0)
    options = {"window": number(1, 14), "is_causal": is_causal}
    if number(0, 3):
        options["key_mask"] = torch.rand(batch, total, generator=pick) < 0.7
    if is_packed:
        cuts = {0, length, *torch.randint(1, length + 1, (3,), generator=pick).tolist()}
        options["cu_seqlens"] = torch.tensor(sorted(cuts))
    return make_inputs(batch, length, total, value_dim=number(4, 6)), options


@pytest.mark.parametrize("stretch", [1, 16, 4096])
def test_windowed_attention_is_what_it_says(stretch, monkeypatch):
    """Outputs, weights and gradients against one query at a time."""
    monkeypatch.setattr(sliding, "STRETCH", stretch)
    for seed in range(25):
        inputs, options = random_case(1000 * stretch + seed)
        expected = reference.windowed_attention(*inputs, **options)
        output = windowed_attention(*inputs, **options)
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
        weights = windowed_attention_weights(*inputs[:2], **options)
        torch.testing.assert_close(weights @ inputs[2], expected, rtol=0, atol=1e-12)
        gradient = torch.randn_like(output)
        if expected.requires_grad:
            wanted = torch.autograd.grad(expected, inputs, gradient)
            for mine, other in zip(torch.autograd.grad(output, inputs, gradient), wanted):
                torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
def test_padding_is_not_seen_whatever_it_holds(is_causal):
    """Not a number in padding reaches no token, and padding gets zeros: outputs and gradients."""
    inputs = make_inputs(2, 23, 23)
    mask = torch.rand(2, 23) < 0.6
    mask[1] = False
    spoilt = [x.detach().masked_fill(~mask[:, None, :, None], torch.nan).requires_grad_() for x in inputs]
    outputs = [windowed_attention(*given, 4, is_causal, mask) for given in (inputs, spoilt)]
    assert torch.equal(*outputs) and (outputs[0].transpose(1, 2)[~mask] == 0).all()
    outputs[1].sum().backward()
    for x in spoilt:
        assert (x.grad.transpose(1, 2)[~mask] == 0).all() and x.grad.isfinite().all()


def test_a_token_sees_its_window_and_no_more():
    query, key, value = make_inputs(1, 30, 30)
    for is_causal, reach in ((True, range(10, 17)), (False, range(4, 17))):
        windowed_attention(query, key, value, 7, is_causal)[0, 0, 10].sum().backward()
        seen = (value.grad[0, 0] != 0).any(-1).nonzero().flatten().tolist()
        assert seen == [2 * 10 - i for i in reversed(reach)]
        value.grad = None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_inputs(dtype):
    inputs = [x.detach() for x in make_inputs(2, 20, 20)]
    output = windowed_attention(*(x.to(dtype) for x in inputs), 6, True)
    assert output.dtype == dtype
    expected = windowed_attention(*inputs, 6, True)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("length", [512, 4096])
def test_memory_is_linear_in_length(length, largest_tensor, monkeypatch):
    """For backward only the inputs are kept, and no tensor is larger than they are, or than a stretch needs."""
    monkeypatch.setattr(sliding, "STRETCH", 256)
    inputs = make_inputs(1, length, length, dtype=torch.float32)
    saved = {}

    def pack(x):
        saved[x.data_ptr()] = x.numel()
        return x

    with largest_tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            output = windowed_attention(*inputs, 32, True)
        output.sum().backward()
    assert sum(saved.values()) == 3 * 2 * length * 4
    assert largest_tensor.numel <= max(2 * length * 4, 256 * 2 * 32 * 2)


def test_rotary_positions_tell_distances_alone():
    x = torch.randn(2, 1, 1, 9, 8, dtype=torch.float64)
    products = []
    for start in (0, 1000):
        angles = rotary_positions(torch.arange(start, start + 9)[None], 8, 10000.0)
        query, key = (rotate(vectors, *angles) for vectors in x)
        torch.testing.assert_close(query.norm(dim=-1), x[0].norm(dim=-1), rtol=1e-6, atol=0)
        products.append(query @ key.mT)
    torch.testing.assert_close(*products, rtol=0, atol=1e-3)
    assert (products[0] - x[0] @ x[1].mT).abs().max() > 0.1


def test_bad_windows_get_a_sentence():
    query, key, value = make_inputs(1, 5, 9)
    with pytest.raises(ValueError, match="`window` must be at least 1, got 0"):
        windowed_attention(query, key, value, 0, True)
    with pytest.raises(ValueError, match=r"as many tokens as `key`.*got 5 and 9"):
        windowed_attention(query, key, value, 3, False)


# Models


@pytest.mark.parametrize("is_causal", [True, False])
@torch.no_grad()
def test_flash_attention_is_asked_through_transformers(is_causal, make_config, monkeypatch):
    """A kernel that was asked for gets all that decides the result: window, direction, padding and packing."""
    calls = []

    def kernel(module, query, key, value, attention_mask, sliding_window, is_causal, **packed):
        calls.append((query.shape[2], attention_mask is not None, bool(packed)))
        options = {"key_mask": attention_mask, "cu_seqlens": packed.get("cu_seq_lens_q")}
        output = reference.windowed_attention(query, key, value, sliding_window, is_causal, **options)
        return output.transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flash_attention_2", kernel)
    model = (GMAForCausalLM if is_causal else GMAForMaskedLM)(make_config(is_causal=is_causal)).eval()
    tokens = make_tokens(1)
    mask = torch.ones_like(tokens)
    mask[0, [0, 6]] = 0
    inputs = [{}, {"attention_mask": mask}, {"seq_idx": torch.arange(21)[None] // 9}]
    expected = [model(tokens, use_cache=False, **given).logits for given in inputs]
    model.config._attn_implementation = "flash_attention_2"
    for given, wanted in zip(inputs, expected):
        logits = model(tokens, use_cache=False, **given).logits
        torch.testing.assert_close(logits[mask == 1], wanted[mask == 1], rtol=1e-4, atol=1e-5)
    assert set(calls) == {(21, False, False), (21, True, False), (21, False, True)}
    if is_causal:
        cache = DynamicCache(config=model.config)
        pieces = [model(x, attention_mask=y, past_key_values=cache).logits for x, y in pieces_of(tokens, mask)]
        assert (1, True, False) in calls
        torch.testing.assert_close(torch.cat(pieces, 1)[mask == 1], expected[1][mask == 1], rtol=1e-4, atol=1e-4)


def pieces_of(*tensors, sizes=(8, 1, 1, 11)):
    return zip(*(x.split(sizes, dim=1) for x in tensors))


def test_linear_layers_are_the_papers_model_bit_for_bit(tiny_config):
    tokens = make_tokens()
    torch.manual_seed(0)
    plain = GMAForCausalLM(tiny_config())
    torch.manual_seed(0)
    named = GMAForCausalLM(tiny_config(layer_types=["linear_attention"] * 2, sliding_window=3, num_local_heads=2))
    assert list(plain.state_dict()) == list(named.state_dict())
    of_mixer = [name for name in plain.state_dict() if ".layers.1.mixer." in name]
    projections = [f"{name}_proj.{part}" for name in "qkvo" for part in ("weight", "bias")]
    expected = [*projections, "mixture_norm.mu", "mixture_norm.omega", "mixture_norm.alpha"]
    assert of_mixer == [f"model.layers.1.mixer.{name}" for name in expected]
    assert torch.equal(plain(tokens).logits, named(tokens).logits)


def test_only_gma_heads_have_mixtures(tiny_config):
    model = GMAModel(tiny_config(layer_types=KINDS["all"], num_hidden_layers=3, num_local_heads=1, forget_gate=True))
    local, linear, hybrid = (layer.mixer for layer in model.layers)
    assert local.mixture_norm is None and local.forget_gate is None
    assert linear.mixture_norm.mu.shape[0] == 4 and hybrid.mixture_norm.mu.shape[0] == 3
    assert hybrid.forget_gate.bias.shape == (3,)
    assert all(mixer.q_proj.weight.shape == (32, 32) for mixer in (local, linear, hybrid))


def test_a_local_layer_is_softmax_attention_in_its_window(tiny_config):
    """With a window as long as the sequence, that of any model with rotary positions; with one of 1, its values."""
    config = tiny_config(num_hidden_layers=1, layer_types=["sliding_attention"], sliding_window=30)
    mixer = GMAAttention(config)
    hidden = torch.randn(2, 21, 32)
    query, key, value = (
        proj(hidden).unflatten(-1, (4, 8)).transpose(1, 2) for proj in (mixer.q_proj, mixer.k_proj, mixer.v_proj)
    )
    angles = rotary_positions(torch.arange(21)[None], 8, 10000.0)
    mixed = torch.nn.functional.scaled_dot_product_attention(
        rotate(query, *angles), rotate(key, *angles), value, is_causal=True
    )
    torch.testing.assert_close(mixer(hidden)[0], mixer.o_proj(mixed.transpose(1, 2).flatten(2)), rtol=1e-4, atol=1e-5)
    config.sliding_window = 1
    torch.testing.assert_close(mixer(hidden)[0], mixer.o_proj(mixer.v_proj(hidden)), rtol=1e-4, atol=1e-5)


def test_positions_are_the_ones_given(make_config):
    model = GMAModel(make_config()).eval()
    tokens = make_tokens()
    expected = model(tokens).last_hidden_state
    moved = model(tokens, position_ids=torch.arange(50, 71)[None]).last_hidden_state
    torch.testing.assert_close(moved, expected, rtol=1e-3, atol=1e-4)
    stretched = model(tokens, position_ids=3 * torch.arange(21)[None]).last_hidden_state
    assert (stretched - expected).abs().max() > 1e-2


@pytest.mark.parametrize("is_causal", [True, False])
def test_attentions_and_responsibilities(is_causal, make_config):
    model = (GMAForCausalLM if is_causal else GMAForMaskedLM)(make_config(is_causal=is_causal)).eval()
    tokens = make_tokens()
    mask = torch.ones_like(tokens)
    mask[0, [0, 1, 7]] = 0
    outputs = model(tokens, attention_mask=mask, output_attentions=True, output_responsibilities=True)
    plain = model(tokens, attention_mask=mask)
    torch.testing.assert_close(outputs.logits[mask == 1], plain.logits[mask == 1], rtol=1e-4, atol=1e-5)
    count = mask.cumsum(-1)
    distance = (count[:, :, None] - count[:, None]).abs()
    for layer, weights, (read, write) in zip(model.model.layers, outputs.attentions, outputs.responsibilities):
        assert weights.shape == (2, 4, 21, 21)
        assert read.shape == write.shape == (2, layer.mixer.num_mixture_heads, 21, 6)
        sums = weights.sum(-1).transpose(1, 2)
        torch.testing.assert_close(sums[mask == 1], torch.ones_like(sums[mask == 1]), rtol=1e-4, atol=1e-4)
        local = weights[:, : layer.mixer.num_local_heads].transpose(0, 1)
        assert (local[:, distance >= 5] == 0).all() and (weights.movedim(3, 1)[mask == 0] == 0).all()
        assert not is_causal or (weights.triu(1) == 0).all()


@torch.no_grad()
def test_attentions_of_a_continuation(make_config):
    model = GMAForCausalLM(make_config()).eval()
    tokens = make_tokens()
    expected = model(tokens, output_attentions=True).attentions
    cache = model(tokens[:, :15]).past_key_values
    outputs = model(tokens[:, 15:], past_key_values=cache, output_attentions=True)
    for mine, whole in zip(outputs.attentions, expected):
        torch.testing.assert_close(mine, whole[:, :, 15:, 15:], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(outputs.logits, model(tokens).logits[:, 15:], rtol=1e-4, atol=1e-4)


def make_cache(kind, config):
    return DynamicCache(config=config) if kind == "dynamic" else StaticCache(config, max_cache_len=64)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("window", [1, 2, 5, 40])
@torch.no_grad()
def test_continuing_equals_parallel_with_padding_anywhere(kind, window, make_config):
    """Token by token and in odd pieces, rows padded unlike each other, whole pieces of padding among them."""
    model = GMAForCausalLM(make_config(sliding_window=window)).eval()
    tokens, mask = make_tokens(3, 37), torch.rand(3, 37) < 0.7
    mask[0, 10:14] = False
    mask[1] = True
    rows = [model(row[kept][None]).logits[0] for row, kept in zip(tokens, mask)]
    cache, start = make_cache(kind, model.config), 0
    logits = []
    for size in (3, 1, 6, 1, 1, 1, 1, 9, 14):
        piece = slice(start, start + size)
        given = None if mask[:, piece].all() else mask[:, piece]
        logits.append(model(tokens[:, piece], attention_mask=given, past_key_values=cache).logits)
        start += size
    logits = torch.cat(logits, dim=1)
    for row, kept, expected in zip(logits, mask, rows):
        torch.testing.assert_close(row[kept], expected, rtol=1e-4, atol=1e-4)
    assert cache.get_seq_length() == 37


def cache_bytes(cache):
    tensors = [x for layer in cache.layers for x in vars(layer).values() if isinstance(x, torch.Tensor)]
    for layer in cache.layers:
        for states in (getattr(layer, name, {}) for name in ("conv_states", "recurrent_states")):
            tensors += [x for x in states.values() if x is not None]
    return sum(x.untyped_storage().nbytes() for x in tensors)


@pytest.mark.parametrize("window", [1, 8])
@torch.no_grad()
def test_cache_is_bounded_by_window_and_memory(window, make_config):
    model = GMAForCausalLM(make_config(sliding_window=window)).eval()
    cache = DynamicCache(config=model.config)
    sizes = set()
    for length in (20, 1, 3000, 1, 1):
        model(make_tokens(1, length), past_key_values=cache)
        if length > 1:
            sizes.add(cache_bytes(cache))
        # Of a single token, what it pushed out goes with the next.
        assert cache_bytes(cache) <= max(sizes) + 3 * 4 * (8 + 4 + 8) * 4
    assert len(sizes) == 1 and cache.get_seq_length() == 3023


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"prefill_chunk_size": 6}, {"cache_implementation": "static"}]
)
def test_generation_with_cache_equals_without(options, make_config):
    model = GMAForCausalLM(make_config()).eval()
    tokens = make_tokens()
    mask = torch.ones_like(tokens)
    mask[0, :6] = 0
    fixed = {"max_new_tokens": 9, "do_sample": False, "num_beams": options.get("num_beams", 1)}
    expected = model.generate(tokens, attention_mask=mask, use_cache=False, **fixed)
    assert torch.equal(model.generate(tokens, attention_mask=mask, **fixed | options), expected)


def test_generation_goes_on_from_a_cache_that_was_reset(make_config):
    model = GMAForCausalLM(make_config()).eval()
    tokens = make_tokens()
    options = {"max_new_tokens": 6, "do_sample": False}
    expected = model.generate(tokens, **options)
    cache = DynamicCache(config=model.config)
    for _ in range(2):
        assert torch.equal(model.generate(tokens, past_key_values=cache, **options), expected)
        copied = copy.deepcopy(cache)
        assert copied.get_seq_length() == 26
        cache.reset()
        assert cache.get_seq_length() == 0
    whole = torch.cat([expected, tokens[:, :2]], dim=1)
    again = model.generate(whole, past_key_values=copied, **options)
    assert torch.equal(again, model.generate(whole, **options))


def test_assisted_decoding_is_refused(make_config):
    model = GMAForCausalLM(make_config())
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        model.generate(make_tokens(1), assistant_model=model, max_new_tokens=4)


def test_caches_of_other_models_are_refused(make_config, tiny_config):
    model = GMAForCausalLM(make_config()).eval()
    tokens = make_tokens()
    layers = model.config.num_hidden_layers
    for other in (tiny_config(num_hidden_layers=layers), make_config(sliding_window=6)):
        with pytest.raises(ValueError, match=r"hold a state, a window of 5 tokens or both.*as of another model"):
            model(tokens, past_key_values=DynamicCache(config=other))
    cache = model(tokens).past_key_values
    with pytest.raises(ValueError, match="another batch"):
        model(make_tokens(3), past_key_values=cache)
    narrow = StaticCache(make_config(sliding_window=30), max_cache_len=8)
    wide = GMAForCausalLM(make_config(sliding_window=30))
    with pytest.raises(ValueError, match="room for 8 tokens, fewer than the window of 30"):
        wide(tokens, past_key_values=narrow)


def test_cross_attention_needs_gma_heads_alone(tiny_config):
    mixer = GMAAttention(tiny_config(layer_types=["hybrid_sliding"] * 2))
    with pytest.raises(ValueError, match="`key_value_states` needs GMA heads alone"):
        mixer(torch.randn(1, 4, 32), key_value_states=torch.randn(1, 6, 32))


def test_a_mixer_counts_positions_by_itself(tiny_config):
    mixer = GMAAttention(tiny_config(layer_types=["hybrid_sliding"] * 2, sliding_window=4), layer_idx=0)
    hidden = torch.randn(2, 12, 32)
    expected = mixer(hidden, position_ids=torch.arange(12)[None])[0]
    torch.testing.assert_close(mixer(hidden)[0], expected, rtol=1e-4, atol=1e-5)
    cache = DynamicCache(config=mixer.config)
    pieces = [mixer(piece, past_key_values=cache)[0] for piece in hidden.split([5, 1, 6], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, rtol=1e-4, atol=1e-5)


def test_training_features(make_config, tmp_path):
    """Every parameter learns, under gradient checkpointing as without it; saved and loaded, the model is the same."""
    model = GMAForCausalLM(make_config()).train()
    tokens = make_tokens()
    model(tokens, labels=tokens).loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    assert all((gradient != 0).any() for gradient in gradients.values())
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model(tokens, labels=tokens).loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, gradients[name], msg=name)
    model.save_pretrained(tmp_path)
    loaded = GMAForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.layer_types == model.config.layer_types
    assert torch.equal(loaded(tokens).logits, model.eval()(tokens).logits)


@torch.no_grad()
def test_bfloat16_and_autocast(make_config):
    model = GMAForCausalLM(make_config()).eval()
    tokens = make_tokens()
    expected = model(tokens).logits
    half = copy.deepcopy(model).to(torch.bfloat16)
    cache = half(tokens[:, :15]).past_key_values
    logits = half(tokens[:, 15:], past_key_values=cache).logits
    assert logits.dtype == torch.bfloat16 and cache.get_seq_length() == 21
    with torch.autocast("cpu", dtype=torch.bfloat16):
        autocast = model(tokens).logits
    for output, wanted in ((logits, expected[:, 15:]), (autocast, expected)):
        assert (output - wanted).abs().max() < 0.1 * expected.abs().max()


@torch.no_grad()
def test_bfloat16_counts_tokens_exactly(tiny_config):
    """A narrow number ends at 256; what the cache knows of its tokens does not."""
    config = tiny_config(layer_types=KINDS["local"], position_embedding_type="none", sliding_window=3)
    model = GMAForCausalLM(config).eval().to(torch.bfloat16)
    cache = DynamicCache(config=config)
    model(make_tokens(1, 70_001), past_key_values=cache, logits_to_keep=1)
    model(make_tokens(1, 2), attention_mask=torch.tensor([[1, 0]]), past_key_values=cache)
    assert cached_count(cache).flatten().tolist() == [70_003, 70_002]


def test_compiled_training_step_in_one_graph(tiny_config):
    torch.compiler.reset()
    model = GMAForCausalLM(tiny_config(num_hidden_layers=1, layer_types=["hybrid_sliding"], sliding_window=5))
    tokens = make_tokens()
    mask = torch.ones_like(tokens)
    mask[0, [0, 7]] = 0
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected = model(tokens, labels=tokens, attention_mask=mask)
    expected.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    outputs = compiled(tokens, labels=tokens, attention_mask=mask)
    outputs.loss.backward()
    torch.testing.assert_close(outputs.logits, expected.logits, rtol=1e-4, atol=1e-5)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, gradients[name], rtol=1e-3, atol=1e-5, msg=name)


def test_diagnostics_look_at_gma_heads(tiny_config):
    model = GMAModel(tiny_config(layer_types=KINDS["all"], num_hidden_layers=3)).eval()
    with torch.no_grad():
        # All tokens to one component.
        model.layers[2].mixer.mixture_norm.alpha[1, 0] = 1e4
    health = mixture_health(model, input_ids=make_tokens())
    assert (health["smallest_usage_layer"], health["smallest_usage_head"], health["collapsed_heads"]) == (2, 1, 1)
    with pytest.raises(ValueError, match="no mixture to look at"):
        mixture_health(GMAModel(tiny_config(layer_types=KINDS["local"])), input_ids=make_tokens())
