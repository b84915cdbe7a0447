"""Generation after prompts of any length: the figures, and that GMA's carry nothing more after long ones."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from profile_generation import Arguments, Clock, generate, main, measure, names_of, table

from baselines import build_twin
from modeling_gma import GMAConfig


SIZES = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_components": 4}


def made(mixer="gma", **fields):
    return build_twin(GMAConfig(**SIZES, position_embedding_type="none", **fields), mixer).eval()


@pytest.mark.parametrize(
    "fields", [{"forget_gate": True}, {"layer_types": ["hybrid_sliding"], "sliding_window": 8, "forget_gate": True}]
)
def test_what_is_carried_is_bounded(fields):
    arguments = Arguments([], new_tokens=5, piece=16)
    few, many = (measure(made(**fields), prompt, arguments) for prompt in (20, 300))
    assert few["cache_bytes"] == many["cache_bytes"] > 0
    assert len(many["seconds"]) == 4 and min(many["seconds"]) > 0
    keys = measure(made("sdpa_rope"), 300, arguments)["cache_bytes"]
    assert keys > 300 * 2 * 16 * 4 > many["cache_bytes"]


def test_memory_does_not_grow_with_the_prompt(tmp_path, monkeypatch, capsys):
    """In processes of their own: a long prompt has the peak of a short one, but for its tokens."""
    made(forget_gate=True).save_pretrained(tmp_path / "gated")
    flags = ["--model_name_or_path", str(tmp_path / "gated"), "--prompts", "500", "20000"]
    flags += ["--rounds", "1", "--new_tokens", "3", "--piece", "256", "--output_dir", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["profile_generation.py", *flags])
    main()
    text = (tmp_path / "out" / "generation.json").read_text()
    short, long = json.loads(text)["rows"]
    assert short["status"] == long["status"] == "ok" and short["cache_bytes"] == long["cache_bytes"]
    if long["peak_bytes"] is not None:
        assert long["peak_bytes"] < short["peak_bytes"] + 10e6
    assert str(tmp_path) not in text
    assert "| gated | 20,000 |" in capsys.readouterr().out


def test_what_fails_is_a_row(tmp_path):
    sent = []
    generate(SimpleNamespace(send=sent.append), str(tmp_path / "none"), 5, Arguments([]))
    status = sent[0]["status"]
    assert status.startswith("unsupported: ") and "none" in status and str(tmp_path) not in status
    assert "\n" not in table([{"model": "none", "prompt": 5, "status": status}])[-1]
    assert names_of([str(tmp_path / "a"), str(tmp_path / "b")]) == ["a", "b"]
    assert names_of([str(tmp_path / "x/a"), str(tmp_path / "y/a")]) == ["x/a", "y/a"]


def test_bad_flags():
    with pytest.raises(ValueError, match="--prompts must be numbers of at least 1, got \\[0\\]"):
        Arguments(["x"], prompts=[0])
    with pytest.raises(ValueError, match="--new_tokens must be at least 2, got 1"):
        Arguments(["x"], new_tokens=1)
    with pytest.raises(ValueError, match="--model_name_or_path '/none' cannot be read"):
        Arguments(["/none"])


def test_clock_counts_the_prompt_as_one():
    clock = Clock()
    made().generate(torch.zeros(1, 7, dtype=torch.long), streamer=clock, max_new_tokens=4, min_new_tokens=4)
    assert len(clock.times) == 5
