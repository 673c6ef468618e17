"""Nothing reads a scheduler-shared mapping behind the fence: real kernels, real graphs.

One configuration a process, chosen by STAGING_LAB_CONFIG (a name in CONFIGS). Every
test repeats single decode steps from the same pool state and compares them bit for
bit; the soak races a second stream against the forward stream.
"""

import json
import os
import random
import time
import unittest
from types import SimpleNamespace

import torch

from sglang.test.ci.ci_register import register_cuda_ci
from sglang.test.test_utils import CustomTestCase

register_cuda_ci(est_time=300, stage="base-b", runner_config="1-gpu-large")

SOAK_STEPS = int(os.environ.get("STAGING_LAB_SOAK_STEPS", "10000"))
PROBE_CYCLES = 10_000_000  # of the GPU's clock, to learn how long a cycle is
SEED = int(os.environ.get("STAGING_LAB_SEED", "20261201"))


def configs():
    from inkling_step_lab import LabConfig

    return {
        c.name: c
        for c in (
            LabConfig("page1_combined", page_size=1),
            LabConfig("page16_per_step", page_size=16, combined=False),
            LabConfig("page128_no_front", page_size=128, boundary_kv_fix=False),
            LabConfig("page1_eight_steps", num_steps=8, capture_bs=(1, 4, 16)),
            # 16 query heads a KV head: a window fills more than one block of 128 rows,
            # and captured attention keeps a schedule that only its metadata owns.
            LabConfig("wide_groups", num_heads=32),
            # Depths 0 and 1 alone can be banded on 0.5.19: see the findings.
            LabConfig("banded", mtp_local_layer_ids=(1,)),
            LabConfig("banded_per_step", mtp_local_layer_ids=(0, 1), combined=False),
            LabConfig("switched_off", staging=False),
            LabConfig("triton_page1_combined", "triton"),
            # No banded depths: the release cannot build this backend for one.
            LabConfig("triton_page16_per_step", "triton", page_size=16, combined=False),
            # Without front rows, where the release's graphs cover all queries: the
            # digests of these two must be equal.
            LabConfig("triton_no_front", "triton", boundary_kv_fix=False),
            LabConfig(
                "triton_no_front_switched_off",
                "triton",
                boundary_kv_fix=False,
                staging=False,
            ),
        )
    }


