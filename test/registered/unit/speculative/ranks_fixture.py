"""Ranks of one server as processes on the CPU, joined by SGLang's own process groups.

Each rank is a fork with its own stack (``draft_extend_staging_fixture``) and its own
scheduler-side batches. Batches, requests, process groups, the MLP-sync adapter and the
preparation of verify and of the draft extend are the real ones; the collectives run on
gloo. Only GPU communicators are left out of the groups.
"""

import contextlib
import json
import logging
import os
import signal
import tempfile
import traceback
from array import array
from types import SimpleNamespace
from typing import Any, Callable, Dict, List, Optional
from unittest import mock

import torch
from draft_extend_staging_fixture import (
    HIDDEN_SIZE,
    NUM_STEPS,
    VOCAB_SIZE,
    RecordingStream,
    Stack,
    build_stack,
    cpu_stand_ins,
    fill_mappings,
    model_config,
    publish_marker,
    published_config,
)
from torch.utils._python_dispatch import TorchDispatchMode

from sglang.kernels.ops.speculative import cache_locs
from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.parallel_state_wrapper import ParallelState
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.layers.moe.utils import initialize_moe_config
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.dp_attn import SchedulerDPAttnAdapter
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner import DecodeCudaGraphRunner
from sglang.srt.runtime_context import get_parallel
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.eagle_utils import eagle_prepare_for_verify
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.utils import require_mlp_sync, require_mlp_tp_gather

NUM_RANKS = 2
NUM_DRAFT_TOKENS = NUM_STEPS + 1
# Longer than any test takes; a rank that waits for another ends the test.
RANK_LIMIT_S = 120


