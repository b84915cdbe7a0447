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
    "dropout of one": ({"hidden_dropout": 1.0}, "`hidden_dropout` must be at least 0 and below 1"),
    "unknown positions": ({"position_embedding_type": "rotary"}, "position_embedding_type.*rotary"),
    "unknown pooling": ({"classifier_pooling": "max"}, "classifier_pooling.*max"),
    "a word for a number": ({"hidden_size": "wide"}, "hidden_size.*expected int"),
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
