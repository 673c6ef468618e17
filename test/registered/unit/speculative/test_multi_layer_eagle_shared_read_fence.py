"""Which event lets the scheduler rewrite the mappings that a step reads, and when a
multi-layer EAGLE step reads them ahead of verify."""

import itertools
import logging
import os
import random
import subprocess
import sys
import tempfile
import unittest
from types import SimpleNamespace
from typing import Optional
from unittest import mock

import prometheus_client
import torch
from draft_extend_staging_fixture import (
    KERNELS_RUN_ON_CPU,
    LAUNCHES,
    NUM_STEPS,
    Batch,
    RecordingEvent,
    RecordingStream,
    build_backend,
    build_stack,
    build_worker,
    cpu_stand_ins,
    fill_mappings,
    model_config,
    published_config,
    run_decode_step,
    staged_buffers,
    unstaged_buffers,
    worker_module,
)

from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative import (
    multi_layer_eagle_draft_extend_cuda_graph_runner as runner_module,
)
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=60, stage="base-a", runner_config="cpu")


# --- the fence -------------------------------------------------------------------


class StepEvent:
    """An event stamped with the step that recorded it last."""

    def __init__(self, server: "Server", name: str):
        self.server = server
        self.name = name
        self.step: Optional[int] = None

    def record(self):
        self.step = self.server.step

    def __repr__(self):
        return f"{self.name} of step {self.step}"


class DraftGraphs:
    """The draft-extend graph runner as the worker sees it before verify."""

    staging_refusal = None

    def __init__(self):
        self.fits = True
        self.drop_staged()

    def can_run_graph(self, forward_batch):
        return self.fits

    def drop_staged(self):
        self.staged = False
        self.prepared_from_staged = False

    def stage(self, seq_lens, req_pool_indices):
        self.staged = True
        return torch.zeros(1), torch.zeros(1)

    def prepare(self, read_again):
        self.prepared_from_staged = self.staged and not read_again


class StepFailed(Exception):
    pass


