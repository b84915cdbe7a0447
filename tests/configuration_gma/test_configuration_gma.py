import json

import pytest
from transformers import AutoConfig

from configuration_gma import GMAConfig


def test_defaults_are_the_papers_decoder():
    config = GMAConfig()
    expected = {
        "vocab_size": 50257,
        "hidden_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_components": 128,
        "routing_dim": 64,
        "value_dim": 64,
        "intermediate_size": 2048,
        "hidden_act": "gelu",
        "max_position_embeddings": 1024,
        "position_embedding_type": "learned",
        "is_causal": True,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "classifier_pooling": "last",
        "output_responsibilities": False,
        "forget_gate": False,
        "output_gate": False,
    }
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.model_type == "gma"
    assert config.layer_types == ["linear_attention"] * 6


def test_pooling_follows_direction():
    assert GMAConfig(is_causal=False).classifier_pooling == "mean"
    assert GMAConfig(is_causal=False, classifier_pooling="last").classifier_pooling == "last"


def test_round_trip(tmp_path):
    config = GMAConfig(
        hidden_size=64, num_attention_heads=4, is_causal=False, num_components=7, routing_dim=5, num_labels=3
    )
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is GMAConfig
    assert loaded.to_diff_dict() == config.to_diff_dict()


BAD = {
    "heads that do not divide": (
        {"num_attention_heads": 7},
        r"`hidden_size` \(512\).*multiple.*`num_attention_heads` \(7\)",
    ),
    "no heads": ({"num_attention_heads": 0}, r"`num_attention_heads`"),
    "no components": ({"num_components": 0}, "`num_components` must be at least 1, got 0"),
    "no layers": ({"num_hidden_layers": 0}, "`num_hidden_layers` must be at least 1, got 0"),
    "no chunk": ({"chunk_size": 0}, "`chunk_size` must be at least 1, got 0"),
    "no floor": ({"variance_floor": 0.0}, "`variance_floor` must be above 0"),
    "nothing to add": ({"residual_initializer_range": 0.0}, "`residual_initializer_range` must be above 0, got 0.0"),
    "dropout of one": ({"hidden_dropout": 1.0}, "`hidden_dropout` must be at least 0 and below 1"),
    "unknown positions": ({"position_embedding_type": "rotary"}, "position_embedding_type.*rotary"),
    "unknown pooling": ({"classifier_pooling": "max"}, "classifier_pooling.*max"),
    "a word for a number": ({"hidden_size": "wide"}, "hidden_size.*expected int"),
    "layers of another kind": (
        {"layer_types": ["full_attention"] * 6},
        r"`layer_types` must name one of \['linear_attention', .*full_attention",
    ),
    "too few layer types": ({"layer_types": ["hybrid_sliding"] * 5}, "for each of the 6 layers"),
    "no window": ({"sliding_window": 0}, "`sliding_window` must be at least 1, got 0"),
    "local heads alone in a hybrid": (
        {"layer_types": ["hybrid_sliding"] * 6, "num_local_heads": 8},
        r"`num_local_heads` must be at least 1 and below `num_attention_heads` \(8\).*got 8",
    ),
    "one head for two kinds": (
        {"layer_types": ["hybrid_sliding"] * 6, "num_attention_heads": 1},
        "`num_local_heads` must be at least 1.*got 0",
    ),
    "positions that stretch": (
        {"layer_types": ["sliding_attention"] * 6, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        "`rope_parameters` must be.*'factor': 2.0",
    ),
    "an odd width to turn": (
        {"layer_types": ["sliding_attention"] * 6, "routing_dim": 7},
        "`routing_dim` must be even.*got 7",
    ),
    "forgetting both ways": ({"forget_gate": True, "is_causal": False}, "`forget_gate=True` needs `is_causal=True`"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_values_are_named(name):
    changes, message = BAD[name]
    with pytest.raises(Exception, match=f"(?s){message}"):
        GMAConfig(**changes)


def test_dims_of_their_own_need_no_division():
    config = GMAConfig(hidden_size=50, num_attention_heads=4, routing_dim=8, value_dim=12)
    assert (config.routing_dim, config.value_dim) == (8, 12)


def test_layers_without_types_follow_their_number(tmp_path):
    """What was not given is not written down, so that it can follow what is changed at loading."""
    GMAConfig(num_hidden_layers=3).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["layer_types"] is None and written["num_local_heads"] is None
    loaded = AutoConfig.from_pretrained(tmp_path, num_hidden_layers=5, num_attention_heads=16)
    assert loaded.layer_types == ["linear_attention"] * 5 and loaded.num_local_heads == 8
    assert written["residual_initializer_range"] is None and loaded.residual_initializer_range == 0.02 / 10


def test_configs_from_before_there_were_types_load(tmp_path):
    config = GMAConfig(num_hidden_layers=2).to_dict()
    for name in ("layer_types", "num_local_heads", "sliding_window", "rope_parameters"):
        del config[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert loaded.layer_types == ["linear_attention"] * 2 and loaded.sliding_window == GMAConfig().sliding_window


def test_layer_types_round_trip(tmp_path):
    fields = {"layer_types": ["hybrid_sliding", "sliding_attention"], "sliding_window": 7, "num_local_heads": 3}
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}
    GMAConfig(num_hidden_layers=2, **fields).save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert {name: getattr(loaded, name) for name in fields} == fields
