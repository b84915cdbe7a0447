"""Twins: GMA models with another mixer."""

import copy
import inspect
import math
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    DynamicCache,
    StaticCache,
)
from transformers.models.mamba.modeling_mamba import MambaMixer

from baselines import MIXERS, TwinConfig, TwinForCausalLM, build_mixer, build_twin, selective_scan
from baselines.linear_transformer import EluMap
from baselines.performer import SoftmaxKernelMap
from modeling_gma import (
    GMAAttention,
    GMAConfig,
    GMAForCausalLM,
    GMAForMaskedLM,
    GMAForSequenceClassification,
    GMAModel,
    parameter_groups,
)
from modeling_gma.attention import FORGET_GATE_BIAS


ALL = list(MIXERS)
CAUSAL = [name for name in ALL if name != "linformer"]
SOFTMAX = ["eager", "sdpa", "sdpa_rope"]
SMALL = {"linformer_dim": 8, "performer_features": 16, "mamba_state_size": 4}
DIRECTIONS = [(name, True) for name in CAUSAL] + [(name, False) for name in ALL]


@pytest.fixture
def twin(tiny_config):
    """A function that makes a small twin, ready to be compared."""

    def make(mixer, model_class=None, **changes):
        if mixer == "linformer":
            changes = {"is_causal": False} | changes
        fields = {} if mixer == "gma" else SMALL
        return build_twin(tiny_config(eos_token_id=None, **changes), mixer, model_class, **fields).eval()

    return make


def make_tokens(batch=2, length=21):
    return torch.randint(3, 99, (batch, length))


def count(module):
    return sum(p.numel() for p in module.parameters())


# Architecture


BLOCKS = [(name, 1000, 2_359_296) for name in (*SOFTMAX, "linear", "performer")]
BLOCKS += [("linformer", length, 2_359_296 + 2 * 256 * length) for length in (1000, 2000, 4000)]
BLOCKS += [("mamba", 1000, 3_770_880), ("gma", 1000, 2_557_440)]


@pytest.mark.parametrize(("mixer", "length", "expected"), BLOCKS)
def test_parameters_of_a_mixing_block(mixer, length, expected):
    config = GMAConfig(
        hidden_size=768, num_attention_heads=12, max_position_embeddings=length, attention_bias=False, is_causal=False
    )
    with torch.device("meta"):
        assert count(build_mixer(config, mixer)) == expected
    printed = {("linformer", 1000): 2.87, ("linformer", 2000): 3.38, ("linformer", 4000): 4.41, ("mamba", 1000): 3.77}
    assert round(expected / 1e6, 2) == printed.get((mixer, length), round(expected / 1e6, 2))


WIKITEXT = dict.fromkeys(("eager", "sdpa", "linear", "performer"), 45_171_200)
WIKITEXT |= {"mamba": 49_035_776, "gma": 45_963_776, "sdpa_rope": 45_171_200 - 1024 * 512}


@pytest.mark.parametrize("mixer", WIKITEXT)
def test_parameters_of_the_wikitext_decoder(mixer):
    with torch.device("meta"):
        assert count(build_twin(GMAConfig(), mixer)) == WIKITEXT[mixer]


LRA = [("sdpa", 3.74, 4.25), ("mamba", 4.44, 4.95), ("linformer", 7.84, 12.44), ("gma", 4.01, 4.52)]


@pytest.mark.parametrize(("mixer", "listops", "text"), LRA)
def test_parameters_of_the_lra_encoder(mixer, listops, text):
    for length, labels, expected in ((2000, 10, listops), (4000, 2, text)):
        config = GMAConfig(
            vocab_size=257,
            hidden_size=256,
            num_hidden_layers=4,
            max_position_embeddings=length,
            is_causal=False,
            num_labels=labels,
        )
        with torch.device("meta"):
            assert round(count(build_twin(config, mixer, GMAForSequenceClassification)) / 1e6, 2) == expected


@pytest.mark.parametrize("mixer", ["gma", *ALL])
def test_what_adds_to_hidden_states_begins_as_told(mixer, twin):
    """All that adds, and nothing else, whatever the mixer."""
    model = twin(mixer, hidden_size=256, residual_initializer_range=0.003)
    spreads = {name: float(weight.detach().std()) for name, weight in model.named_parameters() if weight.dim() == 2}
    small = {name for name, spread in spreads.items() if 0 < spread < 0.01}
    ends = ("mixer.mamba.out_proj.weight" if mixer == "mamba" else "mixer.o_proj.weight", "mlp.down_proj.weight")
    assert small == {name for name in spreads if name.endswith(ends)} and len(small) == 2 * len(model.model.layers)
    assert all(0.0028 < spreads[name] < 0.0032 for name in small)


@pytest.mark.parametrize(("given", "expected"), [(None, 0.05), (0.2, 0.2)])
def test_what_adds_to_hidden_states_begins_smaller_by_default(given, expected, twin):
    model = twin("gma", hidden_size=256, num_hidden_layers=2, initializer_range=0.2, residual_initializer_range=given)
    for layer in model.model.layers:
        spreads = [layer.mixer.o_proj.weight.std().item(), layer.mlp.down_proj.weight.std().item()]
        assert spreads == pytest.approx([expected] * 2, rel=0.05)


@pytest.mark.parametrize("mixer", ALL)
def test_twins_differ_only_in_their_mixer(mixer, twin):
    def others(model):
        return {name: p.shape for name, p in model.named_parameters() if ".mixer." not in name}

    changes = {"position_embedding_type": "none"} if mixer == "sdpa_rope" else {}
    gma = twin("gma", is_causal=mixer != "linformer", **changes)
    assert others(twin(mixer)) == others(gma)
    ours, theirs = (list(inspect.signature(c.forward).parameters) for c in (MIXERS[mixer], GMAAttention))
    assert ours == theirs