class Server:
    """The real worker and the real WAR barrier; draft, verify and draft extend only
    publish the events that the real model and graph runners publish.

    ``run(kind)`` runs one step, ``barrier()`` what the scheduler does behind it.
    """

    # What the barrier must wait for behind a step of each kind.
    FENCE_OF = {
        "staged": "target",
        # staged, but one of the graphs did not replay
        "eager draft extend": None,
        "eager verify": "draft",
        "verify fences before its replay": "draft",
        "all eager": None,
        # staged, but the mappings were read once more behind verify
        "read again": "draft",
        # not staged
        "does not fit": "draft",
        "does not fit, eager draft extend": None,
        "idle": "draft",
        "prefill": None,
        "mixed": None,
        # a step that raised leaves nothing to wait for; the next must not care
        "fails in verify": None,
        "fails behind the draft extend": None,
    }

    def __init__(self, server_args):
        def runner():
            return SimpleNamespace(
                shared_read_done_event=None, model_config=model_config()
            )

        self.step = 0
        self.target = runner()
        self.draft_runners = [runner() for _ in range(NUM_STEPS)]
        self.worker = build_worker(server_args, self.target, self.draft_runners)
        self.marker = StepEvent(self, "marker")
        self.draft_event = StepEvent(self, "draft event")
        self.target.decode_cuda_graph_runner = SimpleNamespace(
            in_graph_metadata_prep_done=self.marker
        )
        self.draft_graphs = DraftGraphs()
        self.calls = []
        draft_worker = self.worker._draft_worker
        draft_worker.cuda_graph_runner_for_draft_extend = self.draft_graphs
        draft_worker.draft = self._draft
        draft_worker._draft_extend_for_decode = self._draft_extend
        draft_worker._draft_extend_for_prefill = lambda *args: None
        self.worker.verify = self._verify
        self.worker._target_worker.forward_batch_generation = lambda batch, **kwargs: (
            SimpleNamespace(
                logits_output=SimpleNamespace(hidden_states=None),
                next_token_ids=None,
            )
        )
        stage = draft_worker.stage_draft_extend
        draft_worker.stage_draft_extend = lambda batch: (
            self.calls.append("stage"),
            stage(batch),
        )
        self.scheduler = SimpleNamespace(
            _war_barrier_enabled=True,
            model_worker=self.worker,
            schedule_stream=RecordingStream(),
            forward_stream="the whole forward stream",
        )

    def run(self, kind: str):
        self.step += 1
        self.kind = kind
        self.calls.clear()
        self.draft_graphs.fits = not kind.startswith("does not fit")
        mode = {
            "idle": ForwardMode.IDLE,
            "prefill": ForwardMode.EXTEND,
            "mixed": ForwardMode.MIXED,
        }.get(kind, ForwardMode.DECODE)
        batch = Batch(
            torch.tensor([5]), torch.tensor([1]), forward_mode=mode, spec_info=object()
        )
        try:
            self.worker.forward_batch_generation(
                batch, on_publish=lambda seq_lens: self.calls.append("publish")
            )
        except StepFailed:
            assert kind.startswith("fails"), kind

    def _draft(self, batch):
        self.calls.append("draft")
        return SimpleNamespace(is_verify_input=lambda: True)

    def _verify(self, batch, grammar_barrier=None):
        self.calls.append("verify")
        if self.kind == "verify fences before its replay":
            event = StepEvent(self, "event ahead of the verify replay")
            event.record()
            self.target.shared_read_done_event = event
        elif self.kind not in ("eager verify", "all eager"):
            self.marker.record()
            self.target.shared_read_done_event = self.marker
        if self.kind == "fails in verify":
            raise StepFailed
        return SimpleNamespace(new_seq_lens=batch.seq_lens)

    def _draft_extend(self, batch, batch_output):
        self.calls.append("draft extend")
        if self.kind != "all eager" and not self.kind.endswith("eager draft extend"):
            self.draft_graphs.prepare(read_again=self.kind == "read again")
            self.draft_event.record()
            self.draft_runners[-1].shared_read_done_event = self.draft_event
        if self.kind == "fails behind the draft extend":
            raise StepFailed

    def barrier(self):
        """Apply the scheduler's barrier; returns what it waits for."""
        waits = self.scheduler.schedule_stream.waits
        waits.clear()
        Scheduler._apply_war_barrier(self.scheduler)
        (waited_for,) = waits
        return waited_for


