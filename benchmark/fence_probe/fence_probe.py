"""SGLang plugin that counts which event fences the scheduler, a step at a time, and
marks decode steps in a profiler's trace.

Put this folder on PYTHONPATH and set FENCE_PROBE_OUT to a file. Rank 0 writes it, rank
N a file of that name with ".rankN" behind it. Works on the unpatched release too, where
every step is "coarse" (the whole forward stream).
"""

import contextlib
import json
import os
from collections import Counter

_FLUSH_EVERY = 32
_counts: Counter = Counter()


def _fence(worker) -> str:
    runner = worker.last_shared_read_runner
    if runner.shared_read_done_event is None:
        return "coarse"
    if runner is worker.target_worker.model_runner:
        return "target"
    return "draft"


def _file(worker) -> str:
    path, rank = os.environ["FENCE_PROBE_OUT"], worker._draft_worker.ps.tp_rank
    return path if rank == 0 else f"{path}.rank{rank}"


def _mark(mode: str):
    """A range in the trace, if there is a profiler to write one."""
    import torch

    if mode != "decode" or not torch.autograd.profiler._is_profiler_enabled:
        return contextlib.nullcontext()
    return torch.profiler.record_function("mtp_decode_step")


def _count(original, worker, batch, *args, **kwargs):
    mode = "prefill" if batch.forward_mode.is_extend() else "decode"
    if batch.forward_mode.is_idle():
        mode = "idle"
    with _mark(mode):
        result = original(worker, batch, *args, **kwargs)
    _counts[f"{mode}:{_fence(worker)}"] += 1
    if sum(_counts.values()) % _FLUSH_EVERY == 0 or mode == "prefill":
        path = _file(worker)
        with open(path + ".tmp", "w") as f:
            json.dump(_counts, f)
        os.replace(path + ".tmp", path)
    return result


def install():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if os.environ.get("FENCE_PROBE_OUT"):
        HookRegistry.register(
            "sglang.srt.speculative.multi_layer_eagle_worker_v2"
            ".MultiLayerEagleWorkerV2.forward_batch_generation",
            _count,
            HookType.AROUND,
        )