class Collectives(TorchDispatchMode):
    """Names of the collectives called while the block runs."""

    def __init__(self):
        super().__init__()
        self.names: List[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Rank:
    """One rank: its stack, its view of the server and its scheduler's barrier."""

    def __init__(self, rank: int, server_args, **stack_kwargs):
        self.rank = rank
        self.model_config = model_config()
        self.model_config.is_matryoshka = False
        self.tp_group = parallel_state.get_tp_group()
        parallel = get_parallel()
        self.ps = ParallelState.trivial(
            tp_rank=rank,
            tp_size=NUM_RANKS,
            attn_tp_rank=parallel.attn_tp_rank,
            attn_tp_size=parallel.attn_tp_size,
            attn_dp_rank=parallel.attn_dp_rank,
            attn_dp_size=parallel.attn_dp_size,
        )
        with log_lines("Draft-extend metadata") as self.start_lines:
            self.stack: Stack = build_stack(server_args, ps=self.ps, **stack_kwargs)
        self.worker = self.stack.worker
        self.target = self.worker._target_worker.model_runner
        self.final_draft = self.stack.draft_worker.draft_runner_list[-1]
        self.target_graphs = self._target_graphs()
        for runner in (self.target, *self.stack.draft_worker.draft_runner_list):
            vars(runner).update(
                prefill_attention_backend_str="fa3",
                ngram_embedding_manager=SimpleNamespace(enabled=False),
                lora_manager=None,
                prefill_cuda_graph_runner=None,
                forward=self._eager_draft_forward,
            )
            runner.model_config.model_is_mrope = False
        self.adapter = SchedulerDPAttnAdapter(
            model_runner=self.target,
            tp_group=self.tp_group,
            req_to_token_pool=self.stack.req_to_token_pool,
            token_to_kv_pool_allocator=self.stack.allocator,
            tree_cache=None,
            offload_tags=set(),
            ps=self.ps,
            model_config=self.model_config,
            enable_overlap=True,
            spec_algorithm=SpeculativeAlgorithm.EAGLE,
            get_require_mlp_sync=require_mlp_sync,
        )
        self.scheduler = SimpleNamespace(
            _war_barrier_enabled=True,
            model_worker=self.worker,
            schedule_stream=RecordingStream(),
            forward_stream="the whole forward stream",
        )

    def _target_graphs(self) -> DecodeCudaGraphRunner:
        """The target's graph runner, as far as it decides whether verify replays."""
        draft_graphs = self.stack.runner.get_runner(0)
        runner = object.__new__(DecodeCudaGraphRunner)
        vars(runner).update(
            model_runner=self.target,
            backend=draft_graphs.backend,
            ragged_verify_mode=False,
            captured_req_width=NUM_DRAFT_TOKENS,
            require_mlp_tp_gather=require_mlp_tp_gather(),
            require_mlp_sync=require_mlp_sync(),
            enable_pdmux=False,
            enable_two_batch_overlap=False,
            record_nolora_graph=False,
            is_encoder_decoder=False,
            disable_padding=False,
            max_bs=draft_graphs.max_bs,
            in_graph_metadata_prep_done=(
                self.target.decode_cuda_graph_runner.in_graph_metadata_prep_done
            ),
            load_batch=lambda forward_batch: None,
        )
        self.target.decode_cuda_graph_runner = runner
        return runner

    # --- batches, as the rank's scheduler makes them ---

    def _batch(self, num_reqs: int) -> ScheduleBatch:
        reqs = [
            Req(f"{self.rank}-{i}", "", array("q", [1, 2]), SamplingParams())
            for i in range(num_reqs)
        ]
        return ScheduleBatch.init_new(
            reqs,
            self.stack.req_to_token_pool,
            self.stack.allocator,
            None,
            self.model_config,
            True,
            SpeculativeAlgorithm.EAGLE,
        )

    def decode(self, lens: List[int], seed: int = 0) -> Optional[ScheduleBatch]:
        """A decode batch with a request per length; None without any."""
        if not lens:
            return None
        rows = fill_mappings(self.stack, lens, seed)
        batch = self._batch(len(lens))
        batch.forward_mode = ForwardMode.DECODE
        batch.seq_lens, batch.req_pool_indices = rows.seq_lens, rows.req_pool_indices
        batch.seq_lens_cpu = batch.seq_lens.clone()
        batch.orig_seq_lens = batch.seq_lens.to(torch.int32)
        batch.sampling_info = SamplingBatchInfo.from_schedule_batch(batch, VOCAB_SIZE)
        # What the last step's draft extend left.
        batch.spec_info = SimpleNamespace()
        return batch

    def prefill(self, lens: List[int]) -> ScheduleBatch:
        batch = self.decode(lens)
        batch.forward_mode = ForwardMode.EXTEND
        batch.extend_lens, batch.extend_num_tokens = lens, sum(lens)
        batch.extend_logprob_start_lens = lens
        return batch

    def sync(self, batch: Optional[ScheduleBatch]) -> Optional[ScheduleBatch]:
        return self.adapter.maybe_prepare_mlp_sync_batch(batch)

    # --- one step ---

    def step(self, batch: ScheduleBatch) -> Dict[str, Any]:
        """Run ``batch`` and the scheduler's barrier; what the rank decided."""
        self.taken = {"verify": None, "draft extend": "eager"}
        records = self.stack.runner.read_done_event, self._marker
        before = [event and event.records for event in records]
        prepare = self.stack.runner.prepare
        target_worker = self.worker._target_worker
        with (
            Collectives() as collectives,
            mock.patch.object(self.stack.draft_worker, "draft", self._draft),
            mock.patch.object(self.worker, "verify", self._verify),
            mock.patch.object(self.stack.runner, "prepare", self._noting(prepare)),
            mock.patch.object(
                target_worker, "forward_batch_generation", self._prefill, create=True
            ),
            mock.patch.object(
                self.stack.draft_worker,
                "_draft_extend_for_prefill",
                lambda *args: None,
            ),
        ):
            self.worker.forward_batch_generation(batch)
            Scheduler._apply_war_barrier(self.scheduler)
        (waited_for,) = self.scheduler.schedule_stream.waits
        self.scheduler.schedule_stream.waits.clear()
        names = {id(event): name for event, name in zip(records, ("draft", "target"))}
        fence = names.get(id(waited_for), "coarse")
        fresh = {
            name: event is not None and event.records == count + 1
            for event, count, name in zip(records, before, ("draft", "target"))
        }
        return {
            "why not": self.stack.draft_worker.unstaged_reason,
            "staged": self.stack.draft_worker._staged_window is not None,
            "fence": fence,
            # The event that the scheduler waits for was recorded in this very step.
            "fresh": fence == "coarse" or fresh[fence],
            **self.taken,
            "collectives": collectives.names,
        }

    @property
    def _marker(self):
        return self.target_graphs.in_graph_metadata_prep_done

    def _noting(self, prepare):
        def note(forward_batch):
            prepare(forward_batch)
            self.taken["draft extend"] = f"graph of {self.stack.runner.bs}"

        return note

    def _draft(self, batch):
        if batch.forward_mode.is_idle():
            return EagleVerifyInput.create_idle_input(
                1, NUM_STEPS, NUM_DRAFT_TOKENS, "cpu"
            )
        rows = batch.batch_size() * NUM_DRAFT_TOKENS
        return EagleVerifyInput(
            draft_token=torch.zeros(rows, dtype=torch.int64),
            custom_mask=None,
            positions=torch.zeros(rows, dtype=torch.int64),
            retrieve_index=None,
            retrieve_next_token=None,
            retrieve_next_sibling=None,
            retrieve_cum_len=None,
            spec_steps=NUM_STEPS,
            topk=1,
            draft_token_num=NUM_DRAFT_TOKENS,
            capture_hidden_mode=None,
            seq_lens_sum=None,
            seq_lens_cpu=None,
        )

    def prepare_for_verify(self, batch):
        """The verify batch, and whether the target replays a graph for it."""
        # The Triton kernel, in the interpreter.
        with mock.patch.object(cache_locs, "_is_cuda", True):
            return eagle_prepare_for_verify(
                batch.spec_info,
                self.stack.req_to_token_pool,
                batch,
                self.worker._target_worker,
            )

    def _verify(self, batch, grammar_barrier=None):
        _, replays = self.prepare_for_verify(batch)
        self.taken["verify"] = "graph" if replays else "eager"
        if replays:
            publish_marker(self.target)
        num_reqs = len(batch.seq_lens)
        rows = num_reqs * NUM_DRAFT_TOKENS
        accept_lens = torch.full((num_reqs,), 2, dtype=torch.int32)
        return SimpleNamespace(
            next_token_ids=torch.zeros(rows, dtype=torch.int64),
            logits_output=SimpleNamespace(hidden_states=torch.zeros(rows, HIDDEN_SIZE)),
            accept_lens=accept_lens,
            new_seq_lens=batch.seq_lens + accept_lens,
            next_draft_input=SimpleNamespace(),
        )

    def _prefill(self, batch, **kwargs):
        return SimpleNamespace(
            logits_output=SimpleNamespace(hidden_states=None), next_token_ids=None
        )

    def _eager_draft_forward(self, forward_batch):
        rows = forward_batch.input_ids.shape[0]
        if not self.stack.runner.prune_draft_extend_logits:
            num_logits = rows
        else:
            num_logits = forward_batch.batch_size
        return SimpleNamespace(
            logits_output=SimpleNamespace(
                next_token_logits=torch.zeros(num_logits, VOCAB_SIZE),
                hidden_states=None,
            )
        )


@contextlib.contextmanager
def _process_groups(rank: int, store: str, dp_size: int):
    """The server's process groups, without their GPU communicators."""
    init_group = parallel_state.init_model_parallel_group

    def without_gpu(*args, **kwargs):
        return init_group(
            *args, **{**kwargs, "use_pynccl": False, "use_custom_allreduce": False}
        )

    with mock.patch.object(parallel_state, "init_model_parallel_group", without_gpu):
        parallel_state.init_distributed_environment(
            world_size=NUM_RANKS,
            rank=rank,
            local_rank=rank,
            distributed_init_method=f"file://{store}",
            backend="gloo",
        )
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=NUM_RANKS,
            attention_data_parallel_size=dp_size,
            backend="gloo",
        )
    yield