class TestSharedReadFence(CustomTestCase):
    def setUp(self):
        config = published_config()
        self.server = Server(config.__enter__())
        self.addCleanup(config.__exit__, None, None, None)

    def assert_fenced(self, kinds):
        """The barrier waits for this step's fence, or for the whole stream."""
        server = self.server
        expected = {
            "target": server.marker,
            "draft": server.draft_event,
            None: server.scheduler.forward_stream,
        }[Server.FENCE_OF[server.kind]]
        waited_for = server.barrier()
        self.assertIs(waited_for, expected, kinds)
        if isinstance(waited_for, StepEvent):
            self.assertEqual(waited_for.step, server.step, kinds)

    def test_each_kind_of_step(self):
        for kind in Server.FENCE_OF:
            if kind.startswith("fails"):
                continue  # the scheduler does not get as far as the barrier
            with self.subTest(kind):
                self.server.run(kind)
                self.assert_fenced([kind])

    def test_the_scheduler_reads_every_step(self):
        kinds = Server.FENCE_OF
        for sequence in itertools.product(kinds, repeat=3):
            self._run_sequence(sequence, barrier_after=lambda index: True)

    def test_the_scheduler_reads_only_the_last_step(self):
        """As when event_loop_normal ran the steps before."""
        for sequence in itertools.product(Server.FENCE_OF, repeat=3):
            self._run_sequence(sequence, barrier_after=lambda index: index == 2)

    def test_long_random_sequences(self):
        rng = random.Random(0)
        kinds = list(Server.FENCE_OF)
        for _ in range(200):
            self._run_sequence(
                rng.choices(kinds, k=12), barrier_after=lambda index: rng.random() < 0.5
            )

    def _run_sequence(self, sequence, barrier_after):
        for index, kind in enumerate(sequence):
            self.server.run(kind)
            if barrier_after(index) and not kind.startswith("fails"):
                self.assert_fenced(sequence[: index + 1])

    def test_named_sequences(self):
        """The sequences that the exhaustive tests are there for, by name."""
        for middle in ("prefill", "mixed", "idle", "all eager", "fails in verify"):
            with self.subTest(middle):
                self._run_sequence(
                    ("staged", middle, "staged"), barrier_after=lambda index: True
                )

    def test_a_draft_event_left_behind_fences_no_eager_step(self):
        self.server.run("staged")
        self.assertIs(self.server.barrier(), self.server.marker)
        # The draft's event of the staged step was published and never read.
        self.assertIsNotNone(self.server.draft_runners[-1].shared_read_done_event)
        self.server.run("all eager")
        self.assertIs(self.server.barrier(), self.server.scheduler.forward_stream)

    def test_a_marker_left_behind_fences_no_step_whose_verify_is_eager(self):
        self.server.run("does not fit")
        self.assertIs(self.server.barrier(), self.server.draft_event)
        self.assertIs(self.server.target.shared_read_done_event, self.server.marker)
        self.server.run("eager verify")
        self.assertIs(self.server.barrier(), self.server.draft_event)

    def test_events_on_earlier_depths_do_not_outlive_their_step(self):
        for runner in self.server.draft_runners:
            runner.shared_read_done_event = StepEvent(self.server, "stale")
        self.server.run("prefill")
        for runner in self.server.draft_runners:
            self.assertIsNone(runner.shared_read_done_event)

    def test_the_step_is_staged_between_draft_and_verify(self):
        self.server.run("staged")
        self.assertEqual(
            self.server.calls, ["draft", "stage", "verify", "publish", "draft extend"]
        )

    def test_prefill_stages_nothing(self):
        for kind in ("prefill", "mixed"):
            self.server.run(kind)
            self.assertEqual(self.server.calls, ["publish"])

    def test_a_worker_that_has_run_nothing_fences_on_the_final_draft(self):
        self.assertIs(
            self.server.worker.last_shared_read_runner, self.server.draft_runners[-1]
        )

    def test_a_target_without_graphs_never_fences(self):
        self.server.target.decode_cuda_graph_runner = None
        self.server.run("staged")
        self.assertIs(self.server.barrier(), self.server.draft_event)


