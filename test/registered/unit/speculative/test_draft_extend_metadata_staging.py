"""The draft extend's metadata, staged ahead of verify, is what its graphs would have
read in place, and stays so when the scheduler rewrites the mappings."""

import ast
import contextlib
import inspect
import itertools
import os
import unittest
from types import SimpleNamespace
from unittest import mock

import torch
from draft_extend_staging_fixture import (
    KERNELS_RUN_ON_CPU,
    LAUNCHES,
    NUM_STEPS,
    SLIDING_WINDOW,
    RecordingStream,
    bucket_of,
    build_backend,
    build_model_runner,
    build_pools,
    build_stack,
    cpu_stand_ins,
    fill_mappings,
    poison_mappings,
    prepare,
    published_config,
    run_decode_step,
    scribble_over_staged_buffers,
    stage,
    staged_buffers,
    unstaged_buffers,
    window_of,
)
from torch.utils._python_dispatch import TorchDispatchMode

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend
from sglang.srt.layers.attention.linear import inkling_sconv_backend
from sglang.srt.layers.attention.linear.inkling_sconv_backend import (
    InklingShortConvAttnBackend,
    InklingShortConvHybridAttnBackend,
)
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative import multi_layer_eagle_worker_v2 as worker_module
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=120, stage="base-a", runner_config="cpu")

WINDOW_KERNEL = "_stage_draft_extend_window_kernel"
STAGING_SWITCH = "SGLANG_ENABLE_DRAFT_EXTEND_METADATA_STAGING"


@unittest.skipUnless(KERNELS_RUN_ON_CPU, "runs kernels in Triton's interpreter")
class StagingTestCase(CustomTestCase):
    make_backend = staticmethod(build_backend)

    def setUp(self):
        self._enter(cpu_stand_ins())

    def _enter(self, context):
        value = context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)
        return value

    def build(self, *, page_size=16, buckets=(1, 2, 4), **kwargs):
        server_args = self._enter(
            published_config(page_size=page_size, buckets=buckets)
        )
        return build_stack(server_args, **{"make_backend": self.make_backend, **kwargs})

    def build_unstaged(self, **kwargs):
        with mock.patch.dict(os.environ, {STAGING_SWITCH: "0"}):
            return self.build(**kwargs)

    def assert_staged(self, stack, batch, expected=None):
        """All that staging fills is what the unstaged hooks produce for ``batch``."""
        if expected is None:
            expected = unstaged_buffers(stack, batch)
        staged = staged_buffers(stack, len(batch))
        self.assertEqual(staged.keys(), expected.keys())
        for name, tensor in expected.items():
            self.assertTrue(
                torch.equal(staged[name], tensor),
                f"{name}: staged {staged[name]}, expected {tensor}",
            )


# --- who supports it -------------------------------------------------------------