def test_the_class_follows_the_direction(tiny_config):
    assert type(build_twin(tiny_config())) is TwinForCausalLM and build_twin(tiny_config()).config.mixer == "sdpa"
    assert isinstance(build_twin(tiny_config(is_causal=False)), GMAForMaskedLM)
    assert type(build_twin(tiny_config(), "gma")) is GMAForCausalLM
    classifier = build_twin(tiny_config(num_labels=5), "linear", GMAForSequenceClassification)
    assert isinstance(classifier, GMAForSequenceClassification) and classifier.score.out_features == 5
    assert build_twin(tiny_config(), "sdpa_rope").config.position_embedding_type == "none"
    hybrid = tiny_config(layer_types=["hybrid_sliding"] * 2)
    assert build_twin(hybrid, "linear").config.layer_types == ["linear_attention"] * 2
    with pytest.raises(Exception, match="`layer_types` goes with GMA's mixer alone"):
        TwinConfig(num_hidden_layers=1, layer_types=["sliding_attention"])
    twice = build_twin(build_twin(tiny_config(), "performer", performer_features=7).config, "linear")
    assert twice.config.mixer == "linear" and twice.config.performer_features == 7


# Training, saving and loading


@pytest.mark.parametrize("mixer", ALL)
def test_trains(mixer, twin):
    model = twin(mixer, initializer_range=0.05).train()
    tokens = make_tokens(length=12)
    optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.01), lr=1e-2)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        unused = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
        assert not unused
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize("mixer", ALL)
@pytest.mark.parametrize(
    ("model_class", "auto_class"),
    [
        (GMAForCausalLM, AutoModelForCausalLM),
        (GMAForMaskedLM, AutoModelForMaskedLM),
        (GMAForSequenceClassification, AutoModelForSequenceClassification),
    ],
)
def test_save_and_load_through_auto_classes(mixer, model_class, auto_class, twin, tmp_path):
    if model_class is GMAForCausalLM and mixer == "linformer":
        pytest.skip("bidirectional only")
    model = twin(mixer, model_class, is_causal=model_class is GMAForCausalLM)
    model.save_pretrained(tmp_path)
    assert [f.name for f in tmp_path.iterdir() if f.suffix not in (".json", ".safetensors")] == []
    # Anything drawn again would be drawn differently.
    torch.manual_seed(1)
    loaded = auto_class.from_pretrained(tmp_path)
    assert type(loaded) is type(model) and loaded.config.mixer == mixer and not loaded.training
    tokens = make_tokens()
    assert torch.equal(model(tokens).logits, loaded(tokens).logits)


def test_random_features_are_drawn_from_the_seed_and_saved(twin):
    def features(seed):
        torch.manual_seed(seed)
        return twin("performer").state_dict()["model.layers.1.mixer.features"]

    assert torch.equal(features(3), features(3))
    assert not torch.equal(features(3), features(4))
    assert twin("performer").num_parameters() == twin("sdpa").num_parameters()


@pytest.mark.parametrize("mixer", ["linformer", "performer", "mamba"])
def test_what_a_checkpoint_lacks_is_started(mixer, twin, tmp_path):
    twin("sdpa", is_causal=False).save_pretrained(tmp_path)
    new = twin(mixer, is_causal=False)
    loaded = type(new).from_pretrained(tmp_path, config=new.config)
    names = {"linformer": ["key_projection", "value_projection"], "performer": ["features"]}
    for name in names.get(mixer, ["mamba.A_log", "mamba.D", "mamba.dt_proj.bias", "mamba.conv1d.weight"]):
        got, want = (model.get_parameter_or_buffer(f"model.layers.1.mixer.{name}") for model in (loaded, new))
        torch.testing.assert_close(got.mean(), want.mean(), atol=0.2, rtol=0.2)
        torch.testing.assert_close(got.std(), want.std(), atol=1e-4, rtol=0.3)


@pytest.mark.parametrize("mixer", ALL)
def test_gradient_checkpointing_changes_nothing(mixer, twin):
    model = twin(mixer).train()
    tokens = make_tokens()

    def gradients():
        model.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = gradients()
    model.gradient_checkpointing_enable()
    for got, want in zip(gradients(), expected):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(("mixer", "is_causal"), DIRECTIONS)
def test_narrow_types(mixer, is_causal, twin):
    model = twin(mixer, is_causal=is_causal)
    tokens = make_tokens()
    expected = model(tokens).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(model(tokens).logits.float(), expected, atol=0.3, rtol=0.1)
    narrow = model.to(torch.bfloat16)(tokens).logits
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.float(), expected, atol=0.5, rtol=0.1)


def test_mamba_begins_as_in_transformers(twin):
    mamba = twin("mamba").model.layers[1].mixer.mamba
    states = torch.arange(1.0, 5.0).expand(mamba.intermediate_size, -1)
    torch.testing.assert_close(mamba.A_log.exp(), states)
    assert (mamba.D == 1).all() and (mamba.conv1d.bias == 0).all()
    steps = F.softplus(mamba.dt_proj.bias)
    assert 1e-3 <= steps.min() < 0.02 and 0.03 < steps.max() <= 0.1001
    assert mamba.dt_proj.weight.abs().max() <= mamba.time_step_rank**-0.5
    assert mamba.out_proj.weight.abs().max() <= mamba.intermediate_size**-0.5