class TestStepCounter(CustomTestCase):
    """What reaches /metrics."""

    NAME = "sglang:mtp_draft_extend_steps_total"

    def make_counter(self):
        counter = worker_module.DraftExtendStepCounter(enabled=True)
        self.addCleanup(prometheus_client.REGISTRY.unregister, counter._counter)
        return counter

    def exported(self, fence, reason):
        return prometheus_client.REGISTRY.get_sample_value(
            self.NAME, {"fence": fence, "reason": reason}
        )

    def test_the_sums_are_exported_every_few_steps(self):
        counter = self.make_counter()
        for _ in range(counter.FLUSH_EVERY - 1):
            counter.count("target", "")
        self.assertIsNone(self.exported("target", ""))
        counter.count("draft", "a reason")
        self.assertEqual(self.exported("target", ""), counter.FLUSH_EVERY - 1)
        self.assertEqual(self.exported("draft", "a reason"), 1)
        for _ in range(counter.FLUSH_EVERY):
            counter.count("target", "")
        self.assertEqual(self.exported("target", ""), 2 * counter.FLUSH_EVERY - 1)

    def test_the_servers_metrics_endpoint_has_the_sums(self):
        """Counted in one process, served by SGLang's endpoint in another."""
        count = (
            "from sglang.srt.speculative.multi_layer_eagle_worker_v2 import *\n"
            "counter = DraftExtendStepCounter(enabled=True)\n"
            "for _ in range(counter.FLUSH_EVERY): counter.count('target', '')\n"
        )
        serve = (
            "from fastapi import FastAPI\n"
            "from fastapi.testclient import TestClient\n"
            "from sglang.srt.utils.common import add_prometheus_middleware\n"
            "app = FastAPI()\n"
            "add_prometheus_middleware(app)\n"
            "print(TestClient(app).get('/metrics').text)\n"
        )
        with tempfile.TemporaryDirectory() as folder:
            env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": folder}
            env["PYTHONPATH"] = os.pathsep.join(sys.path)
            for script in (count, serve):
                done = subprocess.run(
                    [sys.executable, "-c", script],
                    env=env,
                    capture_output=True,
                    text=True,
                )
                self.assertEqual(done.returncode, 0, done.stderr[-2000:])
        steps = worker_module.DraftExtendStepCounter.FLUSH_EVERY
        self.assertIn(
            f'{self.NAME}{{fence="target",reason=""}} {float(steps)}', done.stdout
        )

    def test_without_metrics_nothing_is_kept(self):
        counter = worker_module.DraftExtendStepCounter(enabled=False)
        for _ in range(2 * counter.FLUSH_EVERY):
            counter.count("target", "")
        self.assertEqual(counter._pending, {})
        self.assertIsNone(self.exported("target", ""))

    def test_every_kind_of_decode_step_is_counted_as_it_was_fenced(self):
        config = published_config()
        server = Server(config.__enter__())
        self.addCleanup(config.__exit__, None, None, None)
        server.worker._step_counter = counter = self.make_counter()
        for kind, fence in Server.FENCE_OF.items():
            if kind.startswith("fails") or kind in ("prefill", "mixed"):
                continue
            with self.subTest(kind):
                counter._pending.clear()
                server.run(kind)
                ((counted, reason),) = counter._pending
                self.assertEqual(counted, fence or "coarse")
                self.assertEqual(reason == "", fence == "target")

    def test_the_ranks_that_export_metrics_count(self):
        for enable_metrics, all_ranks, rank, enabled in (
            (False, False, 0, False),
            (True, False, 0, True),
            (True, False, 1, False),
            (True, True, 1, True),
        ):
            config = SimpleNamespace(
                enable_metrics=enable_metrics,
                enable_metrics_for_all_schedulers=all_ranks,
            )
            with (
                self.subTest(enable_metrics=enable_metrics, rank=rank),
                mock.patch.object(worker_module, "get_observability", lambda: config),
                mock.patch.object(
                    worker_module.DraftExtendStepCounter, "__init__", return_value=None
                ) as init,
            ):
                worker_module.DraftExtendStepCounter.for_rank(
                    SimpleNamespace(attn_tp_rank=rank)
                )
                init.assert_called_once_with(enabled=enabled)

    def test_prefill_is_not_counted(self):
        config = published_config()
        server = Server(config.__enter__())
        self.addCleanup(config.__exit__, None, None, None)
        server.worker._step_counter = counter = self.make_counter()
        server.run("prefill")
        self.assertEqual(counter._pending, {})


# --- what is staged --------------------------------------------------------------


@unittest.skipUnless(KERNELS_RUN_ON_CPU, "runs kernels in Triton's interpreter")
class StackTestCase(CustomTestCase):
    """Builds stacks with small buckets; their CPU stand-ins last for the test."""

    buckets = (1, 2, 4)

    def setUp(self):
        stand_ins = cpu_stand_ins()
        stand_ins.__enter__()
        self.addCleanup(stand_ins.__exit__, None, None, None)
        config = published_config(page_size=16, buckets=self.buckets)
        self.server_args = config.__enter__()
        self.addCleanup(config.__exit__, None, None, None)

    def build(self, **kwargs):
        return build_stack(self.server_args, **kwargs)


