"""The Triton backend under Inkling's wrapper stages its draft-extend metadata as
FlashAttention does, and is the release's backend wherever it may not."""

import itertools
import os
import unittest
from types import SimpleNamespace
from unittest import mock

import test_draft_extend_metadata_staging as staging
import torch
from draft_extend_staging_fixture import (
    LAUNCHES,
    NUM_STEPS,
    RecordedGraph,
    build_model_runner,
    build_pools,
    build_triton_backend,
    fill_mappings,
    prepare,
    published_config,
    run_decode_step,
    stage,
    unstaged_buffers,
    window_of,
)
from transformers import LlamaConfig

from sglang.srt.environ import envs
from sglang.srt.layers.attention import triton_backend
from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel, get_spec
from sglang.srt.speculative.multi_layer_eagle_draft_extend_cuda_graph_runner import (
    OneGraphMultiLayerEagleMultiStepDraftExtendCudaGraphRunner,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=150, stage="base-a", runner_config="cpu")


class TritonTestCase(staging.StagingTestCase):
    make_backend = staticmethod(build_triton_backend)


class TestTritonCapability(TritonTestCase):
    def model_runner(self, *, swa=True, is_draft_worker=True, **overrides):
        server_args = self._enter(
            published_config(page_size=16, buckets=(4,), **overrides)
        )
        pools = build_pools(max_reqs=4, page_size=16, swa=swa)
        return build_model_runner(server_args, *pools, is_draft_worker=is_draft_worker)

    def assert_supported(self, backend, expected, message=None):
        for answer in (
            backend.supports_draft_extend_metadata_staging,
            backend.draft_extend_metadata_captured_in_graph(),
        ):
            self.assertEqual(answer, expected, message)

    def test_with_and_without_a_sliding_window_pool(self):
        for swa in (True, False):
            self.assert_supported(TritonAttnBackend(self.model_runner(swa=swa)), True)

    def test_conditions(self):
        backend = TritonAttnBackend(self.model_runner())
        for owner, name, value in (
            (backend, "enable_deterministic", True),
            (backend.kv_index_translator, "is_translating", True),
            # A pool that translates through page tables has no such mapping.
            (backend.token_to_kv_pool, "full_to_swa_index_mapping", None),
        ):
            with self.subTest(name, value=value), mock.patch.object(owner, name, value):
                self.assert_supported(backend, False)
        self.assert_supported(backend, True)

    def test_a_chain_only(self):
        for topk in (0, 2):
            model_runner = self.model_runner(speculative_eagle_topk=topk)
            self.assert_supported(TritonAttnBackend(model_runner), False, topk)

    def test_a_whole_prefix_only(self):
        model_runner = self.model_runner()
        with get_parallel().override(attn_dcp_size=2, attn_dcp_rank=0):
            backend = TritonAttnBackend(model_runner)
        self.assert_supported(backend, False)
        self.assertFalse(backend._is_inkling_chain, "a mask there is an error")

    def check_the_release_s_backend(self, model_runner):
        """It records nothing, and its graph metadata is the release's."""
        backend = TritonAttnBackend(model_runner)
        self.assert_supported(backend, False)
        stack = self.build(buckets=(4,))
        forward_batch = stack.runner.runners[0].get_forward_batch(4)
        backend.init_cuda_graph_state(4, 4 * stack.width)
        backend.init_forward_metadata_out_graph(forward_batch, in_capture=True)
        self.assertEqual(backend.forward_metadata.max_extend_len, NUM_STEPS + 1)
        self.assertIsNone(backend.forward_metadata.window_kv_indices)
        with LAUNCHES.of() as launches:
            backend.init_forward_metadata_in_graph(forward_batch)
        self.assertEqual(launches, [])

    def test_a_target_is_the_release_s(self):
        self.check_the_release_s_backend(self.model_runner(is_draft_worker=False))

    def test_a_single_layer_eagle_draft_is_the_release_s(self):
        """Its runner rebuilds the metadata ahead of every replay."""
        self.check_the_release_s_backend(
            self.model_runner(enable_multi_layer_eagle=False)
        )

    def test_a_draft_without_conv_state_is_the_release_s(self):
        model_runner = self.model_runner()
        model_runner.model_config.hf_config = LlamaConfig()
        self.check_the_release_s_backend(model_runner)

    def test_switched_off_it_is_the_release_s(self):
        with mock.patch.dict(os.environ, {staging.STAGING_SWITCH: "0"}):
            backend = TritonAttnBackend(self.model_runner())
        self.assert_supported(backend, False)

    def test_only_draft_extend_is_recorded(self):
        stack = self.build(buckets=(4,))
        backend = stack.backends[0].full_attn_backend
        for mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DECODE, ForwardMode.EXTEND):
            with LAUNCHES.of() as launches:
                backend.init_forward_metadata_in_graph(
                    SimpleNamespace(forward_mode=mode)
                )
            self.assertEqual(launches, [], mode)

    def test_the_wrapper_takes_it(self):
        wrapper = build_triton_backend(self.model_runner())
        self.assertTrue(wrapper.enable_draft_extend_metadata_staging())
        self.assertFalse(
            wrapper.full_attn_backend.enable_draft_extend_metadata_staging(),
            "on its own it keeps its metadata in the graph",
        )


