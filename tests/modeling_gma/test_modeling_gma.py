"""The models under transformers' own rules."""

import copy
import json
import subprocess
import sys
import weakref

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DataCollatorWithFlattening,
    DynamicCache,
    LlamaConfig,
    MambaConfig,
    StaticCache,
)
from transformers.trainer_utils import set_seed

from modeling_gma import (
    GMAConfig,
    GMAForCausalLM,
    GMAForMaskedLM,
    GMAForSequenceClassification,
    GMAForTokenClassification,
    GMAModel,
)


HEADS = {
    GMAModel: AutoModel,
    GMAForCausalLM: AutoModelForCausalLM,
    GMAForMaskedLM: AutoModelForMaskedLM,
    GMAForSequenceClassification: AutoModelForSequenceClassification,
    GMAForTokenClassification: AutoModelForTokenClassification,
}
POSITIONS = ("learned", "sinusoidal", "none")
GATES = {"forget_gate": True, "output_gate": True}
LOCAL = [
    {"layer_types": ["hybrid_sliding"] * 2, "sliding_window": 5} | GATES,
    {"layer_types": ["sliding_attention", "hybrid_sliding"], "sliding_window": 5, "position_embedding_type": "none"},
]


def config_for(model_class, tiny_config, **changes):
    if model_class is GMAForMaskedLM:
        changes = {"is_causal": False} | changes
    return tiny_config(**changes)


def make_tokens(batch=2, length=21, vocab_size=99):
    return torch.randint(3, vocab_size, (batch, length))


def main_output(outputs):
    return outputs.last_hidden_state if "last_hidden_state" in outputs else outputs.logits


# Architecture


def count_parameters(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("components", "expected"), [(128, 45_963_776), (256, 46_756_352)])
def test_parameters_of_the_wikitext_decoder(components, expected):
    with torch.device("meta"):
        assert count_parameters(GMAForCausalLM(GMAConfig(num_components=components))) == expected


@pytest.mark.parametrize(
    ("components", "expected"), [(64, 2_458_368), (128, 2_557_440), (256, 2_755_584), (512, 3_151_872)]
)
def test_parameters_of_a_mixing_block(components, expected):
    config = GMAConfig(hidden_size=768, num_attention_heads=12, num_components=components, attention_bias=False)
    with torch.device("meta"):
        model = GMAModel(config)
    assert count_parameters(model.layers[0].mixer) == expected


@pytest.mark.parametrize(("length", "labels", "expected"), [(2000, 10, 4.01), (4000, 2, 4.52)])
def test_parameters_of_the_lra_encoder(length, labels, expected):
    config = GMAConfig(
        vocab_size=257,
        hidden_size=256,
        num_hidden_layers=4,
        max_position_embeddings=length,
        is_causal=False,
        num_labels=labels,
    )
    with torch.device("meta"):
        assert round(count_parameters(GMAForSequenceClassification(config)) / 1e6, 2) == expected


def test_twins_differ_only_in_their_mixer():
    """Without its mixtures, the decoder counts what the paper's softmax twin counts."""
    with torch.device("meta"):
        model = GMAForCausalLM(GMAConfig())
    mixtures = sum(count_parameters(layer.mixer.mixture_norm) for layer in model.model.layers)
    assert count_parameters(model) - mixtures == 45_171_200


# Saving and loading


@pytest.mark.parametrize("model_class", HEADS)
def test_save_and_load_through_auto_classes(model_class, tiny_config, tmp_path):
    model = model_class(config_for(model_class, tiny_config)).eval()
    model.save_pretrained(tmp_path)
    assert not [f.name for f in tmp_path.iterdir() if f.suffix in (".bin", ".pt", ".pkl")]
    loaded = HEADS[model_class].from_pretrained(tmp_path)
    assert type(loaded) is model_class and not loaded.training
    for (name, a), (_, b) in zip(model.state_dict().items(), loaded.state_dict().items()):
        assert torch.equal(a, b), name
    tokens = make_tokens()
    assert torch.equal(main_output(model(tokens)), main_output(loaded(tokens)))


def test_sharded_save_and_load(tiny_config, tmp_path):
    model = GMAForCausalLM(tiny_config(hidden_size=64)).eval()
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = make_tokens()
    assert torch.equal(model(tokens).logits, loaded(tokens).logits)


def test_tied_weights_are_saved_once_and_stay_tied(tiny_config, tmp_path):
    from safetensors import safe_open

    GMAForCausalLM(tiny_config()).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in list(file.keys())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    untied = GMAForCausalLM(tiny_config(tie_word_embeddings=False))
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight


@pytest.mark.parametrize("spoil", ["truncated", "header", "config"])
def test_spoilt_files_are_refused(spoil, tiny_config, tmp_path):
    GMAForCausalLM(tiny_config()).save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    data = weights.read_bytes()
    if spoil == "truncated":
        weights.write_bytes(data[: len(data) // 2])
    elif spoil == "header":
        weights.write_bytes(b"\xff" * 8 + data[8:])
    else:
        config = json.loads((tmp_path / "config.json").read_text())
        config["num_components"] = 9
        (tmp_path / "config.json").write_text(json.dumps(config))
    message = "shape|size" if spoil == "config" else "(?i)safetensors|header|incomplete|invalid"
    with pytest.raises(Exception, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_overrides_at_loading(tiny_config, tmp_path):
    """A causal checkpoint can become a bidirectional classifier, with the pooling that goes with it."""
    GMAForCausalLM(tiny_config()).save_pretrained(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, is_causal=False, num_labels=4)
    assert model.config.classifier_pooling == "mean" and model(make_tokens()).logits.shape == (2, 4)
    model.save_pretrained(tmp_path / "again")
    assert AutoConfig.from_pretrained(tmp_path / "again").classifier_pooling == "mean"


def test_a_shared_padding_token_still_learns(tiny_config):
    """GPT-2 style vocabularies pad with end of text, which has an embedding to learn."""
    model = GMAForCausalLM(tiny_config(pad_token_id=2, eos_token_id=2, tie_word_embeddings=False))
    assert (model.model.embed_tokens.weight[2] != 0).all()
    model(torch.tensor([[5, 2, 7]]), attention_mask=torch.ones(1, 3)).logits.sum().backward()
    assert (model.model.embed_tokens.weight.grad[2] != 0).any()


def test_a_copied_cache_counts_for_itself(tiny_config):
    model = GMAForCausalLM(tiny_config()).eval()
    tokens = make_tokens()
    with torch.no_grad():
        outputs = model(tokens)
    cache = copy.deepcopy(outputs.past_key_values)
    expected = model(torch.cat([tokens, tokens[:, :5]], dim=1)).logits[:, 21:]
    torch.testing.assert_close(model(tokens[:, :5], past_key_values=cache).logits, expected, rtol=1e-4, atol=1e-5)
    assert cache.get_seq_length() == 26
    assert outputs.past_key_values.get_seq_length() == 21
    alive = weakref.ref(outputs.past_key_values)
    del outputs
    assert alive() is None


def test_a_head_can_start_from_another(tiny_config, tmp_path):
    """A classifier starts from a causal or a masked language model: same backbone, new head."""
    for model_class in (GMAForCausalLM, GMAForMaskedLM):
        model = model_class(config_for(model_class, tiny_config))
        model.save_pretrained(tmp_path / model_class.__name__)
        classifier, info = AutoModelForSequenceClassification.from_pretrained(
            tmp_path / model_class.__name__, num_labels=3, output_loading_info=True
        )
        assert set(info["missing_keys"]) == {"score.weight", "score.bias"}
        assert not info["unexpected_keys"]
        assert classifier.config.is_causal == model.config.is_causal
        assert torch.equal(
            classifier.model.layers[1].mixer.mixture_norm.mu, model.model.layers[1].mixer.mixture_norm.mu
        )


def test_meta_device_initialisation_matches_plain(tiny_config, tmp_path):
    """What from_pretrained fills in for missing weights is what the constructor would have made."""
    model = GMAForCausalLM(tiny_config(**GATES))
    made_up = ("mixture_norm", "forget_gate", "own_norm")
    state = {k: v for k, v in model.state_dict().items() if not any(name in k for name in made_up)}
    model.save_pretrained(tmp_path, state_dict=state)
    loaded, info = GMAForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert len(info["missing_keys"]) == 2 * (3 + 2 + 1)
    mixer, fresh = loaded.model.layers[0].mixer, model.model.layers[0].mixer
    assert (mixer.mixture_norm.alpha == 0).all()
    assert torch.equal(mixer.mixture_norm.omega, fresh.mixture_norm.omega)
    assert torch.equal(mixer.forget_gate.bias, fresh.forget_gate.bias)
    assert (mixer.output_gate.own_norm == 0.5).all()  # as tests have it
    norms = [m.mixture_norm.mu.norm(dim=-1) for m in (mixer, fresh)]
    torch.testing.assert_close(norms[0].mean(), norms[1].mean(), rtol=0.2, atol=0)


def test_big_model_loading_with_device_map(tiny_config, tmp_path):
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch

    config = tiny_config()
    model = GMAForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "model")
    tokens = make_tokens()
    expected = model(tokens).logits
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", device_map="cpu")
    assert torch.equal(loaded(tokens).logits, expected)
    with init_empty_weights():
        empty = GMAForCausalLM(config)
    empty.tie_weights()
    dispatched = load_checkpoint_and_dispatch(
        empty, str(tmp_path / "model"), device_map={"": "cpu"}, no_split_module_classes=["GMALayer"]
    ).eval()
    assert torch.equal(dispatched(tokens).logits, expected)


def test_offload_to_disk(tiny_config, tmp_path):
    model = GMAForCausalLM(tiny_config()).eval()
    model.save_pretrained(tmp_path / "model")
    device_map = {"model.embed_tokens": "cpu", "lm_head": "cpu", "model.positions": "cpu", "model.norm": "cpu"}
    device_map |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=str(tmp_path / "offload")
    )
    tokens = make_tokens()
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits)
    expected = model.generate(tokens, max_new_tokens=5, do_sample=False)
    assert torch.equal(loaded.generate(tokens, max_new_tokens=5, do_sample=False), expected)


@pytest.mark.parametrize("model_class", HEADS)
def test_bfloat16(model_class, tiny_config, tmp_path):
    model = model_class(config_for(model_class, tiny_config)).eval()
    model.save_pretrained(tmp_path)
    half = HEADS[model_class].from_pretrained(tmp_path, dtype="bfloat16")
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    tokens = make_tokens()
    output, expected = main_output(half(tokens)), main_output(model(tokens))
    assert output.dtype == torch.bfloat16
    assert (output - expected).abs().max() < 0.1 * expected.abs().max()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = main_output(model(tokens))
    assert (output - expected).abs().max() < 0.1 * expected.abs().max()


def test_bfloat16_keeps_a_wide_state(tiny_config):
    model = GMAForCausalLM(tiny_config()).eval().to(torch.bfloat16)
    cache = model(make_tokens()).past_key_values
    assert cache.layers[0].recurrent_states[0].dtype == torch.float32
    tokens = model.generate(make_tokens(), max_new_tokens=5)
    assert tokens.shape == (2, 26)


# Inputs and outputs


@pytest.mark.parametrize("model_class", HEADS)
def test_outputs(model_class, tiny_config):
    config = config_for(model_class, tiny_config, attention_eps=1e-12)
    model = model_class(config).eval()
    tokens = make_tokens()
    outputs = model(tokens, output_hidden_states=True, output_attentions=True, output_responsibilities=True)
    assert len(outputs.hidden_states) == config.num_hidden_layers + 1
    assert [tuple(a.shape) for a in outputs.attentions] == [(2, 4, 21, 21)] * 2
    for read, write in outputs.responsibilities:
        assert read.shape == write.shape == (2, 4, 21, 6)
        torch.testing.assert_close(read.sum(-1), torch.ones(2, 4, 21))
    for weights in outputs.attentions:
        assert (weights >= 0).all()
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 21))
        if config.is_causal:
            assert (weights.triu(1) == 0).all()
    plain = model(tokens)
    assert plain.hidden_states is None and plain.attentions is None and plain.responsibilities is None
    torch.testing.assert_close(main_output(plain), main_output(outputs), rtol=1e-4, atol=1e-5)
    assert torch.equal(main_output(plain), model(tokens, return_dict=False)[0])