class TestCapability(StagingTestCase):
    def model_runner(self, *, swa=True, pool_class=HybridReqToTokenPool):
        server_args = self._enter(published_config(page_size=16, buckets=(4,)))
        return build_model_runner(
            server_args,
            *build_pools(max_reqs=4, page_size=16, swa=swa, pool_class=pool_class),
        )

    def test_off_by_default(self):
        class SomeBackend(AttentionBackend):
            pass

        backend = SomeBackend()
        self.assertFalse(backend.supports_draft_extend_metadata_staging)
        self.assertFalse(backend.enable_draft_extend_metadata_staging())
        self.assertFalse(backend.share_staged_draft_extend_metadata(SomeBackend()))
        with self.assertRaises(NotImplementedError):
            backend.stage_draft_extend_metadata(None)

    def test_flash_attention_conditions(self):
        for swa in (True, False):
            backend = FlashAttentionBackend(self.model_runner(swa=swa))
            self.assertTrue(backend.supports_draft_extend_metadata_staging, swa)

        backend = FlashAttentionBackend(self.model_runner())
        for owner, name, value in (
            (backend, "topk", 0),
            (backend, "topk", 2),
            (backend, "has_local_attention", True),
            (backend, "is_encoder_decoder", True),
            (backend.kv_index_translator, "is_translating", True),
            # A pool that translates through page tables has no such mapping.
            (backend.token_to_kv_pool, "full_to_swa_index_mapping", None),
        ):
            with self.subTest(name, value=value), mock.patch.object(owner, name, value):
                self.assertFalse(backend.supports_draft_extend_metadata_staging)
        self.assertTrue(backend.supports_draft_extend_metadata_staging)

    def test_wrapper_asks_both_children(self):
        model_runner = self.model_runner()
        wrapper = build_backend(model_runner)
        self.assertTrue(wrapper.supports_draft_extend_metadata_staging)
        self.assertFalse(wrapper.draft_extend_metadata_staged, "nobody asked yet")

        wrapper.full_attn_backend.topk = 2
        self.assertFalse(wrapper.supports_draft_extend_metadata_staging)
        self.assertFalse(wrapper.enable_draft_extend_metadata_staging())
        self.assertFalse(wrapper.draft_extend_metadata_staged)

        wrapper.full_attn_backend.topk = 1
        self.assertTrue(wrapper.enable_draft_extend_metadata_staging())
        self.assertTrue(wrapper.draft_extend_metadata_staged)

    def test_translated_conv_slots(self):
        wrapper = build_backend(self.model_runner(pool_class=TranslatingPool))
        self.assertTrue(
            wrapper.full_attn_backend.supports_draft_extend_metadata_staging
        )
        self.assertFalse(
            wrapper.short_conv_backend.supports_draft_extend_metadata_staging
        )
        self.assertFalse(wrapper.enable_draft_extend_metadata_staging())

    def test_wrapper_takes_any_child_that_supports_it(self):
        class OtherBackend(FlashAttentionBackend):
            supports_draft_extend_metadata_staging = True
            staged = 0

            def stage_draft_extend_metadata(self, forward_batch):
                self.staged += 1

        model_runner = self.model_runner()
        child = OtherBackend(model_runner)
        wrapper = InklingShortConvHybridAttnBackend(
            child, InklingShortConvAttnBackend(model_runner), [0]
        )
        self.assertTrue(wrapper.enable_draft_extend_metadata_staging())
        wrapper.stage_draft_extend_metadata(
            SimpleNamespace(req_pool_indices=torch.tensor([1, 2]))
        )
        self.assertEqual(child.staged, 1)

        imported = {
            node.module
            for node in ast.walk(ast.parse(inspect.getsource(inkling_sconv_backend)))
            if isinstance(node, ast.ImportFrom)
        }
        self.assertEqual(
            {name for name in imported if name.startswith("sglang.srt.layers")},
            {
                # what the wrapper and its sidecar derive from; no concrete backend
                "sglang.srt.layers.attention.base_attn_backend",
                "sglang.srt.layers.attention.hybrid_linear_attn_backend",
                "sglang.srt.layers.attention.linear.short_conv_backend",
                "sglang.srt.layers.attention.mamba.mamba2_metadata",
            },
        )


class TranslatingPool(HybridReqToTokenPool):
    """A pool whose mapping holds virtual slot ids, as the unified pool's does."""

    def translate_mamba_indices(self, mamba_indices):
        return mamba_indices + 1


# --- what is staged --------------------------------------------------------------


def edge_lens(page_size, width):
    """Lengths before verify for which they, or the lengths behind it, lie at a page,
    sliding-window, front-window or conv edge."""
    edges = (1, NUM_STEPS, width - NUM_STEPS - 1, page_size, SLIDING_WINDOW)
    lens = {
        edge + offset + shift
        for edge in edges
        for offset in (-1, 0, 1)
        for shift in (0, -NUM_STEPS - 1)
    }
    return sorted(length for length in lens if length > 0)


