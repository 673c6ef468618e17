"""The opt-in staging capability of attention backends, off by default."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.utils.common import get_bool_env_var

from inkling_mtp_staging.edit import append_docstring

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


def draft_extend_metadata_staging_enabled() -> bool:
    """The operator's switch, on by default. Off, every step launches what it
    launches without staging, and waits as long. Read where backends and graph
    runners are built, so it takes effect at server start."""
    return get_bool_env_var("SGLANG_ENABLE_DRAFT_EXTEND_METADATA_STAGING", "true")


@append_docstring("AttentionBackend.draft_extend_metadata_captured_in_graph")
def staged_counts_as_rebuilt(self):
    """Metadata that :py:meth:`stage_draft_extend_metadata` fills counts as rebuilt:
    it is in place before the replay.
    """


class AttentionBackend:
    def draft_extend_metadata_captured_in_graph(self) -> bool: ...

    # Opt in when stage_draft_extend_metadata can do all of this backend's
    # DRAFT_EXTEND_V2 reads of the scheduler-shared mappings (request -> KV slot,
    # full -> SWA slot, request -> conv slot) ahead of the draft graph.
    supports_draft_extend_metadata_staging: bool = False

    def enable_draft_extend_metadata_staging(self) -> bool:
        """Ask, before any capture, that the draft graphs leave the mapping reads
        to :py:meth:`stage_draft_extend_metadata`.

        True commits both sides: the backend records none of those reads, and
        the runner stages ahead of every replay. False (the default) keeps them
        in the graph; a backend may support staging only as a wrapper's child
        and still answer False here.
        """
        return False

    def share_staged_draft_extend_metadata(self, other: AttentionBackend) -> bool:
        """Ask, before any capture, to read what ``other`` stages. ``other`` has this
        backend's type, belongs to an earlier draft depth and is staged ahead of the
        same replays.

        True if both would stage the same values: this backend's draft graphs then
        read ``other``'s buffers, which ``other`` fills on the forward stream, and the
        runner does not stage this one. Between the staging of a replay and the last
        depth's end nothing else may write them. False (the default): it is staged by
        itself.
        """
        return False

    def stage_draft_extend_metadata(self, forward_batch: ForwardBatch) -> None:
        """Do one DRAFT_EXTEND_V2 replay's reads of the shared mappings.

        Called on the forward stream, once per step and draft depth that shares no
        other's, normally ahead of the target's verify graph; the draft graph
        replays later on the same stream. The runner records it into a CUDA graph
        per batch size, so the body must be recordable: static shapes, no host
        sync, no allocation.

        ``forward_batch`` views the runner's static buffers for the padded batch
        (``batch_size`` rows, padded ones with request slot 0):
        ``req_pool_indices`` ``[bs]`` int64, ``seq_lens`` ``[bs]`` int32 (lengths
        after the draft extend's writes), ``extend_seq_lens`` ``[bs]`` int32 and
        ``out_cache_loc`` ``[bs * tokens_per_req]`` int64. None of them depends
        on the verify result.

        May write only what this backend's draft-extend graph reads: its own buffers,
        or those it shares. Afterwards the scheduler may rewrite the
        mappings at any time: nothing on the draft-extend path may read them
        again.
        """
        raise NotImplementedError()