def test_attentions_are_the_induced_weights(tiny_config):
    model = GMAForCausalLM(tiny_config(forget_gate=True)).eval()
    seen = {}
    mixer = model.model.layers[0].mixer
    mixer.v_proj.register_forward_hook(lambda module, args, output: seen.update(value=output))
    mixer.o_proj.register_forward_hook(lambda module, args, output: seen.update(mixed=args[0]))
    weights = model(make_tokens(), output_attentions=True).attentions[0]
    value = seen["value"].unflatten(-1, (4, -1)).transpose(1, 2)
    torch.testing.assert_close((weights @ value).transpose(1, 2).flatten(2), seen["mixed"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("grad", [False, True])
def test_attentions_of_a_continuation(grad, tiny_config):
    model = GMAForCausalLM(tiny_config()).eval()
    tokens = make_tokens()
    expected = model(tokens, output_attentions=True).attentions
    with torch.set_grad_enabled(grad):
        cache = model(tokens[:, :15]).past_key_values
        attentions = model(tokens[:, 15:], past_key_values=cache, output_attentions=True).attentions
    for mine, whole in zip(attentions, expected):
        torch.testing.assert_close(mine, whole[:, :, 15:, 15:], rtol=1e-4, atol=1e-6)


def test_hidden_states_and_attentions_have_gradients(tiny_config):
    outputs = GMAForCausalLM(tiny_config())(make_tokens(), output_hidden_states=True, output_attentions=True)
    recorded = [*outputs.hidden_states, *outputs.attentions]
    for tensor in recorded:
        tensor.retain_grad()
    outputs.logits[0, -1, 0].backward()
    assert all(tensor.grad is not None for tensor in recorded)


def test_outputs_asked_for_in_the_config(tiny_config):
    model = GMAForCausalLM(
        tiny_config(output_responsibilities=True, output_attentions=True, output_hidden_states=True)
    )
    outputs = model(make_tokens())
    assert (
        outputs.responsibilities is not None and outputs.attentions is not None and outputs.hidden_states is not None
    )
    assert model(make_tokens(), output_responsibilities=False).responsibilities is None


@pytest.mark.parametrize("model_class", HEADS)
def test_inputs_embeds(model_class, tiny_config):
    model = model_class(config_for(model_class, tiny_config)).eval()
    tokens = make_tokens()
    embeds = model.get_input_embeddings()(tokens)
    assert torch.equal(main_output(model(tokens)), main_output(model(inputs_embeds=embeds)))


def test_generate_from_embeds(tiny_config):
    model = GMAForCausalLM(tiny_config()).eval()
    tokens = make_tokens()
    expected = model.generate(tokens, max_new_tokens=6, do_sample=False)[:, tokens.shape[1] :]
    embeds = model.get_input_embeddings()(tokens)
    assert torch.equal(model.generate(inputs_embeds=embeds, max_new_tokens=6, do_sample=False), expected)


def test_resize_embeddings(tiny_config):
    model = GMAForCausalLM(tiny_config()).eval()
    tokens = make_tokens()
    before = model(tokens).logits
    model.resize_token_embeddings(120)
    assert model.config.vocab_size == 120 and model.lm_head.weight is model.model.embed_tokens.weight
    after = model(tokens).logits
    torch.testing.assert_close(after[..., :99], before)
    model(torch.full((1, 3), 119))
    model.resize_token_embeddings(50)
    assert model(torch.randint(0, 50, (1, 5))).logits.shape == (1, 5, 50)


def test_logits_to_keep(tiny_config):
    model = GMAForCausalLM(tiny_config()).eval()
    tokens = make_tokens()
    full = model(tokens).logits
    torch.testing.assert_close(model(tokens, logits_to_keep=3).logits, full[:, -3:])
    torch.testing.assert_close(model(tokens, logits_to_keep=torch.tensor([1, 5])).logits, full[:, [1, 5]])


def test_losses(tiny_config):
    tokens = make_tokens()
    causal = GMAForCausalLM(tiny_config()).eval()
    outputs = causal(tokens, labels=tokens)
    expected = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(outputs.loss, expected)
    summed = causal(tokens, labels=tokens, num_items_in_batch=10).loss
    torch.testing.assert_close(summed, expected * 40 / 10)
    masked = GMAForMaskedLM(tiny_config(is_causal=False)).eval()
    labels = tokens.masked_fill(torch.rand(tokens.shape) > 0.3, -100)
    outputs = masked(tokens, labels=labels)
    torch.testing.assert_close(
        outputs.loss, torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())
    )
    classes = torch.randint(0, 2, (2, 21))
    outputs = GMAForTokenClassification(tiny_config(is_causal=False)).eval()(tokens, labels=classes)
    torch.testing.assert_close(
        outputs.loss, torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), classes.flatten())
    )


@pytest.mark.parametrize(
    ("labels", "num_labels", "kind"),
    [
        (torch.tensor([1, 0]), 3, "single_label_classification"),
        (torch.tensor([[1.0, 0, 1], [0, 0, 1]]), 3, "multi_label_classification"),
        (torch.tensor([0.3, 0.9]), 1, "regression"),
    ],
)
def test_classification_problems(labels, num_labels, kind, tiny_config):
    model = GMAForSequenceClassification(tiny_config(num_labels=num_labels))
    outputs = model(make_tokens(), labels=labels)
    outputs.loss.backward()
    assert outputs.logits.shape == (2, num_labels) and model.config.problem_type == kind


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_pooling(pooling, is_causal, tiny_config):
    model = GMAForSequenceClassification(tiny_config(is_causal=is_causal, classifier_pooling=pooling)).eval()
    tokens = make_tokens()
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    mask[1, -3:] = 0
    hidden = model.model(tokens, attention_mask=mask).last_hidden_state
    rows = [hidden[0, 4:], hidden[1, :-3]]
    pooled = torch.stack([row.mean(0) if pooling == "mean" else row[-1] for row in rows])
    torch.testing.assert_close(model(tokens, attention_mask=mask).logits, model.score(pooled))


# Causality, padding, packing


