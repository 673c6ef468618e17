"""Dimensions of a dense Inkling with MTP heads, and its config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

HEAD_DIM = 128  # the fused attention prologue takes no other
CONV_WIDTH = 4
REL_RANK = 16
FULL_REL_EXTENT = 1024
REL_EXTENT_MULTIPLE = 128  # FlashAttention's relative-bias kernel tiles keys by 128


@dataclass(frozen=True)
class Shape:
    """Every second layer is a sliding-window layer; no layer is a MoE."""

    num_layers: int = 4
    hidden_size: int = 1024
    num_mtp_heads: int = 8
    vocab_size: int = 960
    sliding_window: int = 128
    mtp_local_layer_ids: tuple[int, ...] = ()

    def __post_init__(self):
        if self.hidden_size < 512 or self.hidden_size % HEAD_DIM:
            raise ValueError(
                f"hidden size {self.hidden_size}: use a multiple of {HEAD_DIM}, at "
                "least 512 (four heads)"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"hidden size {self.hidden_size} gives {self.num_heads} heads for "
                f"{self.num_kv_heads} KV heads; use a multiple of 512"
            )
        if self.num_layers < 4:
            raise ValueError(f"{self.num_layers} layers: use at least 4")
        if self.sliding_window < 1 or self.sliding_window % REL_EXTENT_MULTIPLE:
            raise ValueError(
                f"sliding window {self.sliding_window}: use a positive multiple of "
                f"{REL_EXTENT_MULTIPLE}"
            )
        if self.vocab_size % 64 or self.vocab_size < 448:
            raise ValueError(
                f"vocabulary of {self.vocab_size}: use a multiple of 64, at least 448"
            )
        depths = range(self.num_mtp_heads)
        if not set(self.mtp_local_layer_ids) <= set(depths):
            raise ValueError(
                f"sliding-window draft depths {self.mtp_local_layer_ids}: there are "
                f"depths 0 to {self.num_mtp_heads - 1}"
            )

    @property
    def num_heads(self) -> int:
        return self.hidden_size // HEAD_DIM

    @property
    def num_kv_heads(self) -> int:
        return max(self.num_heads // 4, 1)

    @property
    def intermediate_size(self) -> int:
        return 2 * self.hidden_size

    @property
    def local_layer_ids(self) -> list[int]:
        return list(range(1, self.num_layers, 2))

    def rel_extent(self, is_local: bool) -> int:
        return self.sliding_window if is_local else FULL_REL_EXTENT


def write_config(model_dir: Path, shape: Shape) -> None:
    """Write ``config.json`` to ``model_dir``, which is made if need be."""
    text_config = {
        "model_type": "inkling_model",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "dense_intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "dense_mlp_idx": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": HEAD_DIM,
        "d_rel": REL_RANK,
        "rel_extent": FULL_REL_EXTENT,
        "local_layer_ids": shape.local_layer_ids,
        "sliding_window_size": shape.sliding_window,
        "mtp_local_layer_ids": list(shape.mtp_local_layer_ids),
        "use_sconv": True,
        "sconv_kernel_size": CONV_WIDTH,
        "use_embed_norm": True,
        "max_position_embeddings": 65536,
        "model_max_length": 65536,
        "vocab_size": shape.vocab_size,
        "num_nextn_predict_layers": shape.num_mtp_heads,
    }
    config = {
        "architectures": ["InklingForConditionalGeneration"],
        "model_type": "inkling_mm_model",
        "torch_dtype": "bfloat16",
        "audio_config": {},
        "vision_config": {},
        "text_config": text_config,
    }
    model_dir.mkdir(parents=True, exist_ok=True)
    (model_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n")
