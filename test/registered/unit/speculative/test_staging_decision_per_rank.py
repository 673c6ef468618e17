"""Every rank of a server decides on its own whether a step is staged: what the ranks
decide, that none asks another, and that no decision changes which graph a rank runs."""

import os
import unittest
from unittest import mock

import torch
from draft_extend_staging_fixture import (
    KERNELS_RUN_ON_CPU,
    build_backend,
    build_triton_backend,
)
from ranks_fixture import NUM_RANKS, Collectives, on_all_ranks

from sglang.srt.managers.scheduler_components import dp_attn
from sglang.srt.model_executor import forward_batch_info
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils import (
    require_attn_tp_gather,
    require_mlp_sync,
    require_mlp_tp_gather,
)
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=100, stage="base-a", runner_config="cpu")

SWITCH = "SGLANG_ENABLE_DRAFT_EXTEND_METADATA_STAGING"

# The set-ups of two ranks that differ in what MLP-sync does.
TP = {}
# The ranks of one attention-TP group scatter and gather: MLP-sync within a DP rank.
TP_WITH_MLP_SYNC = {"moe_dense_tp_size": 1}
DP = {"dp_size": 2, "enable_dp_attention": True}
# DP attention whose MLPs gather nothing: each DP rank has a bucket of its own.
DP_WITHOUT_GATHER = {
    **DP,
    "moe_dense_tp_size": 1,
    "enable_dp_lm_head": True,
    "moe_a2a_backend": "mooncake",
}

FITS = [40, 7]
FITS_TOO = [12, 33, 64]
FITS_NO_BUCKET = [9] * 5
IDLE = []

GATHER = "MLP-TP gather sizes the bucket by the largest rank"
NO_BUCKET = "the batch fits no captured draft-extend bucket"


def run_steps(batches):
    """What ``on_all_ranks`` runs: a step for each of ``batches``, which are lists of
    request lengths by rank. A rank that has no request runs what MLP-sync gives it."""

    def body(rank):
        results = []
        for by_rank in batches:
            batch = rank.sync(rank.decode(by_rank[rank.rank]))
            results.append(rank.step(batch))
        return results

    return body


@unittest.skipUnless(KERNELS_RUN_ON_CPU, "runs kernels in Triton's interpreter")
class RanksTestCase(CustomTestCase):
    def assert_own_decision(self, results):
        """No rank asked another, or fenced on what an older step had recorded."""
        for steps in results:
            for step in steps:
                self.assertEqual(step["collectives"], [], step)
                self.assertTrue(step["fresh"], step)

    def of(self, results, name):
        return [[step[name] for step in steps] for steps in results]


class TestTensorParallel(RanksTestCase):
    """The ranks have the same batches, and a shard each of the heads."""

    def assert_alike(self, config, **stack):
        batches = [(b, b) for b in (FITS, FITS_NO_BUCKET, FITS_TOO, FITS)]
        for single_graph in (True, False):
            stack["single_graph"] = single_graph
            with self.subTest(config=config, stack=stack):
                results = on_all_ranks(run_steps(batches), stack, **config)
                self.assertEqual(results[0], results[1])
                self.assert_own_decision(results)
                self.assertEqual(
                    self.of(results, "fence")[0],
                    ["target", "coarse", "target", "target"],
                )
                self.assertEqual(
                    self.of(results, "why not")[0], [None, NO_BUCKET, None, None]
                )

    def test_the_ranks_decide_alike(self):
        self.assert_alike(TP)

    def test_the_ranks_decide_alike_behind_mlp_sync(self):
        self.assert_alike(TP_WITH_MLP_SYNC)

    def test_the_ranks_decide_alike_on_triton(self):
        self.assert_alike(TP, make_backend=build_triton_backend)

    def test_what_mlp_sync_does(self):
        """The set-ups are what their names say."""
        requirements = (require_mlp_sync, require_mlp_tp_gather, require_attn_tp_gather)
        for config, required, gathers in (
            (TP, [False, False, False], False),
            (TP_WITH_MLP_SYNC, [True, False, True], False),
            (DP, [True, True, False], True),
            (DP_WITHOUT_GATHER, [True, False, False], True),
        ):

            def body(rank):
                with Collectives() as collectives:
                    batch = rank.sync(rank.decode(FITS))
                return [
                    [requirement() for requirement in requirements],
                    collectives.names != [],
                    batch.can_run_decode_cuda_graph,
                ]

            with self.subTest(config=config):
                for result in on_all_ranks(body, **config):
                    self.assertEqual(result, [required, gathers, any(required)])


