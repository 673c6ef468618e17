"""The Triton backend can fill its draft-extend metadata ahead of the draft graph, fills
verify's without waiting for the GPU, and verifies a chain without a tree mask."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Optional

import msgspec
import torch
import triton
import triton.language as tl

from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.environ import envs
from sglang.srt.layers.attention.base_attn_backend import (
    draft_extend_metadata_staging_enabled,
)
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.runtime_context import get_spec

from inkling_mtp_staging.edit import after, before

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


class ForwardMetadata: ...


# How the gather of one request's KV indices is split: the programs of a request take
# its blocks in turn, so a long prefix is not one program's serial loop.
_CHAIN_METADATA_KV_BLOCK = 1024
_CHAIN_METADATA_MAX_PROGRAMS_PER_REQ = 32


@triton.jit(do_not_specialize=["bs", "width", "num_write_locs"])
def _chain_metadata_kernel(
    # sources: the runner's static buffers and the shared mappings
    seq_lens_ptr,  # [bs]
    req_pool_indices_ptr,  # [bs]
    out_cache_loc_ptr,  # [num_write_locs], at most bs * width
    req_to_token_ptr,
    full_to_swa_ptr,  # (dummy unless HAS_SWA_POOL)
    # destinations
    qo_indptr_ptr,  # [bs + 1] int64
    kv_indptr_ptr,  # [bs + 1] int32
    kv_indices_ptr,  # int64, ragged by kv_indptr
    window_kv_indptr_ptr,  # [bs + 1] int32 (dummies unless HAS_WINDOW)
    window_kv_indices_ptr,  # int64, ragged by window_kv_indptr
    swa_out_cache_loc_ptr,  # [bs * width] int64 (dummy unless HAS_SWA_POOL)
    req_to_token_stride,
    bs,
    width,
    num_write_locs,
    window_size,
    IS_VERIFY: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SWA_POOL: tl.constexpr,
    ROWS_BLOCK: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
):
    """Grid ``(bs, programs per request)``. Queries are ``width`` new tokens of each
    request, which ``seq_lens`` counts in a draft extend and not in verify. Their K and V
    reach the attention kernel as tensors, so the indices cover the prefix in front of
    them, and for window layers its last ``window_size`` tokens. No query reads past
    ``kv_indptr``: the tails keep stale values."""
    i = tl.program_id(0)
    program = tl.program_id(1)
    rows = tl.arange(0, ROWS_BLOCK)
    kv_lens = tl.load(seq_lens_ptr + rows, mask=rows < bs, other=0).to(tl.int32)
    if not IS_VERIFY:
        # A sequence shorter than its window, or a padded row, has no prefix.
        kv_lens = tl.maximum(kv_lens - width, 0)
    kv_start = tl.sum(tl.where(rows < i, kv_lens, 0))
    kv_len = tl.sum(tl.where(rows == i, kv_lens, 0))
    if HAS_WINDOW:
        window_lens = tl.minimum(kv_lens, window_size)
        window_kv_start = tl.sum(tl.where(rows < i, window_lens, 0))
        window_begin = kv_len - tl.minimum(kv_len, window_size)

    if program == 0:
        tl.store(kv_indptr_ptr + i + 1, kv_start + kv_len)
        tl.store(qo_indptr_ptr + i + 1, (i.to(tl.int64) + 1) * width)
        if HAS_WINDOW:
            window_kv_end = window_kv_start + kv_len - window_begin
            tl.store(window_kv_indptr_ptr + i + 1, window_kv_end)
        if i == 0:
            tl.store(kv_indptr_ptr, 0)
            tl.store(qo_indptr_ptr, 0)
            if HAS_WINDOW:
                tl.store(window_kv_indptr_ptr, 0)
        if HAS_SWA_POOL:
            offs = tl.arange(0, WIDTH_BLOCK)
            in_width = offs < width
            token = i.to(tl.int64) * width + offs
            is_written = in_width & (token < num_write_locs)
            loc = tl.load(out_cache_loc_ptr + token, mask=is_written, other=0)
            swa_loc = tl.load(full_to_swa_ptr + loc, mask=is_written, other=0)
            tl.store(swa_out_cache_loc_ptr + token, swa_loc, mask=in_width)

    req = tl.load(req_pool_indices_ptr + i).to(tl.int64)
    for block in range(program, tl.cdiv(kv_len, KV_BLOCK), tl.num_programs(1)):
        pos = block * KV_BLOCK + tl.arange(0, KV_BLOCK)
        in_prefix = pos < kv_len
        loc = tl.load(
            req_to_token_ptr + req * req_to_token_stride + pos,
            mask=in_prefix,
            other=0,
        ).to(tl.int64)
        tl.store(kv_indices_ptr + kv_start + pos, loc, mask=in_prefix)
        if HAS_WINDOW:
            in_window = in_prefix & (pos >= window_begin)
            if HAS_SWA_POOL:
                loc = tl.load(full_to_swa_ptr + loc, mask=in_window, other=0)
            window_pos = window_kv_start + pos - window_begin
            tl.store(window_kv_indices_ptr + window_pos, loc, mask=in_window)


class TritonAttnBackend:
    def get_cuda_graph_seq_len_fill_value(self): ...

    def _builds_chain_metadata_in_one_kernel(self) -> bool:
        # The kernel gathers straight from the mappings of a chain draft, so it serves
        # no translated ids and no sharded prefix. Deterministic inference takes
        # another attention kernel, whose window starts no draft batch carries.
        return (
            self._chain_metadata_in_one_kernel
            and not self.enable_deterministic
            and not self.kv_index_translator.is_translating
            and (
                not self.use_sliding_window_kv_pool
                or self._full_to_swa_mapping() is not None
            )
        )

    def draft_extend_metadata_captured_in_graph(self) -> bool:
        return self.is_draft_runner and self._builds_chain_metadata_in_one_kernel()

    @property
    def supports_draft_extend_metadata_staging(self) -> bool:
        # As a wrapper's child (enable_draft_extend_metadata_staging is not
        # overridden). The same gathers as in the release's eager rebuild, so it pays
        # at any context length: they move ahead of verify, and only the window's, which
        # is bounded, is new.
        return self.draft_extend_metadata_captured_in_graph()

    def share_staged_draft_extend_metadata(self, other: TritonAttnBackend) -> bool:
        # This backend's own buffers stay, for its other forwards.
        shares = (
            self.req_to_token is other.req_to_token
            and self._full_to_swa_mapping() is other._full_to_swa_mapping()
            and self.sliding_window_size == other.sliding_window_size
        )
        if shares:
            self._draft_extend_stager = other._draft_extend_stager
        return shares

    def _full_to_swa_mapping(self) -> Optional[torch.Tensor]:
        if not self.use_sliding_window_kv_pool:
            return None
        return self.token_to_kv_pool.full_to_swa_index_mapping

    def stage_draft_extend_metadata(self, forward_batch: ForwardBatch) -> None:
        # Same kernel, same destinations as in the graph; only the time differs.
        self._draft_extend_stager.init_forward_metadata_in_graph(forward_batch)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """DRAFT_EXTEND_V2 metadata, in one launch and into this backend's own buffers,
        which :meth:`_draft_extend_graph_metadata` views, its own and those of depths
        that share it. Eager forwards of the same draft depth fill the indptrs too, on
        the same stream; none comes between a step's staging and its draft extend."""
        if not (
            forward_batch.forward_mode.is_draft_extend_v2()
            and self.draft_extend_metadata_captured_in_graph()
        ):
            return
        width = forward_batch.out_cache_loc.shape[0] // forward_batch.batch_size
        self._launch_chain_metadata(forward_batch, width, is_verify=False)

    def _fill_verify_metadata(self, forward_batch: ForwardBatch) -> None:
        """Refill what a captured TARGET_VERIFY graph reads, in one launch on the forward
        stream, ahead of its replay. The host waits for nothing: the release slices the
        window indices by a length on the GPU. ``out_cache_loc`` is that of the real
        rows; padded ones write to slot 0."""
        self._launch_chain_metadata(
            forward_batch, self.num_draft_tokens, is_verify=True
        )

    def _launch_chain_metadata(
        self, forward_batch: ForwardBatch, width: int, *, is_verify: bool
    ) -> None:
        bs = forward_batch.batch_size
        has_window = self.window_kv_indptr is not None
        has_swa_pool = self.use_sliding_window_kv_pool
        unused = self.kv_indptr
        num_programs = min(
            triton.cdiv(self.max_context_len, _CHAIN_METADATA_KV_BLOCK),
            _CHAIN_METADATA_MAX_PROGRAMS_PER_REQ,
        )
        _chain_metadata_kernel[(bs, num_programs)](
            forward_batch.seq_lens,
            forward_batch.req_pool_indices,
            forward_batch.out_cache_loc,
            self.req_to_token,
            self._full_to_swa_mapping() if has_swa_pool else unused,
            self.qo_indptr,
            self.kv_indptr,
            self.cuda_graph_kv_indices,
            self.window_kv_indptr if has_window else unused,
            self.cuda_graph_window_kv_indices if has_window else unused,
            self.cuda_graph_swa_out_cache_loc if has_swa_pool else unused,
            self.req_to_token.stride(0),
            bs,
            width,
            forward_batch.out_cache_loc.shape[0],
            self.sliding_window_size if has_window else 0,
            IS_VERIFY=is_verify,
            HAS_WINDOW=has_window,
            HAS_SWA_POOL=has_swa_pool,
            ROWS_BLOCK=triton.next_power_of_2(bs),
            WIDTH_BLOCK=triton.next_power_of_2(width),
            KV_BLOCK=_CHAIN_METADATA_KV_BLOCK,
        )

    def _draft_extend_graph_metadata(
        self, forward_batch: ForwardBatch
    ) -> ForwardMetadata:
        """What a draft-extend graph reads, at the batch's size: the release's view of
        the buffers of who stages them, with as many queries as the batch has and with
        window indices."""
        bs = forward_batch.batch_size
        num_tokens = forward_batch.out_cache_loc.shape[0]
        stager = self._draft_extend_stager
        has_window = stager.window_kv_indptr is not None
        return replace(
            self.forward_metadata,
            max_extend_len=num_tokens // bs,
            qo_indptr=stager.qo_indptr[: bs + 1],
            kv_indptr=stager.kv_indptr[: bs + 1],
            kv_indices=stager.cuda_graph_kv_indices,
            window_kv_indptr=stager.window_kv_indptr[: bs + 1] if has_window else None,
            window_kv_indices=(
                stager.cuda_graph_window_kv_indices if has_window else None
            ),
            swa_out_cache_loc=(
                stager.cuda_graph_swa_out_cache_loc[:num_tokens]
                if stager.use_sliding_window_kv_pool
                else None
            ),
        )


