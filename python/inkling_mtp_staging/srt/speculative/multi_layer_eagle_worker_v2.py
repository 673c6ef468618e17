"""Stage before verify and choose which event fences the scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Dict, Optional, Tuple

import torch

from sglang.srt.distributed.parallel_state_wrapper import ParallelState
from sglang.srt.runtime_context import get_observability

from inkling_mtp_staging.edit import after, before

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = ...

_IDLE_BATCH = "idle batch"  # a reason not to stage that needs no log line


class DraftExtendStepCounter:
    """Decode steps by the fence that released the scheduler ("target", "draft", or
    "coarse" for the whole forward stream) and by the reason that kept the target's
    marker from being it ("" when it was), for SGLang's /metrics.

    ``count`` adds to a dict. The sums reach Prometheus every ``FLUSH_EVERY`` steps,
    so /metrics lags by up to that many.
    """

    FLUSH_EVERY = 16

    def __init__(self, enabled: bool):
        self._pending: Dict[Tuple[str, str], int] = {}
        self._num_pending = 0
        self._counter = None
        if enabled:
            # Imported late, as SGLang's collectors are: the launcher must have set
            # the multiprocess directory.
            from prometheus_client import Counter

            self._counter = Counter(
                name="sglang:mtp_draft_extend_steps_total",
                documentation="MTP decode steps by the fence of their shared reads.",
                labelnames=["fence", "reason"],
            )

    @classmethod
    def for_rank(cls, ps: ParallelState) -> DraftExtendStepCounter:
        """Enabled on the ranks whose scheduler exports metrics."""
        config = get_observability()
        exports = ps.attn_tp_rank == 0 or config.enable_metrics_for_all_schedulers
        return cls(enabled=config.enable_metrics and exports)

    def count(self, fence: str, reason: str) -> None:
        if self._counter is None:
            return
        key = (fence, reason)
        self._pending[key] = self._pending.get(key, 0) + 1
        self._num_pending += 1
        if self._num_pending >= self.FLUSH_EVERY:
            self.flush()

    def flush(self) -> None:
        for (fence, reason), steps in self._pending.items():
            self._counter.labels(fence=fence, reason=reason).inc(steps)
        self._pending.clear()
        self._num_pending = 0


@after(
    "MultiLayerEagleDraftWorker.__init__",
    "self.plan_stream, self.plan_stream_ctx = get_plan_stream(self.device)",
)
def nothing_staged_yet(self):
    # (out_cache_loc, positions, ready_event) of the draft window staged for the
    # step in progress; None when the step reads the mappings after verify.
    self._staged_window = None
    # Why that step was not staged; None when it was.
    self.unstaged_reason: Optional[str] = None


@before(
    "MultiLayerEagleDraftWorker._compute_boundary_kv_locs_positions",
    "if self.draft_extend_num_front_tokens == 0 or batch.forward_mode.is_idle():",
)
def use_the_staged_window(self):
    if self._staged_window is not None:
        # Without front rows the caller keeps verify's out_cache_loc: the same slots.
        return self._staged_window


class MultiLayerEagleDraftWorker:
    def draft(self, batch: ScheduleBatch): ...

    def _staging_refusal(self, batch: ScheduleBatch) -> Optional[str]:
        """Why this decode step cannot stage before verify, or None if it can."""
        runner = self.cuda_graph_runner_for_draft_extend
        if not runner:
            return "draft-extend CUDA graphs are off"
        if runner.staging_refusal is not None:
            return runner.staging_refusal
        target_graph_runner = self.target_worker.model_runner.decode_cuda_graph_runner
        if (
            target_graph_runner is None
            or target_graph_runner.in_graph_metadata_prep_done is None
        ):
            return "no target verify graph carries the metadata marker"
        # spec_info still describes the draft, not the draft extend: leave the
        # width out, it is the captured one by construction.
        if not runner.can_run_graph(
            SimpleNamespace(
                spec_info=None,
                seq_lens=batch.seq_lens,
                can_run_decode_cuda_graph=batch.can_run_decode_cuda_graph,
            )
        ):
            return "the batch fits no captured draft-extend bucket"
        return None

    def stage_draft_extend(self, batch: ScheduleBatch) -> None:
        """Read the shared mappings for this step's draft extend, before verify.

        Runs on the forward stream. A step that cannot be staged reads them after
        verify, as it does without staging.
        """
        runner = self.cuda_graph_runner_for_draft_extend
        self._staged_window = None
        if runner:
            runner.drop_staged()
        if batch.forward_mode.is_idle():
            self.unstaged_reason = _IDLE_BATCH
            return
        self.unstaged_reason = self._staging_refusal(batch)
        if self.unstaged_reason is not None:
            return
        out_cache_loc, positions = runner.stage(batch.seq_lens, batch.req_pool_indices)
        staged_event = None
        if self.plan_stream:
            staged_event = torch.get_device_module(self.device).Event()
            staged_event.record()
        self._staged_window = (out_cache_loc, positions, staged_event)


@after(
    "MultiLayerEagleWorkerV2.__init__",
    "self.plan_stream, self.plan_stream_ctx = get_plan_stream(self.device)",
)
def fence_on_the_draft_by_default(self, ps):
    self._shared_read_runner = self._draft_worker.draft_runner_list[-1]
    self._step_counter = DraftExtendStepCounter.for_rank(ps)


class MultiLayerEagleWorkerV2:
    @property
    def last_shared_read_runner(self):
        # The target when the step's draft-extend reads were staged before verify,
        # else the final draft depth: its replay is the last to read the mappings.
        return self._shared_read_runner

    def spec_v2_attn_backends(self) -> tuple: ...

    def _begin_shared_reads(self):
        """Drop what earlier steps published. The scheduler clears only the event
        it waits on, and runners reuse their events: one left behind is already
        complete and would fence nothing."""
        draft_runners = self._draft_worker.draft_runner_list
        self._target_worker.model_runner.shared_read_done_event = None
        for runner in draft_runners:
            runner.shared_read_done_event = None
        self._shared_read_runner = draft_runners[-1]

    def _select_shared_read_fence(self):
        """Let the target's marker release the scheduler if nothing behind it reads
        the mappings: the step was staged, and both graphs replayed."""
        reason = self._draft_fence_reason()
        if reason is None:
            self._shared_read_runner = self._target_worker.model_runner
            fence = "target"
        else:
            if reason != _IDLE_BATCH:
                logger.info_once(f"Draft extend fences the scheduler: {reason}.")
            event = self._shared_read_runner.shared_read_done_event
            fence = "coarse" if event is None else "draft"
        self._step_counter.count(fence, reason or "")

    def _draft_fence_reason(self) -> Optional[str]:
        """Why the mappings may still be read behind the target's marker, or None."""
        draft_worker = self._draft_worker
        if draft_worker.unstaged_reason is not None:
            return draft_worker.unstaged_reason
        target: ModelRunner = self._target_worker.model_runner
        marker = target.decode_cuda_graph_runner.in_graph_metadata_prep_done
        if target.shared_read_done_event is not marker:
            return "target verify did not replay its graph"
        if not draft_worker.cuda_graph_runner_for_draft_extend.prepared_from_staged:
            return "the draft extend did not replay what was staged"
        return None


@before(
    "MultiLayerEagleWorkerV2.forward_batch_generation",
    "if batch.forward_mode.is_extend() or batch.is_extend_in_batch:",
)
def no_event_outlives_its_step(self):
    self._begin_shared_reads()


@before(
    "MultiLayerEagleWorkerV2.forward_batch_generation",
    "batch.spec_info = verify_input",
)
def stage_before_verify(self, batch):
    # Ahead of the verify graph, whose marker may then release the scheduler.
    self.draft_worker.stage_draft_extend(batch)


@after(
    "MultiLayerEagleWorkerV2.forward_batch_generation",
    "self.draft_worker._draft_extend_for_decode(batch, batch_output)",
)
def fence_the_scheduler(self):
    self._select_shared_read_fence()
