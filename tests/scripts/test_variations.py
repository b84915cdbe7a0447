"""Variations begin where the model is, are trained, and are causal."""

import pytest
import torch
from train_wikitext import prefix_error
from transformers import AutoModelForCausalLM
from variations import VARIATIONS, vary

from baselines import build_twin
from modeling_gma import GMAConfig


@pytest.mark.parametrize("name", [*VARIATIONS, "convolution,write_gate"])
@pytest.mark.parametrize("mixer", ["gma", "linear", "performer"])
def test_variations(mixer, name):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_components": 8}
    model = build_twin(GMAConfig(vocab_size=50, **sizes, forget_gate=True), mixer)
    tokens = torch.randint(0, 50, (2, 40))
    before = model(tokens, use_cache=False).logits
    names = {name for name, _ in model.named_parameters()}
    vary(model, name)
    output = model(tokens, labels=tokens, use_cache=False)
    if name == "output_norm":
        lengths = []
        model.base_model.layers[0].mixer.o_proj.norm.register_forward_hook(lambda *of: lengths.append(of[2]))
        model(tokens, use_cache=False)
        torch.testing.assert_close(lengths[0].square().mean(-1), torch.ones(2, 40, 2), rtol=1e-2, atol=1e-2)
    else:
        torch.testing.assert_close(output.logits, before, rtol=1e-4, atol=1e-5)
    output.loss.backward()
    new = {name: p for name, p in model.named_parameters() if name not in names}
    assert new and all(p.grad is not None and p.grad.abs().sum() > 0 for p in new.values())
    assert prefix_error(model, tokens[:1]) == 0


def test_write_gate_weighs_tokens():
    """With weights of its own for every token the output is the mean under them times the induced weights."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_components": 4}
    model = build_twin(GMAConfig(vocab_size=50, **sizes), "gma")
    vary(model, "write_gate")
    mixer, states = model.base_model.layers[0].mixer, torch.randn(1, 12, 16)
    seen = []
    mixer.o_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    torch.nn.init.normal_(mixer.write_gate.proj.weight)
    mixer(states)
    weight = mixer.write_gate.proj(states).exp().transpose(1, 2)
    del mixer._mix  # the plain one again
    induced = mixer(states, output_attentions=True)[1] * weight.unsqueeze(-2)
    value = mixer.v_proj(states).unflatten(-1, (2, 8)).transpose(1, 2)
    expected = (induced / induced.sum(-1, keepdim=True)) @ value
    torch.testing.assert_close(seen[0].unflatten(-1, (2, 8)).transpose(1, 2), expected, rtol=1e-4, atol=1e-5)


def test_nothing_takes_it_for_a_model_of_its_own(tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_components": 4}
    for mixer in ("gma", "linear"):
        model = build_twin(GMAConfig(vocab_size=50, **sizes), mixer)
        vary(model, "write_gate")
        model.save_pretrained(tmp_path / mixer)
        with pytest.raises(ValueError, match="gma_varied"):
            AutoModelForCausalLM.from_pretrained(tmp_path / mixer)
    local = build_twin(GMAConfig(vocab_size=50, **sizes, layer_types=["sliding_attention"]), "gma")
    with pytest.raises(ValueError, match="must be without write_gate where a layer has no memory"):
        vary(local, "write_gate")