@after(
    "TritonAttnBackend.__init__",
    "self.is_draft_runner = model_runner.is_draft_worker",
)
def decide_who_builds_the_metadata(self, model_runner: ModelRunner):
    # Only the drafts of hybrid models have a wrapper that stages for them, and only
    # multi-layer EAGLE leaves the eager rebuild out: to record the metadata for any
    # other draft graph would build it twice.
    self._is_inkling_chain = (
        self.topk == 1
        and self.dcp_size == 1
        and get_spec().enable_multi_layer_eagle
        and mambaish_config(model_runner.model_config) is not None
    )
    # A glue graph would keep the write locations of the step it was captured in; the
    # usual metadata waits for the GPU, so that none can be captured.
    glue_graph = envs.SGLANG_ENABLE_METADATA_GLUE_GRAPH.get()
    # Whose metadata this backend's draft-extend graphs read.
    self._draft_extend_stager: TritonAttnBackend = self
    self._chain_metadata_in_one_kernel = (
        self._is_inkling_chain
        and draft_extend_metadata_staging_enabled()
        and (self.is_draft_runner or not glue_graph)
    )


@before(
    "TritonAttnBackend.init_forward_metadata_out_graph",
    "bs = forward_batch.batch_size",
)
def fill_verify_metadata_in_one_launch(self, forward_batch, in_capture):
    if (
        not self.is_draft_runner
        and forward_batch.forward_mode.is_target_verify()
        and self._builds_chain_metadata_in_one_kernel()
    ):
        self._fill_verify_metadata(forward_batch)
        if not in_capture:
            return
        # Here only to be compiled: what follows makes the views that replays reuse.