class TestStagedBuffers(StagingTestCase):
    MAPPED = ("page_table", "swa_page_table", "swa_out_cache_loc", "conv_slots")

    def check_edges(self, page_size, **kwargs):
        stack = self.build(page_size=page_size, buckets=(4, 8), **kwargs)
        self.assertIsNone(stack.runner.staging_refusal)
        lens = edge_lens(page_size, stack.width)
        for seed, start in enumerate(range(0, len(lens), 7)):
            batch = fill_mappings(stack, lens[start : start + 7], seed)
            scribble_over_staged_buffers(stack)
            out_cache_loc, positions = stage(stack, batch)
            self.assert_staged(stack, batch)
            expected = window_of(stack, batch)
            self.assertTrue(torch.equal(out_cache_loc, expected[0]))
            self.assertTrue(torch.equal(positions, expected[1]))

    def test_page_size_1(self):
        self.check_edges(1)

    def test_page_size_16(self):
        self.check_edges(16)

    def test_page_size_128(self):
        self.check_edges(128)

    def test_page_size_1_without_front(self):
        self.check_edges(1, boundary_kv_fix=False)

    def test_page_size_16_without_front(self):
        self.check_edges(16, boundary_kv_fix=False)

    def test_page_size_128_without_front(self):
        self.check_edges(128, boundary_kv_fix=False)

    def test_without_sliding_window_pool(self):
        self.check_edges(16, swa=False)

    def test_single_graph(self):
        self.check_edges(16, single_graph=True)

    def test_poison_moves_an_unstaged_read_only(self):
        stack = self.build()
        batch = fill_mappings(stack, [40, 7, 100])
        expected = unstaged_buffers(stack, batch)
        stage(stack, batch)
        poison_mappings(stack)
        self.assert_staged(stack, batch, expected)

        stack.runner.drop_staged()
        prepare(stack, batch)
        reread = staged_buffers(stack, len(batch))
        for depth, name in itertools.product(
            range(NUM_STEPS),
            self.MAPPED,
        ):
            name = f"depth {depth} {name}"
            self.assertFalse(torch.equal(reread[name], expected[name]), name)

    def test_rows_of_a_larger_batch_do_not_survive(self):
        stack = self.build(buckets=(2, 8, 32))
        for seed, num_reqs in enumerate((32, 5, 17, 1)):
            lens = [9 + 5 * (request % 13) for request in range(num_reqs)]
            batch = fill_mappings(stack, lens, seed)
            scribble_over_staged_buffers(stack)
            stage(stack, batch)
            self.assert_staged(stack, batch)
            self.assert_padding_points_at_slot_0(stack, num_reqs)

    def test_nor_when_they_are_read_behind_verify(self):
        stack = self.build(buckets=(2, 8))
        for seed, num_reqs in enumerate((8, 5, 1)):
            batch = fill_mappings(stack, [9 + 5 * i for i in range(num_reqs)], seed)
            scribble_over_staged_buffers(stack)
            prepare(stack, batch)
            self.assert_staged(stack, batch)
            self.assert_padding_points_at_slot_0(stack, num_reqs)

    def assert_padding_points_at_slot_0(self, stack, num_reqs):
        num_padded = bucket_of(stack, num_reqs) - num_reqs
        for name, tensor in staged_buffers(stack, num_reqs).items():
            if "cu_seqlens" in name or "indptr" in name or "max" in name:
                continue  # sums over the rows or sizes, not slots
            rows = tensor.view(num_reqs + num_padded, -1)[num_reqs:]
            expected = stack.runner.seq_len_fill_value if "seq" in name else 0
            self.assertTrue((rows == expected).all(), f"{name}: {rows}")


# --- when it is staged, and when read again --------------------------------------