class TestStagingDecision(StackTestCase):
    def assert_refused(self, stack, reason, batch=None):
        """The step is not staged, which is logged once, however many steps follow."""
        batch = batch or fill_mappings(stack, [40, 7])
        logging.Logger.info_once.cache_clear()
        with (
            self.assertLogs(worker_module.logger, "INFO") as logs,
            LAUNCHES.of() as launches,
        ):
            for _ in range(3):
                stack.draft_worker.stage_draft_extend(batch)
                stack.worker._select_shared_read_fence()
        self.assertIsNone(stack.draft_worker._staged_window)
        self.assertEqual(launches, [])
        self.assertEqual(
            [record.getMessage() for record in logs.records],
            [f"Draft extend fences the scheduler: {reason}."],
        )

    def test_a_fitting_decode_step_is_staged(self):
        stack = self.build()
        batch = fill_mappings(stack, [40, 7])
        with self.assertNoLogs(worker_module.logger, "INFO"):
            stack.draft_worker.stage_draft_extend(batch)
        self.assertIsNotNone(stack.draft_worker._staged_window)

    def test_no_draft_graphs(self):
        stack = self.build(capture=False)
        self.assert_refused(stack, "draft-extend CUDA graphs are off")

    def test_draft_graphs_disabled_in_the_runner(self):
        with mock.patch.object(
            worker_module.MultiLayerEagleMultiStepDraftExtendCudaGraphRunner,
            "_cuda_graph_disabled",
            lambda runner: True,
        ):
            stack = self.build()
        self.assert_refused(stack, "draft-extend CUDA graphs are disabled")

    def test_switched_off(self):
        name = "SGLANG_ENABLE_DRAFT_EXTEND_METADATA_STAGING"
        with mock.patch.dict(os.environ, {name: "0"}):
            stack = self.build()
        self.assertEqual(stack.runner.staged_backends, [])
        self.assert_refused(stack, f"{name} is off")

    def test_mlp_tp_gather(self):
        stack = self.build()
        stack.runner.staged_backends = []
        stack.runner.require_mlp_tp_gather = True
        stack.runner._enable_staging()
        self.assertEqual(stack.runner.staged_backends, [])
        self.assert_refused(stack, "MLP-TP gather sizes the bucket by the largest rank")

    def test_pd_decode_server(self):
        """Its peers learn which slots to write behind the fence, which must therefore
        be behind all of the step's KV writes, those of finished requests included."""
        for mode, fence in (("decode", "draft"), ("prefill", "target")):
            config = published_config(
                page_size=16, buckets=self.buckets, disaggregation_mode=mode
            )
            with self.subTest(mode), config as server_args:
                stack = build_stack(server_args)
                if mode == "decode":
                    self.assertEqual(stack.runner.staged_backends, [])
                    self.assert_refused(
                        stack, "PD transfers must start behind the step's KV writes"
                    )
                run_decode_step(stack, fill_mappings(stack, [40, 7]))
                fenced_by = {
                    "target": stack.worker._target_worker.model_runner,
                    "draft": stack.draft_worker.draft_runner_list[-1],
                }[fence]
                self.assertIs(stack.worker.last_shared_read_runner, fenced_by)
                self.assertIsNotNone(fenced_by.shared_read_done_event)

    def test_one_depth_without_support(self):
        def make_backend(model_runner):
            backend = build_backend(model_runner)
            if model_runner.req_to_token_pool.mamba_map == {1: 0}:  # depth 1
                backend.full_attn_backend.topk = 0
            return backend

        stack = self.build(make_backend=make_backend)
        self.assertEqual(stack.runner.staged_backends, [])
        # No depth commits to staging when one cannot.
        for backend in stack.backends:
            self.assertFalse(backend.draft_extend_metadata_staged)
        self.assert_refused(stack, "FlashAttentionBackend of draft depth 1 lacks it")

    def test_one_line_at_start_tells_each_depth(self):
        def make_backend(model_runner):
            backend = build_backend(model_runner)
            if model_runner.req_to_token_pool.mamba_map == {2: 0}:  # depth 2
                backend.full_attn_backend.topk = 0
            return backend

        for kwargs, line in (
            (
                {},
                "yes. Support by draft depth, or what lacks it: 0: yes; 1: yes; 2: yes.",
            ),
            (
                {"make_backend": make_backend},
                "no, FlashAttentionBackend of draft depth 2 lacks it. Support by draft "
                "depth, or what lacks it: 0: yes; 1: yes; 2: FlashAttentionBackend.",
            ),
        ):
            with self.assertLogs(runner_module.logger, "INFO") as logs:
                self.build(**kwargs)
            lines = [r.getMessage() for r in logs.records]
            self.assertEqual(
                [m for m in lines if m.startswith("Draft-extend metadata")],
                [f"Draft-extend metadata is staged before verify: {line}"],
            )

    def test_standalone_flash_attention(self):
        stack = self.build(make_backend=FlashAttentionBackend)
        self.assertEqual(stack.runner.staged_backends, [])
        self.assert_refused(
            stack, "FlashAttentionBackend keeps its metadata in the draft graph"
        )

    def test_target_without_marker(self):
        stack = self.build()
        target = stack.worker._target_worker.model_runner
        reason = "no target verify graph carries the metadata marker"
        target.decode_cuda_graph_runner.in_graph_metadata_prep_done = None
        self.assert_refused(stack, reason)
        target.decode_cuda_graph_runner = None
        self.assert_refused(stack, reason)

    def test_batch_beyond_the_buckets(self):
        stack = self.build()
        batch = Batch(torch.ones(5, dtype=torch.int64), torch.arange(5))
        self.assert_refused(
            stack, "the batch fits no captured draft-extend bucket", batch
        )

    def test_padding_disabled(self):
        stack = self.build()
        stack.runner.runners[0].disable_padding = True
        self.assert_refused(
            stack,
            "the batch fits no captured draft-extend bucket",
            fill_mappings(stack, [9, 9, 9]),
        )
        stack.draft_worker.stage_draft_extend(fill_mappings(stack, [9, 9]))
        self.assertIsNotNone(stack.draft_worker._staged_window)

    def test_mlp_sync_turned_the_graphs_off(self):
        stack = self.build()
        stack.runner.runners[0].require_mlp_sync = True
        batch = fill_mappings(stack, [9, 9])
        batch.can_run_decode_cuda_graph = False
        self.assert_refused(
            stack, "the batch fits no captured draft-extend bucket", batch
        )
        batch.can_run_decode_cuda_graph = True
        stack.draft_worker.stage_draft_extend(batch)
        self.assertIsNotNone(stack.draft_worker._staged_window)

    def test_idle_is_never_staged(self):
        stack = self.build()
        stack.draft_worker.stage_draft_extend(fill_mappings(stack, [9]))
        idle = Batch(
            torch.empty(0, dtype=torch.int64),
            torch.empty(0, dtype=torch.int64),
            forward_mode=ForwardMode.IDLE,
        )
        with (
            self.assertNoLogs(worker_module.logger, "INFO"),
            LAUNCHES.of() as launches,
        ):
            stack.draft_worker.stage_draft_extend(idle)
            stack.worker._select_shared_read_fence()
        self.assertEqual(launches, [])
        self.assertIsNone(stack.draft_worker._staged_window)
        self.assertIsNone(stack.runner._staged_raw_bs)


