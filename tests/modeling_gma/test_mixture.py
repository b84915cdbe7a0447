import math

import pytest
import torch

from modeling_gma import GaussianMixture, GMAAttention, GMAModel, parameter_groups
from modeling_gma.diagnostics import normalised_entropy


def test_parameters_become_a_mixture(tiny_config):
    mixture = GaussianMixture(num_heads=3, num_components=5, routing_dim=4, variance_floor=0.01)
    with torch.no_grad():
        for p in mixture.parameters():
            p.normal_()
        mixture.omega[0, 0, 0] = -1e4
    means, variances, log_priors = mixture()
    assert torch.equal(means, mixture.mu)
    torch.testing.assert_close(variances, (1 + mixture.omega.exp()).log() + 0.01)
    assert variances.min() == 0.01
    torch.testing.assert_close(log_priors.exp().sum(-1), torch.ones(3))
    assert [tuple(p.shape) for p in (mixture.mu, mixture.omega, mixture.alpha)] == [(3, 5, 4), (3, 5, 4), (3, 5)]


def test_computed_in_float32_from_narrow_parameters(tiny_config):
    mixture = GMAModel(tiny_config()).to(torch.bfloat16).layers[0].mixer.mixture_norm
    assert mixture.mu.dtype == torch.bfloat16
    assert {x.dtype for x in mixture()} == {torch.float32}
    assert {x.dtype for x in mixture.double()()} == {torch.float64}


def test_initial_mixture(tiny_config):
    """Uniform priors, equal variances, and every component used at the start."""
    config = tiny_config(hidden_size=256, num_attention_heads=4, num_components=64, initializer_range=0.02)
    model = GMAModel(config).eval()
    means, variances, log_priors = model.layers[0].mixer.mixture_norm()
    torch.testing.assert_close(log_priors, torch.full((4, 64), -math.log(64)))
    torch.testing.assert_close(variances, variances.mean().expand_as(variances))
    norms = means.norm(dim=-1)
    torch.testing.assert_close(norms, norms.mean().expand_as(norms))


@pytest.mark.parametrize("forget_gate", [False, True])
@pytest.mark.parametrize("hidden_size", [128, 512, 2048])
def test_initial_entropies_do_not_depend_on_width(hidden_size, forget_gate, tiny_config):
    """Every component is used, and every token uses most of them, however wide the model. Where memory does not fade,
    queries begin with a preference."""
    sizes = {"hidden_size": hidden_size, "num_attention_heads": hidden_size // 64, "num_components": 64}
    model = GMAModel(tiny_config(**sizes, initializer_range=0.02, forget_gate=forget_gate)).eval()
    with torch.no_grad():
        outputs = model(torch.randint(3, 99, (4, 100)), output_responsibilities=True)
    for read, write in outputs.responsibilities:
        for gamma in (read, write) if forget_gate else (write,):
            assert normalised_entropy(gamma.mean((0, 2))).min() > 0.95
            assert 0.95 < normalised_entropy(gamma).mean() < 0.999
        if not forget_gate:
            assert 0.1 < normalised_entropy(read.mean((0, 2))).mean() < 0.6


def test_a_start_narrower_than_the_floor(tiny_config):
    for changes in ({"variance_floor": 50.0}, {"initializer_range": 1e-4}):
        config = tiny_config(**changes)
        _, variances, _ = GMAModel(config).layers[0].mixer.mixture_norm()
        assert variances.isfinite().all() and (variances >= config.variance_floor).all()


def test_a_mixture_or_mixer_alone_is_ready_to_use(tiny_config):
    torch.empty(1_000_000).fill_(math.nan)
    for mixture in (GaussianMixture(3, 5, 4), GMAAttention(tiny_config(forget_gate=True)).mixture_norm):
        means, variances, log_priors = mixture()
        assert means.norm(dim=-1).min() > 0.5 and (variances > 0.1).all()
        torch.testing.assert_close(log_priors.exp().sum(-1), torch.ones(len(log_priors)))
    output, *_ = GMAAttention(tiny_config(forget_gate=True))(torch.randn(2, 10, 32))
    assert output.isfinite().all()


def test_parameter_groups(tiny_config):
    model = GMAModel(tiny_config(forget_gate=True, output_gate=True))
    decayed, free = parameter_groups(model, weight_decay=0.3)
    names = {p: name for name, p in model.named_parameters()}
    assert decayed["weight_decay"] == 0.3 and free["weight_decay"] == 0.0
    assert sorted(names[p] for p in [*decayed["params"], *free["params"]]) == sorted(names.values())
    for name in map(names.get, free["params"]):
        assert "mixture" in name or "norm" in name or name.endswith("bias")
    for name in map(names.get, decayed["params"]):
        assert name.endswith("weight") and "norm" not in name and "mixture" not in name
    model.embed_tokens.weight.requires_grad_(False)
    assert all(p is not model.embed_tokens.weight for p in parameter_groups(model, 0.3)[0]["params"])


def test_trainer_makes_the_same_groups(tiny_config, tmp_path):
    from transformers import Trainer, TrainingArguments

    model = GMAModel(tiny_config(forget_gate=True, output_gate=True))
    trainer = Trainer(model, TrainingArguments(output_dir=tmp_path, weight_decay=0.3, report_to=[]))
    theirs = trainer.create_optimizer().param_groups
    ours = parameter_groups(model, 0.3)
    for mine, group in zip(ours, theirs):
        assert mine["weight_decay"] == group["weight_decay"]
        assert set(mine["params"]) == set(group["params"])