class _Ops(TorchDispatchMode):
    """Collects the tensor ops that run, launches and graph replays aside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class TestComposite(StagingTestCase):
    def replays(self, stack):
        return sum(graph.replays for graph in stack.runner._staging_graphs.values())

    def test_staging_is_two_launches(self):
        stack = self.build()
        batch = fill_mappings(stack, [40, 7, 100])
        with LAUNCHES.of() as launches, _Ops() as ops:
            stage(stack, batch)
        self.assertEqual(launches, [WINDOW_KERNEL, "graph"])
        self.assertEqual(self.replays(stack), 1)
        self.assertLessEqual(set(ops.names), {"aten::slice.Tensor"}, "views only")

    def test_a_staged_batch_is_not_read_again(self):
        stack = self.build()
        batch = fill_mappings(stack, [40, 7, 100])
        expected = unstaged_buffers(stack, batch)
        stage(stack, batch)
        prepare(stack, batch)
        self.assertEqual(self.replays(stack), 1)
        self.assert_staged(stack, batch, expected)

    def test_a_staged_batch_is_used_once(self):
        stack = self.build()
        stage(stack, fill_mappings(stack, [40, 7, 100]))
        prepare(stack, fill_mappings(stack, [40, 7, 100]))
        batch = fill_mappings(stack, [41, 8, 101], seed=1)
        prepare(stack, batch)
        self.assertEqual(self.replays(stack), 2)
        self.assert_staged(stack, batch)

    def test_an_unstaged_batch_is_read_behind_verify(self):
        stack = self.build()
        batch = fill_mappings(stack, [40, 7, 100])
        scribble_over_staged_buffers(stack)
        prepare(stack, batch)
        self.assertEqual(self.replays(stack), 1)
        self.assert_staged(stack, batch)

    def test_a_dropped_batch_is_read_behind_verify(self):
        stack = self.build()
        stage(stack, fill_mappings(stack, [40, 7, 100]))
        stack.runner.drop_staged()
        batch = fill_mappings(stack, [41, 8, 101], seed=1)
        prepare(stack, batch)
        self.assertEqual(self.replays(stack), 2)
        self.assert_staged(stack, batch)

    def test_a_batch_of_another_size_is_read_behind_verify(self):
        for staged, prepared in ((4, 3), (3, 4), (2, 1)):
            with self.subTest(staged=staged, prepared=prepared):
                stack = self.build()
                stage(stack, fill_mappings(stack, [40, 7, 100, 30][:staged]))
                batch = fill_mappings(stack, [41, 8, 101, 29][:prepared], seed=1)
                prepare(stack, batch)
                self.assertEqual(self.replays(stack), 2)
                self.assert_staged(stack, batch)

    def test_a_refused_composite_prepares_as_before(self):
        """No staging graph, and padded rows keep their request slots."""
        stack = self.build_unstaged()
        self.assertEqual(stack.runner._staging_graphs, {})
        stack.runner.buffers.req_pool_indices.fill_(3)
        prepare(stack, fill_mappings(stack, [40, 7, 100]))
        self.assertEqual(stack.runner.buffers.req_pool_indices[3].item(), 3)

    def test_the_final_depth_publishes(self):
        stack = self.build()
        final = stack.runner.runners[-1].model_runner
        batch = fill_mappings(stack, [40, 7, 100])
        stage(stack, batch)
        prepare(stack, batch)
        for step in range(NUM_STEPS - 1):
            with LAUNCHES.of() as launches:
                stack.runner.replay(step)
            self.assertEqual(launches, ["graph"])
            self.assertIsNone(final.shared_read_done_event)
        with LAUNCHES.of() as launches:
            stack.runner.replay(NUM_STEPS - 1)
        self.assertEqual(launches, ["graph", "event"])
        self.assertIs(final.shared_read_done_event, stack.runner.read_done_event)

    def test_the_single_graph_publishes(self):
        stack = self.build(single_graph=True)
        final = stack.runner.runners[-1].model_runner
        batch = fill_mappings(stack, [40, 7, 100])
        prepare(stack, batch)
        self.assertIsNone(final.shared_read_done_event)
        with LAUNCHES.of() as launches:
            for step in range(NUM_STEPS):
                stack.runner.replay(step)
        self.assertEqual(launches, ["graph", "event"])
        self.assertIs(final.shared_read_done_event, stack.runner.read_done_event)

    def test_a_refused_composite_publishes_too(self):
        stack = self.build_unstaged()
        run_decode_step(stack, fill_mappings(stack, [40, 7, 100]))
        self.assertIs(
            stack.worker.last_shared_read_runner.shared_read_done_event,
            stack.runner.read_done_event,
        )


# --- the draft graphs ------------------------------------------------------------


def draft_graphs(stack):
    return [
        graph
        for runner in stack.runner.runners
        for graph in runner.backend.graphs.values()
    ]


class TestDraftGraphs(StagingTestCase):
    def test_they_read_no_mapping_when_staged(self):
        for single_graph in (False, True):
            with self.subTest(single_graph=single_graph):
                stack = self.build(single_graph=single_graph)
                for name, mapping in stack.mappings.items():
                    for graph in draft_graphs(stack):
                        self.assertFalse(graph.touches(mapping), name)
                    for bs, graph in stack.runner._staging_graphs.items():
                        self.assertTrue(graph.touches(mapping), (bs, name))

    def test_they_read_the_mappings_when_nobody_asked(self):
        """A wrapper on which enable was not called, and FlashAttention on its own."""
        wrapped = self.build_unstaged()
        standalone = self.build(make_backend=FlashAttentionBackend)
        for stack in (wrapped, standalone):
            for graph in draft_graphs(stack):
                self.assertTrue(graph.touches(stack.mappings["req_to_token"]))
                self.assertTrue(graph.touches(stack.mappings["full_to_swa"]))
        for graph in draft_graphs(wrapped):
            self.assertTrue(graph.touches(wrapped.mappings["req_to_conv_slot"]))

    def test_standalone_flash_attention_keeps_its_hook(self):
        stack = self.build(make_backend=FlashAttentionBackend)
        batch = fill_mappings(stack, [40, 7, 100])
        prepare(stack, batch)
        for step in range(NUM_STEPS):
            stack.runner.replay(step)
        bs = bucket_of(stack, len(batch))
        req_to_token = stack.mappings["req_to_token"]
        for backend in stack.backends:
            self.assertFalse(backend.enable_draft_extend_metadata_staging())
            page_table = backend.draft_extend_metadata[bs].page_table
            for row, (request, length) in enumerate(
                zip(batch.req_pool_indices, batch.seq_lens + NUM_STEPS + 1)
            ):
                expected = req_to_token[request, :length:16] // 16
                self.assertTrue(torch.equal(page_table[row, : len(expected)], expected))

    def test_only_draft_extend_is_staged(self):
        """The wrapper's other phases keep their in-graph hooks."""
        stack = self.build()
        wrapper = stack.backends[0]
        child, sidecar = wrapper.full_attn_backend, wrapper.short_conv_backend
        for mode, in_place in (
            (ForwardMode.DRAFT_EXTEND_V2, False),
            (ForwardMode.TARGET_VERIFY, True),
            (ForwardMode.DECODE, True),
        ):
            with (
                self.subTest(mode),
                mock.patch.object(child, "init_forward_metadata_in_graph") as of_child,
                mock.patch.object(
                    sidecar, "init_forward_metadata_in_graph"
                ) as of_sidecar,
                mock.patch.object(
                    sidecar, "init_staged_draft_extend_metadata_in_graph"
                ) as staged,
            ):
                wrapper.init_forward_metadata_in_graph(
                    SimpleNamespace(forward_mode=mode)
                )
                self.assertEqual(of_child.called, in_place)
                self.assertEqual(of_sidecar.called, in_place)
                self.assertEqual(staged.called, not in_place)

    def test_capture_stages_and_replay_prep_does_not(self):
        stack = self.build()
        wrapper = stack.backends[0]
        self.check_capture_stages(stack, wrapper, wrapper.attn_backend_list)

    def test_capture_of_a_later_depth_fills_what_it_shares(self):
        stack = self.build(swa=False)
        first, second = stack.backends[:2]
        conv_slots = first.short_conv_backend._cache_indices_buf
        page_table = first.full_attn_backend.draft_extend_metadata["page_table"]
        for buffer in (conv_slots, page_table):
            buffer.fill_(7)
        forward_batch = stack.runner.runners[0].get_forward_batch(2)
        second.init_forward_metadata_out_graph(forward_batch, in_capture=True)
        self.assertFalse(conv_slots[:2].any())
        self.assertFalse(page_table[:2, 0].any())

    def check_capture_stages(self, stack, wrapper, stagers):
        forward_batch = stack.runner.runners[0].get_forward_batch(2)
        with contextlib.ExitStack() as patches:
            staged = [
                patches.enter_context(
                    mock.patch.object(stager, "stage_draft_extend_metadata")
                )
                for stager in stagers
            ]
            wrapper.init_forward_metadata_out_graph(forward_batch, in_capture=True)
            for method in staged:
                method.assert_called_once_with(forward_batch)
            wrapper.init_forward_metadata_out_graph(forward_batch)
            for method in staged:
                method.assert_called_once()

    def test_eager_metadata_reads_the_mappings_at_once(self):
        stack = self.build()
        batch = fill_mappings(stack, [40, 7])
        wrapper = stack.backends[0]
        with (
            mock.patch.object(
                wrapper.full_attn_backend, "init_forward_metadata"
            ) as of_child,
            mock.patch.object(wrapper.short_conv_backend, "_refresh_sconv_metadata"),
        ):
            wrapper.init_forward_metadata(batch)
        of_child.assert_called_once_with(batch)
        self.assertEqual(
            wrapper.short_conv_backend._cache_indices.tolist(),
            stack.mappings["req_to_conv_slot"][batch.req_pool_indices].tolist(),
        )


