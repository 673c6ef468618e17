"""Take one guard out of the composed sources at a time: its tests must notice.

A mutation names the edited module, the source text that makes up the guard and what
stands there instead, and the tests of which each must fail then. Nearly all of them fail
on the release without the edits. That all pass on the sources as they are is seen in
`test/registered`; here a control runs one of each class, as the mutants are run.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from mutants import run_jobs, write_job

from inkling_mtp_staging.compose import compose_all
from inkling_mtp_staging.install import pristine_sources

pytestmark = [
    # One process runs all mutants before the first test reports.
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="the tests run kernels in the interpreter"
    ),
]

WORKER = "srt/speculative/multi_layer_eagle_worker_v2.py"
RUNNER = "srt/speculative/multi_layer_eagle_draft_extend_cuda_graph_runner.py"
SCONV = "srt/layers/attention/linear/inkling_sconv_backend.py"
FLASH = "srt/layers/attention/flashattention_backend.py"
TRITON = "srt/layers/attention/triton_backend.py"

_FENCE = "test_multi_layer_eagle_shared_read_fence"
_STAGING = "test_draft_extend_metadata_staging"
FENCE = f"{_FENCE}.TestSharedReadFence"
COUNTER = f"{_FENCE}.TestStepCounter"
DECISION = f"{_FENCE}.TestStagingDecision"
STEP = f"{_FENCE}.TestStagedStep"
PLAN = f"{_FENCE}.TestPlanStream"
CAPABILITY = f"{_STAGING}.TestCapability"
BUFFERS = f"{_STAGING}.TestStagedBuffers"
COMPOSITE = f"{_STAGING}.TestComposite"
GRAPHS = f"{_STAGING}.TestDraftGraphs"
SHARED = f"{_STAGING}.TestSharedMetadata"
POISON = f"{_STAGING}.TestPoisonedStep"
COMMIT = f"{_STAGING}.TestConvCommit"
_TRITON = "test_triton_draft_extend_staging"
TRITON_CAPABILITY = f"{_TRITON}.TestTritonCapability"
TRITON_BUFFERS = f"{_TRITON}.TestTritonStagedBuffers"
TRITON_GRAPHS = f"{_TRITON}.TestTritonDraftGraphs"
TRITON_SHARED = f"{_TRITON}.TestTritonSharedMetadata"
TRITON_POISON = f"{_TRITON}.TestTritonPoisonedStep"
TRITON_VERIFY = f"{_TRITON}.TestTritonVerify"
_RANKS = "test_staging_decision_per_rank"
RANKS_TP = f"{_RANKS}.TestTensorParallel"
RANKS_DP = f"{_RANKS}.TestDPAttention"
RANKS_GRAPHS = f"{_RANKS}.TestGraphOrEager"
RANKS_PADDED = f"{_RANKS}.TestPaddedVerify"

# Where the commit, sharing and the Triton backend keep what the release always does.
AS_RELEASED = {
    f"{SHARED}.test_what_a_captured_graph_owns_lives_on",
    f"{TRITON_CAPABILITY}.test_only_draft_extend_is_recorded",
    f"{TRITON_GRAPHS}.test_switched_off_the_single_graph_refuses_it",
    f"{TRITON_VERIFY}.test_it_is_what_the_release_builds",
    f"{TRITON_VERIFY}.test_a_tree_keeps_its_mask",
    f"{TRITON_VERIFY}.test_a_glue_graph_cannot_capture_it",
    f"{COMMIT}.test_pdmux_looks_the_slots_up",
    f"{COMMIT}.test_a_translating_pool_looks_the_slots_up",
    f"{COMMIT}.test_more_requests_than_the_slot_buffer_holds",
}


@dataclass(frozen=True)
class Mutation:
    name: str
    path: str
    changes: tuple[tuple[str, str], ...]
    tests: tuple[str, ...]

    def apply(self, source: str) -> str:
        for guard, instead in self.changes:
            assert source.count(guard) == 1, (
                f"{self.name}: {self.path} has {source.count(guard)} times: {guard}"
            )
            source = source.replace(guard, instead)
        return source


def mutation(name: str, path: str, guard: str, instead: str, *tests: str) -> Mutation:
    return Mutation(name, path, ((guard, instead),), tests)


MUTATIONS = [
    # which event fences the scheduler
    mutation(
        "the target's event outlives its step",
        WORKER,
        "        self._target_worker.model_runner.shared_read_done_event = None\n",
        "",
        f"{FENCE}.test_a_marker_left_behind_fences_no_step_whose_verify_is_eager",
        f"{FENCE}.test_the_scheduler_reads_every_step",
        f"{FENCE}.test_the_scheduler_reads_only_the_last_step",
    ),
    mutation(
        "the drafts' events outlive their step",
        WORKER,
        "            runner.shared_read_done_event = None\n",
        "            pass\n",
        f"{FENCE}.test_a_draft_event_left_behind_fences_no_eager_step",
        f"{FENCE}.test_events_on_earlier_depths_do_not_outlive_their_step",
        f"{FENCE}.test_the_scheduler_reads_only_the_last_step",
        f"{RANKS_DP}.test_idle_while_the_other_rank_prefills",
    ),
    mutation(
        "a staged step's fence outlives it",
        WORKER,
        "            runner.shared_read_done_event = None\n"
        "        self._shared_read_runner = draft_runners[-1]\n",
        "            runner.shared_read_done_event = None\n",
        f"{FENCE}.test_named_sequences",
        f"{FENCE}.test_long_random_sequences",
    ),
    mutation(
        "why a step was not staged is lost",
        WORKER,
        "        if draft_worker.unstaged_reason is not None:\n"
        "            return draft_worker.unstaged_reason\n",
        "",
        f"{DECISION}.test_batch_beyond_the_buckets",
        f"{DECISION}.test_switched_off",
    ),
    mutation(
        "the target fences without staging",
        WORKER,
        "        if draft_worker.unstaged_reason is not None:\n"
        "            return draft_worker.unstaged_reason\n",
        "        if draft_worker.unstaged_reason is not None:\n"
        "            return None\n",
        f"{FENCE}.test_each_kind_of_step",
        f"{STEP}.test_an_unstaged_step_fences_on_the_final_draft",
    ),
    mutation(
        "the target fences without its graph",
        WORKER,
        '            return "target verify did not replay its graph"\n',
        "            pass\n",
        f"{FENCE}.test_each_kind_of_step",
    ),
    mutation(
        "any event of the target fences",
        WORKER,
        "        if target.shared_read_done_event is not marker:\n",
        "        if target.shared_read_done_event is None:\n",
        f"{FENCE}.test_each_kind_of_step",
    ),
    mutation(
        "the target fences whatever the draft extend did",
        WORKER,
        "        if not draft_worker.cuda_graph_runner_for_draft_extend.prepared_from_staged:\n",
        "        if False:\n",
        f"{FENCE}.test_each_kind_of_step",
        f"{STEP}.test_a_step_that_read_again_fences_on_the_final_draft",
    ),
    mutation(
        "an idle batch is reported",
        WORKER,
        "            if reason != _IDLE_BATCH:\n",
        "            if True:\n",
        f"{DECISION}.test_idle_is_never_staged",
    ),
    mutation(
        "steps are not counted",
        WORKER,
        '        self._step_counter.count(fence, reason or "")\n',
        "",
        f"{COUNTER}.test_every_kind_of_decode_step_is_counted_as_it_was_fenced",
    ),
    mutation(
        "the counts are kept without metrics",
        WORKER,
        "        if self._counter is None:\n            return\n",
        "",
        f"{COUNTER}.test_without_metrics_nothing_is_kept",
    ),
    Mutation(
        "staged behind verify",
        WORKER,
        (
            ("            self.draft_worker.stage_draft_extend(batch)\n", ""),
            (
                "            batch_output = self.verify(batch,",
                "            verified_batch = batch\n"
                "            batch_output = self.verify(batch,",
            ),
            (
                "            # Publish before draft_extend so the fence is at verify-end.",
                "            self.draft_worker.stage_draft_extend(verified_batch)\n"
                "            # Publish before draft_extend so the fence is at verify-end.",
            ),
        ),
        (
            f"{FENCE}.test_the_step_is_staged_between_draft_and_verify",
            f"{POISON}.test_page_size_16",
        ),
    ),
    # what one step leaves to the next
    mutation(
        "the staged window outlives its step",
        WORKER,
        "        self._staged_window = None\n        if runner:\n",
        "        if runner:\n",
        f"{DECISION}.test_idle_is_never_staged",
        f"{PLAN}.test_an_unstaged_step_computes_the_window_itself",
    ),
    mutation(
        "the staged batch outlives its step",
        WORKER,
        "            runner.drop_staged()\n",
        "            pass\n",
        f"{DECISION}.test_idle_is_never_staged",
        f"{STEP}.test_what_an_eager_draft_extend_left_staged_is_not_used",
        f"{STEP}.test_a_failed_step_leaves_nothing_staged",
    ),
    mutation(
        "the staged batch outlives its replay",
        RUNNER,
        "            self._staging_graphs[self.bs].replay()\n"
        "        self._staged_raw_bs = None\n",
        "            self._staging_graphs[self.bs].replay()\n",
        f"{COMPOSITE}.test_a_staged_batch_is_used_once",
    ),
    mutation(
        "an unstaged batch is not read",
        RUNNER,
        "        if not self.prepared_from_staged:\n",
        "        if False:\n",
        f"{COMPOSITE}.test_an_unstaged_batch_is_read_behind_verify",
        f"{COMPOSITE}.test_a_dropped_batch_is_read_behind_verify",
        f"{COMPOSITE}.test_a_batch_of_another_size_is_read_behind_verify",
        f"{BUFFERS}.test_poison_moves_an_unstaged_read_only",
    ),
    mutation(
        "a batch of another size counts as staged",
        RUNNER,
        "self.prepared_from_staged = self._staged_raw_bs == self.raw_bs",
        "self.prepared_from_staged = self._staged_raw_bs is not None",
        f"{COMPOSITE}.test_a_batch_of_another_size_is_read_behind_verify",
    ),
    # which steps are staged
    mutation(
        "an idle batch is staged",
        WORKER,
        "            runner.drop_staged()\n"
        "        if batch.forward_mode.is_idle():\n"
        "            self.unstaged_reason = _IDLE_BATCH\n"
        "            return\n",
        "            runner.drop_staged()\n",
        f"{DECISION}.test_idle_is_never_staged",
        f"{RANKS_DP}.test_an_idle_rank_is_not_staged",
    ),
    mutation(
        "a batch that fits no bucket is staged",
        WORKER,
        '            return "the batch fits no captured draft-extend bucket"\n',
        "            return None\n",
        f"{DECISION}.test_batch_beyond_the_buckets",
        f"{DECISION}.test_padding_disabled",
        f"{DECISION}.test_mlp_sync_turned_the_graphs_off",
        f"{RANKS_TP}.test_the_ranks_decide_alike",
    ),
    # what the ranks of one server decide
    mutation(
        "MLP-TP gather is not refused",
        RUNNER,
        "        if self.require_mlp_tp_gather:\n            self.staging_refusal",
        "        if False:\n            self.staging_refusal",
        f"{DECISION}.test_mlp_tp_gather",
        f"{RANKS_DP}.test_mlp_tp_gather_is_refused_at_start",
        f"{RANKS_DP}.test_mlp_tp_gather_keeps_the_ranks_in_one_bucket",
    ),
    mutation(
        "a PD decode server stages",
        RUNNER,
        '        if get_disagg().disaggregation_mode == "decode":\n',
        "        if False:\n",
        f"{DECISION}.test_pd_decode_server",
    ),
    mutation(
        "the other ranks' votes are not counted",
        WORKER,
        "can_run_decode_cuda_graph=batch.can_run_decode_cuda_graph,",
        "can_run_decode_cuda_graph=True,",
        f"{DECISION}.test_mlp_sync_turned_the_graphs_off",
        f"{RANKS_DP}.test_a_rank_without_graphs_votes_for_all",
    ),
    mutation(
        "a rank asks the others",
        WORKER,
        "        self.unstaged_reason = self._staging_refusal(batch)\n",
        "        self.unstaged_reason = self._staging_refusal(batch)\n"
        "        torch.distributed.all_reduce(torch.zeros(1))\n",
        f"{RANKS_TP}.test_the_ranks_decide_alike",
        f"{RANKS_DP}.test_without_gather_each_rank_has_its_own_bucket",
    ),
    mutation(
        "the ranks decide by rank",
        WORKER,
        "        self.unstaged_reason = self._staging_refusal(batch)\n",
        "        self.unstaged_reason = self._staging_refusal(batch)\n"
        "        if torch.distributed.get_rank() == 1:\n"
        '            self.unstaged_reason = "rank 1"\n',
        f"{RANKS_TP}.test_the_ranks_decide_alike",
    ),
    mutation(
        "an unstaged draft extend runs eagerly",
        WORKER,
        "            self.cuda_graph_runner_for_draft_extend\n"
        "            and self.cuda_graph_runner_for_draft_extend.can_run_graph(forward_batch)\n",
        "            self._staged_window is not None\n"
        "            and self.cuda_graph_runner_for_draft_extend.can_run_graph(forward_batch)\n",
        f"{RANKS_GRAPHS}.test_in_tensor_parallel",
        f"{RANKS_DP}.test_mlp_tp_gather_keeps_the_ranks_in_one_bucket",
        f"{RANKS_DP}.test_an_idle_rank_is_not_staged",
    ),
    mutation(
        "a step whose target has no marker is staged",
        WORKER,
        '            return "no target verify graph carries the metadata marker"\n',
        "            pass\n",
        f"{DECISION}.test_target_without_marker",
    ),
    mutation(
        "some depths stage without the others",
        RUNNER,
        'of draft depth {step} lacks it"\n                return\n',
        'of draft depth {step} lacks it"\n',
        f"{DECISION}.test_one_depth_without_support",
    ),
    # the window
    mutation(
        "the front of a short sequence",
        RUNNER,
        "tl.maximum(NUM_FRONT_TOKENS - valid_len, NUM_FRONT_TOKENS - seq_len), 0\n",
        "NUM_FRONT_TOKENS - valid_len, 0\n",
        f"{BUFFERS}.test_page_size_1",
    ),
    mutation(
        "the front rows that warm the convs up",
        RUNNER,
        "first_valid + NUM_WARMUP_TOKENS, NUM_FRONT_TOKENS)\n        has_data",
        "first_valid, NUM_FRONT_TOKENS)\n        has_data",
        f"{BUFFERS}.test_page_size_1",
    ),
    # padded rows
    mutation(
        "stale lengths when staged",
        RUNNER,
        "        tl.store(seq_lens_ptr + i, SEQ_LEN_FILL_VALUE)\n",
        "",
        f"{BUFFERS}.test_rows_of_a_larger_batch_do_not_survive",
    ),
    mutation(
        "stale request slots when staged",
        RUNNER,
        "        tl.store(req_pool_indices_ptr + i, 0)\n",
        "",
        f"{BUFFERS}.test_rows_of_a_larger_batch_do_not_survive",
    ),
    mutation(
        "stale KV slots when staged",
        RUNNER,
        "        tl.store(out_cache_loc_ptr + row, zeros, mask=in_width)\n",
        "",
        f"{BUFFERS}.test_rows_of_a_larger_batch_do_not_survive",
    ),
    mutation(
        "stale request slots when read behind verify",
        RUNNER,
        "self.buffers.req_pool_indices[self.raw_bs : self.bs].zero_()",
        "pass",
        f"{BUFFERS}.test_nor_when_they_are_read_behind_verify",
    ),
    # the draft's read-done event
    mutation(
        "every depth publishes",
        RUNNER,
        "        if runner is self.get_last_runner():\n",
        "        if True:\n",
        f"{COMPOSITE}.test_the_final_depth_publishes",
    ),
    mutation(
        "the single graph does not publish",
        RUNNER,
        "            self._publish_shared_read_done()\n            raw_bs = self.raw_bs\n",
        "            raw_bs = self.raw_bs\n",
        f"{COMPOSITE}.test_the_single_graph_publishes",
    ),
    # the plan stream
    mutation(
        "the plan stream waits for nothing",
        WORKER,
        "self._staged_window = (out_cache_loc, positions, staged_event)",
        "self._staged_window = (out_cache_loc, positions, None)",
        f"{PLAN}.test_the_window_carries_an_event_behind_the_stage_writes",
        f"{PLAN}.test_the_plan_stream_waits_for_the_staged_window",
    ),
    mutation(
        "the window is computed again",
        WORKER,
        "            return self._staged_window\n",
        "            pass\n",
        f"{PLAN}.test_the_window_carries_an_event_behind_the_stage_writes",
        f"{POISON}.test_page_size_16",
    ),
    # no mapping read in the draft graphs
    mutation(
        "the draft graphs gather the conv slots",
        SCONV,
        "            self.short_conv_backend.init_staged_draft_extend_metadata_in_graph(\n",
        "            self.short_conv_backend.init_forward_metadata_in_graph(\n",
        f"{GRAPHS}.test_they_read_no_mapping_when_staged",
        f"{POISON}.test_page_size_16",
    ),
    mutation(
        "the draft graphs build the page tables",
        SCONV,
        "            self.short_conv_backend.init_staged_draft_extend_metadata_in_graph(\n",
        "            self.full_attn_backend.init_forward_metadata_in_graph(forward_batch)\n"
        "            self.short_conv_backend.init_staged_draft_extend_metadata_in_graph(\n",
        f"{GRAPHS}.test_they_read_no_mapping_when_staged",
        f"{POISON}.test_page_size_16",
    ),
    mutation(
        "capture leaves the slots unset",
        SCONV,
        "        if in_capture and self._is_staged(forward_batch):\n",
        "        if False:\n",
        f"{GRAPHS}.test_capture_stages_and_replay_prep_does_not",
    ),
    # depths that share what is staged
    mutation(
        "every depth stages by itself",
        RUNNER,
        "            self._share_staged_metadata()\n",
        "            pass\n",
        f"{SHARED}.test_depths_that_are_alike_are_staged_once",
        f"{TRITON_SHARED}.test_depths_that_are_alike_are_staged_once",
    ),
    mutation(
        "a wrapper of another type is asked to share",
        RUNNER,
        "                type(earlier) is type(backend)\n                and ",
        "                ",
        f"{SHARED}.test_a_wrapper_of_another_type_is_staged",
    ),
    mutation(
        "a child of another type is asked to share",
        SCONV,
        "                type(others) is type(child)\n                and ",
        "                ",
        f"{SHARED}.test_a_child_of_another_type_is_staged",
    ),
    mutation(
        "what a depth shares is staged again",
        SCONV,
        "        for attn_backend in self._children_to_stage:\n",
        "        for attn_backend in self.attn_backend_list:\n",
        f"{SHARED}.test_depths_with_sliding_window_slots_share_the_conv_slots",
    ),
    mutation(
        "a depth forgets what it shares with another",
        SCONV,
        "            if child in self._children_to_stage\n            and not (",
        "            if not (",
        f"{SHARED}.test_what_is_shared_with_one_depth_stays_shared",
    ),
    mutation(
        "capture fills only what the depth stages",
        SCONV,
        "            # for it: give it the dummy batch's slots.\n"
        "            for attn_backend in self.attn_backend_list:\n",
        "            # for it: give it the dummy batch's slots.\n"
        "            for attn_backend in self._children_to_stage:\n",
        f"{GRAPHS}.test_capture_of_a_later_depth_fills_what_it_shares",
    ),
    mutation(
        "capture fills the depth's own conv slots",
        SCONV,
        "        self._draft_extend_stager._prepare_slot_indices(forward_batch)\n",
        "        self._prepare_slot_indices(forward_batch)\n",
        f"{GRAPHS}.test_capture_of_a_later_depth_fills_what_it_shares",
    ),
    mutation(
        "depths share beside a plan stream",
        RUNNER,
        "        if not self.eagle_worker.plan_stream:\n            self._share",
        "        if True:\n            self._share",
        f"{SHARED}.test_nothing_is_shared_beside_a_plan_stream",
    ),
    mutation(
        "FlashAttention's captured metadata is dropped",
        FLASH,
        "            for name in self.draft_extend_metadata:\n"
        "                self.draft_extend_metadata[name] = other.draft_extend_metadata[name]\n",
        "            self.draft_extend_metadata = other.draft_extend_metadata\n",
        f"{SHARED}.test_what_a_captured_graph_owns_lives_on",
        f"{SHARED}.test_banded_depths_beside_full_ones",
    ),
    mutation(
        "FlashAttention shares sliding-window tables",
        FLASH,
        "            not self.use_sliding_window_kv_pool\n            and self.req",
        "            self.req",
        f"{SHARED}.test_depths_with_sliding_window_slots_share_the_conv_slots",
        f"{BUFFERS}.test_page_size_16",
    ),
    mutation(
        "FlashAttention shares page tables of other requests",
        FLASH,
        "            and self.req_to_token is other.req_to_token\n",
        "",
        f"{SHARED}.test_another_request_mapping_is_not_shared",
    ),
    mutation(
        "FlashAttention's shared tables are its own",
        FLASH,
        "                self.draft_extend_metadata[name] = other.draft_extend_metadata[name]\n",
        "                pass\n",
        f"{BUFFERS}.test_without_sliding_window_pool",
    ),
    mutation(
        "conv slots of another mapping are shared",
        SCONV,
        "self._slot_mapping is other._slot_mapping",
        "True",
        f"{SHARED}.test_another_conv_slot_mapping_is_not_shared",
    ),
    mutation(
        "shared conv slots lie in the depth's own buffer",
        SCONV,
        "        staged_slots = self._draft_extend_stager._cache_indices_buf\n",
        "        staged_slots = self._cache_indices_buf\n",
        f"{POISON}.test_page_size_16",
    ),
    mutation(
        "Triton shares KV indices of other requests",
        TRITON,
        "            self.req_to_token is other.req_to_token\n            and ",
        "            ",
        f"{TRITON_SHARED}.test_what_must_be_alike",
    ),
    mutation(
        "Triton shares sliding-window slots of another pool",
        TRITON,
        "            and self._full_to_swa_mapping() is other._full_to_swa_mapping()\n",
        "",
        f"{TRITON_SHARED}.test_what_must_be_alike",
    ),
    mutation(
        "Triton shares another window",
        TRITON,
        "            and self.sliding_window_size == other.sliding_window_size\n",
        "",
        f"{TRITON_SHARED}.test_what_must_be_alike",
    ),
    mutation(
        "Triton's shared metadata is its own",
        TRITON,
        "        stager = self._draft_extend_stager\n",
        "        stager = self\n",
        f"{TRITON_SHARED}.test_an_eager_forward_of_a_later_depth_changes_nothing_staged",
        f"{TRITON_BUFFERS}.test_page_size_16",
    ),
    # the conv commit
    mutation(
        "the commit looks the slots up",
        SCONV,
        "            self._commit_uses_prepared_slots\n",
        "            False\n",
        f"{COMMIT}.test_into_the_slots_of_the_verify",
        f"{COMMIT}.test_wrapper_commits_through_the_sidecar",
    ),
    mutation(
        "pdmux commits through a sibling's slots",
        SCONV,
        "            and not model_runner.server_args.enable_pdmux\n",
        "",
        f"{COMMIT}.test_pdmux_looks_the_slots_up",
    ),
    mutation(
        "a translating pool commits through prepared slots",
        SCONV,
        "            self._slot_gather_recordable\n            and not model_runner",
        "            not model_runner",
        f"{COMMIT}.test_a_translating_pool_looks_the_slots_up",
    ),
    mutation(
        "a commit past the slot buffer",
        SCONV,
        "            and num_reqs <= self._cache_indices_buf.shape[0]\n",
        "",
        f"{COMMIT}.test_more_requests_than_the_slot_buffer_holds",
    ),
    mutation(
        "a padded verify commits into an older step's slots",
        SCONV,
        "            buf.copy_(self._cache_indices[: buf.shape[0]])\n",
        "            pass\n",
        f"{RANKS_PADDED}.test_commits_into_its_own_slots",
    ),
    # who may stage
    mutation(
        "one supporting child is enough",
        SCONV,
        "        return all(\n            backend.supports_draft_extend_metadata_staging",
        "        return any(\n            backend.supports_draft_extend_metadata_staging",
        f"{CAPABILITY}.test_wrapper_asks_both_children",
        f"{CAPABILITY}.test_translated_conv_slots",
    ),
    *(
        mutation(
            f"FlashAttention stages {what}",
            FLASH,
            guard,
            instead,
            f"{CAPABILITY}.test_flash_attention_conditions",
        )
        for what, guard, instead in (
            ("trees", "            self.topk == 1\n            and ", "            "),
            (
                "through page tables",
                "            and self.draft_extend_metadata_captured_in_graph()\n",
                "",
            ),
            (
                "translated ids",
                "            and not self.kv_index_translator.is_translating\n",
                "",
            ),
            (
                "local attention",
                "            and not self.has_local_attention\n",
                "",
            ),
            ("encoders", "            and not self.is_encoder_decoder\n", ""),
        )
    ),
    *(
        mutation(
            f"Triton stages {what}",
            TRITON,
            guard,
            instead,
            f"{TRITON_CAPABILITY}.test_conditions",
        )
        for what, guard, instead in (
            (
                "deterministic inference",
                "            and not self.enable_deterministic\n",
                "",
            ),
            (
                "translated ids",
                "            and not self.kv_index_translator.is_translating\n",
                "",
            ),
            (
                "through page tables",
                "            and (\n"
                "                not self.use_sliding_window_kv_pool\n"
                "                or self._full_to_swa_mapping() is not None\n"
                "            )\n",
                "",
            ),
        )
    ),
    # whose Triton graphs are left as released
    mutation(
        "Triton records a target's draft extend",
        TRITON,
        "        return self.is_draft_runner and self._builds_chain",
        "        return self._builds_chain",
        f"{TRITON_CAPABILITY}.test_a_target_is_the_release_s",
    ),
    mutation(
        "Triton stages trees",
        TRITON,
        "            self.topk == 1\n            and self.dcp_size",
        "            self.dcp_size",
        f"{TRITON_CAPABILITY}.test_a_chain_only",
        f"{TRITON_VERIFY}.test_a_tree_keeps_its_mask",
    ),
    mutation(
        "Triton stages a sharded prefix",
        TRITON,
        "            and self.dcp_size == 1\n            and get_spec().enable",
        "            and get_spec().enable",
        f"{TRITON_CAPABILITY}.test_a_whole_prefix_only",
    ),
    mutation(
        "Triton records a single-layer draft's",
        TRITON,
        "            and get_spec().enable_multi_layer_eagle\n",
        "",
        f"{TRITON_CAPABILITY}.test_a_single_layer_eagle_draft_is_the_release_s",
    ),
    mutation(
        "Triton records the draft extend of a model without conv state",
        TRITON,
        "            and mambaish_config(model_runner.model_config) is not None\n",
        "",
        f"{TRITON_CAPABILITY}.test_a_draft_without_conv_state_is_the_release_s",
    ),
    mutation(
        "Triton records it whatever the switch",
        TRITON,
        "            self._is_inkling_chain\n"
        "            and draft_extend_metadata_staging_enabled()\n",
        "            self._is_inkling_chain\n",
        f"{TRITON_CAPABILITY}.test_switched_off_it_is_the_release_s",
        f"{TRITON_GRAPHS}.test_switched_off_the_single_graph_refuses_it",
        f"{TRITON_VERIFY}.test_switched_off_it_is_the_release_s",
    ),
    mutation(
        "Triton records it in every mode",
        TRITON,
        "            forward_batch.forward_mode.is_draft_extend_v2()\n"
        "            and self.draft_extend_metadata_captured_in_graph()\n"
        "        ):\n"
        "            return\n",
        "            self.draft_extend_metadata_captured_in_graph()\n"
        "        ):\n"
        "            return\n",
        f"{TRITON_CAPABILITY}.test_only_draft_extend_is_recorded",
    ),
    mutation(
        "Triton rebuilds it ahead of the replay",
        TRITON,
        "        return self.is_draft_runner and self._builds_chain",
        "        return False and self._builds_chain",
        f"{TRITON_GRAPHS}.test_the_single_graph_takes_it",
        f"{TRITON_GRAPHS}.test_unstaged_they_rebuild_it_themselves",
    ),
    # what Triton's draft graphs read
    mutation(
        "Triton's graphs leave out the front rows",
        TRITON,
        "            max_extend_len=num_tokens // bs,\n",
        "",
        f"{TRITON_GRAPHS}.test_the_queries_are_the_whole_window",
        f"{TRITON_BUFFERS}.test_page_size_16",
    ),
    mutation(
        "Triton's graphs have no window indices",
        TRITON,
        "            window_kv_indices=(\n"
        "                stager.cuda_graph_window_kv_indices if has_window else None\n"
        "            ),\n",
        "",
        f"{TRITON_BUFFERS}.test_page_size_16",
    ),
    mutation(
        "Triton's graphs read the window of another batch size",
        TRITON,
        "            window_kv_indptr=stager.window_kv_indptr[: bs + 1]"
        " if has_window else None,\n",
        "",
        f"{TRITON_BUFFERS}.test_page_size_16",
    ),
    mutation(
        "Triton's indices of a sequence shorter than its window",
        TRITON,
        "        kv_lens = tl.maximum(kv_lens - width, 0)\n",
        "        kv_lens = kv_lens - width\n",
        f"{TRITON_BUFFERS}.test_a_sequence_shorter_than_its_window",
    ),
    mutation(
        "Triton's indptrs begin with what was there",
        TRITON,
        "            tl.store(kv_indptr_ptr, 0)\n"
        "            tl.store(qo_indptr_ptr, 0)\n",
        "            pass\n",
        f"{TRITON_BUFFERS}.test_page_size_16",
    ),
    mutation(
        "Triton's window begins with the sequence",
        TRITON,
        "        window_begin = kv_len - tl.minimum(kv_len, window_size)\n",
        "        window_begin = kv_len * 0\n",
        f"{TRITON_BUFFERS}.test_prefixes_of_several_blocks",
    ),
    mutation(
        "Triton's window reads full KV slots",
        TRITON,
        "                loc = tl.load(full_to_swa_ptr + loc, mask=in_window, other=0)\n",
        "                pass\n",
        f"{TRITON_BUFFERS}.test_page_size_16",
        f"{TRITON_BUFFERS}.test_poison_moves_an_unstaged_read_only",
    ),
    mutation(
        "Triton writes to full KV slots",
        TRITON,
        "            swa_loc = tl.load(full_to_swa_ptr + loc, mask=is_written, other=0)\n",
        "            swa_loc = loc\n",
        f"{TRITON_BUFFERS}.test_page_size_16",
    ),
    mutation(
        "Triton's programs take only their first block",
        TRITON,
        "range(program, tl.cdiv(kv_len, KV_BLOCK), tl.num_programs(1)):\n",
        "range(program, program + 1, tl.num_programs(1)):\n",
        f"{TRITON_BUFFERS}.test_prefixes_of_several_blocks",
    ),
    # Triton's verify
    mutation(
        "a glue graph keeps Triton's write locations",
        TRITON,
        "            and (self.is_draft_runner or not glue_graph)\n",
        "",
        f"{TRITON_VERIFY}.test_a_glue_graph_cannot_capture_it",
    ),
    mutation(
        "Triton's verify waits for a length on the GPU",
        TRITON,
        "            self._fill_verify_metadata(forward_batch)\n"
        "            if not in_capture:\n"
        "                return\n",
        "            self._fill_verify_metadata(forward_batch)\n",
        f"{TRITON_VERIFY}.test_one_launch_and_no_host_copy",
    ),
    mutation(
        "Triton's verify kernel is compiled in the first step",
        TRITON,
        "            not self.is_draft_runner\n"
        "            and forward_batch.forward_mode.is_target_verify()\n",
        "            not self.is_draft_runner\n"
        "            and not in_capture\n"
        "            and forward_batch.forward_mode.is_target_verify()\n",
        f"{TRITON_VERIFY}.test_capture_compiles_it",
    ),
    mutation(
        "Triton's verify leaves its queries out of the lengths",
        TRITON,
        "    if not IS_VERIFY:\n",
        "    if True:\n",
        f"{TRITON_VERIFY}.test_it_is_what_the_release_builds",
    ),
    mutation(
        "Triton's padded rows write where a larger batch wrote",
        TRITON,
        "            tl.store(swa_out_cache_loc_ptr + token, swa_loc, mask=in_width)\n",
        "            tl.store(swa_out_cache_loc_ptr + token, swa_loc, mask=is_written)\n",
        f"{TRITON_VERIFY}.test_it_is_what_the_release_builds",
    ),
    mutation(
        "Triton's captured chain keeps the mask that does not compile",
        TRITON,
        "do not compile under a score_mod.\n"
        "            if self._is_inkling_chain:\n"
        "                custom_mask = None\n",
        "do not compile under a score_mod.\n",
        f"{TRITON_VERIFY}.test_a_chain_s_mask_is_neither_kept_filled_nor_copied",
    ),
    mutation(
        "Triton's eager chain keeps the mask that does not compile",
        TRITON,
        "            custom_mask = spec_info.custom_mask\n"
        "            if self._is_inkling_chain:\n"
        "                custom_mask = None\n",
        "            custom_mask = spec_info.custom_mask\n",
        f"{TRITON_VERIFY}.test_nor_is_it_eagerly",
    ),
    mutation(
        "the draft fills a mask that nothing reads",
        TRITON,
        "msgspec.structs.replace(mask, is_read=False)",
        "mask",
        f"{TRITON_VERIFY}.test_a_chain_s_mask_is_neither_kept_filled_nor_copied",
    ),
    mutation(
        "the draft graphs build Triton's metadata",
        SCONV,
        "            self.short_conv_backend.init_staged_draft_extend_metadata_in_graph(\n",
        "            self.full_attn_backend.init_forward_metadata_in_graph(forward_batch)\n"
        "            self.short_conv_backend.init_staged_draft_extend_metadata_in_graph(\n",
        f"{TRITON_GRAPHS}.test_they_read_no_mapping_when_staged",
        f"{TRITON_POISON}.test_page_size_16",
    ),
]


def one_of_each_class(tests):
    return list({test.rpartition(".")[0]: test for test in tests}.values())


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict]:
    """What each mutant's tests did, and the control on the unmutated sources."""
    pristine = pristine_sources()
    composed = compose_all(pristine)
    root = tmp_path_factory.mktemp("mutants")
    all_tests = sorted({test for mutant in MUTATIONS for test in mutant.tests})
    jobs = {
        "unmutated": write_job(
            root / "unmutated", composed, one_of_each_class(all_tests)
        ),
        "unpatched": write_job(root / "unpatched", pristine, all_tests),
    }
    for number, mutant in enumerate(MUTATIONS):
        mutated = {mutant.path: mutant.apply(composed[mutant.path])}
        jobs[mutant.name] = write_job(
            root / str(number), {**composed, **mutated}, mutant.tests
        )
    return run_jobs(root, jobs)


def test_the_control_passes(results):
    assert results["unmutated"] == {"import_error": None, "failed": {}}


@pytest.mark.parametrize("mutant", MUTATIONS, ids=lambda mutant: mutant.name)
def test_a_missing_guard_is_noticed(results, mutant):
    result = results[mutant.name]
    assert result["import_error"] is None
    unnoticed = set(mutant.tests) - result["failed"].keys()
    assert not unnoticed


def test_the_unpatched_release_fails(results):
    result = results["unpatched"]
    assert result["import_error"] is None
    tested = {test for mutant in MUTATIONS for test in mutant.tests}
    assert tested - result["failed"].keys() == AS_RELEASED