class TestTritonStagedBuffers(TritonTestCase, staging.TestStagedBuffers):
    MAPPED = ("kv_indices", "window_kv_indices", "swa_out_cache_loc", "conv_slots")

    def test_a_sequence_shorter_than_its_window(self):
        stack = self.build(buckets=(1, 2))
        for length in (1, stack.num_front_tokens - 1):
            batch = fill_mappings(stack, [length])
            stage(stack, batch)
            self.assert_staged(stack, batch)

    def test_prefixes_of_several_blocks(self):
        """More blocks than programs, and a window that begins inside a block."""
        with (
            mock.patch.object(triton_backend, "_CHAIN_METADATA_KV_BLOCK", 32),
            mock.patch.object(
                triton_backend, "_CHAIN_METADATA_MAX_PROGRAMS_PER_REQ", 3
            ),
        ):
            stack = self.build(buckets=(8,))
            lens = [1, 31, 45, 100, 137, 160, 333, 480]
            batch = fill_mappings(stack, lens)
            stage(stack, batch)
            self.assert_staged(stack, batch)

    def test_what_the_release_rebuilds_ahead_of_a_replay(self):
        """Without front rows, where the release covers all the queries."""
        stack = self.build(boundary_kv_fix=False)
        batch = fill_mappings(stack, [40, 7, 100])
        stage(stack, batch)
        prepare(stack, batch)
        staged = stack.runner.runners[0].model_runner.model.metadata[4]

        with mock.patch.dict(os.environ, {staging.STAGING_SWITCH: "0"}):
            released = TritonAttnBackend(stack.runner.runners[0].model_runner)
        released.init_cuda_graph_state(4, 4 * stack.width)
        forward_batch = stack.runner.runners[0].get_forward_batch(4)
        released.init_forward_metadata_out_graph(forward_batch, in_capture=True)
        forward_batch.spec_info = stack.runner._replay_spec_info
        released.init_forward_metadata_out_graph(forward_batch)
        expected = released.forward_metadata
        self.assertEqual(staged.max_extend_len, expected.max_extend_len)
        for name in ("qo_indptr", "kv_indptr", "swa_out_cache_loc"):
            self.assertTrue(
                torch.equal(getattr(staged, name), getattr(expected, name)), name
            )
        live = expected.kv_indptr[-1]
        self.assertGreater(live, 0)
        self.assertTrue(
            torch.equal(staged.kv_indices[:live], expected.kv_indices[:live])
        )