class TestStagedStep(StackTestCase):
    def test_the_staged_step_fences_on_the_target(self):
        for boundary_kv_fix, single_graph in itertools.product((True, False), repeat=2):
            with self.subTest(
                boundary_kv_fix=boundary_kv_fix, single_graph=single_graph
            ):
                stack = self.build(
                    boundary_kv_fix=boundary_kv_fix, single_graph=single_graph
                )
                batch = fill_mappings(stack, [40, 7, 2])
                run_decode_step(stack, batch)
                target = stack.worker._target_worker.model_runner
                self.assertIs(stack.worker.last_shared_read_runner, target)

    def test_an_unstaged_step_fences_on_the_final_draft(self):
        stack = self.build()
        stack.runner.staging_refusal = "the test says so"
        run_decode_step(stack, fill_mappings(stack, [40, 7, 2]))
        final = stack.draft_worker.draft_runner_list[-1]
        self.assertIs(stack.worker.last_shared_read_runner, final)
        self.assertIs(final.shared_read_done_event, stack.runner.read_done_event)

    def test_a_step_that_read_again_fences_on_the_final_draft(self):
        """Should anything drop what was staged, the second read is behind the marker."""
        stack = self.build()
        run_decode_step(
            stack,
            fill_mappings(stack, [40, 7, 2]),
            after_marker=lambda: stack.runner.drop_staged(),
        )
        final = stack.draft_worker.draft_runner_list[-1]
        self.assertIs(stack.worker.last_shared_read_runner, final)
        self.assertIs(final.shared_read_done_event, stack.runner.read_done_event)

    def test_what_an_eager_draft_extend_left_staged_is_not_used(self):
        """Staged, not replayed; the next step has as many requests and is not
        staged: it must read its own mappings."""
        stack = self.build()
        stack.draft_worker.stage_draft_extend(fill_mappings(stack, [40, 7, 2]))
        stack.runner.staging_refusal = "the test says so"
        batch = fill_mappings(stack, [12, 33, 64], seed=1)
        expected = unstaged_buffers(stack, batch)
        run_decode_step(stack, batch)
        staged = staged_buffers(stack, len(batch))
        for name, tensor in expected.items():
            self.assertTrue(torch.equal(staged[name], tensor), name)

    def test_a_failed_step_leaves_nothing_staged(self):
        stack = self.build()
        with self.assertRaises(StepFailed):

            def fail():
                raise StepFailed

            run_decode_step(stack, fill_mappings(stack, [40, 7, 2]), after_marker=fail)
        batch = fill_mappings(stack, [12, 33, 64], seed=1)
        expected = unstaged_buffers(stack, batch)
        stack.runner.staging_refusal = "the test says so"
        run_decode_step(stack, batch)
        staged = staged_buffers(stack, len(batch))
        for name, tensor in expected.items():
            self.assertTrue(torch.equal(staged[name], tensor), name)
        self.assertIsNone(stack.draft_worker._staged_window)


