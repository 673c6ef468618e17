"""The multi-layer EAGLE draft extend on a machine without a GPU.

Pools, attention backends, input buffers, graph runners and spec workers are the
real classes. Stood in for, because they need a GPU, are only:

- CUDA graphs: ``RecordedGraph`` notes the kernel launches and tensor ops of a
  capture with the tensors they used, and runs them again on ``replay``. As with a
  CUDA graph, no Python of the captured body runs again, so what a graph reads is
  what was recorded (``RecordedGraph.touches``);
- streams and events: ``RecordingEvent`` / ``RecordingStream`` note their use;
- model runners and the draft model: namespaces with the attributes that the real
  backends read, and a model whose "attention" is a digest of the metadata;
- ``fused_extend_sconv_metadata``, which declines CPU tensors.

Triton kernels run in Triton's interpreter.
"""

import os

import torch

if not torch.cuda.is_available():
    # Kernels bind to the interpreter when they are decorated, at import.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from sglang.test.test_utils import maybe_stub_sgl_kernel

maybe_stub_sgl_kernel()

import contextlib
import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any, Callable, Dict, List, Optional, Tuple
from unittest import mock

from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

from sglang.srt.configs.inkling import (
    InklingConvCacheParams,
    InklingConvStateShape,
    InklingModelConfig,
)
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.distributed.parallel_state_wrapper import ParallelState
from sglang.srt.environ import envs
from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend
from sglang.srt.layers.attention.linear import inkling_sconv_backend
from sglang.srt.layers.attention.linear.inkling_sconv_backend import (
    InklingShortConvAttnBackend,
    InklingShortConvHybridAttnBackend,
)
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.cuda_graph_config import (
    Backend,
    CudaGraphConfig,
    PhaseConfig,
)
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.runtime_context import get_context, get_parallel, get_schedule
from sglang.srt.speculative import (
    multi_layer_eagle_draft_extend_cuda_graph_runner as runner_module,
)
from sglang.srt.speculative import multi_layer_eagle_worker_v2 as worker_module
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

KERNELS_RUN_ON_CPU = not torch.cuda.is_available()

BUCKETS = (1, 2, 4, 8, 16, 32)
NUM_STEPS = 3
MAX_CONTEXT_LEN = 512
SLIDING_WINDOW = 96
SCONV_KERNEL = 4
HIDDEN_SIZE = 8
VOCAB_SIZE = 64


# --- CUDA graphs, launches, streams and events -----------------------------------


_no_dispatch_mode = torch.utils._python_dispatch._disable_current_modes


class _Recorder(TorchDispatchMode):
    """Appends every tensor op to the graph that is being captured."""

    def __init__(self, graph: "RecordedGraph"):
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.graph.ops.append((func, args, kwargs, out))
        return out


class RecordedGraph:
    """A CUDA graph's stand-in; see the module's docstring."""

    _capturing: Optional["RecordedGraph"] = None

    def __init__(self):
        self.ops: List[Tuple[Callable, tuple, dict, Any]] = []
        self.replays = 0

    @contextlib.contextmanager
    def capture(self):
        assert RecordedGraph._capturing is None, "captures do not nest"
        RecordedGraph._capturing = self
        try:
            with _Recorder(self):
                yield self
        finally:
            RecordedGraph._capturing = None

    def replay(self):
        self.replays += 1
        with LAUNCHES.as_one("graph"), _no_dispatch_mode():
            for func, args, kwargs, recorded in self.ops:
                out = func(*args, **kwargs)
                for new, old in zip(_tensors(out), _tensors(recorded)):
                    # The result lives where capture put it; views already do.
                    if new.data_ptr() != old.data_ptr():
                        old.copy_(new)

    def touches(self, tensor: torch.Tensor) -> bool:
        """Whether a recorded launch or op has ``tensor``'s memory as an argument."""
        storage = tensor.untyped_storage().data_ptr()
        return any(
            argument.untyped_storage().data_ptr() == storage
            for _, args, kwargs, _ in self.ops
            for argument in _tensors((args, kwargs))
        )