@pytest.mark.parametrize("length", [2, 7, 8, 9, 40, 100])
@pytest.mark.parametrize("changes", [{}, GATES, *LOCAL])
def test_prefix_is_bit_identical(length, changes, tiny_config):
    model = GMAForCausalLM(tiny_config(**changes)).eval()
    tokens = make_tokens(length=length)
    logits = model(tokens).logits
    for j in {1, length // 2, length - 1}:
        changed = tokens.clone()
        changed[:, j:] = (changed[:, j:] + 7) % 90 + 3
        after = model(changed).logits
        assert torch.equal(logits[:, :j], after[:, :j])
        assert not torch.equal(logits[:, j:], after[:, j:])


def padded_variants(tokens):
    """The same valid tokens with padding left, right, inside, and all of these, for batches of one and of two."""
    batch, length = tokens.shape
    garbage = make_tokens(batch, length)
    layouts = {
        "left": [0] * 5 + [1] * length,
        "right": [1] * length + [0] * 5,
        "inside": [1] * 4 + [0] * 3 + [1] * (length - 4),
        "everywhere": [0] * 2 + [1] * 9 + [0] * 4 + [1] * (length - 9) + [0] * 3,
    }
    for layout in layouts.values():
        mask = torch.tensor(layout).expand(batch, -1)
        padded = garbage[:, :1].repeat(1, mask.shape[1])
        padded[mask == 1] = tokens.flatten()
        yield padded, mask


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    "changes",
    [
        *({"is_causal": c, "position_embedding_type": p} for c in (True, False) for p in POSITIONS),
        GATES,
        *LOCAL,
        LOCAL[1] | {"is_causal": False},
    ],
)
def test_padding_changes_nothing(batch, changes, tiny_config):
    """Valid logits and every parameter's gradient are the same with padding anywhere; padding gets no gradient."""
    model_class = GMAForCausalLM if changes.get("is_causal", True) else GMAForMaskedLM
    model = model_class(tiny_config(**changes)).eval()
    tokens = make_tokens(batch)
    weights = torch.randn(batch, tokens.shape[1], 99)

    def run(tokens, mask=None):
        model.zero_grad()
        embeds = model.get_input_embeddings()(tokens).detach().requires_grad_()
        logits = model(inputs_embeds=embeds, attention_mask=mask, use_cache=False).logits
        valid = logits if mask is None else logits[mask == 1].view(batch, -1, 99)
        (valid * weights).sum().backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        return valid.detach(), gradients, embeds.grad

    expected, expected_gradients, _ = run(tokens)
    for padded, mask in padded_variants(tokens):
        logits, gradients, embeds_gradient = run(padded, mask)
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        for name, gradient in expected_gradients.items():
            scale = gradient.abs().max()
            assert (gradients[name] - gradient).abs().max() <= 1e-5 * scale + 1e-5, name
        assert (embeds_gradient[mask == 0] == 0).all()


def test_rows_do_not_disturb_each_other(tiny_config):
    """Rows of different lengths in one batch give what each gives alone."""
    model = GMAForCausalLM(tiny_config()).eval()
    rows = [make_tokens(1, n) for n in (3, 21, 10)]
    batch, mask = torch.zeros(3, 21, dtype=torch.long), torch.zeros(3, 21, dtype=torch.long)
    for i, row in enumerate(rows):
        batch[i, : row.shape[1]], mask[i, : row.shape[1]] = row, 1
    logits = model(batch, attention_mask=mask).logits
    for i, row in enumerate(rows):
        torch.testing.assert_close(logits[i : i + 1, : row.shape[1]], model(row).logits, rtol=1e-5, atol=1e-5)


def test_all_padding_is_finite(tiny_config):
    for model_class in (GMAForCausalLM, GMAForSequenceClassification):
        outputs = model_class(tiny_config())(make_tokens(), attention_mask=torch.zeros(2, 21))
        assert outputs.logits.isfinite().all()


@pytest.mark.parametrize("changes", [GATES, {"is_causal": False}, LOCAL[0], LOCAL[1] | {"is_causal": False}])
@pytest.mark.parametrize(
    "sent",
    [
        {},
        {"return_seq_idx": True},
        {"return_flash_attn_kwargs": True},
        {"return_flash_attn_kwargs": True, "return_seq_idx": True, "return_position_ids": False},
    ],
)
def test_packing_as_the_collator_sends_it(changes, sent, tiny_config):
    """Packed equals separate: logits of every document, and gradients of every parameter."""
    model_class = GMAForCausalLM if changes.get("is_causal", True) else GMAForMaskedLM
    model = model_class(tiny_config(**changes)).eval()
    rows = [make_tokens(1, n) for n in (5, 1, 17, 9)]
    batch = DataCollatorWithFlattening(**sent)([{"input_ids": row[0].tolist()} for row in rows])
    labels = batch.pop("labels")
    weights = torch.randn(1, 32, 99)
    logits = model(**batch).logits
    (logits * weights).sum().backward()
    packed = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    start = 0
    for row in rows:
        end = start + row.shape[1]
        alone = model(row).logits
        torch.testing.assert_close(logits[:, start:end], alone, rtol=1e-5, atol=1e-5)
        (alone * weights[:, start:end]).sum().backward()
        start = end
    for name, p in model.named_parameters():
        assert (packed[name] - p.grad).abs().max() <= 1e-5 * p.grad.abs().max() + 1e-5, name
    assert model(**batch, labels=labels).loss.isfinite()


@pytest.mark.parametrize("changes", [{}, *LOCAL])
def test_packing_with_padding_inside(changes, tiny_config):
    model = GMAForCausalLM(tiny_config(**changes)).eval()
    rows = [make_tokens(1, 6), make_tokens(1, 9)]
    garbage = make_tokens(1, 3)
    packed = torch.cat([garbage[:, :2], rows[0], garbage, rows[1]], dim=1)
    mask = torch.tensor([[0] * 2 + [1] * 6 + [0] * 3 + [1] * 9])
    seq_idx = torch.tensor([[0] * 8 + [1] * 12])
    logits = model(packed, attention_mask=mask, seq_idx=seq_idx).logits
    torch.testing.assert_close(logits[:, 2:8], model(rows[0]).logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits[:, 11:], model(rows[1]).logits, rtol=1e-4, atol=1e-5)


def test_positions_with_gaps_stay_one_sequence(tiny_config):
    model = GMAForCausalLM(tiny_config(position_embedding_type="none")).eval()
    tokens = make_tokens()
    torch.testing.assert_close(model(tokens, position_ids=2 * torch.arange(21)[None]).logits, model(tokens).logits)


