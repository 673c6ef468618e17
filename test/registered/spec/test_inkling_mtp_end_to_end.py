"""The patch changes when the scheduler goes on, and no answer: real engines.

Each setting is booted on the patched release and on its reference: the unpatched one, or
on the Triton backend, with which the unpatched one does not start (see the findings), the
patched one with staging switched off. Some are booted without speculation as well. Greedy
answers must be the checkpoint's own (``tiny_inkling``); patched and
reference must also accept the same number of drafts at every step.

MTP_E2E_JOBS boots so many engines at a time on one GPU (default 1; each takes about
5 GB). MTP_E2E_SETTINGS picks settings by name, separated by commas.
"""

import os
import unittest
from concurrent.futures import ThreadPoolExecutor

import torch
from inkling_mtp_boots import BootsTestCase, reference

from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=2400, stage="base-b", runner_config="1-gpu-large")

SMALL_POOL = ("--max-total-tokens", "8192", "--workloads", "churn")
TRITON = ("--attention-backend", "triton")

GREEDY_SETTINGS = {
    "churn": SMALL_POOL,
    "churn_page16_per_step": (*SMALL_POOL, "--page-size", "16", "--per-step-graphs"),
    "page1": (),
    "page1_per_step": ("--per-step-graphs",),
    "page1_no_fix": ("--no-boundary-kv-fix",),
    "page1_per_step_no_fix": ("--per-step-graphs", "--no-boundary-kv-fix"),
    "page1_eight_steps": ("--steps", "8"),
    "page16": ("--page-size", "16"),
    "page16_per_step": ("--page-size", "16", "--per-step-graphs"),
    "page16_no_fix": ("--page-size", "16", "--no-boundary-kv-fix"),
    "page128": ("--page-size", "128"),
    "page128_per_step": ("--page-size", "128", "--per-step-graphs"),
    "page128_per_step_no_fix": (
        *("--page-size", "128", "--per-step-graphs", "--no-boundary-kv-fix"),
    ),
    "triton_churn": (*TRITON, *SMALL_POOL),
    "triton_page1": TRITON,
    "triton_page1_per_step": (*TRITON, "--per-step-graphs"),
    "triton_page1_no_fix": (*TRITON, "--no-boundary-kv-fix"),
    "triton_page16": (*TRITON, "--page-size", "16"),
    "triton_page128_per_step": (*TRITON, "--page-size", "128", "--per-step-graphs"),
}
SAMPLED_SETTINGS = {
    "sampled": ("--rejection-sampling", "--workloads", "sampled"),
    "sampled_per_step": (
        *("--rejection-sampling", "--workloads", "sampled", "--per-step-graphs"),
    ),
}


def chi_square_p(left, right):
    """P value that two {token: count} samples are of one distribution.

    Tokens seen fewer than ten times in all are put together.
    """
    from scipy.stats import chi2_contingency

    tokens = set(left) | set(right)
    common = [t for t in tokens if left.get(t, 0) + right.get(t, 0) >= 10]
    rows = [[side.get(t, 0) for t in common] for side in (left, right)]
    rare = [sum(side.values()) - sum(row) for side, row in zip((left, right), rows)]
    if sum(rare):
        rows = [row + [n] for row, n in zip(rows, rare)]
    return len(rows[0]), float(chi2_contingency(rows).pvalue)


@unittest.skipUnless(torch.cuda.is_available(), "needs an NVIDIA GPU")
class TestInklingMTPEndToEnd(BootsTestCase):
    all_settings = {**SAMPLED_SETTINGS, **GREEDY_SETTINGS}

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        boots = []
        for name, args in cls.settings.items():
            boots.append((name, "patched", args, None, {}))
            boots.append((name, *reference(name, args, cls.release)))
        # Not on triton, which decodes with too short a window: see the findings.
        for name in cls.picked(("page1", "page16", "page128")):
            args = (*cls.settings[name], "--no-speculation")
            boots.append((name, "target_alone", args, cls.release, {}))
        with ThreadPoolExecutor(int(os.environ.get("MTP_E2E_JOBS", "1"))) as pool:
            results = pool.map(lambda boot: cls.boot(*boot), boots)
            cls.results = {b[:2]: r for b, r in zip(boots, results)}

    def test_answers_are_the_checkpoints_own(self):
        for name, side in self.results:
            with self.subTest(name, side=side):
                result = self.result(name, side)
                self.assertEqual(result["wrong"], 0, result["first_wrong"])

    def test_patched_accepts_the_same_drafts(self):
        """With the fix off, the release's drafts read draft KV that nobody wrote, so
        its accept counts follow what an earlier request left there: tokens only. On
        triton its draft graphs leave out the window's front rows, so that staged drafts
        are the better ones."""
        for name in self.picked(n for n in GREEDY_SETTINGS if "churn" not in n):
            with self.subTest(name):
                patched, reference = (
                    self.result(name, side) for side in ("patched", "reference")
                )
                if "triton" in name and "no_fix" not in name:
                    for batch, result in patched["batches"].items():
                        self.assertGreater(
                            result["accept_length"],
                            reference["batches"][batch]["accept_length"],
                        )
                elif "no_fix" not in name:
                    self.assertEqual(patched["batches"], reference["batches"])
                    self.assertEqual(patched["prefix"], reference["prefix"])
                most = 3.5 if "eight" not in name else 8.5
                for batch in patched["batches"].values():
                    self.assertGreater(batch["accept_length"], 1.5)
                    self.assertLess(batch["accept_length"], most)

    def test_every_decode_step_was_staged(self):
        for name in self.picked(self.settings):
            with self.subTest(name):
                fences = self.result(name, "patched")["fences"]
                self.assertEqual(set(fences), {"decode:target", "prefill:coarse"})
                fences = self.result(name, "reference")["fences"]
                self.assertEqual(set(fences), {"decode:coarse", "prefill:coarse"})

    def test_sampled_distributions_agree(self):
        for name in self.picked(SAMPLED_SETTINGS):
            with self.subTest(name):
                sides = (
                    self.result(name, s)["sampled"] for s in ("patched", "reference")
                )
                for place, (patched, reference) in enumerate(zip(*sides), 2):
                    bins, p = chi_square_p(patched, reference)
                    print(f"MTP_E2E {name} place {place}: {bins} bins, p = {p:.3f}")
                    self.assertGreater(bins, 4)
                    self.assertGreater(p, 0.01)


if __name__ == "__main__":
    unittest.main(verbosity=2)
