"""GMA models: Gaussian mixture attention in a pre-norm transformer, causal or bidirectional."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    MaskedLMOutput,
    SequenceClassifierOutputWithPast,
    TokenClassifierOutput,
)
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple, logging
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from configuration_gma import GMAConfig

from .attention import (
    OWN_VALUE,
    GMAAttention,
    GMAForgetGate,
    GMAOutputGate,
    GMAQueryProjection,
    cached_count,
    check_cache,
    count_tokens,
    let_cache_tell_length,
)
from .chunked import sequence_of_token
from .functional import can_look_inside
from .linear import Linear, ResidualProjection
from .mixture import GaussianMixture
from .sliding import rotary_positions


logger = logging.get_logger(__name__)


class GMAKwargs(TransformersKwargs, total=False):
    """
    output_responsibilities (`bool`, *optional*):
        Whether to return query and key responsibilities of every layer.
    """

    output_responsibilities: bool | None


@dataclass
class GMAModelOutput(BaseModelOutputWithPast):
    """
    responsibilities (`tuple` of pairs of `torch.FloatTensor`, *optional*):
        For every layer, query and key responsibilities of its GMA heads, each (batch, heads, length, components);
        without such heads there are 0. Returned with `output_responsibilities=True`.
    """

    responsibilities: tuple[tuple[torch.FloatTensor, torch.FloatTensor], ...] | None = None


@dataclass
class GMACausalLMOutput(CausalLMOutputWithPast):
    responsibilities: tuple[tuple[torch.FloatTensor, torch.FloatTensor], ...] | None = None


@dataclass
class GMAMaskedLMOutput(MaskedLMOutput):
    responsibilities: tuple[tuple[torch.FloatTensor, torch.FloatTensor], ...] | None = None


@dataclass
class GMASequenceClassifierOutput(SequenceClassifierOutputWithPast):
    responsibilities: tuple[tuple[torch.FloatTensor, torch.FloatTensor], ...] | None = None


@dataclass
class GMATokenClassifierOutput(TokenClassifierOutput):
    responsibilities: tuple[tuple[torch.FloatTensor, torch.FloatTensor], ...] | None = None


class GMAMLP(nn.Module):
    def __init__(self, config: GMAConfig):
        super().__init__()
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.act_fn = ACT2FN[config.hidden_act]
        self.down_proj = ResidualProjection(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.up_proj(hidden_states)))


class GMALayer(GradientCheckpointingLayer):
    """Pre-norm block: norm, mixer, residual; norm, MLP, residual. Only `mixer` makes it GMA."""

    mixer_class = GMAAttention

    def __init__(self, config: GMAConfig, layer_idx: int):
        super().__init__()
        self.mixer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mixer = self.mixer_class(config, layer_idx)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = GMAMLP(config)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        mixed, *_ = self.mixer(self.mixer_norm(hidden_states), **kwargs)
        hidden_states = hidden_states + self.dropout(mixed)
        return hidden_states + self.dropout(self.mlp(self.mlp_norm(hidden_states)))


class GMAPositions(nn.Module):
    """Position embeddings: a table, sinusoids computed where they are needed, or nothing."""

    def __init__(self, config: GMAConfig):
        super().__init__()
        self.config = config
        if config.position_embedding_type == "learned":
            self.embedding = nn.Embedding(config.max_position_embeddings, config.hidden_size)

    def forward(self, hidden_states: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        kind = self.config.position_embedding_type
        if kind == "none":
            return hidden_states
        if kind == "learned":
            return hidden_states + self.embedding(position_ids)
        half = (hidden_states.shape[-1] + 1) // 2
        frequencies = torch.exp(torch.arange(half, device=hidden_states.device) * (-math.log(10000.0) / half))
        angles = position_ids.unsqueeze(-1).to(torch.float32) * frequencies
        sinusoids = torch.cat([angles.sin(), angles.cos()], dim=-1)[..., : hidden_states.shape[-1]]
        # As strong as learned positions are at the start: at full size they would drown the token embeddings.
        return hidden_states + (sinusoids * (self.config.initializer_range * math.sqrt(2))).to(hidden_states.dtype)


class GMAPreTrainedModel(PreTrainedModel):
    config_class = GMAConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["GMALayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _is_stateful = True
    _can_compile_fullgraph = True
    # What local heads can run on; GMA heads have kernels of their own.
    _supports_sdpa = True
    _supports_flash_attn = True
    _can_record_outputs = {
        "hidden_states": GMALayer,
        "attentions": OutputRecorder(GMAAttention, index=1),
        "responsibilities": OutputRecorder(GMAAttention, index=2),
    }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        # Routing vectors are projections of normalised hidden states.
        routing_std = self.config.initializer_range * math.sqrt(self.config.hidden_size)
        if isinstance(module, GaussianMixture):
            module.reset_parameters(routing_std)
        elif isinstance(module, GMAQueryProjection):
            module.reset_bias(routing_std)
        elif isinstance(module, GMAForgetGate):
            module.reset_bias()
        elif isinstance(module, GMAOutputGate):
            init.constant_(module.own_norm, OWN_VALUE)
        elif isinstance(module, ResidualProjection):
            residual_std = self.config.residual_initializer_range
            # As wide as the others, it stays as drawn with them.
            if residual_std != self.config.initializer_range:
                init.normal_(module.weight, std=residual_std)


class GMAModel(GMAPreTrainedModel):
    """Embeddings, GMA blocks and a final norm, without a head."""

    layer_class = GMALayer

    def __init__(self, config: GMAConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = GMAPositions(config)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.layers = nn.ModuleList([self.layer_class(config, index) for index in range(config.num_hidden_layers)])
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[GMAKwargs],
    ) -> GMAModelOutput:
        r"""
        Args:
            input_ids: (batch, length) token ids; exactly one of `input_ids` and `inputs_embeds` must be given.
            attention_mask: (batch, length) with 1 for tokens and 0 for padding, anywhere. With a cache it may also
                cover the tokens that the cache has seen.
            position_ids: (batch, length). By default tokens that are not padding are counted, from where the cache
                ends. Given without mask and cache, positions that do not count on by one begin a packed sequence.
            past_key_values: the cache of an earlier call, or `DynamicCache(config=model.config)`.
            inputs_embeds: (batch, length, hidden_size).
            use_cache: whether to return the cache; by default the config's, and False while training.
            cu_seq_lens_q, seq_idx: where packed sequences begin, as `DataCollatorWithFlattening` sends them.
            output_hidden_states, output_attentions, output_responsibilities: whether to return them for every layer.
                Attentions are the induced weights, and of local heads the softmax weights, formed only here:
                quadratic in length. With a cache they are those among the new tokens.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError(
                "Exactly one of `input_ids` and `inputs_embeds` must be given, got "
                f"{'neither' if input_ids is None else 'both'}."
            )
        is_causal = self._option(kwargs, "is_causal")
        output_attentions = self._option(kwargs, "output_attentions")
        output_responsibilities = self._option(kwargs, "output_responsibilities")
        if past_key_values is not None and not is_causal:
            raise ValueError("`past_key_values` needs a causal model (`is_causal=True`).")
        if self.gradient_checkpointing and self.training:
            if past_key_values is not None:
                logger.warning_once("`past_key_values` is left out: gradient checkpointing would write it twice.")
            use_cache, past_key_values = False, None
        if inputs_embeds is None:
            self._check_token_ids(input_ids)
            self.warn_if_padding_and_no_attention_mask(input_ids, attention_mask)
            inputs_embeds = self.embed_tokens(input_ids)
        elif inputs_embeds.dim() != 3 or inputs_embeds.shape[-1] != self.config.hidden_size:
            raise ValueError(
                f"`inputs_embeds` must be (batch, length, {self.config.hidden_size}), got "
                f"{tuple(inputs_embeds.shape)}."
            )
        if past_key_values is not None:
            check_cache(past_key_values, [layer.mixer for layer in self.layers], self.config, inputs_embeds.shape[0])

        cu_seqlens = self._packed_sequences(inputs_embeds, attention_mask, position_ids, past_key_values, kwargs)
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if use_cache and is_causal and cu_seqlens is None and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if past_key_values is not None and not torch.compiler.is_compiling():
            let_cache_tell_length(past_key_values)

        attention_mask = self._local_mask(attention_mask, inputs_embeds, past_key_values)
        if position_ids is None:
            position_ids = self._count_positions(inputs_embeds, attention_mask, past_key_values, cu_seqlens)
        self._check_positions(position_ids, inputs_embeds)
        hidden_states = self.dropout(self.positions(inputs_embeds, position_ids))

        position_embeddings = None
        if not {"hybrid_sliding", "sliding_attention"}.isdisjoint(self.config.layer_types):
            theta = self.config.rope_parameters["rope_theta"]
            position_embeddings = rotary_positions(position_ids, self.config.routing_dim, theta)
        tokens_seen = None if past_key_values is None else count_tokens(past_key_values, attention_mask, inputs_embeds)
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                tokens_seen=tokens_seen,
                cu_seqlens=cu_seqlens,
                position_ids=position_ids,
                position_embeddings=position_embeddings,
                is_causal=is_causal,
                output_attentions=output_attentions,
                output_responsibilities=output_responsibilities,
            )
        return GMAModelOutput(last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values)

    def _option(self, kwargs: dict, name: str):
        value = kwargs.pop(name, None)
        return getattr(self.config, name) if value is None else value

    def _check_token_ids(self, input_ids: torch.Tensor) -> None:
        if input_ids.dim() != 2:
            raise ValueError(f"`input_ids` must be (batch, length), got {tuple(input_ids.shape)}.")
        if can_look_inside(input_ids) and input_ids.numel():
            smallest, largest = input_ids.aminmax()
            vocab_size = getattr(self.embed_tokens, "num_embeddings", self.config.vocab_size)
            if smallest < 0 or largest >= vocab_size:
                raise ValueError(
                    f"`input_ids` must lie between 0 and {vocab_size - 1} (`vocab_size` is {vocab_size}), got ids "
                    f"from {smallest.item()} to {largest.item()}."
                )

    def _local_mask(self, attention_mask, inputs_embeds, past_key_values) -> torch.Tensor | None:
        """The mask of the new tokens, (B, N) bool, or None where nothing is padding."""
        if attention_mask is None:
            return None
        batch, length = inputs_embeds.shape[:2]
        seen = cached_count(past_key_values)
        lengths = {length}
        if seen is not None:
            # Where the count cannot be read for free, any mask that reaches over the new tokens is believed.
            seen = int(seen[0, 0, 0]) if can_look_inside(seen) else max(0, attention_mask.shape[-1] - length)
            lengths.add(seen + length)
        if attention_mask.dim() != 2 or attention_mask.shape[0] != batch or attention_mask.shape[1] not in lengths:
            raise ValueError(
                f"`attention_mask` must be (batch, length), here ({batch}, {' or '.join(map(str, sorted(lengths)))}), "
                f"with 1 for tokens and 0 for padding, got shape {tuple(attention_mask.shape)}. GMA takes no mask of "
                f"token pairs."
            )
        if can_look_inside(attention_mask):
            if not ((attention_mask == 0) | (attention_mask == 1)).all():
                raise ValueError("`attention_mask` must hold only 1 for tokens and 0 for padding.")
            if attention_mask[:, -length:].all():
                return None
        elif attention_mask.is_floating_point():
            # Unseen, it could be an additive mask, which means the opposite.
            raise ValueError(f"`attention_mask` must be of integers or bool here, got {attention_mask.dtype}.")
        return attention_mask[:, -length:].to(device=inputs_embeds.device, dtype=torch.bool)

    def _count_positions(self, inputs_embeds, attention_mask, past_key_values, cu_seqlens) -> torch.Tensor:
        """Positions (B, N) of the new tokens among those of their sequence that are not padding."""
        batch, length = inputs_embeds.shape[:2]
        device = inputs_embeds.device
        if cu_seqlens is not None:
            valid = attention_mask if attention_mask is not None else torch.ones(batch, length, device=device)
            before = nn.functional.pad(valid.flatten().long().cumsum(0), (1, 0))
            starts = cu_seqlens.to(device)[sequence_of_token(cu_seqlens.to(device), batch * length) - 1].long()
            return (before[1:] - 1 - before[starts]).clamp(min=0).view(batch, length)
        if attention_mask is None:
            self._check_limit(0, length - 1)
            positions = torch.arange(length, device=device).unsqueeze(0)
        else:
            positions = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        seen = cached_count(past_key_values)
        return positions if seen is None else positions + seen[:, 1].to(device)

    def _check_positions(self, position_ids: torch.Tensor, inputs_embeds: torch.Tensor) -> None:
        batch, length = inputs_embeds.shape[:2]
        if position_ids.dim() != 2 or position_ids.shape[0] not in (1, batch) or position_ids.shape[1] != length:
            raise ValueError(f"`position_ids` must be {(batch, length)}, got {tuple(position_ids.shape)}.")
        if can_look_inside(position_ids) and position_ids.numel():
            self._check_limit(int(position_ids.min()), int(position_ids.max()))

    def _check_limit(self, first: int, last: int) -> None:
        limit = self.config.max_position_embeddings
        if self.config.position_embedding_type == "learned" and (first < 0 or last >= limit):
            raise ValueError(
                f"Learned positions end at `max_position_embeddings` = {limit}, got positions from {first} to {last}. "
                f'Shorten the input, or use a model whose `position_embedding_type` is "sinusoidal" or "none".'
            )

    def _packed_sequences(
        self, inputs_embeds, attention_mask, position_ids, past_key_values, kwargs
    ) -> torch.Tensor | None:
        """Boundaries of packed sequences over all rows, taken out of `kwargs` or seen in `position_ids`."""
        batch, length = inputs_embeds.shape[:2]
        cu_seqlens, seq_idx = kwargs.pop("cu_seq_lens_q", None), kwargs.pop("seq_idx", None)
        for name in ("cu_seq_lens_k", "max_length_q", "max_length_k"):
            kwargs.pop(name, None)
        if (cu_seqlens is not None or seq_idx is not None) and past_key_values is not None:
            raise ValueError("Packed sequences (`cu_seq_lens_q` or `seq_idx`) do not go with `past_key_values`.")
        if cu_seqlens is not None:
            if batch != 1:
                raise ValueError(f"`cu_seq_lens_q` takes sequences packed into one row, got a batch of {batch}.")
            return cu_seqlens
        if seq_idx is not None:
            if seq_idx.shape != (batch, length):
                raise ValueError(f"`seq_idx` must be {(batch, length)}, got {tuple(seq_idx.shape)}.")
            starts = seq_idx.diff(dim=-1) != 0
        elif position_ids is not None and attention_mask is None and cached_count(past_key_values) is None:
            starts = restarts(position_ids.expand(batch, -1))
            if torch.compiler.is_compiling():
                if past_key_values is not None:
                    return None
            elif not starts.any():
                return None
            elif past_key_values is not None:
                raise ValueError("`position_ids` that begin again pack sequences, which do not go with a cache.")
        else:
            return None
        starts = nn.functional.pad(starts, (1, 0), value=True).flatten()
        tokens = torch.arange(batch * length + 1, device=starts.device)
        if torch.compiler.is_compiling():
            # As many boundaries as could be, the spare ones at the end, so that the graph fits any packing.
            boundaries = torch.where(starts, tokens[:-1], tokens[-1:]).sort().values
        else:
            boundaries = starts.nonzero().flatten()
        return torch.cat([boundaries, tokens[-1:]])