@pytest.mark.parametrize("changes", [{}, *LOCAL])
def test_packing_in_several_rows_by_position_ids(changes, tiny_config):
    model = GMAForCausalLM(tiny_config(**changes)).eval()
    tokens = make_tokens(2, 12)
    position_ids = torch.tensor([[*range(5), *range(7)], [*range(9), *range(3)]])
    outputs = model(tokens, position_ids=position_ids, output_responsibilities=True)
    for row, cut in ((0, 5), (1, 9)):
        for piece in (slice(0, cut), slice(cut, 12)):
            alone = model(tokens[row : row + 1, piece], output_responsibilities=True)
            torch.testing.assert_close(outputs.logits[row : row + 1, piece], alone.logits, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(
                outputs.responsibilities[1][1][row : row + 1, :, piece],
                alone.responsibilities[1][1],
                rtol=1e-4,
                atol=1e-5,
            )
    with pytest.raises(ValueError, match="one row"):
        model(tokens, position_ids=position_ids, output_attentions=True)


# Decoding


@pytest.mark.parametrize("changes", [*({"position_embedding_type": p} for p in POSITIONS), GATES, *LOCAL])
def test_continuing_equals_parallel(changes, tiny_config):
    """In pieces of any size, single tokens included."""
    model = GMAForCausalLM(tiny_config(**changes)).eval()
    tokens = make_tokens(length=40)
    expected = model(tokens).logits
    cache, pieces = None, []
    for piece in tokens.split([7, 1, 1, 20, 11], dim=1):
        outputs = model(piece, past_key_values=cache, use_cache=True)
        cache = outputs.past_key_values
        pieces.append(outputs.logits)
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, rtol=1e-4, atol=1e-4)
    assert cache.get_seq_length() == 40