def on_all_ranks(body: Callable[[Rank], Any], stack=None, **config) -> List[Any]:
    """``body`` on each rank of a server of two; what it returned, by rank.

    ``config`` goes to ``published_config``; ``stack`` to ``build_stack``. Results come
    as JSON. Raises with the traceback of a rank that failed, or that did not end.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        ranks = [_fork(rank, body, store, stack or {}, config) for rank in range(2)]
        replies = [_reply(*rank) for rank in ranks]
    failed = [reply["failed"] for reply in replies if "failed" in reply]
    if failed:
        raise AssertionError("\n".join(failed))
    return [reply["result"] for reply in replies]


def _fork(rank, body, store, stack, config):
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write_end)
        return pid, read_end
    os.close(read_end)
    signal.alarm(RANK_LIMIT_S)
    try:
        reply = {"result": _run(rank, body, store, stack, config)}
    except BaseException:
        reply = {"failed": f"rank {rank}: {traceback.format_exc()}"}
    with os.fdopen(write_end, "w") as pipe:
        json.dump(reply, pipe)
    # A process group is left without ceremony: the other rank may be done already.
    os._exit(0)


def _reply(pid, read_end):
    with os.fdopen(read_end) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return json.loads(text) if text else {"failed": "a rank did not end"}


def _run(rank, body, store, stack, config):
    # A fork has none of the threads that the parent's parallel regions use.
    torch.set_num_threads(1)
    dp_size = config.get("dp_size", 1)
    config = {
        "page_size": 16,
        "buckets": (1, 2, 4),
        # Some batches fit no bucket.
        "max_running_requests": 8 * dp_size,
        "tp_size": NUM_RANKS,
        **config,
    }
    with published_config(**config) as server_args, cpu_stand_ins():
        with _process_groups(rank, store, dp_size):
            initialize_moe_config()
            initialize_dp_attention(server_args, model_config())
            # The size as well: in a process that imported SGLang's attention kit the
            # kit's own, 1, would show through.
            sizes = dict(tp_size=NUM_RANKS, attn_tp_size=NUM_RANKS // dp_size)
            with get_parallel().override(**sizes):
                return body(Rank(rank, server_args, **stack))


@contextlib.contextmanager
def log_lines(start: str):
    """The INFO lines that begin with ``start``, logged while the block runs."""
    lines: List[str] = []

    class Collect(logging.Handler):
        def emit(self, record):
            message = record.getMessage()
            if message.startswith(start):
                lines.append(message)

    logger, handler = logging.getLogger("sglang"), Collect()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