def kernels_and_gathers(graph):
    # A kernel is recorded as the function that launches it, a tensor op as itself.
    recorded = [func for func, *_ in graph.ops]
    kernels = [func for func in recorded if inspect.isfunction(func)]
    gathers = [func for func in recorded if "index_select" in str(func)]
    return len(kernels), len(gathers)


class TestSharedMetadata(StagingTestCase):
    """Depths that would stage the same values read those of the first one."""

    def assert_staging_graphs_hold(self, stack, *, kernels, gathers):
        for graph in stack.runner._staging_graphs.values():
            self.assertEqual(kernels_and_gathers(graph), (kernels, gathers))

    def test_depths_that_are_alike_are_staged_once(self):
        for single_graph in (False, True):
            stack = self.build(swa=False, single_graph=single_graph)
            self.assertEqual(stack.runner.staged_backends, stack.backends[:1])
            self.assert_staging_graphs_hold(stack, kernels=1, gathers=1)

    def test_depths_with_sliding_window_slots_share_the_conv_slots(self):
        stack = self.build()
        self.assertEqual(stack.runner.staged_backends, stack.backends)
        self.assert_staging_graphs_hold(stack, kernels=NUM_STEPS, gathers=1)

    def build_with_banded(self, *banded, **kwargs):
        """Only these depths have sliding-window slots."""
        full_pool = None
        depth = itertools.count()

        def make_backend(model_runner):
            nonlocal full_pool
            if next(depth) not in banded:
                full_pool = full_pool or self.full_pool()
                model_runner.token_to_kv_pool = full_pool
            return build_backend(model_runner)

        return self.build(make_backend=make_backend, **kwargs)

    @staticmethod
    def full_pool():
        _, kv_pool, _ = build_pools(max_reqs=4, page_size=16, swa=False)
        return kv_pool

    def test_banded_depths_beside_full_ones(self):
        for banded, single_graph in itertools.product(
            ((0,), (1,), (0, 1)), (False, True)
        ):
            with self.subTest(banded=banded, single_graph=single_graph):
                stack = self.build_with_banded(*banded, single_graph=single_graph)
                # A banded depth has a window table; its other tables are anyone's.
                stagers = [stack.backends[depth] for depth in sorted({0, *banded})]
                self.assertEqual(stack.runner.staged_backends, stagers)
                batch = fill_mappings(stack, [40, 7, 100])
                scribble_over_staged_buffers(stack)
                stage(stack, batch)
                self.assert_staged(stack, batch)

    def test_what_a_captured_graph_owns_lives_on(self):
        """Attention keeps per-graph buffers on the metadata it was captured with."""
        for single_graph in (False, True):
            stack = self.build(swa=False, single_graph=single_graph)
            for runner, backend in zip(stack.runner.runners, stack.backends):
                captured = runner.model_runner.model.metadata
                kept = backend.full_attn_backend.draft_extend_metadata
                for bs in stack.runner.capture_bs:
                    self.assertIs(kept[bs], captured[bs])

    def test_nothing_is_shared_beside_a_plan_stream(self):
        with mock.patch.object(
            worker_module,
            "get_plan_stream",
            return_value=(RecordingStream(), contextlib.nullcontext()),
        ):
            stack = self.build(swa=False)
        self.assertEqual(stack.runner.staged_backends, stack.backends)

    def build_with_depth_1(self, make_backend):
        """A stack whose second depth has a backend of another type."""
        depth = itertools.count()
        return self.build(
            swa=False,
            make_backend=lambda model_runner: (
                make_backend if next(depth) == 1 else self.make_backend
            )(model_runner),
        )

    def test_a_child_of_another_type_is_staged(self):
        class OtherBackend(FlashAttentionBackend):
            pass

        stack = self.build_with_depth_1(
            lambda model_runner: build_backend(model_runner, OtherBackend)
        )
        self.assertEqual(stack.runner.staged_backends, stack.backends[:2])
        self.assert_staging_graphs_hold(stack, kernels=2, gathers=1)

    def test_a_wrapper_of_another_type_is_staged(self):
        class OtherWrapper(InklingShortConvHybridAttnBackend):
            pass

        def make_backend(model_runner):
            wrapper = build_backend(model_runner)
            wrapper.__class__ = OtherWrapper
            return wrapper

        stack = self.build_with_depth_1(make_backend)
        self.assertEqual(stack.runner.staged_backends, stack.backends[:2])
        self.assert_staging_graphs_hold(stack, kernels=2, gathers=2)

    def depths(self, count, **kwargs):
        backends = self.build(capture=False, **kwargs).backends[:count]
        for backend in backends:
            backend.init_cuda_graph_state(4, 4 * (NUM_STEPS + 1))
            self.assertTrue(backend.enable_draft_extend_metadata_staging())
        return backends

    def test_another_request_mapping_is_not_shared(self):
        first, second = self.depths(2, swa=False)
        child = second.full_attn_backend
        child.req_to_token = child.req_to_token.clone()
        self.assertFalse(second.share_staged_draft_extend_metadata(first))
        self.assertEqual(second._children_to_stage, [child])

    def test_another_conv_slot_mapping_is_not_shared(self):
        first, second = self.depths(2, swa=False)
        pool = second.short_conv_backend.req_to_token_pool
        pool.req_index_to_mamba_index_mapping = (
            pool.req_index_to_mamba_index_mapping.clone()
        )
        self.assertFalse(second.share_staged_draft_extend_metadata(first))
        self.assertEqual(second._children_to_stage, [second.short_conv_backend])

    def test_what_is_shared_with_one_depth_stays_shared(self):
        first, second, third = self.depths(3, swa=False)
        mapping = first.full_attn_backend.req_to_token.clone()
        for backend in (second, third):
            backend.full_attn_backend.req_to_token = mapping
        pool = second.short_conv_backend.req_to_token_pool
        pool.req_index_to_mamba_index_mapping = (
            pool.req_index_to_mamba_index_mapping.clone()
        )
        self.assertFalse(third.share_staged_draft_extend_metadata(first))
        self.assertEqual(third._children_to_stage, [third.full_attn_backend])
        self.assertTrue(third.share_staged_draft_extend_metadata(second))
        self.assertIs(
            third.short_conv_backend._draft_extend_stager, first.short_conv_backend
        )

    def test_an_eager_forward_of_a_later_depth_changes_nothing_staged(self):
        stack = self.build(swa=False)
        batch = fill_mappings(stack, [40, 7, 100])
        expected = unstaged_buffers(stack, batch)
        stage(stack, batch)
        other = fill_mappings(stack, [9, 30, 55], seed=1)
        stack.backends[1].short_conv_backend._prepare_slot_indices(other)
        self.assert_staged(stack, batch, expected)


