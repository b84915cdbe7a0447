"""GMA model configuration."""

from typing import Literal

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN


LAYER_TYPES = ("linear_attention", "hybrid_sliding", "sliding_attention")


@strict
class GMAConfig(PreTrainedConfig):
    r"""
    Every choice that makes a Gaussian Mixture Attention (GMA) model. The defaults: the paper's WikiText-103 decoder.

    Args:
        vocab_size (`int`, defaults to 50257):
            Number of tokens; the default is GPT-2's.
        hidden_size (`int`, defaults to 512):
            Width of the model.
        num_hidden_layers (`int`, defaults to 6):
            Number of blocks.
        num_attention_heads (`int`, defaults to 8):
            Number of heads, each with a mixture of its own. Must divide `hidden_size`, unless `routing_dim` and
            `value_dim` are given.
        num_components (`int`, defaults to 128):
            Gaussian components in each head's mixture, K: the number of memory slots.
        routing_dim (`int`, *optional*, defaults to `hidden_size // num_attention_heads`):
            Width of queries and keys in each head.
        value_dim (`int`, *optional*, defaults to `hidden_size // num_attention_heads`):
            Width of values in each head.
        intermediate_size (`int`, *optional*, defaults to `4 * hidden_size`):
            Width of the MLP.
        hidden_act (`str`, defaults to `"gelu"`):
            Activation of the MLP, by its name in transformers.
        max_position_embeddings (`int`, defaults to 1024):
            Number of learned positions. Without `position_embedding_type="learned"` it limits nothing.
        position_embedding_type (`str`, defaults to `"learned"`):
            `"learned"`, `"sinusoidal"` or `"none"`; the last two have no length limit.
        is_causal (`bool`, defaults to `True`):
            Whether a token reads only itself and earlier tokens.
        attention_bias (`bool`, defaults to `True`):
            Whether the query, key, value and output projections have biases.
        mlp_bias (`bool`, defaults to `True`):
            Whether the MLP has biases.
        hidden_dropout (`float`, defaults to 0.0):
            Dropout on the embeddings and on what each mixer and MLP adds to the hidden states.
        layer_norm_eps (`float`, defaults to 1e-5):
            Epsilon of the layer norms.
        attention_eps (`float`, defaults to 1e-6):
            Added to the normaliser when memory is read.
        variance_floor (`float`, defaults to 1e-4):
            Smallest variance a component can have.
        chunk_size (`int`, defaults to 64):
            Tokens that a causal mixer handles at once. Changes speed and memory, not results.
        initializer_range (`float`, defaults to 0.02):
            Standard deviation of weights and embeddings at the start.
        residual_initializer_range (`float`, *optional*, defaults to `initializer_range / (2 * num_hidden_layers)`):
            Standard deviation, at the start, of the last projection of each mixer and MLP, whose output is added to
            the hidden states.
        forget_gate (`bool`, defaults to `False`):
            Whether each GMA head scales its memory before each token by a learned, token-dependent factor. Causal
            only.
        output_gate (`bool`, defaults to `False`):
            Whether a token scales what the heads bring it, value by value, by a learned factor (silu of a projection),
            and has its own value in it, as much as is learned.
        layer_types (`list[str]`, *optional*):
            What each layer is, by transformers' names: `"linear_attention"`, all heads GMA, which is the default;
            `"hybrid_sliding"`, the first `num_local_heads` heads exact softmax attention within `sliding_window` and
            the others GMA; `"sliding_attention"`, all heads such local ones.
        num_local_heads (`int`, *optional*, defaults to half of `num_attention_heads`):
            Local heads in each `"hybrid_sliding"` layer.
        sliding_window (`int`, defaults to 128):
            Tokens that a local head sees, padding not counted: its own and the `sliding_window - 1` before it, and in
            a bidirectional model as many after it.
        rope_parameters (`dict`, *optional*, defaults to `{"rope_type": "default", "rope_theta": 10000.0}`):
            Rotary positions, which local heads have, and they alone. With `position_embedding_type="none"` they give
            order without a length limit.
        tie_word_embeddings (`bool`, defaults to `True`):
            Whether language-model heads share the input embeddings.
        use_cache (`bool`, defaults to `True`):
            Whether a causal model returns its state to continue from.
        classifier_pooling (`str`, *optional*):
            What `GMAForSequenceClassification` classifies: the `"mean"` of the tokens or the `"last"` token. By
            default `"last"` for causal models and `"mean"` for bidirectional ones.
        output_responsibilities (`bool`, defaults to `False`):
            Whether the models return query and key responsibilities.
        pad_token_id, bos_token_id, eos_token_id (`int`, *optional*):
            Special tokens.

    Example:

    ```python
    >>> from configuration_gma import GMAConfig
    >>> from modeling_gma import GMAForCausalLM

    >>> config = GMAConfig(hidden_size=256, num_hidden_layers=4, num_components=64)
    >>> model = GMAForCausalLM(config)
    ```
    """

    model_type = "gma"
    keys_to_ignore_at_inference = ["past_key_values", "responsibilities"]

    vocab_size: int = 50257
    hidden_size: int = 512
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    num_components: int = 128
    routing_dim: int | None = None
    value_dim: int | None = None
    intermediate_size: int | None = None
    hidden_act: str = "gelu"
    max_position_embeddings: int = 1024
    position_embedding_type: Literal["learned", "sinusoidal", "none"] = "learned"
    is_causal: bool = True
    attention_bias: bool = True
    mlp_bias: bool = True
    hidden_dropout: float | int = 0.0
    layer_norm_eps: float = 1e-5
    attention_eps: float = 1e-6
    variance_floor: float = 1e-4
    chunk_size: int = 64
    initializer_range: float = 0.02
    residual_initializer_range: float | None = None
    forget_gate: bool = False
    output_gate: bool = False
    layer_types: list[str] | None = None
    num_local_heads: int | None = None
    sliding_window: int = 128
    rope_parameters: dict | None = None
    tie_word_embeddings: bool = True
    use_cache: bool = True
    classifier_pooling: Literal["mean", "last"] | None = None
    output_responsibilities: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs):
        head_dim = self.hidden_size // self.num_attention_heads if self.num_attention_heads else 0
        divides = head_dim * self.num_attention_heads == self.hidden_size
        if not divides and (self.routing_dim is None or self.value_dim is None):
            raise ValueError(
                f"`hidden_size` ({self.hidden_size}) must be a multiple of `num_attention_heads` "
                f"({self.num_attention_heads}), or `routing_dim` and `value_dim` must both be given."
            )
        self.routing_dim = head_dim if self.routing_dim is None else self.routing_dim
        self.value_dim = head_dim if self.value_dim is None else self.value_dim
        self.intermediate_size = 4 * self.hidden_size if self.intermediate_size is None else self.intermediate_size
        super().__post_init__(**kwargs)

    def validate_architecture(self):
        """Part of `@strict`-powered validation."""
        sizes = (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_components",
            "routing_dim",
            "value_dim",
            "intermediate_size",
            "max_position_embeddings",
            "chunk_size",
            "sliding_window",
        )
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")
        for name in (
            "layer_norm_eps",
            "attention_eps",
            "variance_floor",
            "initializer_range",
            "residual_initializer_range",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"`{name}` must be above 0, got {getattr(self, name)}.")
        if not 0 <= self.hidden_dropout < 1:
            raise ValueError(f"`hidden_dropout` must be at least 0 and below 1, got {self.hidden_dropout}.")
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"`hidden_act` must be one of {sorted(ACT2FN)}, got {self.hidden_act!r}.")
        if self.forget_gate and not self.is_causal:
            raise ValueError("`forget_gate=True` needs `is_causal=True`: forgetting has a direction.")
        if vars(self)["layer_types"] is not None:
            self._validate_local_heads()

    def _validate_local_heads(self):
        kinds, heads = self.layer_types, self.num_attention_heads
        if len(kinds) != self.num_hidden_layers or not set(kinds) <= set(LAYER_TYPES):
            raise ValueError(
                f"`layer_types` must name one of {list(LAYER_TYPES)} for each of the {self.num_hidden_layers} layers "
                f"(`num_hidden_layers`), got {kinds}."
            )
        if "hybrid_sliding" in kinds and not 1 <= self.num_local_heads < heads:
            raise ValueError(
                f'`num_local_heads` must be at least 1 and below `num_attention_heads` ({heads}) in "hybrid_sliding" '
                f"layers, got {self.num_local_heads}."
            )
        if set(kinds) == {"linear_attention"}:
            return
        if self.routing_dim % 2:
            raise ValueError(
                f"`routing_dim` must be even for the rotary positions of local heads, got {self.routing_dim}."
            )
        # Other types stretch positions for longer contexts; distances within a window stay what they are.
        rope = self.rope_parameters
        if set(rope) - {"rope_type", "rope_theta"} or rope["rope_type"] != "default" or not rope["rope_theta"] > 0:
            raise ValueError(
                f'`rope_parameters` must be {{"rope_type": "default", "rope_theta": a number above 0}}, got {rope}.'
            )

    def __getattribute__(self, name):
        value = super().__getattribute__(name)
        # Decided when asked for: `from_pretrained(..., is_causal=False)` changes the default too.
        if value is None:
            if name == "classifier_pooling":
                return "last" if self.is_causal else "mean"
            if name == "layer_types":
                return [self.default_layer_type] * self.num_hidden_layers
            if name == "residual_initializer_range":
                return self.initializer_range / (2 * self.num_hidden_layers)
            if name == "num_local_heads":
                return self.num_attention_heads // 2
        return value

    @property
    def default_layer_type(self) -> str:
        """What a layer is, and transformers' caches build for it, without `layer_types`."""
        return "linear_attention"


__all__ = ["GMAConfig"]
