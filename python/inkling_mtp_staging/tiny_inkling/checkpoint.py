"""Write a checkpoint folder: config, tokenizer, weights and the recipe they follow."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Iterable

from inkling_mtp_staging.tiny_inkling.recipe import Recipe
from inkling_mtp_staging.tiny_inkling.shape import write_config
from inkling_mtp_staging.tiny_inkling.tokenizer import write_tokenizer

if TYPE_CHECKING:
    import torch

SHARD_BYTES = 2 << 30
READABLE_BY_ALL = 0o644  # safetensors makes files that only their owner can read


def write_weights(model_dir: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
    """Write safetensors shards and their index; return the bytes of all tensors."""
    from safetensors.torch import save_file

    weight_map, shard = {}, {}
    total = size = 0

    def flush():
        name = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
        save_file(shard, model_dir / name)
        (model_dir / name).chmod(READABLE_BY_ALL)
        weight_map.update(dict.fromkeys(shard, name))

    for name, tensor in tensors:
        if shard and size + tensor.nbytes > SHARD_BYTES:
            flush()
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
    flush()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    text = json.dumps(index, indent=2) + "\n"
    (model_dir / "model.safetensors.index.json").write_text(text)
    return total


def write_checkpoint(out_dir: Path, recipe: Recipe) -> int:
    """Write the whole checkpoint, or nothing; return the bytes of all tensors.

    Raises FileExistsError if ``out_dir`` has anything in it.
    """
    from inkling_mtp_staging.tiny_inkling.weights import tensors

    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise FileExistsError(f"{out_dir} is not an empty folder; name another")
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=out_dir.name + ".", dir=out_dir.parent
    ) as partial:
        model_dir = Path(partial) / "model"
        write_config(model_dir, recipe.shape)
        write_tokenizer(model_dir, recipe.shape.vocab_size)
        weights = tensors(recipe.shape, recipe.election(), recipe.seed)
        total = write_weights(model_dir, weights)
        recipe.save(model_dir)
        model_dir.replace(out_dir)
    return total