class TestPoisonedStep(StagingTestCase):
    """Whole decode steps of the real worker, the mappings overwritten where the
    target's marker lets the scheduler go."""

    LENS = [40, 7, 100]

    def proposals(self, stack, *, poison):
        batch = fill_mappings(stack, self.LENS)
        return run_decode_step(
            stack,
            batch,
            after_marker=(lambda: poison_mappings(stack)) if poison else lambda: None,
        )

    def check_step(self, **kwargs):
        stack = self.build(**kwargs)
        undisturbed = self.proposals(stack, poison=False)
        poisoned = self.proposals(stack, poison=True)
        self.assertTrue(torch.equal(poisoned, undisturbed))

        unstaged = self.build_unstaged(**kwargs)
        in_place = self.proposals(unstaged, poison=False)
        self.assertTrue(torch.equal(undisturbed, in_place))
        # The proposals do depend on what the graphs read.
        self.assertFalse(torch.equal(self.proposals(unstaged, poison=True), in_place))

    def test_page_size_1(self):
        self.check_step(page_size=1)

    def test_page_size_16(self):
        self.check_step(page_size=16)

    def test_page_size_128(self):
        self.check_step(page_size=128)

    def test_without_front(self):
        self.check_step(boundary_kv_fix=False)

    def test_single_graph(self):
        self.check_step(single_graph=True)

    def test_single_graph_without_front(self):
        self.check_step(single_graph=True, boundary_kv_fix=False)