def test_what_decays_a_state_is_not_decayed(twin):
    model = twin("mamba")
    decayed, free = (group["params"] for group in parameter_groups(model, 0.1))
    mamba = model.model.layers[0].mixer.mamba
    assert any(p is mamba.A_log for p in free) and any(p is mamba.in_proj.weight for p in decayed)


# Causality, padding and packing


@pytest.mark.parametrize("mixer", CAUSAL)
def test_later_tokens_change_no_earlier_output(mixer, twin):
    model = twin(mixer)
    tokens = make_tokens(length=40)
    changed = tokens.clone()
    changed[:, 23] = (changed[:, 23] - 3 + 1) % 96 + 3
    before, after = model(tokens).logits, model(changed).logits
    assert torch.equal(before[:, :23], after[:, :23])
    assert not torch.equal(before[:, 23], after[:, 23])


@pytest.mark.parametrize("mixer", [name for name in ALL if name != "mamba"])
def test_bidirectional_tokens_see_later_ones(mixer, twin):
    model = twin(mixer, is_causal=False)
    tokens = make_tokens(length=40)
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] - 3 + 1) % 96 + 3
    assert (model(tokens).logits[:, 0] != model(changed).logits[:, 0]).any()


@pytest.mark.parametrize(("mixer", "is_causal"), DIRECTIONS)
@pytest.mark.parametrize("where", ["left", "right", "inside"])
def test_padding_changes_nothing(mixer, is_causal, where, twin):
    model = twin(mixer, is_causal=is_causal)
    tokens = make_tokens(batch=1, length=13)
    holes = {"left": range(5), "right": range(13, 18), "inside": (0, 4, 5, 11, 17)}[where]
    mask = torch.ones(2, 18, dtype=torch.long)
    mask[0, list(holes)] = 0
    padded = make_tokens(length=18)
    padded[0, mask[0] == 1] = tokens[0]
    embeds = model.get_input_embeddings()(padded).detach().requires_grad_()
    logits = model(inputs_embeds=embeds, attention_mask=mask).logits
    torch.testing.assert_close(logits[0, mask[0] == 1], model(tokens).logits[0], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(logits[1:], model(padded[1:]).logits, atol=2e-5, rtol=1e-4)
    logits[0, mask[0] == 1].square().sum().backward()
    assert (embeds.grad[0, mask[0] == 0] == 0).all() and (embeds.grad[0, mask[0] == 1] != 0).any()


@pytest.mark.parametrize(("mixer", "is_causal"), DIRECTIONS)
def test_a_row_of_nothing_but_padding_is_harmless(mixer, is_causal, twin):
    model = twin(mixer, GMAForSequenceClassification, is_causal=is_causal)
    tokens = make_tokens()
    mask = torch.tensor([[0], [1]]).expand_as(tokens)
    logits = model(tokens, attention_mask=mask).logits
    logits.sum().backward()
    assert logits.isfinite().all() and all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(("mixer", "is_causal"), DIRECTIONS)
def test_packed_sequences_do_not_meet(mixer, is_causal, twin):
    model = twin(mixer, is_causal=is_causal)
    pieces = [make_tokens(1, n) for n in (5, 1, 11, 3)]
    packed = torch.cat(pieces, dim=1)
    positions = torch.cat([torch.arange(piece.shape[1]) for piece in pieces]).unsqueeze(0)
    expected = torch.cat([model(piece).logits for piece in pieces], dim=1)
    torch.testing.assert_close(model(packed, position_ids=positions).logits, expected, atol=2e-5, rtol=1e-4)
    two_rows = model(packed.view(2, 10), seq_idx=torch.tensor([[0] * 5 + [1] + [2] * 4, [2] * 7 + [3] * 3])).logits
    expected = [model(rows).logits for rows in (pieces[0], pieces[1], pieces[2][:, :4], pieces[2][:, 4:], pieces[3])]
    torch.testing.assert_close(two_rows.view(1, 20, -1), torch.cat(expected, dim=1), atol=2e-5, rtol=1e-4)


# Decoding


@pytest.mark.parametrize("mixer", CAUSAL)
@pytest.mark.parametrize("beams", [1, 3])
def test_generation_with_and_without_cache(mixer, beams, twin):
    model = twin(mixer)
    tokens = make_tokens(batch=3, length=9)
    mask = torch.ones_like(tokens)
    mask[0, :5] = mask[1, :1] = 0
    options = {"max_new_tokens": 12, "do_sample": False, "num_beams": beams}
    cached, plain = (model.generate(tokens, attention_mask=mask, use_cache=x, **options) for x in (True, False))
    assert torch.equal(cached, plain)
    alone = model.generate(tokens[:1, 5:], **options)
    assert torch.equal(cached[0, 9:], alone[0, 4:])
    assert len(cached[:, 9:].unique()) > 3


@pytest.mark.parametrize("mixer", CAUSAL)
def test_pieces_from_a_cache_with_padding_anywhere(mixer, twin):
    model = twin(mixer)
    tokens = make_tokens(batch=3, length=24)
    mask = torch.ones_like(tokens)
    # The first piece has none, the second and fourth have some, inside and at both ends; a single token is one too.
    mask[0, 7:10] = mask[1, 11:13] = mask[2, 18] = mask[1, 16] = mask[0, 22:] = 0
    expected = model(tokens, attention_mask=mask).logits
    pieces = [(0, 7), (7, 13), (13, 16), (16, 17), (17, 24)]
    for covers_all in (False, True):
        cache, got = None, []
        for start, stop in pieces:
            piece_mask = mask[:, 0 if covers_all else start : stop]
            out = model(tokens[:, start:stop], attention_mask=piece_mask, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            got.append(out.logits)
            assert cache.get_seq_length() == stop
        is_token = mask == 1
        torch.testing.assert_close(torch.cat(got, dim=1)[is_token], expected[is_token], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("mixer", [name for name in CAUSAL if name != "mamba"])
def test_gradients_through_a_cache(mixer, twin):
    model = twin(mixer)
    embeds = model.get_input_embeddings()(make_tokens(length=9)).detach().requires_grad_()
    (whole,) = torch.autograd.grad(model(inputs_embeds=embeds).logits[:, 7:].square().sum(), embeds)
    cache, total = DynamicCache(config=model.config), 0
    for start, stop in ((0, 7), (7, 8), (8, 9)):
        logits = model(inputs_embeds=embeds[:, start:stop], past_key_values=cache, use_cache=True).logits
        total = total + (logits.square().sum() if start else 0)
    (pieces,) = torch.autograd.grad(total, embeds)
    # States in a cache are overwritten in place, and carry gradients all the same.
    torch.testing.assert_close(pieces, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("mixer", CAUSAL)
def test_what_a_cache_holds(mixer, twin):
    model = twin(mixer)

    def size(length):
        with torch.no_grad():
            layer = model(make_tokens(length=length), use_cache=True).past_key_values.layers[0]
        states = [*layer.conv_states.values(), *layer.recurrent_states.values()]
        states += [getattr(layer, "keys", None), getattr(layer, "values", None)]
        return sum(x.numel() for x in states if x is not None)

    grows = size(40) - size(20)
    assert grows == (2 * 20 * 2 * 32 if mixer in SOFTMAX else 0)


@pytest.mark.parametrize("mixer", SOFTMAX)
def test_keys_in_a_cache_of_fixed_length(mixer, twin):
    model = twin(mixer)
    tokens = make_tokens(length=12)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    expected = model(tokens, attention_mask=mask).logits
    cache = StaticCache(config=model.config, max_cache_len=30)
    got = [
        model(tokens[:, a:b], attention_mask=mask[:, :b], past_key_values=cache, use_cache=True).logits
        for a, b in ((0, 7), (7, 11), (11, 12))
    ]
    got = torch.cat(got, dim=1)
    torch.testing.assert_close(got[mask == 1], expected[mask == 1], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("mixer", CAUSAL)
def test_a_cache_can_be_copied_and_used_again(mixer, twin):
    model = twin(mixer)
    tokens = make_tokens(length=12)
    with torch.no_grad():
        expected = model(tokens).logits
        cache = model(tokens[:, :6], use_cache=True).past_key_values
        for _ in range(2):
            again = model(tokens[:, 6:], past_key_values=copy.deepcopy(cache)).logits
            torch.testing.assert_close(again, expected[:, 6:], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("mixer", "other"), [("sdpa", "gma"), ("gma", "sdpa"), ("mamba", "gma"), ("linear", "mamba")])
def test_caches_of_other_models_are_refused(mixer, other, twin):
    tokens = make_tokens()
    model = twin(mixer)
    used = twin(other)(tokens, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="another model"):
        model(tokens, past_key_values=used)
    if (mixer, other) != ("gma", "sdpa"):
        with pytest.raises(ValueError, match="another model"):
            model(tokens, past_key_values=DynamicCache(config=twin(other).config))
    with pytest.raises(ValueError, match="another batch"):
        model(tokens[:1], past_key_values=model(tokens, use_cache=True).past_key_values)


# Softmax attention


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("padded", [False, True])
def test_eager_is_sdpa(is_causal, padded, twin):
    eager = twin("eager", is_causal=is_causal)
    sdpa = twin("sdpa", is_causal=is_causal)
    sdpa.load_state_dict(eager.state_dict())
    tokens = make_tokens()
    mask = torch.ones_like(tokens)
    mask[0, [0, 1, 9]] = int(not padded)
    is_token = mask == 1
    expected = eager(tokens, attention_mask=mask).logits[is_token]
    torch.testing.assert_close(sdpa(tokens, attention_mask=mask).logits[is_token], expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("is_causal", [True, False])
def test_softmax_attention_is_what_it_says(is_causal, tiny_config):
    mixer = build_mixer(tiny_config(is_causal=is_causal), "sdpa").double()
    x = torch.randn(2, 10, 32, dtype=torch.float64)
    query, key, value = (
        proj(x).view(2, 10, 4, 8).transpose(1, 2) for proj in (mixer.q_proj, mixer.k_proj, mixer.v_proj)
    )
    scores = torch.einsum("bhid,bhjd->bhij", query, key) / math.sqrt(8)
    if is_causal:
        scores = scores + torch.full((10, 10), -math.inf, dtype=torch.float64).triu(1)
    weights = scores.softmax(-1)
    expected = mixer.o_proj(torch.einsum("bhij,bhjd->bihd", weights, value).reshape(2, 10, 32))
    torch.testing.assert_close(mixer(x)[0], expected)
    output, returned, _ = mixer(x, output_attentions=True)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(returned, weights)


def test_no_mask_means_the_fast_kernel(tiny_config, monkeypatch):
    calls = []
    kernel = F.scaled_dot_product_attention

    def spy(*args, **options):
        calls.append(options)
        return kernel(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    mixer = build_mixer(tiny_config(), "sdpa", layer_idx=0)
    x = torch.randn(2, 10, 32)
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[0, 6:] = False
    mixer(x)
    mixer(x, attention_mask=mask)  # to the right: out of sight
    mixer(x, is_causal=False)
    cache = DynamicCache(config=mixer.config)
    mixer(x, past_key_values=cache)
    mixer(x[:, :1], past_key_values=cache)
    assert [call["attn_mask"] for call in calls] == [None] * 5
    assert [call["is_causal"] for call in calls] == [True, True, False, True, False]
    mixer(x, attention_mask=mask.flip(-1))
    assert calls[-1]["attn_mask"] is not None


@pytest.mark.parametrize("mixer", SOFTMAX)
def test_attentions_of_a_model(mixer, twin):
    model = twin(mixer)
    tokens = make_tokens()
    outputs = model(tokens, output_attentions=True, output_hidden_states=True)
    assert len(outputs.attentions) == 2 and len(outputs.hidden_states) == 3
    assert outputs.attentions[0].shape == (2, 4, 21, 21)
    torch.testing.assert_close(outputs.attentions[0].sum(-1), torch.ones(2, 4, 21))
    torch.testing.assert_close(outputs.logits, model(tokens).logits, atol=2e-5, rtol=1e-4)


def test_rotary_attention_sees_distances_only(tiny_config):
    config = tiny_config(position_embedding_type="none", is_causal=False)
    mixer = build_mixer(config, "sdpa_rope").double()
    x = torch.randn(2, 10, 32, dtype=torch.float64)
    positions = torch.arange(10).unsqueeze(0)
    output = mixer(x, position_ids=positions)[0]
    torch.testing.assert_close(output, mixer(x)[0])
    torch.testing.assert_close(output, mixer(x, position_ids=positions + 7)[0], atol=1e-6, rtol=1e-6)
    assert (output - mixer(x, position_ids=2 * positions)[0]).abs().max() > 1e-3
    # Without positions it would not see the order at all.
    assert (output - mixer(x.flip(1))[0].flip(1)).abs().max() > 1e-3


def test_rotary_attention_alone(tiny_config):
    """Without a model to count positions, the mixer counts them: in pieces, past padding, and anew when packed."""
    mixer = build_mixer(tiny_config(), "sdpa_rope", layer_idx=0).double()
    x = torch.randn(2, 12, 32, dtype=torch.float64)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0, [1, 2, 8]] = False
    expected = mixer(x, attention_mask=mask)[0]
    cache = DynamicCache(config=mixer.config)
    pieces = [mixer(x[:, a:b], attention_mask=mask[:, a:b], past_key_values=cache)[0] for a, b in ((0, 7), (7, 12))]
    torch.testing.assert_close(torch.cat(pieces, dim=1)[mask], expected[mask])
    torch.testing.assert_close(expected[0, mask[0]], mixer(x[:1, mask[0]])[0][0])
    boundaries = torch.tensor([0, 5, 12])
    packed = torch.cat([mixer(x[:1, :5])[0], mixer(x[:1, 5:])[0]], dim=1)
    torch.testing.assert_close(mixer(x[:1], cu_seqlens=boundaries)[0], packed)
    stretched = 2 * torch.arange(12).unsqueeze(0)
    packed = [mixer(x[:1, a:b], position_ids=stretched[:, a:b])[0] for a, b in ((0, 5), (5, 12))]
    got = mixer(x[:1], cu_seqlens=boundaries, position_ids=stretched)[0]
    torch.testing.assert_close(got, torch.cat(packed, dim=1))


@pytest.mark.parametrize("mixer", ["eager", "sdpa", "linear", "performer", "linformer"])
def test_cross_attention(mixer, tiny_config):
    mixer = build_mixer(tiny_config(is_causal=False, output_gate=True), mixer, **SMALL)
    torch.nn.init.normal_(mixer.output_gate.own_norm)
    x, y = torch.randn(2, 5, 32), torch.randn(2, 9, 32)
    output = mixer(x, key_value_states=y)[0]
    assert output.shape == x.shape
    torch.testing.assert_close(mixer(x[:, 2:3], key_value_states=y)[0], output[:, 2:3])
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[:, 6:] = False
    short = mixer(x, key_value_states=y[:, :6])[0]
    torch.testing.assert_close(mixer(x, key_value_states=y, attention_mask=mask)[0], short)
    assert not torch.allclose(output, short)


# Feature maps


def quadratic(mixer, x, features, mask=None, is_causal=True):
    """Output by way of the weights that features of queries and keys make."""
    batch, length = x.shape[:2]
    query, key, value = (
        proj(x).view(batch, length, mixer.num_heads, -1).transpose(1, 2)
        for proj in (mixer.q_proj, mixer.k_proj, mixer.v_proj)
    )
    weights = torch.einsum("bhim,bhjm->bhij", features(query), features(key))
    if is_causal:
        weights = weights.tril()
    if mask is not None:
        weights = weights * mask[:, None, None]
    if mixer.forget_gate is not None and is_causal:
        # A token forgets before it writes, and padding forgets nothing.
        faded = torch.where(mask[:, None], mixer.forget_gate(x), 0.0).cumsum(-1)
        weights = weights * (faded[..., :, None] - faded[..., None, :]).clamp(max=0).exp()
    weights = weights / weights.sum(-1, keepdim=True)
    return mixer.o_proj((weights @ value).transpose(1, 2).reshape(batch, length, -1))


def features_of(mixer):
    if mixer.config.mixer == "linear":
        return lambda x: torch.where(x > 0, x + 1, x.exp())
    w = mixer.features

    def favor(x):
        x = x / x.shape[-1] ** 0.25
        return torch.exp(torch.einsum("bhid,hmd->bhim", x, w) - 0.5 * (x * x).sum(-1, keepdim=True))

    return favor


@pytest.mark.parametrize("name", [name for name in MIXERS if name not in ("mamba", "linformer")])
def test_twins_with_an_output_gate(name, tiny_config):
    positions = {"position_embedding_type": "none"} if name == "sdpa_rope" else {}
    gated = build_mixer(tiny_config(output_gate=True, **positions), name)
    plain = build_mixer(tiny_config(**positions), name)
    plain.load_state_dict({key: value for key, value in gated.state_dict().items() if "output_gate" not in key})
    torch.nn.init.normal_(gated.output_gate.own_norm)
    x, seen = torch.randn(2, 9, 32), []
    for mixer in (plain, gated):
        mixer.o_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        output, _, _ = mixer(x)
    own = gated.output_gate.own_norm * gated.v_proj(x)
    torch.testing.assert_close(seen[1], (seen[0] + own) * F.silu(x @ gated.output_gate.proj.weight.T))
    packed, _, _ = gated(x.flatten(0, 1).unsqueeze(0), cu_seqlens=torch.tensor([0, 9, 18]))
    torch.testing.assert_close(packed.view_as(output), output)
    with pytest.raises(ValueError, match='`output_gate=True` goes with any mixer but "mamba"'):
        build_mixer(tiny_config(output_gate=True), "mamba")


@pytest.mark.parametrize("name", ["linear", "performer"])
@pytest.mark.parametrize(("is_causal", "forget_gate"), [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("padded", [False, True])
def test_linear_mixers_are_their_quadratic_form(name, is_causal, forget_gate, padded, tiny_config):
    config = tiny_config(is_causal=is_causal, forget_gate=forget_gate, attention_eps=1e-12)
    mixer = build_mixer(config, name, **SMALL).double()
    x = (2 * torch.randn(2, 21, 32, dtype=torch.float64)).requires_grad_()
    mask = torch.ones(2, 21, dtype=torch.bool)
    if padded:
        mask[0, [3, 4, 20]] = mask[1, 12:] = False
    parameters = [x, *mixer.parameters()]
    expected = quadratic(mixer, x, features_of(mixer), mask, is_causal)[mask]
    output = mixer(x, attention_mask=mask)[0][mask]
    torch.testing.assert_close(output, expected)
    for got, want in zip(
        torch.autograd.grad(output.square().sum(), parameters),
        torch.autograd.grad(expected.square().sum(), parameters),
    ):
        torch.testing.assert_close(got, want, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("mixer", ["linear", "performer"])
def test_twins_with_a_forget_gate(mixer, twin):
    gated = partial(twin, forget_gate=True)
    bias = gated(mixer).model.layers[0].mixer.forget_gate.bias
    torch.testing.assert_close(bias, torch.linspace(*FORGET_GATE_BIAS, len(bias)))
    test_later_tokens_change_no_earlier_output(mixer, gated)
    test_padding_changes_nothing(mixer, True, "inside", gated)
    test_packed_sequences_do_not_meet(mixer, True, gated)
    test_generation_with_and_without_cache(mixer, 3, gated)
    test_pieces_from_a_cache_with_padding_anywhere(mixer, gated)


@pytest.mark.parametrize("name", ["linear", "performer"])
def test_memory_is_not_narrowed_by_autocast(name, tiny_config):
    mixer = build_mixer(tiny_config(), name, **SMALL)
    query, key, value = torch.randn(3, 2, 4, 20, 8)
    options = {"key_mask": None, "past_key_values": None, "position_ids": None, "is_causal": True}
    expected, _ = mixer.attend(query, key, value, output_attentions=False, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, _ = mixer.attend(query, key, value, output_attentions=False, **options)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("feature_map", [EluMap, SoftmaxKernelMap])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_feature_maps(feature_map, dtype):
    x = torch.randn(2, 3, 7, 8, dtype=dtype)
    projection = torch.randn(3, 16, 8, dtype=dtype)
    if feature_map is SoftmaxKernelMap:
        # One feature far beyond where exponents end.
        projection[0, 0], x[0, 0, 0] = 10.0, 10.0
    x.requires_grad_()
    prepared = feature_map.prepare(*(() if feature_map is EluMap else (projection,)))
    expected = feature_map.features(x, *prepared)
    assert expected.isfinite().all() and (expected >= 0).all()
    gradient = torch.randn_like(expected)
    (expected_by_x,) = torch.autograd.grad(expected, x, gradient)

    memory = {}

    def scratch(name, *shape):
        return memory.setdefault(name, torch.full(shape, math.nan, dtype=dtype)).view(shape)

    # A tile has heads first, and room for three more tokens.
    features, by_x = torch.zeros(3, 2, 10, expected.shape[-1], dtype=dtype), torch.full_like(x, math.nan)
    padded = torch.nn.functional.pad(gradient.transpose(0, 1), (0, 0, 0, 3))
    with torch.no_grad():
        feature_map.fill(features, x.transpose(0, 1), scratch, *prepared)
        torch.testing.assert_close(features[:, :, :7].transpose(0, 1), expected, rtol=1e-4, atol=1e-6)
        feature_map.backward(
            features, padded, scratch, by_x.transpose(0, 1), *(torch.zeros_like(p) for p in prepared), *prepared
        )
    torch.testing.assert_close(by_x, expected_by_x, rtol=1e-4, atol=1e-6 * expected_by_x.abs().max().item())


@pytest.mark.parametrize("is_causal", [True, False])
def test_performer_approaches_softmax_attention(is_causal, tiny_config):
    config = tiny_config(is_causal=is_causal)
    softmax = build_mixer(config, "sdpa")
    x = torch.randn(1, 16, 32)
    expected = softmax(x)[0]
    errors = []
    for count in (16, 256, 4096, 65536):
        error = 0.0
        for _ in range(4):
            performer = build_mixer(config, "performer", performer_features=count)
            performer.load_state_dict(softmax.state_dict(), strict=False)
            error += (performer(x)[0] - expected).square().mean().item()
        errors.append(error)
    # In the limit sixteen times the features have a sixteenth of the squared error; few features err less regularly.
    assert all(later < earlier / 4 for earlier, later in pairwise(errors))
    assert errors[-1] < 1e-3 * expected.square().mean()


def test_performer_features_are_orthogonal_gaussians(tiny_config):
    features = build_mixer(tiny_config(), "performer", performer_features=2000).features  # (4, 2000, 8)
    blocks = features.unflatten(1, (-1, 8))
    products = blocks @ blocks.transpose(-1, -2)
    off_diagonal = products - torch.diag_embed(products.diagonal(dim1=-2, dim2=-1))
    assert off_diagonal.abs().max() < 1e-4
    lengths = features.square().sum(-1)
    assert abs(lengths.mean() - 8) < 0.3 and abs(lengths.var() - 16) < 2
    assert not torch.equal(features[0], features[1])


@pytest.mark.parametrize("scale", [1e-3, 1.0, 8.0, 1e3])
def test_performer_stays_finite(scale, tiny_config):
    mixer = build_mixer(tiny_config(), "performer")
    x = (scale * torch.randn(2, 50, 32)).requires_grad_()
    output = mixer(x)[0]
    output.sum().backward()
    assert output.isfinite().all() and x.grad.isfinite().all()


def test_performer_reads_long_vectors(tiny_config):
    """The first token has only itself to read, however small its features are."""
    mixer = build_mixer(tiny_config(hidden_size=128, num_attention_heads=2), "performer")
    x = torch.randn(2, 5, 128)
    with torch.no_grad():
        for proj in (mixer.q_proj, mixer.k_proj):
            # Along each other, their logit would be 100.
            proj.weight.zero_()
            proj.bias.copy_(10 * 64**0.25 * F.normalize(torch.randn(2, 64), dim=-1).flatten())
    expected = mixer.o_proj(mixer.v_proj(x[:, :1]))
    torch.testing.assert_close(mixer(x)[0][:, :1], expected)


# Linformer


@pytest.mark.parametrize("padded", [False, True])
def test_linformer_is_what_it_says(padded, tiny_config):
    mixer = build_mixer(tiny_config(is_causal=False), "linformer", linformer_dim=5).double()
    assert mixer.key_projection.shape == (5, 128)
    x = torch.randn(1, 10, 32, dtype=torch.float64)
    mask = torch.ones(1, 10, dtype=torch.bool)
    if padded:
        mask[0, [0, 4]] = False
    tokens = x[:, mask[0]]
    columns = tokens.shape[1]
    key = torch.einsum("kn,bnd->bkd", mixer.key_projection[:, :columns], mixer.k_proj(tokens)).view(1, 5, 4, 8)
    value = torch.einsum("kn,bnd->bkd", mixer.value_projection[:, :columns], mixer.v_proj(tokens)).view(1, 5, 4, 8)
    query = mixer.q_proj(x).view(1, 10, 4, 8)
    weights = (torch.einsum("bihd,bkhd->bhik", query, key) / math.sqrt(8)).softmax(-1)
    expected = mixer.o_proj(torch.einsum("bhik,bkhd->bihd", weights, value).reshape(1, 10, 32))
    torch.testing.assert_close(mixer(x, attention_mask=mask)[0], expected)


# Mamba


def recurrence(mamba, x):
    """A selective state space, one token after the other: x (B, N, D)."""
    inner, gate = mamba.in_proj(x).chunk(2, dim=-1)
    kernel, rank, size = mamba.conv1d.weight[:, 0], mamba.dt_proj.in_features, mamba.A_log.shape[1]
    window = torch.zeros(x.shape[0], inner.shape[-1], kernel.shape[-1])
    state = torch.zeros(x.shape[0], inner.shape[-1], size)
    outputs = []
    for i in range(x.shape[1]):
        window = torch.cat([window[..., 1:], inner[:, i, :, None]], dim=-1)
        u = F.silu((window * kernel).sum(-1) + mamba.conv1d.bias)
        step, write, read = mamba.x_proj(u).split([rank, size, size], dim=-1)
        step = F.softplus(mamba.dt_proj(step)).unsqueeze(-1)
        state = state * torch.exp(-step * mamba.A_log.exp()) + step * write.unsqueeze(1) * u.unsqueeze(-1)
        y = (state * read.unsqueeze(1)).sum(-1) + mamba.D * u
        outputs.append(mamba.out_proj(y * F.silu(gate[:, i])))
    return torch.stack(outputs, dim=1)


@pytest.mark.parametrize("length", [1, 2, 16, 19])
def test_mamba_is_its_recurrence(length, tiny_config, monkeypatch):
    # Stretches of four tokens.
    monkeypatch.setattr(selective_scan, "STRETCH", 4 * 2 * 64 * 4)
    mixer = build_mixer(tiny_config(), "mamba", mamba_state_size=4, mamba_conv_kernel=3)
    x = torch.randn(2, length, 32)
    mask = torch.ones(2, length, dtype=torch.bool)
    wanted = [x.requires_grad_(), *mixer.parameters()]
    expected, *others = recurrence(mixer.mamba, x), mixer(x)[0], mixer(x, attention_mask=mask)[0]
    others.append(MambaMixer.forward(mixer.mamba, x))
    by_expected = torch.autograd.grad(expected.square().sum(), wanted)
    for output in others:
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-4)
        gradients = torch.autograd.grad(output.square().sum(), wanted)
        torch.testing.assert_close(gradients, by_expected, atol=1e-5, rtol=1e-4)


def test_selective_scan_has_right_gradients(monkeypatch):
    monkeypatch.setattr(selective_scan, "STRETCH", 4 * 2 * 3 * 2)
    shapes = {"inputs": (2, 9, 3), "steps": (2, 9, 3), "rates": (3, 2), "write": (2, 9, 2), "read": (2, 9, 2)}
    arguments = {name: torch.rand(shape, dtype=torch.float64) for name, shape in shapes.items()}
    arguments["rates"] = -arguments["rates"]
    arguments = [x.requires_grad_() for x in arguments.values()]
    assert torch.autograd.gradcheck(selective_scan.selective_scan, arguments)


# What is refused


def test_linformer_refuses_causal(tiny_config):
    with pytest.raises(ValueError, match=r'`is_causal=True`: the mixer "linformer" is bidirectional only'):
        build_twin(tiny_config(), "linformer")
    with pytest.raises(Exception, match=r'`is_causal=True`: the mixer "linformer" is bidirectional only'):
        TwinConfig(mixer="linformer")
    mixer = build_mixer(tiny_config(is_causal=False), "linformer")
    with pytest.raises(ValueError, match=r'`is_causal=True`: the mixer "linformer" is bidirectional only'):
        mixer(torch.randn(1, 5, 32), is_causal=True)
    with pytest.raises(ValueError, match=r"`max_position_embeddings` = 128, got 129 tokens"):
        mixer(torch.randn(1, 129, 32))


BAD_CONFIGS = {
    "mixer": ({"mixer": "rwkv"}, "`mixer` must be one of .*'sdpa_rope'.*got 'rwkv'"),
    "rotary and learned": ({"mixer": "sdpa_rope"}, "`position_embedding_type` must be \"none\" .*got 'learned'"),
    "odd": (
        {"mixer": "sdpa_rope", "position_embedding_type": "none", "routing_dim": 7},
        "`routing_dim` must be even .*got 7",
    ),
    "linformer_dim": ({"linformer_dim": 0}, "`linformer_dim` must be at least 1, got 0"),
    "performer_features": ({"performer_features": -1}, "`performer_features` must be at least 1, got -1"),
    "responsibilities": ({"output_responsibilities": True}, "`output_responsibilities=True` needs a mixture"),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_bad_configs_get_a_sentence(name):
    fields, message = BAD_CONFIGS[name]
    with pytest.raises(Exception, match=message):
        TwinConfig(**fields)
    if name != "rotary and learned":  # which `build_twin` puts right
        with pytest.raises(ValueError, match=message.replace("'sdpa_rope'", "'gma'")):
            build_twin(GMAConfig(), **({"mixer": "sdpa"} | fields))


def test_bad_calls_get_a_sentence(tiny_config, twin):
    with pytest.raises(ValueError, match=r"`mixer` must be one of \['gma', 'eager', .*got 'rwkv'"):
        build_twin(tiny_config(), "rwkv")
    with pytest.raises(ValueError, match=r"`model_class` must be one of .*'GMAForMaskedLM'.*got TwinForCausalLM"):
        build_twin(tiny_config(), "sdpa", TwinForCausalLM)
    with pytest.raises(ValueError, match=r"`GMAForCausalLM` needs `is_causal=True`"):
        build_twin(tiny_config(is_causal=False), "sdpa", GMAForCausalLM)
    x = torch.randn(1, 5, 32)
    with pytest.raises(ValueError, match=r'`key_value_states`: the mixer "mamba" does no cross-attention'):
        build_mixer(tiny_config(), "mamba")(x, key_value_states=x)
    with pytest.raises(ValueError, match="`past_key_values` needs to know its layer"):
        mixer = build_mixer(tiny_config(), "linear")
        mixer(x, past_key_values=DynamicCache(config=mixer.config))
    with pytest.raises(ValueError, match="`past_key_values` needs a causal mixer"):
        mixer = build_mixer(tiny_config(is_causal=False), "sdpa", layer_idx=0)
        mixer(x, past_key_values=DynamicCache(config=mixer.config))


@pytest.mark.parametrize("mixer", ALL)
def test_outputs_that_a_mixer_has_not(mixer, twin):
    model = twin(mixer)
    tokens = make_tokens()
    with pytest.raises(ValueError, match=rf'`output_responsibilities=True`.* "{mixer}"'):
        model(tokens, output_responsibilities=True)
    if mixer not in SOFTMAX:
        with pytest.raises(ValueError, match=rf'`output_attentions=True`: the mixer "{mixer}" forms no'):
            model(tokens, output_attentions=True)


def test_base_model_and_drop_in(tiny_config):
    """A mixer can be put into a GMA model's layer by hand."""
    model = GMAModel(tiny_config()).eval()
    twin = build_twin(tiny_config(), "linear", GMAModel).eval()
    twin.load_state_dict(model.state_dict(), strict=False)
    for index, layer in enumerate(model.layers):
        layer.mixer = twin.layers[index].mixer
    tokens = make_tokens()
    torch.testing.assert_close(model(tokens).last_hidden_state, twin(tokens).last_hidden_state)
