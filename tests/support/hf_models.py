"""Tiny random models of the transformers library, unmodified, with a batch for each; nothing is downloaded.

The library is imported when a model is built: it takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .oracle import Case
from .zoo import generator

VOCAB = 61
DIM = 32
_DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": DIM,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
Batch = Callable[[int, int], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Kind:
    """``name`` is the model class, whose configuration is made of ``shape``; ``batch(step, rank)``."""

    name: str
    config: str
    shape: dict[str, Any]
    batch: Batch
    blocks: tuple[str, ...]
    """Classes whose modules must be the units, beside the root."""
    generates: bool = True

    def empty(self) -> nn.Module:
        """As its constructor makes it, with dropout as the library has it. The seed is the caller's."""
        import transformers

        shape = getattr(transformers, self.config)(**self.shape)
        model: nn.Module = getattr(transformers, self.name)(shape)
        return model.train()

    def build(self) -> nn.Module:
        """With random values in place of zeros, which would hide what is lost."""
        model = self.empty()
        with torch.no_grad():
            for parameter in model.parameters():
                if not parameter.any():
                    parameter.normal_(std=0.1)
        return model

    def case(self, steps: int = 5, clip: float | None = 1.0) -> Case:
        # The bias of an attention's keys has no gradient but rounding, which Adam would amplify with a smaller eps.
        return Case(self.build, self.loss, steps=steps, eps=1e-4, clip=clip)

    def loss(self, model: nn.Module, step: int, rank: int) -> torch.Tensor:
        found = model(**self.batch(step, rank)).loss
        assert isinstance(found, torch.Tensor)
        return found


def _ids(step: int, rank: int, length: int = 9) -> torch.Tensor:
    return torch.randint(3, VOCAB, (2, length), generator=generator(step, rank))


def _causal(step: int, rank: int) -> dict[str, torch.Tensor]:
    """Ids of two rows, the second padded at its end."""
    ids = _ids(step, rank)
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def _masked(step: int, rank: int) -> dict[str, torch.Tensor]:
    ids = _ids(step, rank)
    hidden = torch.rand(ids.shape, generator=generator(step, 50 + rank)) < 0.4
    hidden[0, 0] = True
    return {"input_ids": ids.masked_fill(hidden, 3), "labels": ids.masked_fill(~hidden, -100)}


def _translated(step: int, rank: int) -> dict[str, torch.Tensor]:
    return {"input_ids": _ids(step, rank), "labels": _ids(step, 50 + rank, 6)}


def _pictures(step: int, rank: int) -> dict[str, torch.Tensor]:
    draw = generator(step, rank)
    return {"pixel_values": torch.randn(2, 3, 8, 8, generator=draw), "labels": torch.randint(3, (2,), generator=draw)}


def _speech(step: int, rank: int) -> dict[str, torch.Tensor]:
    features = torch.randn(2, 8, 16, generator=generator(step, rank))
    return {"input_features": features, "labels": _ids(step, 50 + rank, 6)}


_EXPERTS = {"num_local_experts": 6, "num_experts": 6, "num_experts_per_tok": 1, "output_router_logits": True}

MODELS: dict[str, Kind] = {
    "gpt2": Kind(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": VOCAB, "n_embd": DIM, "n_layer": 2, "n_head": 4, "n_positions": 32, "bos_token_id": 1}
        | {"eos_token_id": 2, "pad_token_id": 0},
        _causal,
        ("GPT2Block",),
    ),
    "llama": Kind("LlamaForCausalLM", "LlamaConfig", _DECODER, _causal, ("LlamaDecoderLayer",)),
    "qwen3": Kind("Qwen3ForCausalLM", "Qwen3Config", _DECODER, _causal, ("Qwen3DecoderLayer",)),
    "gemma": Kind("GemmaForCausalLM", "GemmaConfig", _DECODER, _causal, ("GemmaDecoderLayer",)),
    "gemma2": Kind("Gemma2ForCausalLM", "Gemma2Config", _DECODER, _causal, ("Gemma2DecoderLayer",)),
    "gemma3": Kind("Gemma3ForCausalLM", "Gemma3TextConfig", _DECODER, _causal, ("Gemma3DecoderLayer",)),
    "mixtral": Kind("MixtralForCausalLM", "MixtralConfig", _DECODER | _EXPERTS, _causal, ("MixtralDecoderLayer",)),
    "qwen2-moe": Kind(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        _DECODER | _EXPERTS | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
        _causal,
        ("Qwen2MoeDecoderLayer",),
    ),
    "t5": Kind(
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": VOCAB, "d_model": DIM, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        | {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0},
        _translated,
        ("T5Block",),
    ),
    "bert": Kind(
        "BertForMaskedLM",
        "BertConfig",
        {key: value for key, value in _DECODER.items() if key not in ("num_key_value_heads", "head_dim")},
        _masked,
        ("BertLayer",),
        generates=False,
    ),
    "vit": Kind(
        "ViTForImageClassification",
        "ViTConfig",
        {"hidden_size": DIM, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
        | {"image_size": 8, "patch_size": 4, "num_labels": 3},
        _pictures,
        ("ViTLayer",),
        generates=False,
    ),
    "whisper": Kind(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {"vocab_size": VOCAB, "d_model": DIM, "encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 8}
        | {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
        | {"max_source_positions": 8, "max_target_positions": 24, "pad_token_id": 0, "bos_token_id": 1}
        | {"eos_token_id": 2, "decoder_start_token_id": 1, "begin_suppress_tokens": None, "suppress_tokens": None},
        _speech,
        ("WhisperEncoderLayer", "WhisperDecoderLayer"),
    ),
}
"""By a short name. Experts that no token of a batch is sent to are usual in the mixtures of experts."""