def restarts(position_ids: torch.Tensor) -> torch.Tensor:
    """Where, from the second token on, positions do not go on but begin a new packed sequence: (B, N - 1)."""
    return position_ids.diff(dim=-1) < 1


class GMAForCausalLM(GMAPreTrainedModel, GenerationMixin):
    """GMA as a causal language model."""

    model_class = GMAModel
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: GMAConfig):
        super().__init__(config)
        if not config.is_causal:
            raise ValueError(
                "`GMAForCausalLM` needs `is_causal=True`: a bidirectional model sees the token to predict."
            )
        self.model = self.model_class(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Unpack[GMAKwargs],
    ) -> GMACausalLMOutput:
        r"""
        Args:
            labels: (batch, length) token ids, shifted here; -100 is left out of the loss.
            logits_to_keep: compute logits for that many last tokens only (0 for all), or for these positions.

        The others as in `GMAModel`.

        ```python
        >>> from transformers import AutoModelForCausalLM, AutoTokenizer
        >>> import modeling_gma

        >>> model = AutoModelForCausalLM.from_pretrained("path/to/model")
        >>> tokenizer = AutoTokenizer.from_pretrained("path/to/model")
        >>> tokens = model.generate(**tokenizer("The for statement", return_tensors="pt"), max_new_tokens=20)
        ```
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return GMACausalLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            responsibilities=outputs.responsibilities,
        )

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        if model_kwargs.get("past_key_values") is not None:
            let_cache_tell_length(model_kwargs["past_key_values"])

    @staticmethod
    def create_masks_for_generate(config, inputs_embeds, attention_mask, **kwargs) -> torch.Tensor | None:
        """Padding is all that GMA masks, and `GMAModel` takes the mask as it is."""
        return attention_mask


class GMAForMaskedLM(GMAPreTrainedModel):
    """GMA as a masked language model, for bidirectional pretraining."""

    model_class = GMAModel
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: GMAConfig):
        super().__init__(config)
        if config.is_causal:
            logger.warning_once(
                "`GMAForMaskedLM` with `is_causal=True` predicts masked tokens from the left only; set it to False."
            )
        self.model = self.model_class(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs: Unpack[GMAKwargs],
    ) -> GMAMaskedLMOutput:
        r"""
        Args:
            labels: (batch, length) token ids, -100 where nothing is to be predicted.

        The others as in `GMAModel`.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **({"use_cache": False} | kwargs),
        )
        logits = self.lm_head(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return GMAMaskedLMOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            responsibilities=outputs.responsibilities,
        )


