"""Stage the draft extend's mapping reads before verify; publish its read-done event."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, List, Optional

import torch
import triton
import triton.language as tl

from sglang.srt.layers.attention.base_attn_backend import (
    draft_extend_metadata_staging_enabled,
)
from sglang.srt.runtime_context import get_disagg

from inkling_mtp_staging.edit import after, append_docstring, before

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

logger = ...


@triton.jit(do_not_specialize=["raw_bs"])
def _stage_draft_extend_window_kernel(
    # sources: the scheduler's batch and the shared request -> KV slot mapping
    src_seq_lens_ptr,  # [raw_bs] lengths before verify
    src_req_pool_indices_ptr,  # [raw_bs]
    req_to_token_ptr,
    stash_valid_lens_ptr,  # [req_pool_size] int32 (dummy without front tokens)
    # the draft's static buffers
    seq_lens_ptr,  # [max_bs] int32
    req_pool_indices_ptr,  # [max_bs] int64
    out_cache_loc_ptr,  # [max_bs * width] int64
    positions_ptr,  # [max_bs * width] int64
    raw_bs,
    # the same at every launch: a constant costs the host less than an argument
    REQ_TO_TOKEN_STRIDE: tl.constexpr,
    NUM_FRONT_TOKENS: tl.constexpr,
    NUM_WARMUP_TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    SEQ_LEN_FILL_VALUE: tl.constexpr,
):
    """One program per row of the padded batch. Real rows take the window locs and
    positions of compute_widened_draft_extend_locs_positions_kernel; padded rows
    point at request slot 0, KV slot 0 and position 0."""
    i = tl.program_id(0)
    offs = tl.arange(0, WIDTH_BLOCK)
    in_width = offs < WIDTH
    row = i.to(tl.int64) * WIDTH + offs

    if i >= raw_bs:
        tl.store(seq_lens_ptr + i, SEQ_LEN_FILL_VALUE)
        tl.store(req_pool_indices_ptr + i, 0)
        zeros = tl.zeros((WIDTH_BLOCK,), dtype=tl.int64)
        tl.store(out_cache_loc_ptr + row, zeros, mask=in_width)
        tl.store(positions_ptr + row, zeros, mask=in_width)
        return

    seq_len = tl.load(src_seq_lens_ptr + i).to(tl.int64)
    req = tl.load(src_req_pool_indices_ptr + i).to(tl.int64)
    tl.store(seq_lens_ptr + i, (seq_len + WIDTH - NUM_FRONT_TOKENS).to(tl.int32))
    tl.store(req_pool_indices_ptr + i, req)

    pos = seq_len - NUM_FRONT_TOKENS + offs
    if NUM_FRONT_TOKENS > 0:
        valid_len = tl.load(stash_valid_lens_ptr + req).to(tl.int64)
        first_valid = tl.maximum(
            tl.maximum(NUM_FRONT_TOKENS - valid_len, NUM_FRONT_TOKENS - seq_len), 0
        )
        first_written = tl.minimum(first_valid + NUM_WARMUP_TOKENS, NUM_FRONT_TOKENS)
        has_data = offs >= first_valid
        writes_kv = offs >= first_written
    else:
        has_data = in_width
        writes_kv = in_width
    loc = tl.load(
        req_to_token_ptr + req * REQ_TO_TOKEN_STRIDE + pos,
        mask=in_width & writes_kv,
        other=0,
    ).to(tl.int64)
    tl.store(out_cache_loc_ptr + row, loc, mask=in_width)
    tl.store(positions_ptr + row, tl.where(has_data, pos, 0), mask=in_width)


class MultiLayerEagleMultiStepDraftExtendCudaGraphRunner:
    """With every depth's backend staging, ``stage`` runs before target verify and
    ``prepare`` / ``replay`` read no shared mapping. What is written when, all on
    the forward stream:

    - ``buffers.seq_lens`` / ``req_pool_indices`` / ``out_cache_loc`` /
      ``positions`` and the backends' draft-extend tables: by ``stage`` of step
      N, behind the draft graphs of step N-1 that read them last;
    - token ids, hidden states and accept counts: by ``prepare``, after verify;
    - ``read_done_event``: behind the final depth's replay; it orders the
      scheduler's next mapping writes after the draft when nothing was staged.
    """

    def _create_runner(self, step: int): ...

    def _enable_staging(self):
        """Decide, before capture, which backends leave their mapping reads to
        ``stage``. All depths or none: an unstaged graph would hold the
        scheduler back for the whole step anyway."""
        backends = self.draft_extend_attn_backend_list
        self.staging_refusal = None
        if not draft_extend_metadata_staging_enabled():
            self.staging_refusal = "SGLANG_ENABLE_DRAFT_EXTEND_METADATA_STAGING is off"
            return
        if self.require_mlp_tp_gather:
            self.staging_refusal = "MLP-TP gather sizes the bucket by the largest rank"
            return
        if get_disagg().disaggregation_mode == "decode":
            # A peer writes KV into slots that the running step may still write for a
            # request that has finished. No stream orders it: it is told of the slots
            # once the schedule stream is past the fence.
            self.staging_refusal = "PD transfers must start behind the step's KV writes"
            return
        for step, backend in enumerate(backends):
            lacking = self._lacks_staging(backend)
            if lacking:
                self.staging_refusal = f"{lacking} of draft depth {step} lacks it"
                return
        self.staged_backends = [
            backend
            for backend in backends
            if backend.enable_draft_extend_metadata_staging()
        ]
        if len(self.staged_backends) < len(backends):
            self.staging_refusal = (
                f"{type(backends[0]).__name__} keeps its metadata in the draft graph"
            )
            return
        # An eager draft extend plans its first depth on the plan stream, which does not
        # wait for the later depths' graphs.
        if not self.eagle_worker.plan_stream:
            self._share_staged_metadata()

    def _share_staged_metadata(self):
        """Leave to ``stage`` only the depths whose metadata no earlier depth stages:
        of depths that read the same mappings at the same width, the first."""
        stagers = []
        for backend in self.staged_backends:
            if not any(
                type(earlier) is type(backend)
                and backend.share_staged_draft_extend_metadata(earlier)
                for earlier in stagers
            ):
                stagers.append(backend)
        self.staged_backends = stagers

    @staticmethod
    def _lacks_staging(backend: Optional[AttentionBackend]) -> str:
        """Names of the backends of one depth that cannot stage; empty if all can."""
        if backend is None:
            return "no attention backend"
        return ", ".join(
            type(leaf).__name__
            for leaf in backend.attn_backend_list or [backend]
            if not leaf.supports_draft_extend_metadata_staging
        )

    def _log_staging(self):
        depths = (
            f"{step}: {self._lacks_staging(backend) or 'yes'}"
            for step, backend in enumerate(self.draft_extend_attn_backend_list)
        )
        logger.info(
            "Draft-extend metadata is staged before verify: %s. "
            "Support by draft depth, or what lacks it: %s.",
            "yes" if self.staging_refusal is None else f"no, {self.staging_refusal}",
            "; ".join(depths),
        )

    def _init_staging(self):
        """Static views and one staging graph per bucket; nothing is allocated or
        compiled after this."""
        self.drop_staged()
        self._log_staging()
        self._staging_batches = {}
        self._staging_graphs = {}
        # One event for all steps: the scheduler queues its wait on step N's
        # record before step N+1 can record again.
        self.read_done_event = None
        if draft_extend_metadata_staging_enabled():
            self.read_done_event = torch.get_device_module(self.device).Event()
        if not self.staged_backends:
            return
        buffers = self.buffers
        for bs in self.capture_bs:
            self._staging_batches[bs] = SimpleNamespace(
                forward_mode=self.runners[0].forward_mode,
                batch_size=bs,
                req_pool_indices=buffers.req_pool_indices[:bs],
                seq_lens=buffers.seq_lens[:bs],
                extend_seq_lens=buffers.extend_seq_lens[:bs],
                out_cache_loc=buffers.out_cache_loc[: bs * self.captured_req_width],
            )
        # Made once: two views cost the host as much as half a kernel launch.
        self._staged_windows = [
            (buffers.out_cache_loc[:num_tokens], buffers.positions[:num_tokens])
            for num_tokens in range(
                0, (self.max_bs + 1) * self.captured_req_width, self.captured_req_width
            )
        ]
        self._width_block = triton.next_power_of_2(self.captured_req_width)
        no_requests = torch.empty(0, dtype=torch.int64, device=self.device)
        self._stage_window(no_requests, no_requests, self.max_bs)
        for bs in self.capture_bs:
            self._read_mappings(bs)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._read_mappings(bs)
            self._staging_graphs[bs] = graph

    def _read_mappings(self, bs: int):
        for backend in self.staged_backends:
            backend.stage_draft_extend_metadata(self._staging_batches[bs])

    def _stage_window(
        self, seq_lens: torch.Tensor, req_pool_indices: torch.Tensor, bs: int
    ):
        buffers = self.buffers
        worker = self.eagle_worker
        req_to_token = worker.req_to_token_pool.req_to_token
        _stage_draft_extend_window_kernel[(bs,)](
            seq_lens,
            req_pool_indices,
            req_to_token,
            worker.boundary_kv_stash_valid_lens,
            buffers.seq_lens,
            buffers.req_pool_indices,
            buffers.out_cache_loc,
            buffers.positions,
            seq_lens.shape[0],
            REQ_TO_TOKEN_STRIDE=req_to_token.stride(0),
            NUM_FRONT_TOKENS=self.num_front_tokens,
            NUM_WARMUP_TOKENS=worker.draft_extend_num_warmup_tokens,
            WIDTH=self.captured_req_width,
            WIDTH_BLOCK=self._width_block,
            SEQ_LEN_FILL_VALUE=self.seq_len_fill_value,
        )

    def stage(self, seq_lens: torch.Tensor, req_pool_indices: torch.Tensor):
        """Do all of the next draft extend's reads of the shared mappings, in two
        launches on the current (forward) stream, before target verify.

        Args: ``seq_lens`` ``[raw_bs]``, lengths before verify, and
        ``req_pool_indices`` ``[raw_bs]``, both int64; ``raw_bs`` must fit a
        captured bucket (``can_run_graph``).

        Returns ``(out_cache_loc, positions)`` of the draft window, int64
        ``[raw_bs * width]``: views of the static buffers, valid until the next
        ``stage``.
        """
        raw_bs = seq_lens.shape[0]
        bs = self.get_runner(0)._pad_to_bucket(raw_bs, self.capture_bs)
        self._stage_window(seq_lens, req_pool_indices, bs)
        self._staging_graphs[bs].replay()
        self._staged_raw_bs = raw_bs
        return self._staged_windows[raw_bs]

    def drop_staged(self):
        """Forget what was staged: the next ``prepare`` reads the mappings itself."""
        self._staged_raw_bs = None
        self.prepared_from_staged = False

    def _ensure_staged(self):
        """After ``prepare``: unless this very batch was staged before verify, read
        the mappings now, which ``prepared_from_staged`` tells."""
        if not self.staged_backends:
            return
        self.prepared_from_staged = self._staged_raw_bs == self.raw_bs
        if not self.prepared_from_staged:
            if self.bs != self.raw_bs:
                self.buffers.req_pool_indices[self.raw_bs : self.bs].zero_()
            self._staging_graphs[self.bs].replay()
        self._staged_raw_bs = None

    def _publish_shared_read_done(self):
        if self.read_done_event is None:
            return
        self.read_done_event.record()
        self.get_last_runner().model_runner.shared_read_done_event = (
            self.read_done_event
        )


@append_docstring("MultiLayerEagleDraftExtendCudaGraphRunner.replay")
def no_rebuild_of_what_is_staged(self):
    """A backend that stages has read the mappings in the composite runner's
    ``stage``; its graph rebuilds only what follows from the staged tables.
    """


@append_docstring("MultiLayerEagleMultiStepDraftExtendCudaGraphRunner.prepare")
def what_prepare_reads(self):
    """For a batch that ``stage`` prepared, locations and positions are in place:
    only tokens, hidden states and accept counts are new. Any other batch's mapping
    reads happen here.
    """


@before(
    "MultiLayerEagleMultiStepDraftExtendCudaGraphRunner.__init__",
    "self._init_and_capture()",
)
def start_unstaged(self):
    self.staged_backends: List[AttentionBackend] = []
    self.staging_refusal: Optional[str] = "draft-extend CUDA graphs are disabled"


@after(
    "MultiLayerEagleMultiStepDraftExtendCudaGraphRunner.__init__",
    "self._init_and_capture()",
)
def stage_into_the_captured_buffers(self):
    self._init_staging()


@after(
    "MultiLayerEagleMultiStepDraftExtendCudaGraphRunner._create_runners",
    "for step in range(self.speculative_num_steps):",
)
def enable_staging_before_capture(self):
    self._enable_staging()


@before(
    "MultiLayerEagleMultiStepDraftExtendCudaGraphRunner.prepare",
    "self._prepare_extra(forward_batch)",
)
def never_replay_unstaged(self):
    self._ensure_staged()


@before(
    "MultiLayerEagleMultiStepDraftExtendCudaGraphRunner.replay",
    "raw_bs = self.raw_bs",
)
def publish_behind_the_final_depth(self, runner):
    if runner is self.get_last_runner():
        self._publish_shared_read_done()


@before(
    "OneGraphMultiLayerEagleMultiStepDraftExtendCudaGraphRunner.replay",
    "raw_bs = self.raw_bs",
)
def publish_behind_the_one_graph(self):
    self._publish_shared_read_done()