@torch.no_grad()
def test_4096_single_steps_equal_parallel(tiny_config):
    model = GMAForCausalLM(tiny_config(max_position_embeddings=4096, chunk_size=64)).eval()
    tokens = make_tokens(1, 4096)
    expected = model(tokens).logits
    cache, steps = DynamicCache(config=model.config), []
    for token in tokens.split(1, dim=1):
        steps.append(model(token, past_key_values=cache).logits)
    assert (torch.cat(steps, dim=1) - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("changes", [{}, GATES, *LOCAL])
@torch.no_grad()
def test_padding_while_continuing(changes, tiny_config):
    """Padding in a continued segment, single padding tokens included, leaves the state and later logits alone."""
    model = GMAForCausalLM(tiny_config(**changes)).eval()
    tokens = make_tokens(length=20)
    expected = model(tokens).logits
    cache = model(tokens[:, :8]).past_key_values
    for _ in range(2):
        states = [layer for layer in cache.layers if hasattr(layer, "recurrent_states")]
        before = [layer.recurrent_states[0].clone() for layer in states]
        model(make_tokens(length=1), attention_mask=torch.zeros(2, 1), past_key_values=cache)
        assert all(torch.equal(a, layer.recurrent_states[0]) for a, layer in zip(before, states))
    garbage = make_tokens(length=3)
    mixed = torch.cat([garbage, tokens[:, 8:14], garbage, tokens[:, 14:]], dim=1)
    mask = torch.tensor([0] * 3 + [1] * 6 + [0] * 3 + [1] * 6).expand(2, -1)
    whole = torch.cat([torch.ones(2, 8), torch.zeros(2, 2), mask], dim=1)
    assert cache.get_seq_length() == 10
    for given in (mask, whole):
        logits = model(mixed, attention_mask=given, past_key_values=copy.deepcopy(cache)).logits
        torch.testing.assert_close(logits[mask == 1].view(2, -1, 99), expected[:, 8:], rtol=1e-5, atol=1e-5)


def cache_bytes(cache):
    tensors = [x for layer in cache.layers for x in (layer.recurrent_states[0], layer.conv_states[0])]
    return sum(x.untyped_storage().nbytes() for x in tensors)


@torch.no_grad()
def test_cache_does_not_grow(tiny_config):
    model = GMAForCausalLM(tiny_config(position_embedding_type="none")).eval()
    cache = DynamicCache(config=model.config)
    model(make_tokens(1, 10), past_key_values=cache)
    after_10 = cache_bytes(cache)
    model(make_tokens(1, 9990), past_key_values=cache)
    assert cache.get_seq_length() == 10_000
    assert cache_bytes(cache) == after_10 == 2 * (4 * 6 * 9 * 4 + 2 * 8)
    # Beside what was seen there are only the score weights, of the model's own size.
    others = {(n, x.shape) for layer in cache.layers for n, x in vars(layer).items() if isinstance(x, torch.Tensor)}
    assert others == {("mixture_weights", (4, 2 * 8 + 1, 6))}


PREFILL = """
import resource, sys, torch
from modeling_gma import GMAConfig, GMAForCausalLM
from transformers import DynamicCache

torch.manual_seed(0)
torch.set_num_threads(1)
config = GMAConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_components=8,
                   position_embedding_type="none")
model = GMAForCausalLM(config).eval()
total, piece = int(sys.argv[1]), 10_000
tokens = torch.randint(0, 64, (1, total))
cache = DynamicCache(config=config)
with torch.no_grad():
    for start in range(0, total, piece):
        logits = model(tokens[:, start : start + piece], past_key_values=cache, logits_to_keep=1).logits
mass = cache.layers[1].recurrent_states[0][..., -1].sum(-1)
print(cache.get_seq_length(), bool(logits.isfinite().all()), *mass.flatten().tolist(),
      resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_a_million_tokens():
    def prefill(total):
        output = subprocess.run(
            [sys.executable, "-c", PREFILL, str(total)], capture_output=True, text=True, check=True
        )
        length, finite, *mass, peak = output.stdout.split()
        assert int(length) == total and finite == "True"
        for head in mass:
            assert abs(float(head) - total) <= 1e-5 * total
        return int(peak) * 1024

    input_bytes = 8 * 1_000_000
    assert prefill(1_000_000) <= prefill(10_000) + input_bytes + 20_000_000


@pytest.mark.parametrize("changes", [GATES, *LOCAL])
def test_gradients_flow_through_a_cache(changes, tiny_config):
    """Truncated or not, training over segments works, and equals training over the whole."""
    model = GMAForCausalLM(tiny_config(**changes)).eval()
    tokens = make_tokens(length=24)
    weights = torch.randn(2, 24, 99)
    (model(tokens).logits * weights).sum().backward()
    whole = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    cache, loss = DynamicCache(config=model.config), 0
    for piece, weight in zip(tokens.split(8, dim=1), weights.split(8, dim=1)):
        loss = loss + (model(piece, past_key_values=cache).logits * weight).sum()
    loss.backward()
    for name, p in model.named_parameters():
        assert (whole[name] - p.grad).abs().max() <= 1e-4 * p.grad.abs().max() + 1e-5, name


# Generation


@pytest.fixture
def lm(tiny_config):
    return GMAForCausalLM(tiny_config(eos_token_id=None)).eval()


GENERATION = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 4},
    "sampling": {"do_sample": True, "top_k": 20},
    "beam sampling": {"do_sample": True, "num_beams": 2},
    "several": {"do_sample": True, "num_return_sequences": 3},
    "penalties": {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
}


@pytest.mark.parametrize("mode", GENERATION)
def test_generation_with_cache_equals_without(mode, lm):
    tokens = make_tokens()
    results = []
    for extra in ({}, {"use_cache": False}, {"prefill_chunk_size": 6}, {"cache_implementation": "static"}):
        set_seed(0)
        results.append(lm.generate(tokens, max_new_tokens=12, **GENERATION[mode], **extra))
    for result in results[1:]:
        assert torch.equal(result, results[0])


@pytest.mark.parametrize("changes", [*({"position_embedding_type": p} for p in POSITIONS), GATES, *LOCAL])
@pytest.mark.parametrize("num_beams", [1, 3])
def test_left_padded_prompts_generate_as_alone(changes, num_beams, tiny_config):
    model = GMAForCausalLM(tiny_config(eos_token_id=None, **changes)).eval()
    prompts = [make_tokens(1, n) for n in (4, 11, 20)]
    batch, mask = torch.zeros(3, 20, dtype=torch.long), torch.zeros(3, 20, dtype=torch.long)
    for i, prompt in enumerate(prompts):
        batch[i, 20 - prompt.shape[1] :], mask[i, 20 - prompt.shape[1] :] = prompt, 1
    options = {"max_new_tokens": 10, "do_sample": False, "num_beams": num_beams}
    together = model.generate(batch, attention_mask=mask, **options)[:, 20:]
    in_pieces = model.generate(batch, attention_mask=mask, prefill_chunk_size=7, **options)[:, 20:]
    assert torch.equal(together, in_pieces)
    for i, prompt in enumerate(prompts):
        assert torch.equal(together[i : i + 1], model.generate(prompt, **options)[:, prompt.shape[1] :])


@pytest.mark.parametrize("padded", [False, True])
def test_generation_goes_on_from_a_returned_cache(padded, lm):
    tokens = make_tokens()
    mask = torch.ones_like(tokens)
    if padded:
        mask[0, :6] = 0
    options = {"do_sample": False, "return_dict_in_generate": True}
    whole = lm.generate(tokens, attention_mask=mask, max_new_tokens=10, **options)
    first = lm.generate(tokens, attention_mask=mask, max_new_tokens=4, **options)
    mask = torch.cat([mask, torch.ones(2, 4, dtype=torch.long)], dim=1)
    second = lm.generate(
        first.sequences, attention_mask=mask, past_key_values=first.past_key_values, max_new_tokens=6, **options
    )
    assert torch.equal(second.sequences, whole.sequences)
    assert second.past_key_values.get_seq_length() == whole.past_key_values.get_seq_length() == 30


@pytest.mark.parametrize(
    "make_cache",
    [lambda config: DynamicCache(config=config), lambda config: StaticCache(config=config, max_cache_len=64)],
)
def test_generation_with_a_cache_of_the_users(make_cache, lm):
    tokens = make_tokens()
    expected = lm.generate(tokens, max_new_tokens=8, do_sample=False)
    cache = make_cache(lm.config)
    assert torch.equal(lm.generate(tokens, past_key_values=cache, max_new_tokens=8, do_sample=False), expected)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(lm.generate(tokens, past_key_values=cache, max_new_tokens=8, do_sample=False), expected)


@torch.no_grad()
def test_one_prompt_serves_many_continuations(lm):
    prefix = make_tokens(1, 15)
    cache = lm(prefix, use_cache=True).past_key_values
    for _ in range(2):
        prompt = torch.cat([prefix, make_tokens(1, 4)], dim=1)
        expected = lm.generate(prompt, max_new_tokens=6, do_sample=False)
        used = copy.deepcopy(cache)
        assert torch.equal(lm.generate(prompt, past_key_values=used, max_new_tokens=6, do_sample=False), expected)
        assert cache.get_seq_length() == 15 and used.get_seq_length() == 24


def test_streaming(lm):
    from transformers.generation.streamers import BaseStreamer

    class Collect(BaseStreamer):
        def __init__(self):
            self.tokens, self.ended = [], False

        def put(self, value):
            self.tokens += value.flatten().tolist()

        def end(self):
            self.ended = True

    streamer = Collect()
    tokens = lm.generate(make_tokens(1), max_new_tokens=7, do_sample=False, streamer=streamer)
    assert streamer.tokens == tokens[0].tolist() and streamer.ended


def test_assisted_decoding_is_refused(lm):
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        lm.generate(make_tokens(1), assistant_model=copy.deepcopy(lm), max_new_tokens=4)


def test_generation_in_a_new_process_gives_the_same_tokens(lm, tmp_path):
    lm.save_pretrained(tmp_path)
    tokens = make_tokens(2, 9)
    expected = lm.generate(tokens, max_new_tokens=20, do_sample=False)
    code = (
        "import json, sys, torch, modeling_gma\n"
        "from transformers import AutoModelForCausalLM\n"
        "torch.set_num_threads(1)\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "tokens = torch.tensor(json.loads(sys.argv[2]))\n"
        "print(json.dumps(model.generate(tokens, max_new_tokens=20, do_sample=False).tolist()))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path), json.dumps(tokens.tolist())]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert json.loads(output.strip().splitlines()[-1]) == expected.tolist()


# Training features


def test_gradient_checkpointing(tiny_config):
    model = GMAForCausalLM(tiny_config()).train()
    tokens = make_tokens()
    model(tokens, labels=tokens).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    for reentrant in (False, True):
        model.zero_grad()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        outputs = model(tokens, labels=tokens, use_cache=True)
        assert outputs.past_key_values is None
        outputs.loss.backward()
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, expected[name], msg=name)
        model.gradient_checkpointing_disable()


def test_gradient_checkpointing_leaves_a_given_cache_alone(tiny_config):
    model = GMAForCausalLM(tiny_config()).eval()
    tokens = make_tokens()
    cache = model(tokens).past_key_values
    expected = model(tokens).logits
    model.train()
    model.gradient_checkpointing_enable()
    outputs = model(tokens, past_key_values=cache)
    torch.testing.assert_close(outputs.logits, expected)
    assert outputs.past_key_values is None and cache.get_seq_length() == 21


def test_dropout_acts_in_training_only(tiny_config):
    model = GMAForCausalLM(tiny_config(hidden_dropout=0.5))
    tokens = make_tokens()
    assert not torch.equal(model.train()(tokens).logits, model(tokens).logits)
    assert torch.equal(model.eval()(tokens).logits, model(tokens).logits)


def test_every_parameter_learns(tiny_config):
    for model_class in HEADS:
        config = config_for(model_class, tiny_config)
        if config.is_causal:
            config.forget_gate = True
        model = model_class(config)
        main_output(model(make_tokens())).square().sum().backward()
        for name, p in model.named_parameters():
            assert p.grad is not None and (p.grad != 0).any(), (model_class, name)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("changes", [{}, {"forget_gate": True, "position_embedding_type": "sinusoidal"}])
def test_compiled_training_step_in_one_graph(backend, changes, tiny_config):
    torch.compiler.reset()
    model = GMAForCausalLM(tiny_config(num_hidden_layers=1, **changes)).train()
    tokens = make_tokens()
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for inputs in ({}, {"attention_mask": mask}):
        model.zero_grad()
        expected = model(tokens, labels=tokens, **inputs)
        expected.loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        outputs = compiled(tokens, labels=tokens, **inputs)
        outputs.loss.backward()
        torch.testing.assert_close(outputs.logits, expected.logits, rtol=1e-4, atol=1e-5)
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, gradients[name], rtol=1e-3, atol=1e-5, msg=name)


def test_compiled_packing_in_one_graph(tiny_config):
    torch.compiler.reset()
    model = GMAForCausalLM(tiny_config()).eval()
    rows = [{"input_ids": make_tokens(1, n)[0].tolist()} for n in (5, 1, 17, 9)]
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for sent in ({}, {"return_seq_idx": True}, {"return_flash_attn_kwargs": True}):
        batch = DataCollatorWithFlattening(**sent)(rows)
        torch.testing.assert_close(compiled(**batch).logits, model(**batch).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("changes", [{}, GATES])
@pytest.mark.parametrize("packed", [False, True])
def test_a_compiled_graph_serves_many_lengths(changes, packed, tiny_config):
    torch.compiler.reset()
    model = GMAForCausalLM(tiny_config(num_hidden_layers=1, **changes)).train()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for length in (20, 33, 64, 100, 101, 102, 90, 80, 70, 60):
        tokens = make_tokens(1, length)
        inputs = {"position_ids": torch.arange(length)[None] % 17} if packed else {}
        torch.testing.assert_close(
            compiled(tokens, **inputs).logits, model(tokens, **inputs).logits, rtol=1e-4, atol=1e-5
        )
    assert counter.frame_count <= 3


@pytest.mark.parametrize("cache_class", [DynamicCache, StaticCache])
@torch.no_grad()
def test_compiled_decoding_in_one_graph_without_recompiling(cache_class, tiny_config):
    torch.compiler.reset()
    model = GMAForCausalLM(tiny_config()).eval()
    tokens = make_tokens(length=30)
    expected = model(tokens).logits
    cache = (
        DynamicCache(config=model.config)
        if cache_class is DynamicCache
        else StaticCache(model.config, max_cache_len=64)
    )
    model(tokens[:, :8], past_key_values=cache)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for i in range(8, 30):
        logits = compiled(tokens[:, i : i + 1], past_key_values=cache).logits
        torch.testing.assert_close(logits[:, 0], expected[:, i], rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 1
    assert cache.get_seq_length() == 30


@pytest.mark.parametrize("targets", [["q_proj", "k_proj", "v_proj", "o_proj"], "all-linear"])
@pytest.mark.parametrize("forget_gate", [False, True])
def test_peft_lora(targets, forget_gate, tiny_config, tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model

    base = GMAForCausalLM(tiny_config(forget_gate=forget_gate)).eval()
    tokens = make_tokens()
    before = base(tokens).logits.detach()
    config = LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")
    model = get_peft_model(copy.deepcopy(base), config)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1.0)
    for _ in range(3):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    after = model(input_ids=tokens).logits
    assert not torch.allclose(after, before)
    generated = model.generate(input_ids=tokens, max_new_tokens=5, do_sample=False)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()
    torch.testing.assert_close(loaded(input_ids=tokens).logits, after)
    merged = loaded.merge_and_unload()
    assert torch.equal(merged.generate(tokens, max_new_tokens=5, do_sample=False), generated)


def test_peft_prompt_tuning_generates_with_padding(tiny_config):
    from peft import PromptTuningConfig, get_peft_model

    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    model = get_peft_model(GMAForCausalLM(tiny_config(eos_token_id=None)), config).eval()
    tokens = make_tokens()
    mask = torch.ones_like(tokens)
    assert model.generate(input_ids=tokens, attention_mask=mask, max_new_tokens=4, do_sample=False).shape == (2, 25)


# Refusals


BAD_INPUTS = {
    "neither": (lambda m, x: m(), "got neither"),
    "both": (lambda m, x: m(x, inputs_embeds=torch.zeros(2, 21, 32)), "got both"),
    "ids too large": (lambda m, x: m(torch.full((1, 4), 99)), "between 0 and 98.*from 99 to 99"),
    "ids negative": (lambda m, x: m(torch.full((1, 4), -1)), "between 0 and 98.*from -1 to -1"),
    "ids of one dimension": (lambda m, x: m(x[0]), r"\(batch, length\), got \(21,\)"),
    "mask of another length": (lambda m, x: m(x, attention_mask=torch.ones(2, 20)), r"\(2, 21\).*got shape \(2, 20\)"),
    "mask of pairs": (lambda m, x: m(x, attention_mask=torch.ones(2, 1, 21, 21)), "no mask of token pairs"),
    "additive mask": (lambda m, x: m(x, attention_mask=torch.full((2, 21), -1e9)), "only 1 for tokens and 0"),
    "embeds of another width": (lambda m, x: m(inputs_embeds=torch.zeros(2, 21, 31)), r"\(batch, length, 32\).*31"),
    "positions of another length": (lambda m, x: m(x, position_ids=torch.zeros(2, 20)), r"\(2, 21\), got \(2, 20\)"),
    "packing by positions with a cache": (
        lambda m, x: m(
            x, position_ids=torch.arange(21).expand(2, -1) % 7, past_key_values=DynamicCache(config=m.config)
        ),
        "do not go with a cache",
    ),
    "too long": (
        lambda m, x: m(torch.ones(1, 129, dtype=torch.long)),
        "end at `max_position_embeddings` = 128.*0 to 128",
    ),
    "negative position": (lambda m, x: m(x, position_ids=torch.full((2, 21), -1)), "from -1 to -1"),
    "tuple for a cache": (lambda m, x: m(x, past_key_values=((x, x),)), "must be a transformers `Cache`.*tuple"),
    "cache without config": (lambda m, x: m(x, past_key_values=DynamicCache()), "2 layers that hold a state"),
    "cache of a softmax model": (
        lambda m, x: m(x, past_key_values=DynamicCache(config=LlamaConfig(num_hidden_layers=2))),
        "DynamicLayer.*another model",
    ),
    "cache with other layers": (
        lambda m, x: m(x, past_key_values=DynamicCache(config=MambaConfig(num_hidden_layers=3))),
        "got 3 .*another model",
    ),
    "packing with a cache": (
        lambda m, x: m(x[:1], seq_idx=torch.zeros(1, 21), past_key_values=DynamicCache(config=m.config)),
        "do not go with",
    ),
    "packing several rows": (lambda m, x: m(x, cu_seq_lens_q=torch.tensor([0, 21])), "one row, got a batch of 2"),
}


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_bad_input_gets_a_sentence(name, lm):
    call, message = BAD_INPUTS[name]
    with pytest.raises(ValueError, match=f"(?s){message}"):
        call(lm, make_tokens())


def test_additive_masks_are_refused_where_they_cannot_be_seen(lm):
    torch.compiler.reset()
    additive = torch.zeros(2, 21).masked_fill(torch.arange(21) < 3, -1e9)
    with pytest.raises(Exception, match="must be of integers or bool"):
        torch.compile(lm, backend="eager", fullgraph=True)(make_tokens(), attention_mask=additive)


def test_a_filled_cache_of_another_model_or_batch_is_refused(lm, tiny_config):
    other = GMAForCausalLM(tiny_config(num_components=5)).eval()
    cache = other(make_tokens()).past_key_values
    with pytest.raises(ValueError, match=r"\(2, 4, 5, 9\).*need \(2, 4, 6, 9\).*another model"):
        lm(make_tokens(), past_key_values=cache)
    cache = lm(make_tokens()).past_key_values
    with pytest.raises(ValueError, match="another batch"):
        lm(make_tokens(3), past_key_values=cache)


def test_continuing_past_learned_positions_is_refused(lm):
    cache = lm(make_tokens(length=127)).past_key_values
    lm(make_tokens(length=1), past_key_values=cache)
    with pytest.raises(ValueError, match="end at `max_position_embeddings` = 128"):
        lm(make_tokens(length=1), past_key_values=cache)


def test_too_long_an_input_is_refused_while_compiling(lm):
    torch.compiler.reset()
    with pytest.raises(Exception, match="end at `max_position_embeddings` = 128"):
        torch.compile(lm, backend="eager", fullgraph=True)(make_tokens(length=129))


def test_unlimited_positions_have_no_limit(tiny_config):
    for kind in ("sinusoidal", "none"):
        model = GMAForCausalLM(tiny_config(position_embedding_type=kind, max_position_embeddings=8)).eval()
        assert model(make_tokens(length=300)).logits.isfinite().all()


def test_a_bidirectional_model_has_no_cache_and_is_no_language_model(tiny_config):
    config = tiny_config(is_causal=False)
    with pytest.raises(ValueError, match="`GMAForCausalLM` needs `is_causal=True`"):
        GMAForCausalLM(config)
    model = GMAModel(config).eval()
    assert model(make_tokens(), use_cache=True).past_key_values is None
    with pytest.raises(ValueError, match="needs a causal model"):
        model(make_tokens(), past_key_values=DynamicCache(config=config))


def test_packed_sequences_cannot_be_classified(tiny_config):
    model = GMAForSequenceClassification(tiny_config())
    with pytest.raises(ValueError, match="packed sequences cannot be classified"):
        model(make_tokens(1), position_ids=torch.arange(21)[None] % 9)
    with pytest.raises(ValueError, match="packed sequences cannot be classified"):
        model(make_tokens(1), cu_seq_lens_q=torch.tensor([0, 5, 21]))


def test_a_nan_weight_is_not_hidden(lm):
    with torch.no_grad():
        lm.model.layers[0].mixer.mixture_norm.mu[0, 0, 0] = torch.nan
    assert lm(make_tokens()).logits.isnan().any()


def test_no_tensor_grows_with_the_square_of_the_length(tiny_config, largest_tensor):
    """Over a whole training step of a whole model, nothing is as large as N x N or N x K x d_v a head."""
    length, heads, components, value_dim = 1024, 2, 32, 16
    config = tiny_config(
        hidden_size=32,
        num_attention_heads=heads,
        num_components=components,
        position_embedding_type="none",
        chunk_size=32,
    )
    model = GMAForCausalLM(config)
    tokens = make_tokens(1, length)
    with largest_tensor:
        model(tokens, labels=tokens).loss.backward()
    assert length < largest_tensor.numel < heads * length * components * value_dim / 4


def test_registered_with_every_auto_class(tiny_config):
    assert AutoConfig.for_model("gma").__class__ is GMAConfig
    for model_class, auto_class in HEADS.items():
        assert type(auto_class.from_config(config_for(model_class, tiny_config))) is model_class
