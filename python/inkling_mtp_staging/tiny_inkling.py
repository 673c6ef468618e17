"""A small Inkling for demos and benchmarks: the real architecture, few layers."""

from __future__ import annotations

import json
from pathlib import Path


def write_config(
    model_dir: Path,
    *,
    num_layers: int = 16,
    hidden_size: int = 2048,
    num_mtp_heads: int = 8,
    mtp_local_layer_ids: tuple[int, ...] = (),
    sliding_window: int = 512,
    vocab_size: int = 32768,
) -> None:
    """Write ``config.json`` of a dense Inkling with MTP heads to ``model_dir``.

    Every second layer is a sliding-window layer. ``head_dim`` is 128, which the
    fused attention prologue needs; there is no MoE. Weights are not written: load
    it with ``load_format="dummy"``.
    """
    head_dim = 128
    num_heads = hidden_size // head_dim
    text_config = {
        "model_type": "inkling_model",
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "dense_intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "dense_mlp_idx": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": max(num_heads // 4, 1),
        "head_dim": head_dim,
        "d_rel": 16,
        "rel_extent": 1024,
        "local_layer_ids": list(range(1, num_layers, 2)),
        "sliding_window_size": sliding_window,
        "mtp_local_layer_ids": list(mtp_local_layer_ids),
        "use_sconv": True,
        "sconv_kernel_size": 4,
        "use_embed_norm": True,
        "max_position_embeddings": 65536,
        "model_max_length": 65536,
        "vocab_size": vocab_size,
        "num_nextn_predict_layers": num_mtp_heads,
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