class TestDPAttention(RanksTestCase):
    def test_mlp_tp_gather_is_refused_at_start(self):
        def body(rank):
            return [
                rank.stack.runner.staging_refusal,
                len(rank.stack.runner.staged_backends),
                [b.draft_extend_metadata_staged for b in rank.stack.backends],
                rank.start_lines,
            ]

        for refusal, staged_backends, staged, lines in on_all_ranks(body, **DP):
            self.assertEqual(refusal, GATHER)
            self.assertEqual(staged_backends, 0)
            self.assertEqual(set(staged), {False})
            (line,) = lines
            self.assertIn(f"staged before verify: no, {GATHER}.", line)

    def test_mlp_tp_gather_keeps_the_ranks_in_one_bucket(self):
        batches = [(FITS, FITS_TOO), (FITS_TOO, IDLE), (FITS_NO_BUCKET, FITS)]
        for single_graph in (True, False):
            with self.subTest(single_graph=single_graph):
                stack = {"single_graph": single_graph}
                results = on_all_ranks(run_steps(batches), stack, **DP)
                self.assert_own_decision(results)
                self.assertEqual(
                    self.of(results, "draft extend"),
                    [["graph of 4", "graph of 4", "eager"]] * NUM_RANKS,
                )
                self.assertEqual(
                    self.of(results, "fence"),
                    [["draft", "draft", "coarse"]] * NUM_RANKS,
                )
                self.assertEqual(
                    self.of(results, "why not"),
                    [[GATHER] * 3, [GATHER, "idle batch", GATHER]],
                )

    def test_without_gather_each_rank_has_its_own_bucket(self):
        batches = [(FITS, FITS_TOO), (FITS_NO_BUCKET, FITS), (FITS, FITS)]
        results = on_all_ranks(run_steps(batches), **DP_WITHOUT_GATHER)
        self.assert_own_decision(results)
        self.assertEqual(
            self.of(results, "draft extend"),
            [
                ["graph of 2", "eager", "graph of 2"],
                ["graph of 4"] + ["graph of 2"] * 2,
            ],
        )
        self.assertEqual(
            self.of(results, "fence"),
            [["target", "coarse", "target"], ["target"] * 3],
        )

    def test_an_idle_rank_is_not_staged(self):
        """It replays verify and the draft extend all the same: the marker that verify
        leaves behind fences neither this step nor a later one."""
        batches = [(FITS, FITS), (FITS, IDLE), (FITS, FITS), (IDLE, FITS)]
        results = on_all_ranks(run_steps(batches), **DP_WITHOUT_GATHER)
        self.assert_own_decision(results)
        self.assertEqual(
            self.of(results, "fence"),
            [
                ["target", "target", "target", "draft"],
                ["target", "draft", "target", "target"],
            ],
        )
        self.assertEqual(self.of(results, "why not")[1][1], "idle batch")
        self.assertFalse(results[1][1]["staged"])
        self.assertEqual(
            [step["verify"] for steps in results for step in steps], ["graph"] * 8
        )

    def test_idle_while_the_other_rank_prefills(self):
        """The staged step before left the draft's event unread."""

        def body(rank):
            results = [rank.step(rank.sync(rank.decode(FITS)))]
            batch = rank.sync(rank.prefill(FITS) if rank.rank else None)
            results.append(rank.step(batch))
            results.append(rank.step(rank.sync(rank.decode(FITS))))
            return results

        results = on_all_ranks(body, **DP_WITHOUT_GATHER)
        self.assert_own_decision(results)
        self.assertEqual(
            self.of(results, "fence"), [["target", "coarse", "target"]] * NUM_RANKS
        )

    def test_a_rank_without_graphs_votes_for_all(self):
        def body(rank):
            with mock.patch.object(
                dp_attn, "cuda_graph_fully_disabled", lambda: rank.rank == 1
            ):
                batch = rank.sync(rank.decode(FITS))
            return [rank.step(batch)]

        results = on_all_ranks(body, **DP_WITHOUT_GATHER)
        self.assert_own_decision(results)
        for (step,) in results:
            self.assertEqual(
                [step[name] for name in ("why not", "verify", "draft extend", "fence")],
                [NO_BUCKET, "eager", "eager", "coarse"],
            )


