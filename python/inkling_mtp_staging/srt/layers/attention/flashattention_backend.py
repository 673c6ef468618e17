"""FlashAttention can fill its draft-extend tables ahead of the draft graph."""

from __future__ import annotations

from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class FlashAttentionBackend:
    def draft_extend_metadata_captured_in_graph(self) -> bool: ...

    @property
    def supports_draft_extend_metadata_staging(self) -> bool:
        # As a wrapper's child: standalone, the metadata kernel stays in the draft
        # graph (enable_draft_extend_metadata_staging is not overridden). The
        # kernel gathers straight from the mappings, so it serves neither
        # translated ids nor the local-attention and encoder tables.
        return (
            self.topk == 1
            and self.draft_extend_metadata_captured_in_graph()
            and not self.kv_index_translator.is_translating
            and not self.has_local_attention
            and not self.is_encoder_decoder
        )

    def share_staged_draft_extend_metadata(self, other: FlashAttentionBackend) -> bool:
        # Tables of sliding-window slots come through a mapping that each such depth
        # has to itself; those of full slots are the same for all.
        shares = (
            not self.use_sliding_window_kv_pool
            and self.req_to_token is other.req_to_token
        )
        if shares:
            # The buffers alone: what a graph captured at a batch size also owns
            # must live as long as that graph.
            for name in self.draft_extend_metadata:
                self.draft_extend_metadata[name] = other.draft_extend_metadata[name]
        return shares

    def stage_draft_extend_metadata(self, forward_batch: ForwardBatch) -> None:
        # Same kernel, same destinations as in the graph; only the time differs.
        self.init_forward_metadata_in_graph(forward_batch)