# --- the conv commit -------------------------------------------------------------


class TestConvCommit(StagingTestCase):
    """A commit behind verify goes to the conv slots that verify ran with."""

    NUM_REQS = 3

    def build_sidecar(self, *, pool_class=HybridReqToTokenPool, enable_pdmux=False):
        server_args = self._enter(published_config(page_size=16, buckets=(1, 2, 4)))
        self.pool, kv_pool, allocator = build_pools(
            max_reqs=4, page_size=16, swa=True, pool_class=pool_class
        )
        model_runner = build_model_runner(
            server_args, self.pool, kv_pool, allocator, is_draft_worker=False
        )
        model_runner.server_args = SimpleNamespace(
            enable_pdmux=enable_pdmux, enable_unified_memory=False
        )
        self.mapping = self.pool.req_index_to_mamba_index_mapping
        self.mapping[1:5] = torch.tensor([5, 3, 6, 2], dtype=torch.int32)
        sidecar = InklingShortConvAttnBackend(model_runner)
        sidecar.init_cuda_graph_state(4, 16)
        return sidecar

    def verify(self, sidecar, num_reqs):
        """Target verify's metadata prep, and the conv windows it leaves."""
        self.requests = torch.arange(1, num_reqs + 1)
        prepare_slots = SimpleNamespace(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=num_reqs,
            req_pool_indices=self.requests,
            spec_info=SimpleNamespace(draft_token_num=NUM_STEPS + 1),
        )
        sidecar.init_forward_metadata_out_graph(prepare_slots)
        sidecar.init_forward_metadata_in_graph(prepare_slots)
        cache = self.pool.mamba_pool.mamba_cache
        windows = cache.intermediate_conv_window[0]
        windows.copy_(torch.arange(1, windows.shape[1] + 1)[:, None, None, None])

    def commit(self, sidecar):
        """Commit one accepted token per request; returns the slots written."""
        conv = self.pool.mamba_pool.mamba_cache.conv[0]
        conv.zero_()
        sidecar.commit_conv_state_after_mtp_verify(
            req_pool_indices=self.requests,
            last_correct_step_indices=torch.zeros_like(self.requests),
            mamba_track_indices=None,
            mamba_steps_to_track=None,
        )
        # Request i's windows hold i + 1, so the slots come out in request order.
        owner = conv[0, :, 0, 0].int()
        slots = owner.nonzero().flatten()
        return slots[owner[slots].argsort()].tolist()

    def reassign(self):
        """What the scheduler may do once the marker lets it go."""
        self.mapping[1:5] = torch.tensor([7, 4, 1, 8], dtype=torch.int32)

    def test_into_the_slots_of_the_verify(self):
        sidecar = self.build_sidecar()
        self.verify(sidecar, self.NUM_REQS)
        self.assertEqual(self.commit(sidecar), [5, 3, 6])
        self.reassign()
        self.assertEqual(self.commit(sidecar), [5, 3, 6])

    def test_wrapper_commits_through_the_sidecar(self):
        sidecar = self.build_sidecar()
        model_runner = sidecar._model_runner
        wrapper = InklingShortConvHybridAttnBackend(
            FlashAttentionBackend(model_runner), sidecar, [0]
        )
        self.verify(sidecar, self.NUM_REQS)
        self.reassign()
        conv = self.pool.mamba_pool.mamba_cache.conv[0]
        conv.zero_()
        wrapper.update_mamba_state_after_mtp_verify(
            torch.zeros_like(self.requests), None, None, req_pool_indices=self.requests
        )
        self.assertEqual(conv[0, :, 0, 0].nonzero().flatten().tolist(), [3, 5, 6])

    def test_a_smaller_batch_than_the_one_before(self):
        sidecar = self.build_sidecar()
        self.verify(sidecar, 4)
        self.reassign()
        self.verify(sidecar, 2)
        self.assertEqual(self.commit(sidecar), [7, 4])

    def test_pdmux_looks_the_slots_up(self):
        """A sibling backend may have replayed the verify."""
        sidecar = self.build_sidecar(enable_pdmux=True)
        self.verify(sidecar, self.NUM_REQS)
        self.reassign()
        self.assertEqual(self.commit(sidecar), [7, 4, 1])

    def test_a_translating_pool_looks_the_slots_up(self):
        sidecar = self.build_sidecar(pool_class=TranslatingPool)
        self.verify(sidecar, self.NUM_REQS)
        self.assertEqual(self.commit(sidecar), [6, 4, 7])
        self.reassign()
        self.assertEqual(self.commit(sidecar), [8, 5, 2])

    def test_more_requests_than_the_slot_buffer_holds(self):
        sidecar = self.build_sidecar()
        self.verify(sidecar, 4)
        sidecar._cache_indices_buf = sidecar._cache_indices_buf[:3]
        self.reassign()
        self.assertEqual(self.commit(sidecar), [7, 4, 1, 8])


if __name__ == "__main__":
    unittest.main()
