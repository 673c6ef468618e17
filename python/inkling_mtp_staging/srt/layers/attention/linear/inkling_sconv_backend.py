"""Inkling's wrapper stages its draft's mapping reads; commits use prepared slots."""

from __future__ import annotations

from typing import TYPE_CHECKING, List, Optional

import torch

from sglang.kernels.ops.mamba.mamba_state_scatter_triton import (
    scatter_mamba_states_after_mtp_verify,
)
from sglang.srt.layers.attention.base_attn_backend import (
    AttentionBackend,
    draft_extend_metadata_staging_enabled,
)
from sglang.srt.layers.attention.mamba.mamba2_metadata import ForwardMetadata
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from inkling_mtp_staging.edit import after, append_docstring

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


@append_docstring("")
def staged_draft_extend(self):
    """A draft-extend graph records no slot lookup when its wrapper stages one:
    ``stage_draft_extend_metadata`` fills the slot buffer before target verify, and
    the recorded prep starts from that buffer.
    """


@after(
    "InklingShortConvAttnBackend.__init__",
    "self.sconv_metadata = InklingShortConvMetadata()",
)
def decide_which_slots_a_commit_uses(self, model_runner: ModelRunner):
    # Under pdmux a sibling backend replays the verify graph, so this instance's
    # slot buffer need not be the one that verify used.
    self._commit_uses_prepared_slots = (
        self._slot_gather_recordable
        and not model_runner.server_args.enable_pdmux
        and draft_extend_metadata_staging_enabled()
    )
    # Whose slot buffer this backend's draft-extend graphs read.
    self._draft_extend_stager: InklingShortConvAttnBackend = self


@after(
    "InklingShortConvAttnBackend._prepare_slot_indices",
    "self._refresh_cache_indices()",
)
def keep_the_slots_of_a_padded_batch(self, buf):
    if self._commit_uses_prepared_slots:
        # MLP-sync padding outgrew the buffer. The batch's own rows come first, and a
        # commit takes them from there.
        buf.copy_(self._cache_indices[: buf.shape[0]])


class InklingShortConvAttnBackend:
    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch): ...

    @property
    def supports_draft_extend_metadata_staging(self) -> bool:
        return self._slot_gather_recordable

    def share_staged_draft_extend_metadata(
        self, other: InklingShortConvAttnBackend
    ) -> bool:
        # This backend's own buffer stays: its other graphs have captured it.
        shares = self._slot_mapping is other._slot_mapping
        if shares:
            self._draft_extend_stager = other._draft_extend_stager
        return shares

    @property
    def _slot_mapping(self) -> torch.Tensor:
        return self.req_to_token_pool.req_index_to_mamba_index_mapping

    def stage_draft_extend_metadata(self, forward_batch: ForwardBatch) -> None:
        self._draft_extend_stager._prepare_slot_indices(forward_batch)

    def init_staged_draft_extend_metadata_in_graph(
        self, forward_batch: ForwardBatch
    ) -> None:
        """Recorded instead of :meth:`init_forward_metadata_in_graph` when the
        slots are staged: the conv metadata is built from the slot buffer that
        :meth:`stage_draft_extend_metadata` filled, with no mapping read."""
        self._reset_step_state()
        staged_slots = self._draft_extend_stager._cache_indices_buf
        self._cache_indices = staged_slots[: forward_batch.batch_size]
        self.forward_metadata = ForwardMetadata(
            query_start_loc=None, mamba_cache_indices=self._cache_indices
        )
        self._refresh_sconv_metadata(forward_batch, on_graph_path=True)

    def commit_conv_state_after_mtp_verify(
        self,
        *,
        req_pool_indices: torch.Tensor,
        last_correct_step_indices: torch.Tensor,
        mamba_track_indices: Optional[torch.Tensor],
        mamba_steps_to_track: Optional[torch.Tensor],
    ) -> None:
        """Commit each request's accepted TARGET_VERIFY conv window, into the slots
        that verify ran with.

        The commit comes after verify's metadata marker, when the scheduler may
        already have given a request's slot away, so looking ``req_pool_indices``
        up again could hit another request's state. It is queued on the forward
        stream right behind verify: no later forward has refilled the slot buffer.
        """
        scatter_mamba_states_after_mtp_verify(
            self.req_to_token_pool.get_speculative_mamba2_params_all_layers(),
            self._verify_slot_indices(req_pool_indices),
            last_correct_step_indices,
            mamba_track_indices,
            mamba_steps_to_track,
        )

    def _verify_slot_indices(self, req_pool_indices: torch.Tensor) -> torch.Tensor:
        """Conv slots of the verify just queued, int32 ``[bs]``."""
        num_reqs = req_pool_indices.shape[0]
        if (
            self._commit_uses_prepared_slots
            and num_reqs <= self._cache_indices_buf.shape[0]
        ):
            return self._cache_indices_buf[:num_reqs]
        # Staging off, eager verify past the buffer or virtual slot ids, none of them
        # fenced by the marker, or pdmux, which runs without overlap: the mapping is
        # unchanged.
        return self._translate_mamba_indices(
            self.req_to_token_pool.get_mamba_indices(req_pool_indices)
        )


class InklingShortConvHybridAttnBackend:
    def init_forward_metadata(self, forward_batch: ForwardBatch): ...

    # Set once, before capture, by a runner that stages ahead of every replay. A
    # runner that does not ask keeps the mapping reads in its graph.
    draft_extend_metadata_staged: bool = False

    @property
    def supports_draft_extend_metadata_staging(self) -> bool:
        return all(
            backend.supports_draft_extend_metadata_staging
            for backend in self.attn_backend_list
        )

    def enable_draft_extend_metadata_staging(self) -> bool:
        self.draft_extend_metadata_staged = self.supports_draft_extend_metadata_staging
        # Not those that read what an earlier depth's child stages.
        self._children_to_stage: List[AttentionBackend] = [*self.attn_backend_list]
        return self.draft_extend_metadata_staged

    def share_staged_draft_extend_metadata(
        self, other: InklingShortConvHybridAttnBackend
    ) -> bool:
        """Child by child: True only if no child is left to stage."""
        self._children_to_stage = [
            child
            for child, others in zip(self.attn_backend_list, other.attn_backend_list)
            if child in self._children_to_stage
            and not (
                type(others) is type(child)
                and child.share_staged_draft_extend_metadata(others)
            )
        ]
        return not self._children_to_stage

    def stage_draft_extend_metadata(self, forward_batch: ForwardBatch) -> None:
        for attn_backend in self._children_to_stage:
            attn_backend.stage_draft_extend_metadata(forward_batch)

    def init_forward_metadata_out_graph(
        self, forward_batch: ForwardBatch, in_capture: bool = False
    ):
        super().init_forward_metadata_out_graph(forward_batch, in_capture)
        if in_capture and self._is_staged(forward_batch):
            # The capture warm-up runs the graph body before any step staged
            # for it: give it the dummy batch's slots.
            for attn_backend in self.attn_backend_list:
                attn_backend.stage_draft_extend_metadata(forward_batch)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch):
        if self._is_staged(forward_batch):
            self.short_conv_backend.init_staged_draft_extend_metadata_in_graph(
                forward_batch
            )
        else:
            super().init_forward_metadata_in_graph(forward_batch)

    def _is_staged(self, forward_batch: ForwardBatch) -> bool:
        return (
            self.draft_extend_metadata_staged
            and forward_batch.forward_mode.is_draft_extend_v2()
        )