def _tensors(value) -> List[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return list(itertools.chain.from_iterable(map(_tensors, value)))


@contextlib.contextmanager
def _cuda_graph(graph: RecordedGraph):
    """``torch.cuda.graph`` of a ``RecordedGraph``."""
    with graph.capture():
        yield


class LaunchLog:
    """Names of what was launched, in order. A graph replay is one launch."""

    def __init__(self):
        self.names: List[str] = []
        self._inside = False

    @contextlib.contextmanager
    def as_one(self, name: str):
        if self._inside:
            yield
            return
        self.names.append(name)
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    @contextlib.contextmanager
    def of(self):
        """The names launched while the block runs."""
        names: List[str] = []
        saved, self.names = self.names, names
        try:
            yield names
        finally:
            self.names = saved
            self.names.extend(names)


LAUNCHES = LaunchLog()
_run_kernel = InterpretedFunction.run


def _recorded_run(kernel, *args, grid, warmup, **kwargs):
    """Run a Triton kernel and note the launch."""

    def launch(*args, **kwargs):
        # The interpreter's own tensor ops are not the program's.
        with _no_dispatch_mode():
            _run_kernel(kernel, *args, grid=grid, warmup=False, **kwargs)

    if RecordedGraph._capturing is not None:
        RecordedGraph._capturing.ops.append((launch, args, kwargs, None))
    with LAUNCHES.as_one(kernel.__name__):
        launch(*args, **kwargs)


class RecordedGraphBackend:
    """The decode graph backend, over ``RecordedGraph``."""

    def __init__(self, runner):
        self.runner = runner
        self.graphs: Dict[Any, RecordedGraph] = {}
        self.outputs: Dict[Any, Any] = {}

    def can_run(self, forward_batch, shape_key) -> bool:
        return shape_key in self.graphs

    def capture_one(self, shape_key, forward_fn, **kwargs):
        forward_fn()  # warm-up, as the real backends do
        graph = RecordedGraph()
        with graph.capture():
            self.outputs[shape_key] = forward_fn()
        self.graphs[shape_key] = graph

    def replay(self, shape_key, forward_batch):
        self.graphs[shape_key].replay()
        return self.outputs[shape_key]


class RecordingEvent:
    """An event that counts its records and shows up among the launches."""

    def __init__(self, *args, **kwargs):
        self.records = 0

    def record(self, stream=None):
        self.records += 1
        LAUNCHES.names.append("event")


class RecordingStream:
    """A stream that lists the events and streams it was told to wait for."""

    def __init__(self):
        self.waits: List[Any] = []

    def wait_event(self, event):
        self.waits.append(event)

    def wait_stream(self, stream):
        self.waits.append(stream)


# --- configuration and the CPU stand-ins -----------------------------------------


def _fused_extend_sconv_metadata_on_cpu(
    *,
    B,
    T,
    cache_indices,
    his_mode,
    extend_seq_lens=None,
    his_src=None,
    draft_token_num=None,
    out=None,
):
    """What the fused kernel writes, with tensor ops and into ``out``; eager forwards
    have the unfused fallback."""
    if out is None:
        return None
    sconv = inkling_sconv_backend
    if his_mode == sconv.HIS_ONES:
        lens = torch.full((B,), draft_token_num, dtype=torch.int32)
        has_initial_state = torch.ones(B, dtype=torch.bool)
    else:
        lens = extend_seq_lens[:B].to(torch.int32)
    if his_mode == sconv.HIS_ZEROS:
        has_initial_state = torch.zeros(B, dtype=torch.bool)
    elif his_mode == sconv.HIS_SEQ_MINUS_EXT:
        has_initial_state = (his_src[:B] - lens) > 0
    elif his_mode != sconv.HIS_ONES:
        raise NotImplementedError(his_mode)
    query_start_loc = torch.nn.functional.pad(torch.cumsum(lens, 0), (1, 0)).to(
        torch.int32
    )
    precomputed = sconv.precompute_helion_extend_metadata(
        B=B,
        T=T,
        W=SCONV_KERNEL,
        cache_indices=cache_indices[:B],
        has_initial_state=has_initial_state,
        query_start_loc=query_start_loc,
    )
    out["query_start_loc"].copy_(query_start_loc)
    out["has_initial_state"].copy_(has_initial_state)
    for name in ("cache_mask", "safe_idx", "cu", "si"):
        out[name].copy_(precomputed[name])
    return (
        out["query_start_loc"],
        out["has_initial_state"],
        {name: out[name] for name in ("cache_mask", "safe_idx", "cu", "si")},
    )


def _capture_on_cpu(runner):
    """``DecodeCudaGraphRunner.capture`` without its streams and memory pools."""
    runner.buffers.seq_lens.fill_(runner.seq_len_fill_value)
    runner.buffers.reset_index_buffers()
    for bs in reversed(runner.capture_bs):
        runner.capture_one_shape(bs, runner.model_runner.model.forward)


@contextlib.contextmanager
def cpu_stand_ins():
    """Everything that needs a GPU, stood in for. A stack works only inside."""
    patches = [
        mock.patch.object(InterpretedFunction, "run", _recorded_run),
        mock.patch.object(torch.cuda, "CUDAGraph", RecordedGraph),
        mock.patch.object(torch.cuda, "graph", _cuda_graph),
        mock.patch.object(torch.cpu, "Event", RecordingEvent),
        mock.patch.object(
            inkling_sconv_backend,
            "fused_extend_sconv_metadata",
            _fused_extend_sconv_metadata_on_cpu,
        ),
        mock.patch.object(
            runner_module, "resolve_decode_backend", RecordedGraphBackend
        ),
        mock.patch.object(
            runner_module.MultiLayerEagleDraftExtendCudaGraphRunner,
            "capture",
            _capture_on_cpu,
        ),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


@contextlib.contextmanager
def published_config(
    *, page_size: int = 1, buckets: Tuple[int, ...] = BUCKETS, **overrides
):
    """Publish server args of an Inkling MTP server; yields them."""
    fields = dict(
        device="cpu",
        page_size=page_size,
        attention_backend="fa3",
        max_running_requests=max(buckets),
        speculative_algorithm="EAGLE",
        speculative_eagle_topk=1,
        speculative_num_steps=NUM_STEPS,
        speculative_num_draft_tokens=NUM_STEPS + 1,
        enable_multi_layer_eagle=True,
        # Else the dummy model's config would be looked up.
        _mamba_cache_chunk_size=max(64, page_size),
        cuda_graph_config=CudaGraphConfig(
            decode=PhaseConfig(
                backend=Backend.FULL, bs=list(buckets), max_bs=max(buckets)
            ),
            # Its token counts bound the conv metadata of the widened window.
            prefill=PhaseConfig(backend=Backend.DISABLED, bs=[16 * max(buckets)]),
        ),
    )
    with (
        get_context().override_server_args(**{**fields, **overrides}) as server_args,
        # As process groups of one rank would have stamped them.
        get_parallel().override(attn_tp_size=1, attn_dcp_size=1, attn_dcp_rank=0),
    ):
        yield server_args


# --- the stack -------------------------------------------------------------------


class DigestModel:
    """A draft model whose output is a digest of all that its graph may read.

    Per request: the live KV entries (full and window), the KV write locations, the
    conv slot and its mask, the positions, tokens and hidden states. A single stale
    or poisoned entry changes the digest. ``metadata`` holds the attention metadata
    that the newest forward of each batch size read.
    """

    def __init__(self):
        self.metadata: Dict[int, Any] = {}

    def get_embed_and_head(self):
        return None, None

    def set_embed_and_head(self, embed, head):
        pass

    def forward(self, input_ids, positions, forward_batch):
        backend = get_attn_backend()
        metadata = backend.forward_metadata
        bs = forward_batch.batch_size
        per_request = [
            input_ids.view(bs, -1),
            positions.view(bs, -1),
            forward_batch.out_cache_loc.view(bs, -1),
            forward_batch.spec_info.hidden_states.view(bs, -1).to(torch.int64),
            *_kv_entries(metadata, backend).values(),
        ]
        self.metadata[bs] = metadata
        if hasattr(backend, "short_conv_backend"):
            conv = backend.conv_state_metadata(0, forward_batch)
            per_request += [
                conv.cache_indices.view(bs, -1),
                conv.precomputed["safe_idx"].view(bs, -1),
                conv.precomputed["cache_mask"].view(bs, -1),
            ]
        digest = torch.zeros(bs, dtype=torch.int64)
        for values in per_request:
            weights = torch.arange(1, values.shape[1] + 1) * 2654435761
            digest = (digest * 31 + (values.to(torch.int64) * weights).sum(1)) % 65521
        rows = digest.repeat_interleave(input_ids.shape[0] // bs)
        hidden_states = ((rows[:, None] + torch.arange(HIDDEN_SIZE)) % 127).float()
        # A row a request, or, behind a gathered buffer, a row a token.
        if forward_batch.next_token_logits_buffer.shape[0] != bs:
            digest = rows
        logits = torch.nn.functional.one_hot(digest % VOCAB_SIZE, VOCAB_SIZE).float()
        return LogitsProcessorOutput(
            next_token_logits=logits, hidden_states=hidden_states
        )


def _kv_entries(metadata, backend) -> Dict[str, torch.Tensor]:
    """Per request, row by row, the KV slots (or their pages) that attention reads
    and, in a sliding-window pool, writes; what no kernel reads is zeroed."""
    if isinstance(getattr(backend, "full_attn_backend", backend), TritonAttnBackend):
        return _kv_entries_of_indices(metadata)
    entries = {"page_table": _live_pages(metadata.page_table, metadata, backend)}
    if metadata.swa_page_table is not None:
        bs = metadata.page_table.shape[0]
        entries["swa_page_table"] = _live_pages(
            metadata.swa_page_table, metadata, backend
        )
        entries["swa_out_cache_loc"] = metadata.swa_out_cache_loc.view(bs, -1)
    return entries


def _kv_entries_of_indices(metadata) -> Dict[str, torch.Tensor]:
    bs = metadata.qo_indptr.shape[0] - 1
    entries = {"kv_indices": _live_indices(metadata.kv_indptr, metadata.kv_indices)}
    if metadata.window_kv_indices is not None:
        entries["window_kv_indices"] = _live_indices(
            metadata.window_kv_indptr, metadata.window_kv_indices
        )
    if metadata.swa_out_cache_loc is not None:
        entries["swa_out_cache_loc"] = metadata.swa_out_cache_loc.view(bs, -1)
    return entries


def _live_indices(indptr, indices):
    offsets = torch.arange(MAX_CONTEXT_LEN)[None, :]
    live = offsets < (indptr[1:] - indptr[:-1])[:, None]
    positions = torch.where(live, indptr[:-1, None] + offsets, indices.shape[0])
    # The last position stands for all that no kernel reads.
    return torch.nn.functional.pad(indices, (0, 1))[positions]


def _live_pages(page_table, metadata, backend):
    page_size = getattr(backend, "full_attn_backend", backend).page_size
    pages = (metadata.cache_seqlens_int32 + page_size - 1) // page_size
    live = torch.arange(page_table.shape[1])[None, :] < pages[:, None]
    return torch.where(live, page_table, 0)


@dataclasses.dataclass
class Stack:
    """One Inkling MTP worker pair and the mappings that it shares with a scheduler."""

    server_args: Any
    worker: worker_module.MultiLayerEagleWorkerV2
    req_to_token_pool: HybridReqToTokenPool
    allocator: SWATokenToKVPoolAllocator
    backends: List[InklingShortConvHybridAttnBackend]
    page_size: int

    @property
    def draft_worker(self) -> worker_module.MultiLayerEagleDraftWorker:
        return self.worker._draft_worker

    @property
    def runner(self):
        return self.draft_worker.cuda_graph_runner_for_draft_extend

    @property
    def width(self) -> int:
        return self.runner.captured_req_width

    @property
    def num_front_tokens(self) -> int:
        return self.draft_worker.draft_extend_num_front_tokens

    @property
    def mappings(self) -> Dict[str, torch.Tensor]:
        """The mappings that the scheduler rewrites while a step runs."""
        mappings = {
            "req_to_token": self.req_to_token_pool.req_to_token,
            "req_to_conv_slot": (
                self.req_to_token_pool.req_index_to_mamba_index_mapping
            ),
        }
        if self.allocator is not None:
            mappings["full_to_swa"] = self.allocator.full_to_swa_index_mapping
        return mappings


def model_config() -> SimpleNamespace:
    text_config = SimpleNamespace(num_attention_heads=2, attn_logit_softcapping=None)
    hf_config = InklingModelConfig(
        architectures=["InklingForConditionalGenerationMTP"],
        hidden_size=HIDDEN_SIZE,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCAB_SIZE,
    )
    return SimpleNamespace(
        is_encoder_decoder=False,
        is_local_attention_model=False,
        context_len=MAX_CONTEXT_LEN,
        attention_arch=AttentionArch.MHA,
        head_dim=16,
        v_head_dim=16,
        swa_v_head_dim=16,
        hidden_size=HIDDEN_SIZE,
        spec_hidden_size=HIDDEN_SIZE,
        vocab_size=VOCAB_SIZE,
        dtype=torch.float32,
        hf_config=hf_config,
        hf_text_config=text_config,
        linear_attn_registry_result=None,
        get_num_kv_heads=lambda tp_size, dcp_size=1: 2,
        get_max_num_attention_heads=lambda: 2,
    )


def build_pools(
    *,
    max_reqs: int,
    page_size: int,
    swa: bool,
    pool_class: type = HybridReqToTokenPool,
) -> Tuple[HybridReqToTokenPool, Any, Optional[SWATokenToKVPoolAllocator]]:
    """The request pool (with a conv-state pool), the KV pool and its allocator."""
    with _cuda_tensors_on_cpu():
        req_to_token_pool = pool_class(
            size=max_reqs,
            mamba_size=2 * max_reqs,
            mamba_spec_state_size=max_reqs,
            max_context_len=MAX_CONTEXT_LEN,
            device="cpu",
            enable_memory_saver=False,
            cache_params=conv_cache_params([0]),
            mamba_layer_ids=[0],
            enable_mamba_extra_buffer=False,
            speculative_num_draft_tokens=NUM_STEPS + 1,
            speculative_eagle_topk=1,
        )
    kv_size = (max_reqs + 1) * MAX_CONTEXT_LEN
    if not swa:
        kv_pool = MHATokenToKVPool(
            kv_size,
            page_size=page_size,
            dtype=torch.bfloat16,
            head_num=1,
            head_dim=1,
            layer_num=1,
            device="cpu",
            enable_memory_saver=False,
        )
        return req_to_token_pool, kv_pool, None
    kv_pool = SWAKVPool(
        size=kv_size,
        size_swa=kv_size,
        page_size=page_size,
        dtype=torch.bfloat16,
        head_num=1,
        head_dim=1,
        swa_attention_layer_ids=[1],
        full_attention_layer_ids=[0],
        device="cpu",
    )
    allocator = SWATokenToKVPoolAllocator(
        size=kv_size,
        size_swa=kv_size,
        page_size=page_size,
        dtype=torch.bfloat16,
        device="cpu",
        kvcache=kv_pool,
        need_sort=False,
    )
    kv_pool.register_mapping(allocator.full_to_swa_index_mapping)
    return req_to_token_pool, kv_pool, allocator


@contextlib.contextmanager
def _cuda_tensors_on_cpu():
    """The conv pool allocates its per-draft-token windows on "cuda" by name."""
    zeros = torch.zeros

    def zeros_on_cpu(*args, **kwargs):
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return zeros(*args, **kwargs)

    with mock.patch.object(torch, "zeros", zeros_on_cpu):
        yield


def conv_cache_params(layers: List[int]) -> InklingConvCacheParams:
    return InklingConvCacheParams(
        layers=layers,
        shape=InklingConvStateShape(
            conv=[(SCONV_KERNEL - 1, HIDDEN_SIZE)], temporal=(0, 0, 0)
        ),
    )


def build_model_runner(
    server_args,
    req_to_token_pool,
    kv_pool,
    allocator,
    *,
    is_draft_worker: bool = True,
    ps: Optional[ParallelState] = None,
) -> SimpleNamespace:
    """A namespace with what the real backends and graph runners read."""
    return SimpleNamespace(
        device="cpu",
        gpu_id=0,
        dtype=torch.float32,
        ps=ps or ParallelState.trivial(),
        server_args=server_args,
        page_size=get_schedule().page_size,
        model=DigestModel(),
        model_config=model_config(),
        is_draft_worker=is_draft_worker,
        spec_algorithm=SpeculativeAlgorithm.EAGLE,
        sliding_window_size=SLIDING_WINDOW if allocator is not None else None,
        attention_chunk_size=None,
        kv_cache_dtype=torch.bfloat16,
        kv_cache_dtype_str="auto",
        req_to_token_pool=req_to_token_pool,
        token_to_kv_pool=kv_pool,
        token_to_kv_pool_allocator=allocator,
        kv_index_translator=KVIndexTranslator(
            req_to_token=req_to_token_pool.req_to_token,
            token_to_kv_pool_allocator=allocator,
            token_to_kv_pool=kv_pool,
            page_size=get_schedule().page_size,
            device="cpu",
        ),
        attn_backend=None,
        decode_cuda_graph_runner=None,
        shared_read_done_event=None,
        device_timer=None,
        tp_group=None,
    )


def build_backend(
    model_runner, full_attn: type = FlashAttentionBackend
) -> InklingShortConvHybridAttnBackend:
    """Inkling's wrapper around an attention backend and the conv sidecar."""
    return InklingShortConvHybridAttnBackend(
        full_attn(model_runner), InklingShortConvAttnBackend(model_runner), [0]
    )


def build_triton_backend(model_runner) -> InklingShortConvHybridAttnBackend:
    return build_backend(model_runner, TritonAttnBackend)


def build_worker(server_args, target_runner, draft_runners):
    """The real worker pair over stand-in model runners; no pools, no graphs yet."""
    draft_tp_worker = SimpleNamespace(
        model_runner_list=draft_runners,
        model_config=model_config(),
        alloc_memory_pool=lambda **kwargs: None,
    )
    target_worker = SimpleNamespace(
        model_runner=target_runner, model_config=model_config()
    )
    with mock.patch.object(
        worker_module, "TpModelWorker", lambda **kwargs: draft_tp_worker
    ):
        return worker_module.MultiLayerEagleWorkerV2(
            server_args, 0, ParallelState.trivial(), 0, target_worker
        )


def build_stack(
    server_args,
    *,
    boundary_kv_fix: bool = True,
    swa: bool = True,
    single_graph: bool = False,
    make_backend: Callable[[Any], Any] = build_backend,
    capture: bool = True,
    ps: Optional[ParallelState] = None,
) -> Stack:
    """Everything up to captured draft graphs, in the order that a server starts.

    Call inside ``cpu_stand_ins`` and ``published_config``. Every depth has its own
    conv pool; all share one KV pool and the three mappings.
    """
    page_size = get_schedule().page_size
    max_reqs = get_schedule().max_running_requests
    req_to_token_pool, kv_pool, allocator = build_pools(
        max_reqs=max_reqs, page_size=page_size, swa=swa
    )
    target_runner = build_model_runner(
        server_args,
        req_to_token_pool,
        kv_pool,
        allocator,
        is_draft_worker=False,
        ps=ps,
    )
    # A graph runner that captured the metadata marker.
    target_runner.decode_cuda_graph_runner = SimpleNamespace(
        in_graph_metadata_prep_done=RecordingEvent()
    )
    draft_runners = [
        build_model_runner(
            server_args,
            req_to_token_pool.clone_with_new_mamba(
                mamba_size=2 * max_reqs,
                mamba_spec_state_size=max_reqs,
                cache_params=conv_cache_params([depth]),
                device="cpu",
                enable_mamba_extra_buffer=False,
                draft_model_idx=depth,
            ),
            kv_pool,
            allocator,
            ps=ps,
        )
        for depth in range(NUM_STEPS)
    ]
    worker = build_worker(server_args, target_runner, draft_runners)
    draft_worker = worker._draft_worker
    with envs.SGLANG_ENABLE_MTP_BOUNDARY_KV_FIX.override(boundary_kv_fix):
        draft_worker.alloc_memory_pool(None, req_to_token_pool, allocator)

    backends = [make_backend(runner) for runner in draft_runners]
    draft_worker.draft_extend_attn_backend_list = backends
    for runner, backend in zip(draft_runners, backends):
        runner.attn_backend = backend
    draft_worker.cuda_graph_runner_for_draft_extend = None
    if capture:
        with envs.SGLANG_ENABLE_SINGLE_CG_DRAFT.override(single_graph):
            draft_worker._capture_cuda_graphs()
    return Stack(
        server_args=server_args,
        worker=worker,
        req_to_token_pool=req_to_token_pool,
        allocator=allocator,
        backends=backends,
        page_size=page_size,
    )


# --- batches, mappings and what was staged from them -----------------------------


@dataclasses.dataclass
class Batch:
    """A decode batch, as far as the draft extend reads one."""

    seq_lens: torch.Tensor  # before verify
    req_pool_indices: torch.Tensor
    forward_mode: ForwardMode = ForwardMode.DECODE
    is_extend_in_batch: bool = False
    can_run_decode_cuda_graph: bool = True
    spec_info: Any = None
    out_cache_loc: Optional[torch.Tensor] = None

    def __len__(self) -> int:
        return self.seq_lens.shape[0]


def fill_mappings(stack: Stack, lens: List[int], seed: int = 0) -> Batch:
    """Give one request per length a request slot, KV slots (page by page, in both
    the full and the SWA pool) and a conv slot, all at random; slots 0 stay unused.
    The boundary stash of each request slot has a random number of valid rows."""
    generator = torch.Generator().manual_seed(seed)

    def shuffled(first: int, last: int) -> torch.Tensor:
        return first + torch.randperm(last - first, generator=generator)

    pool = stack.req_to_token_pool
    page = stack.page_size
    num_slots = pool.req_to_token.shape[0]
    requests = shuffled(1, num_slots)[: len(lens)]
    pool.req_to_token.zero_()
    pool.req_index_to_mamba_index_mapping.zero_()
    pool.req_index_to_mamba_index_mapping[requests] = shuffled(
        1, pool.mamba_pool.size + 1
    )[: len(lens)].to(torch.int32)

    num_pages = num_slots * MAX_CONTEXT_LEN // page
    free_pages = shuffled(1, num_pages)
    for request, length in zip(requests.tolist(), lens):
        num_tokens = min(length + NUM_STEPS + 1, MAX_CONTEXT_LEN)
        pages, free_pages = (
            free_pages[: -(-num_tokens // page)],
            free_pages[-(-num_tokens // page) :],
        )
        slots = (pages[:, None] * page + torch.arange(page)).flatten()[:num_tokens]
        pool.req_to_token[request, :num_tokens] = slots.to(torch.int32)
    if stack.allocator is not None:
        swa_pages = torch.cat(
            [torch.zeros(1, dtype=torch.int64), shuffled(1, num_pages)]
        )
        stack.allocator.full_to_swa_index_mapping[: num_pages * page] = (
            swa_pages[:, None] * page + torch.arange(page)
        ).flatten()
    if stack.num_front_tokens:
        draft_worker = stack.draft_worker
        for name, high in (
            ("boundary_kv_stash_valid_lens", stack.num_front_tokens + 1),
            ("boundary_kv_stash_tokens", VOCAB_SIZE),
            ("boundary_kv_stash_hiddens", 99),
        ):
            stash = getattr(draft_worker, name)
            stash.copy_(torch.randint(0, high, stash.shape, generator=generator))
    return Batch(torch.tensor(lens, dtype=torch.int64), requests)


def poison_mappings(stack: Stack) -> None:
    """Point every request and KV slot elsewhere, as a scheduler may do once the
    fence lets it go. Slots 0, which padded rows use, are nobody's."""
    pool = stack.req_to_token_pool
    pool.req_to_token[1:].fill_(2 * stack.page_size + 1)
    pool.req_index_to_mamba_index_mapping[1:].fill_(pool.mamba_pool.size)
    if stack.allocator is not None:
        stack.allocator.full_to_swa_index_mapping[1:-1].fill_(3 * stack.page_size + 2)


def stage(stack: Stack, batch: Batch) -> Tuple[torch.Tensor, torch.Tensor]:
    """Stage ``batch``; returns the window's KV locations and positions."""
    return stack.runner.stage(batch.seq_lens, batch.req_pool_indices)


def bucket_of(stack: Stack, num_reqs: int) -> int:
    return next(bs for bs in stack.runner.capture_bs if bs >= num_reqs)


def staged_buffers(stack: Stack, num_reqs: int) -> Dict[str, torch.Tensor]:
    """Clones of all that staging fills for a batch of ``num_reqs`` requests, padded
    rows included. Page-table entries past a row's length, which no kernel reads,
    are zeroed."""
    bs = bucket_of(stack, num_reqs)
    buffers = stack.runner.buffers
    result = {
        "seq_lens": buffers.seq_lens[:bs],
        "req_pool_indices": buffers.req_pool_indices[:bs],
        "out_cache_loc": buffers.out_cache_loc[: bs * stack.width],
        "positions": buffers.positions[: bs * stack.width],
    }
    for depth, backend in enumerate(stack.backends):
        metadata = stack.runner.runners[depth].model_runner.model.metadata[bs]
        result.update(_metadata_of(backend, metadata, bs, depth))
    return {name: tensor.clone() for name, tensor in result.items()}


def _metadata_of(backend, metadata, bs: int, depth: int) -> Dict[str, torch.Tensor]:
    """What one depth's draft-extend graph reads at batch size ``bs``."""
    stager = backend.short_conv_backend._draft_extend_stager
    result = {
        **_kv_entries(metadata, backend),
        "conv_slots": stager._cache_indices_buf[:bs],
    }
    if isinstance(backend.full_attn_backend, TritonAttnBackend):
        names = ("qo_indptr", "kv_indptr", "window_kv_indptr")
        result["max_extend_len"] = torch.tensor(metadata.max_extend_len)
        # Captured for a causal chain.
        assert metadata.custom_mask is None
    else:
        names = ("cache_seqlens_int32", "cu_seqlens_k", "cu_seqlens_q")
    for name in names:
        if getattr(metadata, name) is not None:
            result[name] = getattr(metadata, name)
    return {f"depth {depth} {name}": tensor for name, tensor in result.items()}


def scribble_over_staged_buffers(stack: Stack, value: int = 7) -> None:
    """Overwrite everything that staging fills, at every batch size."""
    buffers = stack.runner.buffers
    for tensor in (
        buffers.seq_lens,
        buffers.req_pool_indices,
        buffers.out_cache_loc,
        buffers.positions,
    ):
        tensor.fill_(value)
    for backend in stack.backends:
        backend.short_conv_backend._cache_indices_buf.fill_(value)
        fa = backend.full_attn_backend
        if isinstance(fa, TritonAttnBackend):
            for name in (
                "qo_indptr",
                "kv_indptr",
                "window_kv_indptr",
                "cuda_graph_kv_indices",
                "cuda_graph_window_kv_indices",
                "cuda_graph_swa_out_cache_loc",
            ):
                if getattr(fa, name, None) is not None:
                    getattr(fa, name).fill_(value)
            continue
        for name in ("cache_seqlens", "cu_seqlens_q", "cu_seqlens_k", "page_table"):
            fa.draft_extend_metadata[name].fill_(value)
        if "swa_page_table" in fa.draft_extend_metadata:
            fa.draft_extend_metadata["swa_page_table"].fill_(value)
            fa.cuda_graph_swa_out_cache_loc.fill_(value)


def window_of(stack: Stack, batch: Batch) -> Tuple[torch.Tensor, torch.Tensor]:
    """The window's KV locations and positions without staging: upstream's kernel,
    or, without front tokens, the slices that verify was given."""
    draft_worker = stack.draft_worker
    req_to_token = stack.req_to_token_pool.req_to_token
    if stack.num_front_tokens:
        return worker_module.compute_widened_draft_extend_locs_positions(
            batch.seq_lens,
            batch.req_pool_indices,
            req_to_token,
            draft_worker.boundary_kv_stash_valid_lens,
            draft_worker.speculative_num_draft_tokens,
            draft_worker.draft_extend_num_front_tokens,
            draft_worker.draft_extend_num_warmup_tokens,
        )
    positions = batch.seq_lens[:, None] + torch.arange(stack.width)
    out_cache_loc = req_to_token[batch.req_pool_indices[:, None], positions]
    return out_cache_loc.flatten().to(torch.int64), positions.flatten()


def unstaged_buffers(stack: Stack, batch: Batch) -> Dict[str, torch.Tensor]:
    """What the release's own hooks, in graph or eager, of backends that were never
    asked to stage produce from the mappings as they are now; the same keys as
    ``staged_buffers``."""
    runner = stack.runner
    bs = bucket_of(stack, len(batch))

    def padded(values: torch.Tensor, size: int, fill: int) -> torch.Tensor:
        return torch.nn.functional.pad(values, (0, size - len(values)), value=fill)

    out_cache_loc, positions = window_of(stack, batch)
    num_draft_tokens = stack.width - stack.num_front_tokens
    result = {
        "seq_lens": padded(
            batch.seq_lens + num_draft_tokens, bs, runner.seq_len_fill_value
        ).to(torch.int32),
        "req_pool_indices": padded(batch.req_pool_indices, bs, 0),
        "out_cache_loc": padded(out_cache_loc, bs * stack.width, 0),
        "positions": padded(positions, bs * stack.width, 0),
    }
    for depth, depth_runner in enumerate(runner.runners):
        full_attn = type(stack.backends[depth].full_attn_backend)
        backend = build_backend(depth_runner.model_runner, full_attn)
        backend.init_cuda_graph_state(runner.max_bs, runner.max_bs * stack.width)
        # A batch of the captured shape, on tensors of its own.
        forward_batch = depth_runner.get_forward_batch(bs)
        forward_batch.req_pool_indices = result["req_pool_indices"]
        forward_batch.seq_lens = result["seq_lens"]
        forward_batch.out_cache_loc = result["out_cache_loc"]
        if full_attn is TritonAttnBackend:
            # The release records none of it, and what it rebuilds ahead of a replay
            # lacks the front rows and the window indices (docs/upstream-findings.md).
            forward_batch.extend_prefix_lens = (
                forward_batch.seq_lens - stack.width
            ).clamp(min=0)
            forward_batch.extend_prefix_lens_cpu = None
            backend.full_attn_backend.init_forward_metadata(forward_batch)
            backend.short_conv_backend._prepare_slot_indices(forward_batch)
        else:
            backend.init_forward_metadata_out_graph(forward_batch, in_capture=True)
            backend.init_forward_metadata_in_graph(forward_batch)
        result.update(_metadata_of(backend, backend.forward_metadata, bs, depth))
    return {name: tensor.clone() for name, tensor in result.items()}


# --- one decode step of the real worker ------------------------------------------


def run_decode_step(
    stack: Stack,
    batch: Batch,
    *,
    after_marker: Callable[[], None] = lambda: None,
    seed: int = 0,
) -> torch.Tensor:
    """``forward_batch_generation`` with stand-ins for draft and target verify;
    returns the proposed tokens ``[num_reqs, NUM_STEPS]``.

    ``after_marker`` runs where the target's metadata marker lets the scheduler go.
    """
    generator = torch.Generator().manual_seed(seed)
    num_reqs = len(batch)
    num_draft_tokens = NUM_STEPS + 1
    target = stack.worker._target_worker.model_runner

    def draft(batch):
        return SimpleNamespace(is_verify_input=lambda: True)

    def verify(batch, grammar_barrier=None):
        # Verify is given its KV slots ahead of its graph.
        positions = batch.seq_lens[:, None] + torch.arange(num_draft_tokens)
        req_to_token = stack.req_to_token_pool.req_to_token
        batch.out_cache_loc = (
            req_to_token[batch.req_pool_indices[:, None], positions]
            .flatten()
            .to(torch.int64)
        )
        publish_marker(target)
        after_marker()
        accept_lens = torch.randint(
            1, num_draft_tokens + 1, (num_reqs,), generator=generator
        ).to(torch.int32)
        rows = num_reqs * num_draft_tokens
        return SimpleNamespace(
            next_token_ids=torch.randint(0, VOCAB_SIZE, (rows,), generator=generator),
            logits_output=SimpleNamespace(
                hidden_states=torch.randint(
                    0, 99, (rows, HIDDEN_SIZE), generator=generator
                ).float()
            ),
            accept_lens=accept_lens,
            new_seq_lens=batch.seq_lens + accept_lens,
            next_draft_input=SimpleNamespace(),
        )

    with (
        mock.patch.object(stack.draft_worker, "draft", draft),
        mock.patch.object(stack.worker, "verify", verify),
        mock.patch.object(
            worker_module, "prepare_for_draft_extend", _prepare_for_draft_extend
        ),
    ):
        result = stack.worker.forward_batch_generation(batch)
    return result.next_draft_input.topk_index


def prepare(stack: Stack, batch: Batch) -> None:
    """``runner.prepare`` for ``batch``, as behind verify, with all drafts accepted."""
    num_reqs = len(batch)
    out_cache_loc, positions = window_of(stack, batch)
    stack.runner.prepare(
        SimpleNamespace(
            batch_size=num_reqs,
            input_ids=torch.zeros(num_reqs * stack.width, dtype=torch.int64),
            positions=positions,
            out_cache_loc=out_cache_loc,
            seq_lens=batch.seq_lens + NUM_STEPS + 1,
            seq_lens_cpu=None,
            seq_lens_sum=None,
            req_pool_indices=batch.req_pool_indices,
            sampling_info=None,
            spec_info=SimpleNamespace(
                num_correct_drafts=torch.full((num_reqs,), NUM_STEPS),
                num_accept_tokens=torch.full((num_reqs,), NUM_STEPS + 1),
                hidden_states=torch.zeros(num_reqs * stack.width, HIDDEN_SIZE),
            ),
        )
    )


def publish_marker(target_runner) -> None:
    """What a replay of the target's verify graph leaves on its model runner."""
    marker = target_runner.decode_cuda_graph_runner.in_graph_metadata_prep_done
    marker.record()
    target_runner.shared_read_done_event = marker


def _prepare_for_draft_extend(
    draft_extend_input,
    batch,
    predict,
    num_draft_tokens,
    draft_model_runner,
    cuda_graph_runner,
    *,
    widened_out_cache_loc=None,
    widened_positions=None,
    **_,
):
    """``prepare_for_draft_extend`` without a ``ScheduleBatch`` behind it."""
    num_reqs = len(batch)
    width = num_draft_tokens + draft_extend_input.num_front_tokens
    if draft_extend_input.num_front_tokens:
        input_ids = torch.zeros(num_reqs * width, dtype=torch.int64)
        draft_extend_input.hidden_states = torch.zeros(num_reqs * width, HIDDEN_SIZE)
        out_cache_loc, positions = widened_out_cache_loc, widened_positions
    else:
        input_ids = predict
        out_cache_loc = batch.out_cache_loc
        positions = (batch.seq_lens[:, None] + torch.arange(width)).flatten()
    return SimpleNamespace(
        forward_mode=ForwardMode.DRAFT_EXTEND_V2,
        batch_size=num_reqs,
        input_ids=input_ids,
        positions=positions,
        out_cache_loc=out_cache_loc,
        seq_lens=batch.seq_lens + num_draft_tokens,
        seq_lens_cpu=None,
        seq_lens_sum=None,
        req_pool_indices=batch.req_pool_indices,
        spec_info=draft_extend_input,
        sampling_info=None,
        can_run_decode_cuda_graph=batch.can_run_decode_cuda_graph,
        mamba_clear_indices=None,
        mamba_cow_src_indices=None,
        mamba_cow_dst_indices=None,
    )