class TestTritonDraftGraphs(TritonTestCase):
    def test_staging_is_two_launches(self):
        stack = self.build()
        batch = fill_mappings(stack, [40, 7, 100])
        with LAUNCHES.of() as launches, staging._Ops() as ops:
            stage(stack, batch)
        self.assertEqual(launches, [staging.WINDOW_KERNEL, "graph"])
        self.assertLessEqual(set(ops.names), {"aten::slice.Tensor"}, "views only")

    def test_they_read_no_mapping_when_staged(self):
        for single_graph in (False, True):
            with self.subTest(single_graph=single_graph):
                stack = self.build(single_graph=single_graph)
                self.assertIsNone(stack.runner.staging_refusal)
                for name, mapping in stack.mappings.items():
                    for graph in staging.draft_graphs(stack):
                        self.assertFalse(graph.touches(mapping), name)
                    for bs, graph in stack.runner._staging_graphs.items():
                        self.assertTrue(graph.touches(mapping), (bs, name))

    def test_the_single_graph_takes_it(self):
        stack = self.build(single_graph=True)
        self.assertIsInstance(
            stack.runner, OneGraphMultiLayerEagleMultiStepDraftExtendCudaGraphRunner
        )

    def test_switched_off_the_single_graph_refuses_it(self):
        stack = self.build_unstaged(single_graph=True)
        self.assertNotIsInstance(
            stack.runner, OneGraphMultiLayerEagleMultiStepDraftExtendCudaGraphRunner
        )
        for graph in staging.draft_graphs(stack):
            self.assertFalse(graph.touches(stack.mappings["req_to_token"]))
        with mock.patch.object(
            TritonAttnBackend, "init_forward_metadata_out_graph"
        ) as rebuilt:
            run_decode_step(stack, fill_mappings(stack, [40, 7, 100]))
        self.assertEqual(rebuilt.call_count, NUM_STEPS)

    def test_unstaged_they_rebuild_it_themselves(self):
        """A wrapper that nobody asked: the graph's own kernel reads the mappings, and
        no replay rebuilds anything ahead of it."""
        for single_graph in (False, True):
            with (
                self.subTest(single_graph=single_graph),
                mock.patch.object(
                    staging.InklingShortConvHybridAttnBackend,
                    "enable_draft_extend_metadata_staging",
                    lambda wrapper: False,
                ),
            ):
                stack = self.build(single_graph=single_graph)
                for graph in staging.draft_graphs(stack):
                    self.assertTrue(graph.touches(stack.mappings["req_to_token"]))
                    self.assertTrue(graph.touches(stack.mappings["full_to_swa"]))
                batch = fill_mappings(stack, [40, 7, 100])
                expected = unstaged_buffers(stack, batch)
                with mock.patch.object(
                    TritonAttnBackend, "init_forward_metadata_out_graph"
                ) as rebuilt:
                    run_decode_step(stack, batch)
                rebuilt.assert_not_called()
                self.assert_staged(stack, batch, expected)

    def test_the_queries_are_the_whole_window(self):
        for boundary_kv_fix in (True, False):
            stack = self.build(boundary_kv_fix=boundary_kv_fix)
            batch = fill_mappings(stack, [40, 7, 100])
            stage(stack, batch)
            self.assertEqual(len(window_of(stack, batch)[0]), 3 * stack.width)
            for runner in stack.runner.runners:
                metadata = runner.model_runner.model.metadata[4]
                self.assertEqual(metadata.max_extend_len, stack.width)
                self.assertEqual(
                    metadata.qo_indptr.tolist(),
                    [stack.width * row for row in range(5)],
                )


class TestTritonSharedMetadata(TritonTestCase):
    def test_depths_that_are_alike_are_staged_once(self):
        for swa, single_graph in itertools.product((True, False), repeat=2):
            stack = self.build(swa=swa, single_graph=single_graph)
            self.assertEqual(stack.runner.staged_backends, stack.backends[:1])
            for graph in stack.runner._staging_graphs.values():
                self.assertEqual(staging.kernels_and_gathers(graph), (1, 1))

    @staticmethod
    def another_swa_pool():
        _, kv_pool, _ = build_pools(max_reqs=4, page_size=16, swa=True)
        return kv_pool

    def test_what_must_be_alike(self):
        stack = self.build(capture=False)
        first, second = (b.full_attn_backend for b in stack.backends[:2])
        self.assertTrue(second.share_staged_draft_extend_metadata(first))
        for name, value in (
            ("req_to_token", second.req_to_token.clone()),
            ("sliding_window_size", second.sliding_window_size + 1),
            ("token_to_kv_pool", self.another_swa_pool()),
        ):
            with self.subTest(name), mock.patch.object(second, name, value):
                self.assertFalse(second.share_staged_draft_extend_metadata(first))

    def test_an_eager_forward_of_a_later_depth_changes_nothing_staged(self):
        stack = self.build()
        batch = fill_mappings(stack, [40, 7, 100])
        expected = unstaged_buffers(stack, batch)
        stage(stack, batch)
        for name in ("qo_indptr", "kv_indptr", "window_kv_indptr"):
            getattr(stack.backends[1].full_attn_backend, name).fill_(7)
        self.assert_staged(stack, batch, expected)