class TestPlanStream(StackTestCase):
    WINDOW_KERNEL = "_stage_draft_extend_window_kernel"

    def test_the_window_carries_an_event_behind_the_stage_writes(self):
        for boundary_kv_fix in (True, False):
            with self.subTest(boundary_kv_fix=boundary_kv_fix):
                stack = self.build(boundary_kv_fix=boundary_kv_fix)
                draft_worker = stack.draft_worker
                draft_worker.plan_stream = RecordingStream()
                batch = fill_mappings(stack, [40, 7])
                with LAUNCHES.of() as launches:
                    draft_worker.stage_draft_extend(batch)
                self.assertEqual(launches, [self.WINDOW_KERNEL, "graph", "event"])

                with LAUNCHES.of() as launches:
                    window = draft_worker._compute_boundary_kv_locs_positions(batch)
                self.assertEqual(launches, [], "the locations are computed once")
                self.assertIs(window, draft_worker._staged_window)
                self.assertIsInstance(window[2], RecordingEvent)

    def test_the_plan_stream_waits_for_the_staged_window(self):
        for boundary_kv_fix in (True, False):
            with self.subTest(boundary_kv_fix=boundary_kv_fix):
                stack = self.build(boundary_kv_fix=boundary_kv_fix)
                draft_worker = stack.draft_worker
                draft_worker.plan_stream = RecordingStream()
                run_decode_step(stack, fill_mappings(stack, [40, 7]))
                staged_event = draft_worker._staged_window[2]
                self.assertEqual(draft_worker.plan_stream.waits, [staged_event])

    def test_without_a_plan_stream_there_is_no_event(self):
        for boundary_kv_fix in (True, False):
            with self.subTest(boundary_kv_fix=boundary_kv_fix):
                stack = self.build(boundary_kv_fix=boundary_kv_fix)
                batch = fill_mappings(stack, [40, 7])
                with LAUNCHES.of() as launches:
                    stack.draft_worker.stage_draft_extend(batch)
                self.assertEqual(launches, [self.WINDOW_KERNEL, "graph"])
                self.assertIsNone(stack.draft_worker._staged_window[2])

    def test_an_unstaged_step_computes_the_window_itself(self):
        stack = self.build(boundary_kv_fix=True)
        stack.draft_worker.plan_stream = RecordingStream()
        batch = fill_mappings(stack, [40, 7])
        stack.draft_worker.stage_draft_extend(batch)
        stack.runner.staging_refusal = "the test says so"
        stack.draft_worker.stage_draft_extend(batch)
        with LAUNCHES.of() as launches:
            stack.draft_worker._compute_boundary_kv_locs_positions(batch)
        self.assertEqual(
            launches, ["compute_widened_draft_extend_locs_positions_kernel", "event"]
        )


if __name__ == "__main__":
    unittest.main()