class TestGraphOrEager(RanksTestCase):
    """Staging changes no rank's choice. A rank in a graph and one that runs the same
    collectives eagerly would wait for each other for ever."""

    BATCHES = [
        (FITS, FITS),
        (FITS_NO_BUCKET, FITS_NO_BUCKET),
        (FITS, FITS_NO_BUCKET),
        (FITS_TOO, IDLE),
        (FITS, FITS),
    ]

    def assert_as_without_staging(self, config, batches):
        for single_graph in (True, False):
            with self.subTest(config=config, single_graph=single_graph):
                taken = []
                for switch in ("0", "1"):
                    with mock.patch.dict(os.environ, {SWITCH: switch}):
                        results = on_all_ranks(
                            run_steps(batches), {"single_graph": single_graph}, **config
                        )
                    names = ("verify", "draft extend")
                    taken.append([self.of(results, name) for name in names])
                self.assertEqual(taken[1], taken[0])

    def test_in_tensor_parallel(self):
        batches = [(b, b) for b, _ in self.BATCHES]
        for config in (TP, TP_WITH_MLP_SYNC):
            self.assert_as_without_staging(config, batches)

    def test_under_dp_attention(self):
        for config in (DP, DP_WITHOUT_GATHER):
            self.assert_as_without_staging(config, self.BATCHES)


class TestPaddedVerify(RanksTestCase):
    def test_commits_into_its_own_slots(self):
        """An eager verify of as many requests as there are slots, which MLP-sync pads
        to a multiple of the attention-TP size: more rows than the slot buffer has."""

        def body(rank):
            backend = build_backend(rank.target)
            rank.target.attn_backend = backend
            conv = backend.short_conv_backend
            conv._cache_indices_buf.fill_(99)  # an older step's
            batch = rank.sync(rank.decode([40, 7, 9, 12, 33]))
            batch.spec_info = rank._draft(batch)
            forward_batch, replays = rank.prepare_for_verify(batch)
            with (
                get_parallel().override(attn_tp_size=8),
                # Pinned memory needs a GPU.
                mock.patch.object(forward_batch_info, "_is_cpu", True),
                mock.patch.object(
                    type(backend),
                    "get_cpu_graph_seq_len_fill_value",
                    lambda backend: 1,
                    create=True,
                ),
            ):
                forward_batch.prepare_mlp_sync_batch(rank.target)
            backend.init_forward_metadata(forward_batch)
            slots = conv._verify_slot_indices(batch.req_pool_indices)
            mapping = rank.stack.mappings["req_to_conv_slot"]
            return {
                "replays": replays,
                "rows": forward_batch.req_pool_indices.shape[0],
                "buffer": conv._cache_indices_buf.shape[0],
                "slots": slots.tolist(),
                "expected": mapping[batch.req_pool_indices].tolist(),
                "prepared": conv._commit_uses_prepared_slots,
            }

        for result in on_all_ranks(
            body, **TP_WITH_MLP_SYNC, max_running_requests=5, buckets=(1, 2, 4)
        ):
            self.assertEqual(
                [result[name] for name in ("replays", "rows", "buffer", "prepared")],
                [False, 6, 5, True],
            )
            self.assertEqual(result["slots"], result["expected"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    unittest.main()