class TestTritonPoisonedStep(TritonTestCase, staging.TestPoisonedStep):
    def build_unstaged(self, **kwargs):
        """Read behind verify, by the same graphs: the switch would bring the
        release's rebuild back, which knows no window."""
        stack = self.build(**kwargs)
        stack.draft_worker._staging_refusal = lambda batch: "the test asked for it"
        return stack


class VerifyBatch(SimpleNamespace):
    """A class of its own, so that the index translator can hold it weakly."""


class TestTritonVerify(TritonTestCase):
    """The target's metadata: what lets its in-graph marker be the fence, and what keeps
    the host from waiting in it."""

    WIDTH = NUM_STEPS + 1

    def backend_of(self, stack, *, switch="1", capture_bs=4):
        target = stack.worker._target_worker.model_runner
        with mock.patch.dict(os.environ, {staging.STAGING_SWITCH: switch}):
            wrapper = build_triton_backend(target)
        wrapper.init_cuda_graph_state(capture_bs, capture_bs * self.WIDTH)
        return wrapper

    def forward_batch(self, stack, lens, *, bucket=4, mask=None):
        """As the decode graph runner passes it: padded to the bucket, but for the
        write locations."""
        batch = fill_mappings(stack, lens)
        pad = bucket - len(lens)
        pages = stack.mappings["req_to_token"][batch.req_pool_indices]
        locs = torch.cat(
            [row[n : n + self.WIDTH] for row, n in zip(pages, batch.seq_lens.tolist())]
        )
        return VerifyBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=bucket,
            req_pool_indices=torch.nn.functional.pad(batch.req_pool_indices, (0, pad)),
            seq_lens=torch.nn.functional.pad(batch.seq_lens, (0, pad), value=1),
            encoder_lens=None,
            out_cache_loc=locs.to(torch.int64),
            spec_info=SimpleNamespace(draft_token_num=self.WIDTH, custom_mask=mask),
        )

    def captured(self, wrapper, stack, *, mask=None):
        """Capture with a dummy batch, as every replay's metadata was."""
        forward_batch = self.forward_batch(stack, [1, 1, 1, 1], mask=mask)
        forward_batch.out_cache_loc = torch.zeros(4 * self.WIDTH, dtype=torch.int64)
        wrapper.init_forward_metadata_out_graph(forward_batch, in_capture=True)
        return wrapper.full_attn_backend

    def test_its_mapping_reads_end_with_the_metadata(self):
        stack = self.build(buckets=(4,))
        wrapper = self.backend_of(stack)
        self.captured(wrapper, stack)
        forward_batch = self.forward_batch(stack, [40, 7, 100, 133])
        wrapper.init_forward_metadata_out_graph(forward_batch)
        graph = RecordedGraph()
        with graph.capture():
            wrapper.init_forward_metadata_in_graph(forward_batch)
        reads = {
            name: graph.touches(mapping) for name, mapping in stack.mappings.items()
        }
        self.assertEqual(
            reads,
            {"req_to_token": False, "full_to_swa": False, "req_to_conv_slot": True},
        )
        # Recorded behind those hooks, and published when the graph has replayed.
        self.assertEqual(
            wrapper.shared_read_ends(ForwardMode.TARGET_VERIFY),
            SharedReadEnds.IN_REPLAY,
        )

    def live(self, backend):
        """Everything that a verify graph without a mask reads, and no tails."""
        metadata = backend.forward_metadata
        live = {
            name: getattr(metadata, name).clone()
            for name in ("qo_indptr", "kv_indptr", "swa_out_cache_loc")
            if getattr(metadata, name) is not None
        }
        live["kv_indices"] = metadata.kv_indices[: metadata.kv_indptr[-1]].clone()
        if metadata.window_kv_indptr is not None:
            live["window_kv_indptr"] = metadata.window_kv_indptr.clone()
            end = metadata.window_kv_indptr[-1]
            live["window_kv_indices"] = metadata.window_kv_indices[:end].clone()
        return live

    def test_it_is_what_the_release_builds(self):
        for page_size, swa in ((1, True), (16, True), (16, False)):
            stack = self.build(page_size=page_size, buckets=(4,), swa=swa)
            sides = [self.backend_of(stack, switch=switch) for switch in ("1", "0")]
            backends = [self.captured(wrapper, stack) for wrapper in sides]
            for lens in ([40, 7, 100, 133], [1], [31, 32, 33], [300, 2]):
                seen = []
                for wrapper, backend in zip(sides, backends):
                    forward_batch = self.forward_batch(stack, lens)
                    wrapper.init_forward_metadata_out_graph(forward_batch)
                    seen.append(self.live(backend))
                ours, released = seen
                self.assertEqual(ours.keys(), released.keys())
                for name, expected in released.items():
                    with self.subTest(name, page_size=page_size, swa=swa, lens=lens):
                        self.assertEqual(ours[name].dtype, expected.dtype)
                        self.assertEqual(ours[name].tolist(), expected.tolist())

    def replay_of(self, switch, mask=None):
        stack = self.build(buckets=(4,))
        wrapper = self.backend_of(stack, switch=switch)
        self.captured(wrapper, stack)
        forward_batch = self.forward_batch(stack, [40, 7, 100], mask=mask)
        with LAUNCHES.of() as launches, staging._Ops() as ops:
            wrapper.full_attn_backend.init_forward_metadata_out_graph(forward_batch)
        return launches, set(ops.names)

    def test_one_launch_and_no_host_copy(self):
        host_copy = "aten::_local_scalar_dense"
        launches, ops = self.replay_of("1")
        self.assertEqual(launches, ["_chain_metadata_kernel"])
        self.assertEqual(ops, set())
        _, ops = self.replay_of("0")
        self.assertIn(host_copy, ops, "as on a GPU, the release waits for a length")

    def test_capture_compiles_it(self):
        stack = self.build(buckets=(4,))
        with LAUNCHES.of() as launches:
            self.captured(self.backend_of(stack), stack)
        self.assertIn("_chain_metadata_kernel", launches)

    def tree_mask(self):
        return torch.ones(64, dtype=torch.bool)

    def test_a_chain_s_mask_is_neither_kept_filled_nor_copied(self):
        """Whatever the switch: with a mask no server starts."""
        for switch in ("1", "0"):
            stack = self.build(buckets=(4,))
            wrapper = self.backend_of(stack, switch=switch)
            mask = self.tree_mask()
            backend = self.captured(wrapper, stack, mask=mask)
            self.assertIsNone(backend.forward_metadata.custom_mask, switch)
            self.assertFalse(backend.verify_mask.is_read, "the draft would fill it")
        self.assertEqual(self.replay_of("1", mask=mask), self.replay_of("1"))

    def test_nor_is_it_eagerly(self):
        stack = self.build(buckets=(4,))
        backend = self.backend_of(stack).full_attn_backend
        forward_batch = self.forward_batch(stack, [40, 7, 100, 133])
        forward_batch.spec_info.custom_mask = self.tree_mask()
        forward_batch.seq_lens_sum = int(forward_batch.seq_lens.sum())
        backend.init_forward_metadata(forward_batch)
        self.assertIsNone(backend.forward_metadata.custom_mask)

    def test_a_tree_keeps_its_mask(self):
        stack = self.build(buckets=(4,))
        target = stack.worker._target_worker.model_runner
        with get_spec().override(speculative_eagle_topk=2):
            wrapper = build_triton_backend(target)
        wrapper.init_cuda_graph_state(4, 4 * self.WIDTH)
        mask = self.tree_mask()
        backend = self.captured(wrapper, stack, mask=mask)
        self.assertTrue(backend.verify_mask.is_read)
        self.assertIsNotNone(backend.forward_metadata.custom_mask)
        backend.verify_mask.buffer.zero_()
        wrapper.init_forward_metadata_out_graph(
            self.forward_batch(stack, [40, 7], mask=mask)
        )
        self.assertTrue(backend.verify_mask.buffer[:64].all())

    def test_a_glue_graph_cannot_capture_it(self):
        """It would read the write locations of its own step for ever: fresh tensors."""
        with envs.SGLANG_ENABLE_METADATA_GLUE_GRAPH.override(True):
            launches, ops = self.replay_of("1")
        self.assertNotIn("_chain_metadata_kernel", launches)
        self.assertIn("aten::_local_scalar_dense", ops)

    def test_switched_off_it_is_the_release_s(self):
        stack = self.build(buckets=(4,))
        backend = self.captured(self.backend_of(stack, switch="0"), stack)
        with mock.patch.object(backend, "_fill_verify_metadata") as filled:
            backend.init_forward_metadata_out_graph(self.forward_batch(stack, [40, 7]))
        filled.assert_not_called()


if __name__ == "__main__":
    unittest.main()