@after(
    "TritonAttnBackend.init_forward_metadata_out_graph",
    "self.forward_metadata = self._build_cuda_graph_forward_metadata("
    "bs, forward_mode, spec_info, swa_out_cache_loc, out_cache_loc_full_physical)",
)
def view_what_the_graph_rebuilds(self, forward_batch: ForwardBatch):
    if (
        forward_batch.forward_mode.is_draft_extend_v2()
        and self.draft_extend_metadata_captured_in_graph()
    ):
        self.forward_metadata = self._draft_extend_graph_metadata(forward_batch)


# What follows has no switch: with the mask no server starts.


@after(
    "TritonAttnBackend.init_cuda_graph_state",
    "self._verify_mask = maybe_create_verify_mask("
    "is_draft_runner=self.is_draft_runner, skip_prefill=self.skip_prefill, "
    "max_bs=max_bs, max_context_len=self.max_context_len, "
    "num_draft_tokens=self.num_draft_tokens, device=self.device, "
    "is_read=True, dtype=torch.uint8)",
)
def a_chain_s_mask_is_not_read(self):
    # Filled for no reader: see _build_cuda_graph_forward_metadata.
    mask = self._verify_mask
    if mask is not None and self._is_inkling_chain:
        self._verify_mask = msgspec.structs.replace(mask, is_read=False)


@after(
    "TritonAttnBackend._build_cuda_graph_forward_metadata",
    "custom_mask = (self._verify_mask.buffer if self._verify_mask is not None "
    "and spec_info is not None "
    'and getattr(spec_info, "custom_mask", None) is not None else None)',
)
def a_captured_chain_has_no_mask(self):
    # Causality says the same, and the mask's bytes do not compile under a score_mod.
    if self._is_inkling_chain:
        custom_mask = None


@after(
    "TritonAttnBackend.init_forward_metadata",
    "custom_mask = spec_info.custom_mask",
)
def an_eager_chain_has_no_mask(self):
    if self._is_inkling_chain:
        custom_mask = None
