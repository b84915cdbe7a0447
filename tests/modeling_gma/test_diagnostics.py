"""Figures of responsibilities by another route."""

import math

import pytest
import torch

from modeling_gma import GMAConfig, GMAForCausalLM
from modeling_gma.diagnostics import mixture_health, normalised_entropy, usage_statistics


def test_entropy():
    assert normalised_entropy(torch.full((3, 8), 1 / 8)).tolist() == pytest.approx([1.0] * 3)
    assert normalised_entropy(torch.tensor([0.0, 1.0, 0.0])).item() == 0.0
    assert normalised_entropy(torch.tensor([[1.0], [1.0]])).tolist() == [0.0, 0.0]


def test_usage_by_hand():
    torch.manual_seed(0)
    gamma = torch.rand(2, 3, 5, 4).softmax(-1)
    found = usage_statistics(gamma)
    for head in range(3):
        rows = [gamma[b, head, n] for b in range(2) for n in range(5)]
        mean = sum(rows) / len(rows)

        def entropy(p):
            return -sum(x * math.log(x) for x in p.tolist()) / math.log(4)

        assert found["usage_entropy"][head].item() == pytest.approx(entropy(mean), abs=1e-6)
        assert found["token_entropy"][head].item() == pytest.approx(sum(map(entropy, rows)) / len(rows), abs=1e-6)
        assert found["active"][head].item() == len({int(row.argmax()) for row in rows}) / 4


def test_health_sees_a_collapse():
    config = GMAConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_components=8)
    model = GMAForCausalLM(config).eval()
    tokens = torch.randint(0, 50, (2, 30))
    healthy = mixture_health(model, input_ids=tokens)
    assert healthy["smallest_usage_entropy"] > 0.5
    with torch.no_grad():
        mixture = model.model.layers[1].mixer.mixture_norm
        mixture.alpha[0, 0] = 100.0
        mixture.omega[0, 3, 5] = -30.0
    collapsed = mixture_health(model, input_ids=tokens)
    assert collapsed["smallest_usage_entropy"] < 0.01 < healthy["smallest_usage_entropy"]
    assert collapsed["active"] < healthy["active"]
    assert collapsed["smallest_variance"] == pytest.approx(config.variance_floor, rel=1e-3)
