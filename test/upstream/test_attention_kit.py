"""The attention cases that SGLang ships in its wheel, on the backends that the edits
touch. Run it with the edits applied and reverted: the results must be the same.

The wheel has the cases (``sglang.test.kits.attention_unittest``) but not the test
files that call them. Without a GPU only the eager cases of ``torch_native`` can run:
it shares the edited base class, and FlashAttention has no CPU kernel.
"""

import os
import unittest

import torch

if not torch.cuda.is_available():
    # As every CPU test: Triton picks its mode once, at the first import.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from sglang.test.test_utils import CustomTestCase, maybe_stub_sgl_kernel

maybe_stub_sgl_kernel()

from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.test.kits.attention_unittest.attention_methods.dense_attention import (
    DenseAttentionCase,
    make_dense_cases,
    make_swa_no_prefix_input_config_cases,
    make_swa_prefix_input_config_cases,
    run_dense_attention_case,
)
from sglang.test.kits.attention_unittest.runner_modes.cuda_graph_decode_runner import (
    run_dense_cuda_graph_decode_case,
)
from sglang.test.kits.attention_unittest.runner_modes.speculative_draft_extend_runner import (
    run_dense_draft_extend_v2_cuda_graph_case,
)
from sglang.test.kits.attention_unittest.runner_modes.speculative_target_verify_runner import (
    run_dense_eagle_verify_case,
    run_dense_spec_verify_cuda_graph_case,
)

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
BACKENDS = ("fa3", "fa4", "triton") if HAS_GPU else ("torch_native",)
# The kit's default head size, 16, is smaller than any served model's.
SHAPE = dict(head_dim=64, hidden_size=256, device=DEVICE)


def eager_cases(backend: str):
    return (
        *make_dense_cases(backend),
        *make_swa_no_prefix_input_config_cases(backend),
        *make_swa_prefix_input_config_cases(backend),
    )


def speculative_cases(backend: str, forward_mode: ForwardMode):
    for page_size, prefix_lens in ((1, (2, 5)), (16, (15, 16))):
        yield DenseAttentionCase(
            name=f"{forward_mode.name.lower()}_page_{page_size}",
            backend=backend,
            forward_mode=forward_mode,
            num_heads=4,
            num_kv_heads=4,
            page_size=page_size,
            prefix_lens=prefix_lens,
            extend_lens=(4, 4),
        )


class TestAttentionKit(CustomTestCase):
    def run_each(self, cases, run, **options):
        for case in cases:
            with self.subTest(backend=case.backend, case=case.name):
                run(self, case, **SHAPE, **options)

    def test_eager(self):
        for backend in BACKENDS:
            self.run_each(eager_cases(backend), run_dense_attention_case)

    @unittest.skipUnless(HAS_GPU, "CUDA graphs need a GPU")
    def test_decode_graph(self):
        for backend in BACKENDS:
            cases = eager_cases(backend)
            decodes = [case for case in cases if case.forward_mode.is_decode()]
            self.run_each(decodes, run_dense_cuda_graph_decode_case)

    @unittest.skipUnless(HAS_GPU, "CUDA graphs need a GPU")
    def test_target_verify(self):
        for backend in BACKENDS:
            cases = list(speculative_cases(backend, ForwardMode.TARGET_VERIFY))
            self.run_each(cases, run_dense_eagle_verify_case, topk=1)
            # At page size 1 the graph's outputs are off, patched or not.
            paged = [case for case in cases if case.page_size > 1]
            self.run_each(paged, run_dense_spec_verify_cuda_graph_case, topk=1)

    @unittest.skipUnless(HAS_GPU, "CUDA graphs need a GPU")
    def test_draft_extend(self):
        for backend in BACKENDS:
            cases = list(speculative_cases(backend, ForwardMode.DRAFT_EXTEND_V2))
            for pad_style in ("small_real", "prod_fill"):
                self.run_each(
                    cases,
                    run_dense_draft_extend_v2_cuda_graph_case,
                    pad_style=pad_style,
                )


if __name__ == "__main__":
    unittest.main()
