"""Every kernel and tensor op of decode steps and of a conv commit, in order.

Run as a job of ``run_mutants.py``: the trace lies next to the worker module that the
job put in place, as ``trace.json``.
"""

import json
import unittest
from pathlib import Path

import torch
from draft_extend_staging_fixture import (
    LAUNCHES,
    NUM_STEPS,
    RecordedGraph,
    build_backend,
    build_stack,
    build_triton_backend,
    cpu_stand_ins,
    fill_mappings,
    published_config,
    run_decode_step,
    worker_module,
)


def traced(body) -> list:
    """Names of what ``body`` launches; a graph replay is one launch."""
    graph = RecordedGraph()
    with LAUNCHES.of() as launches, graph.capture():
        body()
    return launches + [getattr(func, "__name__", str(func)) for func, *_ in graph.ops]


class TestTrace(unittest.TestCase):
    def test_trace(self):
        trace = {}
        with (
            cpu_stand_ins(),
            published_config(page_size=16, buckets=(1, 4)) as server_args,
        ):
            for boundary_kv_fix in (True, False):
                for single_graph in (True, False):
                    key = f"front {boundary_kv_fix}, one graph {single_graph}"
                    trace[key] = self.trace_steps(
                        server_args, boundary_kv_fix, single_graph, build_backend
                    )
            # The release takes no combined graph here, with or without front rows.
            trace["Triton"] = self.trace_steps(
                server_args, True, True, build_triton_backend
            )
        path = Path(worker_module.__file__).parent / "trace.json"
        path.write_text(json.dumps(trace))

    def trace_steps(self, server_args, boundary_kv_fix, single_graph, make_backend):
        stack = build_stack(
            server_args,
            boundary_kv_fix=boundary_kv_fix,
            single_graph=single_graph,
            make_backend=make_backend,
        )
        trace = {}
        for lens in ([40, 7, 2], [9]):
            batch = fill_mappings(stack, lens)
            trace[f"step of {lens}"] = traced(lambda: run_decode_step(stack, batch))
        target = stack.worker._target_worker.model_runner
        trace["fence"] = str(
            stack.worker.last_shared_read_runner.shared_read_done_event
        )
        wrapper = make_backend(target)
        batch = fill_mappings(stack, [40, 7, 2])
        trace["commit"] = traced(
            lambda: wrapper.update_mamba_state_after_mtp_verify(
                last_correct_step_indices=torch.zeros(len(batch), dtype=torch.int64),
                mamba_track_indices=None,
                mamba_steps_to_track=None,
                req_pool_indices=batch.req_pool_indices,
            )
        )
        graphs = [
            graph
            for runner in stack.runner.runners
            for graph in runner.backend.graphs.values()
        ]
        trace["draft graphs"] = [
            [getattr(func, "__name__", str(func)) for func, *_ in graph.ops]
            for graph in graphs
        ]
        self.assertEqual(
            len(trace["draft graphs"]) % (1 if single_graph else NUM_STEPS), 0
        )
        return trace