class GMAForSequenceClassification(GMAPreTrainedModel):
    """GMA with one linear classifier on the mean of the tokens or on the last one (`config.classifier_pooling`)."""

    model_class = GMAModel

    # The loss is a mean over rows; `Trainer` has to do the averaging over accumulated batches.
    accepts_loss_kwargs = False

    def __init__(self, config: GMAConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = self.model_class(config)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.score = Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[GMAKwargs],
    ) -> GMASequenceClassifierOutput:
        r"""
        Args:
            labels: (batch,) classes, or (batch, num_labels) for several labels or regression.

        The others as in `GMAModel`. Padding is what `attention_mask` says it is, on any side.
        """
        for name in ("cu_seq_lens_q", "seq_idx"):
            if kwargs.get(name) is not None:
                raise ValueError(f"`{name}`: packed sequences cannot be classified one by one; pad them instead.")
        can_be_packed = position_ids is not None and attention_mask is None and not torch.compiler.is_compiling()
        if can_be_packed and restarts(position_ids).any():
            raise ValueError("`position_ids`: packed sequences cannot be classified one by one; pad them instead.")
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=False if use_cache is None else use_cache,
            **kwargs,
        )
        pooled = self._pool(outputs.last_hidden_state, attention_mask)
        logits = self.score(self.dropout(pooled))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config)
        return GMASequenceClassifierOutput(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            responsibilities=outputs.responsibilities,
        )

    def _pool(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """(B, N, D) -> (B, D) over the tokens that are not padding."""
        batch, length = hidden_states.shape[:2]
        if attention_mask is None:
            return hidden_states.mean(1) if self.config.classifier_pooling == "mean" else hidden_states[:, -1]
        mask = attention_mask[:, -length:].to(hidden_states.device)
        if self.config.classifier_pooling == "mean":
            mask = mask.to(hidden_states.dtype).unsqueeze(-1)
            return (hidden_states * mask).sum(1) / mask.sum(1).clamp(min=1)
        last = (mask != 0).long().mul(torch.arange(1, length + 1, device=mask.device)).argmax(-1)
        return hidden_states[torch.arange(batch, device=mask.device), last]


class GMAForTokenClassification(GMAPreTrainedModel):
    """GMA with one linear classifier on every token."""

    model_class = GMAModel

    # The loss is a mean over tokens; `Trainer` has to do the averaging over accumulated batches.
    accepts_loss_kwargs = False

    def __init__(self, config: GMAConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = self.model_class(config)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.score = Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs: Unpack[GMAKwargs],
    ) -> GMATokenClassifierOutput:
        r"""
        Args:
            labels: (batch, length) classes, -100 for tokens to leave out.

        The others as in `GMAModel`.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **({"use_cache": False} | kwargs),
        )
        logits = self.score(self.dropout(outputs.last_hidden_state))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config)
        return GMATokenClassifierOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            responsibilities=outputs.responsibilities,
        )


# By these tables pipelines know the models they are for, and `Trainer` that it has to shift labels that it smooths.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["gma"] = GMAForCausalLM.__name__
MODEL_FOR_MASKED_LM_MAPPING_NAMES["gma"] = GMAForMaskedLM.__name__
MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES["gma"] = GMAForSequenceClassification.__name__
MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES["gma"] = GMAForTokenClassification.__name__

__all__ = [
    "GMAForCausalLM",
    "GMAForMaskedLM",
    "GMAForSequenceClassification",
    "GMAForTokenClassification",
    "GMAModel",
    "GMAPreTrainedModel",
]