@unittest.skipUnless(torch.cuda.is_available(), "needs an NVIDIA GPU")
class TestInklingDraftExtendStaging(CustomTestCase):
    @classmethod
    def setUpClass(cls):
        import inkling_step_lab

        name = os.environ.get("STAGING_LAB_CONFIG", "page1_combined")
        cls.lab = inkling_step_lab.boot(configs()[name])
        cls.StepSpec = inkling_step_lab.StepSpec
        cls.max_len = inkling_step_lab.MAX_LEN
        cls.window = inkling_step_lab.SLIDING_WINDOW
        cls.num_requests = inkling_step_lab.NUM_REQUESTS
        cls.report = {"config": name, "seed": SEED, "gpu": torch.cuda.get_device_name()}

    @classmethod
    def tearDownClass(cls):
        print("STAGING_LAB " + json.dumps(cls.report), flush=True)

    @property
    def expected_fence(self):
        return "target" if self.lab.config.staging else "coarse"

    @property
    def unstaged_fence(self):
        return "draft" if self.lab.config.staging else "coarse"

    def edge_lengths(self):
        front = self.lab.draft.draft_extend_num_front_tokens
        page = self.lab.config.page_size
        edges = {1, 2, self.max_len}
        for base in (page, 2 * page, self.window, self.window + page, front, 256):
            edges.update((base - 1, base, base + 1))
        edges.update(range(max(front - 2, 1), front + 3))
        return sorted(e for e in edges if 1 <= e <= self.max_len)

    def random_spec(self, rng, bs, edges=True):
        rows = rng.sample(range(self.num_requests), bs)
        pool = self.edge_lengths() if edges else range(1, self.max_len)
        return self.StepSpec(
            rows=rows,
            seq_lens=[rng.choice(pool) for _ in rows],
            accept_lens=[rng.randint(1, self.lab.num_draft_tokens) for _ in rows],
            seed=rng.randrange(1 << 30),
        )

    def specs(self, sizes, salt):
        rng = random.Random(SEED + salt)
        return [self.random_spec(rng, bs) for bs in sizes]

    def count(self, key, n=1):
        self.report[key] = self.report.get(key, 0) + n

    def unstaged(self):
        """Refuse staging for one step: the mappings are then read after verify."""
        draft = self.lab.draft
        original = draft._staging_refusal
        draft._staging_refusal = lambda batch: "the test asked for it"
        self.addCleanup(setattr, draft, "_staging_refusal", original)
        return lambda: setattr(draft, "_staging_refusal", original)

    def depths_read_shared_swa_map(self):
        """A full-attention depth has no SWA table, and a banded one an identity map
        of its own: today no Inkling depth reads the allocator's mapping. On triton the
        metadata of a full-attention depth has a window, but its layer reads none."""
        if self.lab.config.attention_backend == "triton":
            return False
        shared = self.lab.mappings["full_to_swa"].data_ptr()
        return any(
            backend.full_attn_backend.use_sliding_window_kv_pool
            and backend.token_to_kv_pool.full_to_swa_index_mapping.data_ptr() == shared
            for backend in self.lab.draft.draft_extend_attn_backend_list
        )

    def need_staging(self):
        if not self.lab.config.staging:
            self.skipTest("staging is switched off in this configuration")

    # -- the tests, in file order ----------------------------------------------

    def test_00_steps_repeat_bit_for_bit(self):
        for spec in self.specs((1, 3, 16), 0):
            a, b = self.lab.observe(spec), self.lab.observe(spec)
            self.assertEqual(self.lab.differences(a, b), [])
            self.assertEqual(a.fence, self.expected_fence)

    def test_01_digests_for_comparison_across_boots(self):
        self.report["digests"] = [
            self.lab.digest(self.lab.observe(spec))
            for spec in self.specs((1, 2, 5, 11, 16), 1)
        ]

    def test_02_lengths_spread_the_outputs(self):
        # Weights that ignore the inputs would make every comparison vacuous.
        spec = self.specs((8,), 2)[0]
        seen = self.lab.observe(spec).outputs["draft_ids"]
        self.assertGreater(len(set(map(tuple, seen.tolist()))), 4)

    def test_03_poison_behind_the_marker_changes_nothing(self):
        self.need_staging()
        sizes = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16] * 3
        for spec in self.specs(sizes, 3):
            clean = self.lab.observe(spec)
            poisoned = self.lab.observe(spec, poison=self.lab.poison_mappings)
            self.assertEqual(clean.fence, "target")
            self.assertEqual(poisoned.fence, "target")
            self.assertEqual(self.lab.differences(clean, poisoned), [], spec)
            self.count("poisoned_cases")

    def test_04_each_mapping_is_detected_when_read_late(self):
        """The same poison on an unstaged step must show, mapping by mapping:
        otherwise test_03 proves nothing."""
        self.unstaged()
        names = ["req_to_token", "req_to_conv"]
        if self.depths_read_shared_swa_map():
            names.append("full_to_swa")
        for name in names:
            caught = 0
            for spec in self.specs([4, 9, 16], 4):
                clean = self.lab.observe(spec)
                poisoned = self.lab.observe(
                    spec, poison=self.lab.poison_mappings, mapping_names=[name]
                )
                self.assertEqual(clean.fence, self.unstaged_fence)
                caught += bool(self.lab.differences(clean, poisoned))
            self.report[f"late_reads_caught_{name}"] = caught
            self.assertEqual(caught, 3, name)

    def test_05_the_commit_goes_to_the_slots_that_verify_used(self):
        self.need_staging()  # unstaged, the draft still looks its slots up late
        lab = self.lab
        sidecar = lab.target_runner.attn_backend.short_conv_backend
        conv_names = ["req_to_conv"]

        def run(spec):
            clean = lab.observe(spec)
            poisoned = lab.observe(
                spec, poison=lab.poison_mappings, mapping_names=conv_names
            )
            return clean, poisoned

        (spec,) = self.specs([6], 5)
        clean, poisoned = run(spec)
        self.assertEqual(lab.differences(clean, poisoned), [])
        rows = lab.template.req_pool_indices
        own = set(lab.true_mappings["req_to_conv"][rows[spec.rows]].tolist())
        others = set(lab.true_mappings["req_to_conv"][rows].tolist()) - own
        pool = lab.target_runner.req_to_token_pool.mamba_pool.mamba_cache
        conv_ptrs = {c.data_ptr() for c in pool.conv}
        touched = set()
        for tensor, before in zip(lab.state, lab.initial_state):
            if tensor.data_ptr() in conv_ptrs:
                touched |= lab.changed_slots(before, tensor)
        self.assertTrue(own <= touched, (own, touched))
        self.assertFalse(others & touched, others & touched)
        self.count("commit_cases")
        # Without the guard the commit follows the reassigned mapping.
        sidecar._commit_uses_prepared_slots = False
        try:
            clean, poisoned = run(spec)
            self.assertNotEqual(lab.differences(clean, poisoned), [])
        finally:
            sidecar._commit_uses_prepared_slots = True

    def test_06_staged_equals_unstaged(self):
        self.need_staging()
        specs = self.specs([1, 2, 3, 6, 8, 13, 16], 6)
        staged = [self.lab.observe(spec) for spec in specs]
        self.unstaged()
        for spec, a in zip(specs, staged):
            b = self.lab.observe(spec)
            self.assertEqual(b.fence, "draft")
            self.assertEqual(self.lab.differences(a, b), [])
            self.count("staged_equals_unstaged_cases")

    def test_07_batch_reuse_leaves_no_stale_rows(self):
        self.need_staging()
        lab = self.lab
        composite = lab.draft.cuda_graph_runner_for_draft_extend
        sizes = [16, 5, 13, 1, 16, 9, 3, 2]
        rng = random.Random(SEED + 7)
        for bs in sizes:
            spec = self.random_spec(rng, bs)
            lab.run_step(self.random_spec(rng, 16))  # leaves 16 live rows behind
            lab.restore_state()
            torch.cuda.synchronize()
            batch = lab.batch_of(spec)
            composite.stage(batch.seq_lens, batch.req_pool_indices)
            torch.cuda.synchronize()
            bucket = next(b for b in lab.config.capture_bs if b >= bs)
            self.check_padded_rows(composite, bs, bucket)
            before = [t.clone() for t in lab.state]
            lab.run_step(spec, batch=batch)
            torch.cuda.synchronize()
            self.check_written_slots(spec, before)
            self.count("batch_reuse_cases")

    def check_padded_rows(self, composite, raw_bs, bs):
        width = composite.captured_req_width
        buffers = composite.buffers
        pads, tokens = slice(raw_bs, bs), slice(raw_bs * width, bs * width)
        for tensor in (
            buffers.req_pool_indices[pads],
            buffers.out_cache_loc[tokens],
            buffers.positions[tokens],
        ):
            self.assertFalse(tensor.any().item())
        fill = composite.seq_len_fill_value
        self.assertTrue((buffers.seq_lens[pads] == fill).all().item())
        for backend in composite.staged_backends:
            self.assertFalse(
                backend.short_conv_backend._cache_indices_buf[pads].any().item()
            )
            if self.lab.config.attention_backend == "triton":
                self.check_padded_indices(backend.full_attn_backend, raw_bs, bs, width)
                continue
            metadata = backend.full_attn_backend.draft_extend_metadata[bs]
            self.assertFalse(metadata.page_table[pads, 0].any().item())
            if metadata.swa_page_table is not None:
                self.assertFalse(metadata.swa_page_table[pads, 0].any().item())
                self.assertFalse(metadata.swa_out_cache_loc[tokens].any().item())

    def check_padded_indices(self, backend, raw_bs, bs, width):
        """Padded rows have queries, but no prefix and no slot."""
        queries = backend.qo_indptr[: bs + 1].tolist()
        self.assertEqual(queries, [width * row for row in range(bs + 1)])
        for indptr in (backend.kv_indptr, backend.window_kv_indptr):
            if indptr is not None:
                self.assertEqual(len(set(indptr[raw_bs : bs + 1].tolist())), 1)
        if backend.use_sliding_window_kv_pool:
            tokens = slice(raw_bs * width, bs * width)
            self.assertFalse(backend.cuda_graph_swa_out_cache_loc[tokens].any().item())

    def check_written_slots(self, spec, before):
        """KV writes land in the batch's own window slots and the dummy page."""
        lab = self.lab
        page = lab.config.page_size
        front = lab.draft.draft_extend_num_front_tokens
        req_to_token = lab.true_mappings["req_to_token"]
        rows = lab.template.req_pool_indices.tolist()
        full = set(range(page))
        for row, seq_len in zip(spec.rows, spec.seq_lens):
            lo, hi = max(seq_len - front, 0), seq_len + lab.num_draft_tokens
            full |= set(req_to_token[rows[row], lo:hi].tolist())
        swa_map = lab.true_mappings["full_to_swa"]
        index = torch.tensor(sorted(full), device="cuda")
        swa = set(swa_map[index].tolist()) | set(range(page))
        for old, new in zip(before, lab.state):
            if old.dim() == 3 and old.shape[0] > 4096:
                changed = lab.changed_slots(old, new)
                self.assertTrue(
                    changed <= full or changed <= swa,
                    f"{len(changed - full)} slots outside the batch were written",
                )

    def test_08_fallbacks_equal_the_unstaged_step_and_keep_the_draft_fence(self):
        lab = self.lab
        rng = random.Random(SEED + 8)
        target_graphs = lab.target_runner.decode_cuda_graph_runner
        composite = lab.draft.cuda_graph_runner_for_draft_extend

        def with_patch(owner, name, value, spec):
            original = getattr(owner, name)
            setattr(owner, name, value)
            try:
                return lab.observe(spec)
            finally:
                delattr(owner, name)
                if getattr(owner, name) != original:
                    setattr(owner, name, original)

        never = lambda forward_batch: False
        spec = self.random_spec(rng, 6)
        eager_target = with_patch(target_graphs, "can_run_graph", never, spec)
        self.assertEqual(eager_target.fence, self.unstaged_fence)
        if lab.config.staging:
            # The bucket fits when staging asks, and is refused when the draft runs.
            answers = iter([True, False, False])
            staged_then_eager = with_patch(
                composite, "can_run_graph", lambda fb: next(answers), spec
            )
            self.assertEqual(staged_then_eager.fence, "coarse")
        missed = self.random_spec(rng, 17)
        bucket_miss = lab.observe(missed)
        self.assertEqual(bucket_miss.fence, "coarse")
        self.unstaged()
        self.assertEqual(
            lab.differences(
                eager_target, with_patch(target_graphs, "can_run_graph", never, spec)
            ),
            [],
        )
        if lab.config.staging:
            never_graphed = with_patch(composite, "can_run_graph", never, spec)
            self.assertEqual(lab.differences(staged_then_eager, never_graphed), [])
            self.count("fallback_cases")
        self.assertEqual(lab.differences(bucket_miss, lab.observe(missed)), [])
        self.count("fallback_cases", 2)

    def test_09_no_draft_graph_node_holds_a_mapping_address(self):
        from cuda_graph_audit import Audit, audit_graph

        lab = self.lab
        composite = lab.draft.cuda_graph_runner_for_draft_extend
        runners = composite.runners[:1] if lab.config.combined else composite.runners
        audit = Audit()
        for runner in runners:
            for graph in runner.backend._graphs.values():
                audit_graph(graph, lab.mappings, audit)
        self.report["audited_nodes"] = audit.nodes
        self.report["unreadable_kernels"] = sorted(set(audit.unreadable))
        self.report["mapping_readers"] = sorted(set(audit.readers))
        self.assertGreater(audit.nodes, 0)
        if lab.config.staging:
            self.assertEqual(audit.readers, [])
        else:
            self.assertNotEqual(audit.readers, [], "the audit would not see a reader")

    def test_10_race(self):
        self.need_staging()
        rng = random.Random(SEED + 10)
        sizes = [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 15, 16]
        distinct = [self.random_spec(rng, rng.choice(sizes)) for _ in range(64)]
        order = [rng.randrange(len(distinct)) for _ in range(SOAK_STEPS)]
        serial = self.soak(distinct, order, scribble=None)
        # Above the host time of nearly every step, however busy the host is.
        slow_step = sorted(serial.host_seconds)[int(0.99 * len(order))]
        delay = int(1.5 * slow_step * self.cycles_per_second())
        self.report["race_delay_ms"] = round(1500 * slow_step, 1)
        raced = self.soak(distinct, order, scribble="published fence", delay=delay)
        self.report["race_steps"] = SOAK_STEPS
        self.report["race_fences"] = raced.fences
        self.report["race_steps_queued_ahead"] = raced.queued_ahead
        # A scribble queued after its step had begun might have raced nothing. The
        # host starts level with the GPU after every 64 steps, so a few are.
        self.assertGreater(raced.queued_ahead, 0.95 * SOAK_STEPS)
        mismatches = int((serial.log != raced.log).any(dim=1).sum())
        self.report["race_mismatches"] = mismatches
        self.assertEqual(mismatches, 0)
        short = order[: min(200, SOAK_STEPS)]
        early = self.soak(distinct, short, scribble="start of step", delay=delay)
        caught = int((serial.log[: len(short)] != early.log).any(dim=1).sum())
        self.report["early_fence_steps"] = len(short)
        self.report["early_fence_mismatches"] = caught
        self.assertGreater(caught, 0, "the race detector cannot fail")
        # Staging refused, target fence kept by force: late reads must show.
        unstage = self.unstaged()
        late = self.soak(distinct, short, scribble="marker", delay=delay)
        unstage()
        caught = int((serial.log[: len(short)] != late.log).any(dim=1).sum())
        self.report["unstaged_marker_fence_mismatches"] = caught
        self.assertGreater(caught, 0, "reads behind the marker go unnoticed")

    @staticmethod
    def cycles_per_second():
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(PROBE_CYCLES)
        start.record()
        torch.cuda._sleep(PROBE_CYCLES)
        end.record()
        torch.cuda.synchronize()
        return 1000 * PROBE_CYCLES / start.elapsed_time(end)

    def soak(self, distinct, order, scribble, delay=0):
        """Run the steps back to back from one state. A second stream waits for
        ``scribble``'s event, overwrites all three mappings, and puts them right
        only when the step has ended. The GPU begins each step ``delay`` cycles late.
        Returns a row of outputs per step, and the host's time for each."""
        lab = self.lab
        width = lab.num_draft_tokens
        log = torch.zeros(
            (len(order), 16 * (2 * width + 1)), dtype=torch.int64, device="cuda"
        )
        fences = {}
        lab.restore_state()
        batches = [lab.batch_of(spec) for spec in distinct]
        torch.cuda.synchronize()
        marker = lab.target_runner.decode_cuda_graph_runner.in_graph_metadata_prep_done
        forward, schedule = lab.forward_stream, lab.schedule_stream
        started, released, ended = (torch.cuda.Event() for _ in range(3))
        queued_ahead = 0
        host_seconds = []
        for i, which in enumerate(order):
            host_start = time.perf_counter()
            spec, n = distinct[which], len(distinct[which].rows)
            forward.wait_stream(schedule)
            started.record(forward)
            if scribble is not None:
                # Keep the GPU behind the host, so that the second stream is
                # already waiting when the event fires.
                with torch.cuda.stream(forward):
                    torch.cuda._sleep(delay)
                    released.record(forward)
            step = lab.run_step(spec, batch=self.fresh(batches[which]))
            fences[step.fence] = fences.get(step.fence, 0) + 1
            with torch.cuda.stream(forward):
                draft_input = step.result.next_draft_input
                row = torch.cat(
                    [
                        draft_input.topk_index.flatten().long(),
                        step.result.next_token_ids.flatten().long(),
                        step.result.new_seq_lens.flatten().long(),
                    ]
                )
                log[i, : row.numel()].copy_(row)
                ended.record(forward)
            host_seconds.append(time.perf_counter() - host_start)
            if scribble is None:
                torch.cuda.synchronize()
                continue
            event = {
                "published fence": step.event,
                "start of step": started,
                "marker": marker,
            }[scribble]
            if event is None:
                schedule.wait_stream(forward)
            else:
                schedule.wait_event(event)
            with torch.cuda.stream(schedule):
                lab.write_mappings(lab.poison_mappings)
                schedule.wait_event(ended)
                lab.write_mappings(lab.true_mappings)
            queued_ahead += not released.query()
            if i % 64 == 63:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        lab.write_mappings(lab.true_mappings)
        torch.cuda.synchronize()
        return SimpleNamespace(
            log=log.cpu(),
            fences=fences,
            queued_ahead=queued_ahead,
            host_seconds=host_seconds,
        )

    @staticmethod
    def fresh(batch):
        """The worker rebinds fields of the batch it is given: hand it a copy."""
        import copy

        out = copy.copy(batch)
        out.spec_info = copy.copy(batch.spec_info)
        return out


if __name__ == "__main__":
    unittest.main(verbosity=2)
