"""A real scheduler process in which single MTP decode steps can be repeated.

The lab boots the real Scheduler (target and draft runners, pools, backends, CUDA
graphs) on a small Inkling with seeded random weights, then drives
``MultiLayerEagleWorkerV2.forward_batch_generation`` itself: any rows, any lengths,
any accept counts, from any pool state, as often as needed. Nothing on the step's
path is replaced; the accept counts are imposed on the real sampler's result.

One lab per process: SGLang's distributed and config state is global.
"""

import copy
import functools
import json
import os
import tempfile
from array import array
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Dict, List, Optional, Sequence

import torch

MAX_LEN = 400  # tokens a request may hold before the step
ROW_TOKENS = 512  # KV slots mapped per request
NUM_REQUESTS = 32
CAPTURE_BS = [1, 2, 4, 8, 16]  # 17..32 requests run eagerly
SLIDING_WINDOW = 128
VOCAB = 4096
NUM_KV_HEADS = 2
HEAD_DIM = 128


@dataclass
class LabConfig:
    """What differs between boots. ``staging`` drives the environment switch."""

    name: str
    attention_backend: Optional[str] = "fa4"  # None: SGLang's own choice
    page_size: int = 1
    num_steps: int = 3
    combined: bool = True
    boundary_kv_fix: bool = True
    staging: bool = True
    mtp_local_layer_ids: Sequence[int] = ()
    capture_bs: Sequence[int] = tuple(CAPTURE_BS)
    num_requests: int = NUM_REQUESTS
    row_tokens: int = ROW_TOKENS
    num_heads: int = 4

    def __post_init__(self):
        if self.row_tokens % self.page_size:
            raise ValueError("row_tokens must be whole pages")
        # Attention kernels may number a KV buffer's elements in int32.
        if self.max_total_tokens * NUM_KV_HEADS * HEAD_DIM >= 2**31:
            raise ValueError("num_requests * row_tokens is too large for one KV buffer")

    @property
    def context_length(self) -> int:
        """Past the mapped slots, so that no step is near the model's limit."""
        return self.row_tokens + 512

    @property
    def max_total_tokens(self) -> int:
        return (self.num_requests + 4) * self.row_tokens


def write_model(path: str, config: LabConfig) -> None:
    hidden = 512
    max_positions = max(4096, config.context_length)
    text = dict(
        model_type="inkling_model",
        hidden_size=hidden,
        intermediate_size=1024,
        dense_intermediate_size=1024,
        num_hidden_layers=4,
        dense_mlp_idx=4,
        num_attention_heads=config.num_heads,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        d_rel=16,
        rel_extent=256,
        local_layer_ids=[1, 3],
        sliding_window_size=SLIDING_WINDOW,
        mtp_local_layer_ids=list(config.mtp_local_layer_ids),
        use_sconv=True,
        sconv_kernel_size=4,
        use_embed_norm=True,
        vocab_size=VOCAB,
        num_nextn_predict_layers=8,
        max_position_embeddings=max_positions,
        model_max_length=max_positions,
    )
    with open(os.path.join(path, "config.json"), "w") as f:
        json.dump(
            dict(
                architectures=["InklingForConditionalGeneration"],
                model_type="inkling_mm_model",
                torch_dtype="bfloat16",
                audio_config={},
                vision_config={},
                text_config=text,
            ),
            f,
        )


def random_weights(model: torch.nn.Module, *args, seed: int = 1234, **kwargs) -> None:
    """Seeded weights that keep activations and logits well spread: norms at one,
    matrices at 1/sqrt(fan_in). Takes the place of the loader's 1e-3 dummies, under
    which every activation vanishes and a wrong read would leave no trace."""
    for i, (name, param) in enumerate(sorted(model.state_dict().items())):
        if not torch.is_floating_point(param):
            continue
        generator = torch.Generator(device=param.device)
        generator.manual_seed(seed + i)
        if param.dim() == 1:
            param.fill_(1.0 if "norm" in name else 0.0)
        else:
            param.normal_(0, param.shape[-1] ** -0.5, generator=generator)


def _keep_captured_graphs() -> None:
    """Make every CUDA graph keep its source graph, for the node audit."""
    torch.cuda.CUDAGraph = functools.partial(torch.cuda.CUDAGraph, keep_graph=True)


def boot(config: LabConfig) -> "StepLab":
    """Start the scheduler of ``config`` in this process. Takes about a minute."""
    os.environ["SGLANG_ENABLE_SINGLE_CG_DRAFT"] = str(int(config.combined))
    os.environ["SGLANG_ENABLE_MTP_BOUNDARY_KV_FIX"] = str(int(config.boundary_kv_fix))
    os.environ["SGLANG_ENABLE_DRAFT_EXTEND_METADATA_STAGING"] = str(int(config.staging))

    import sglang.srt.model_loader.loader as loader
    from sglang.srt.entrypoints.engine import _set_envs_and_config
    from sglang.srt.managers.scheduler import Scheduler, configure_scheduler_process
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import PortArgs, ServerArgs

    loader.initialize_dummy_weights = random_weights
    _keep_captured_graphs()
    model_path = tempfile.mkdtemp(prefix="inkling-lab-")
    write_model(model_path, config)
    server_args = ServerArgs(
        model_path=model_path,
        load_format="dummy",
        skip_tokenizer_init=True,
        attention_backend=config.attention_backend,
        sampling_backend="pytorch",
        grammar_backend="none",
        speculative_algorithm="EAGLE",
        speculative_num_steps=config.num_steps,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=config.num_steps + 1,
        enable_multi_layer_eagle=True,
        page_size=config.page_size,
        context_length=config.context_length,
        max_running_requests=config.num_requests,
        max_total_tokens=config.max_total_tokens,
        swa_full_tokens_ratio=1.0,
        max_mamba_cache_size=max(256, 8 * config.num_requests),
        mem_fraction_static=0.8,
        cuda_graph_bs_decode=list(config.capture_bs),
        disable_prefill_cuda_graph=True,
        watchdog_timeout=3600,
        log_level="info",
    )
    server_args.resolve_once()
    _set_envs_and_config(server_args)
    server_args.check_server_args()
    publish(server_args, role="scheduler")
    port_args = PortArgs.init_new(server_args)
    configure_scheduler_process(server_args, 0, 0, 0, 0, 0, 0, None)
    scheduler = Scheduler(server_args, port_args, 0, 0, 0, 0, 0, 0, None)
    return StepLab(config, scheduler)


def tensors_of(root, found: Dict[int, torch.Tensor]) -> None:
    """Adds every floating-point CUDA tensor that a pool object holds, by address."""
    seen = set()
    todo = [root]
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            # Integer tensors of the pools are bookkeeping, such as addresses.
            if item.is_cuda and item.numel() and torch.is_floating_point(item):
                found.setdefault(item.data_ptr(), item)
        elif isinstance(item, dict):
            todo.extend(item.values())
        elif isinstance(item, (list, tuple)):
            todo.extend(item)
        elif type(item).__module__.startswith("sglang.srt.mem_cache"):
            todo.extend(vars(item).values() if hasattr(item, "__dict__") else ())


@dataclass
class StepSpec:
    """One decode step: which rows, their lengths, imposed accept counts, drafts."""

    rows: List[int]  # indices into the lab's requests
    seq_lens: List[int]
    accept_lens: List[int]
    seed: int = 0


class StepLab:
    def __init__(self, config: LabConfig, scheduler):
        self.config = config
        self.scheduler = scheduler
        self.worker = scheduler.model_worker
        self.draft = self.worker._draft_worker
        self.target_runner = self.worker.target_worker.model_runner
        self.forward_stream = scheduler.forward_stream
        self.schedule_stream = torch.cuda.Stream()
        self.num_draft_tokens = config.num_steps + 1
        scheduler.schedule_stream = self.schedule_stream
        scheduler._war_barrier_enabled = True
        scheduler.result_queue = deque()
        self._accept_lens: Optional[torch.Tensor] = None
        self._before_sample = None
        self._impose_accept_lens()
        self.template = self._admit()
        pool = scheduler.req_to_token_pool
        allocator = scheduler.token_to_kv_pool_allocator
        self.mappings = {
            "req_to_token": pool.req_to_token,
            "full_to_swa": allocator.full_to_swa_index_mapping,
            "req_to_conv": pool.req_index_to_mamba_index_mapping,
        }
        self._fill_mappings()
        self.true_mappings = {k: v.clone() for k, v in self.mappings.items()}
        self.poison_mappings = self._poison()
        self.state = self._find_state()
        self.intermediate_windows = {
            window.data_ptr()
            for runner in (self.target_runner, *self.draft.draft_runner_list)
            for window in getattr(
                runner.req_to_token_pool.mamba_pool.mamba_cache,
                "intermediate_conv_window",
                (),
            )
        }
        self._randomize_state()
        self.initial_state = [t.clone() for t in self.state]
        torch.cuda.synchronize()

    # -- set-up ---------------------------------------------------------------

    def _impose_accept_lens(self):
        from sglang.srt.speculative import eagle_worker_common

        original = eagle_worker_common.eagle_sample
        width = self.num_draft_tokens

        def eagle_sample(verify_input, batch, logits_output, grammar_mask=None):
            if self._before_sample is not None:
                self._before_sample()
            predict, accept_lens, accept_index = original(
                verify_input, batch, logits_output, grammar_mask
            )
            if self._accept_lens is not None:
                accept_lens = self._accept_lens.to(accept_lens.dtype)
                columns = torch.arange(width, device=predict.device)
                nodes = (
                    torch.arange(len(accept_lens), device=predict.device)[:, None]
                    * width
                    + columns
                )
                accept_index = torch.where(
                    columns < accept_lens[:, None], nodes, -1
                ).to(accept_index.dtype)
            return predict, accept_lens, accept_index

        eagle_worker_common.eagle_sample = eagle_sample

    def _admit(self):
        """Admit the requests through the scheduler; return its first decode batch."""
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.managers.overlap_utils import resolve_forward_inputs
        from sglang.srt.sampling.sampling_params import SamplingParams

        scheduler = self.scheduler
        requests = []
        for i in range(self.config.num_requests):
            params = SamplingParams(max_new_tokens=64, temperature=0, ignore_eos=True)
            params.normalize(None)
            requests.append(
                TokenizedGenerateReqInput(
                    rid=f"lab-{i}",
                    input_text=None,
                    input_ids=array("q", [(37 * i + 11 * j) % 997 for j in range(64)]),
                    input_embeds=None,
                    mm_inputs=None,
                    token_type_ids=None,
                    sampling_params=params,
                    return_logprob=False,
                    logprob_start_len=-1,
                    top_logprobs_num=0,
                    token_ids_logprob=None,
                    stream=False,
                )
            )
        with torch.no_grad(), torch.cuda.stream(self.schedule_stream):
            scheduler.process_input_requests(requests)
            for _ in range(64):
                plan = scheduler.get_next_batch_to_run(
                    running_batch=scheduler.running_batch,
                    last_batch=scheduler.last_batch,
                )
                scheduler.running_batch = plan.running_batch
                batch = plan.batch_to_run
                if (
                    batch.forward_mode.is_decode()
                    and len(batch.reqs) == self.config.num_requests
                ):
                    break
                result = scheduler.run_batch(batch)
                scheduler._apply_war_barrier()
                scheduler.process_batch_result(batch.copy(), result)
                scheduler.last_batch = batch
            else:
                raise RuntimeError("the scheduler never formed the full decode batch")
        with torch.no_grad(), torch.cuda.stream(self.forward_stream):
            self.forward_stream.wait_stream(self.schedule_stream)
            resolve_forward_inputs(batch, scheduler.future_map)
        torch.cuda.synchronize()
        return batch

    def _fill_mappings(self):
        """Page-wise random, disjoint KV slots, SWA slots and conv slots."""
        page = self.config.page_size
        generator = torch.Generator().manual_seed(7)
        req_to_token = self.mappings["req_to_token"]
        rows = self.template.req_pool_indices.cpu()
        pages_per_row = self.config.row_tokens // page
        num_pages = self.config.num_requests * pages_per_row
        pages = (torch.randperm(num_pages, generator=generator) + 1).view(
            self.config.num_requests, pages_per_row, 1
        )
        slots = (pages * page + torch.arange(page)).view(self.config.num_requests, -1)
        req_to_token.zero_()
        req_to_token[rows.cuda(), : slots.shape[1]] = slots.int().cuda()
        full_to_swa = self.mappings["full_to_swa"]
        if full_to_swa.numel() < page + slots.numel():
            raise RuntimeError("the KV pool came out smaller than the mapped rows need")
        swa_pages = torch.randperm(num_pages, generator=generator) + 1
        swa_slots = (swa_pages.view(-1, 1) * page + torch.arange(page)).view(-1)
        full_to_swa.zero_()
        full_to_swa[page : page + swa_slots.numel()] = swa_slots.to(
            full_to_swa.dtype
        ).cuda()
        # The slots the allocator gave, so that none is also a prefix-cache track slot.
        conv = self.mappings["req_to_conv"]
        conv_slots = conv[rows.cuda()]
        conv.zero_()
        order = torch.randperm(self.config.num_requests, generator=generator).cuda()
        conv[rows.cuda()] = conv_slots[order]

    def _poison(self):
        """Plausible, in-range, wrong mappings: what reassignment would leave."""
        rows = self.template.req_pool_indices
        poison = {k: v.clone() for k, v in self.true_mappings.items()}
        req_to_token = poison["req_to_token"]
        req_to_token[rows] = self.true_mappings["req_to_token"][rows.roll(5)]
        row_tokens = self.config.row_tokens
        req_to_token[0, :row_tokens] = req_to_token[rows[0], :row_tokens]
        page = self.config.page_size
        live = slice(page, page + self.config.num_requests * row_tokens)
        swa = self.true_mappings["full_to_swa"]
        poison["full_to_swa"][live] = swa[live].roll(3 * page)
        poison["full_to_swa"][:page] = swa[page : 2 * page]
        poison["req_to_conv"][rows] = self.true_mappings["req_to_conv"][rows.roll(7)]
        poison["req_to_conv"][0] = self.true_mappings["req_to_conv"][rows[3]]
        return poison

    def _find_state(self) -> List[torch.Tensor]:
        """All tensors a step may write and a later step read, but the mappings."""
        found: Dict[int, torch.Tensor] = {}
        runners = [self.target_runner, *self.draft.draft_runner_list]
        for runner in runners:
            tensors_of(runner.token_to_kv_pool, found)
            tensors_of(runner.req_to_token_pool.mamba_pool, found)
        for name in ("tokens", "hiddens", "valid_lens"):
            stash = getattr(self.draft, f"boundary_kv_stash_{name}")
            if stash is not None:
                found[stash.data_ptr()] = stash
        return [t for t in found.values() if t.numel() > 1]

    def _randomize_state(self):
        generator = torch.Generator(device="cuda").manual_seed(99)
        stash_lens = self.draft.boundary_kv_stash_valid_lens
        stash_tokens = self.draft.boundary_kv_stash_tokens
        for tensor in self.state:
            if torch.is_floating_point(tensor):
                tensor.normal_(0, 0.5, generator=generator)
        if stash_lens is not None:
            front = self.draft.draft_extend_num_front_tokens
            stash_lens.random_(0, front + 1, generator=generator)
            stash_tokens.random_(0, VOCAB, generator=generator)

    # -- one step -------------------------------------------------------------

    def restore_state(self):
        for tensor, saved in zip(self.state, self.initial_state):
            tensor.copy_(saved)

    def write_mappings(self, values: Dict[str, torch.Tensor], only=None):
        for name, tensor in self.mappings.items():
            if only is None or name in only:
                tensor.copy_(values[name])

    def batch_of(self, spec: StepSpec):
        """The template decode batch, narrowed to the step's rows and lengths."""
        template = self.template
        batch = copy.copy(template)
        rows = torch.tensor(spec.rows, device="cuda")
        generator = torch.Generator().manual_seed(spec.seed)
        n = len(spec.rows)
        batch.reqs = [template.reqs[r] for r in spec.rows]
        batch.req_pool_indices = template.req_pool_indices[rows]
        batch.seq_lens = torch.tensor(spec.seq_lens, dtype=torch.int64, device="cuda")
        batch.orig_seq_lens = batch.seq_lens.to(torch.int32)
        if template.seq_lens_cpu is not None:
            batch.seq_lens_cpu = torch.tensor(spec.seq_lens)
            batch.seq_lens_sum = sum(spec.seq_lens)
        if template.multimodal_inputs is not None:
            batch.multimodal_inputs = [None] * n
        lazy = template.mamba_lazy_spec_track_positions_cpu
        if lazy is not None:
            batch.mamba_lazy_spec_track_positions_cpu = [lazy[r] for r in spec.rows]
        made = [batch.req_pool_indices, batch.seq_lens, batch.orig_seq_lens]
        sampling = template.sampling_info.copy_for_forward()
        for name in ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed"):
            value = getattr(sampling, name)
            if value is not None:
                made.append(value[rows])
                setattr(sampling, name, made[-1])
        batch.sampling_info = sampling
        draft_input = copy.copy(template.spec_info)
        shape = (n, self.config.num_steps)
        draft_input.topk_index = torch.randint(
            0, VOCAB, shape, generator=generator
        ).cuda()
        draft_input.topk_p = torch.ones(shape, device="cuda")
        draft_input.bonus_tokens = torch.randint(
            0, VOCAB, (n,), generator=generator, dtype=torch.int32
        ).cuda()
        draft_input.future_indices = batch.req_pool_indices
        batch.spec_info = draft_input
        # Made here: a copy to the GPU waits for the stream, and a step must not.
        batch.lab_accept_lens = torch.tensor(spec.accept_lens, device="cuda")
        # The worker rebinds spec_info. Kept here, what it held is not freed within the
        # step, whose time a benchmark may take.
        batch.lab_draft_input = draft_input
        made += [draft_input.topk_index, draft_input.topk_p, draft_input.bonus_tokens]
        # A step may still be queued when its batch is dropped. Not told so, the
        # allocator would give the next batch the memory that the step is to read.
        for tensor in (*made, batch.lab_accept_lens):
            tensor.record_stream(self.forward_stream)
        return batch

    def run_step(self, spec: StepSpec, *, before_sample=None, batch=None):
        """Queue one decode step on the forward stream; returns its result, the
        fence the worker chose ("target", "draft" or "coarse") and its event."""
        if batch is None:
            batch = self.batch_of(spec)
        self._before_sample = before_sample
        self.forward_stream.wait_stream(torch.cuda.current_stream())
        self._accept_lens = batch.lab_accept_lens
        with torch.no_grad(), torch.cuda.stream(self.forward_stream):
            result = self.worker.forward_batch_generation(batch)
        runner = self.worker.last_shared_read_runner
        event = runner.shared_read_done_event
        if event is None:
            fence = "coarse"
        else:
            fence = "target" if runner is self.target_runner else "draft"
        self._before_sample = None
        return SimpleNamespace(result=result, fence=fence, event=event, batch=batch)

    def outputs_of(self, step) -> Dict[str, torch.Tensor]:
        draft_input = step.result.next_draft_input
        return {
            "predict": step.result.next_token_ids.clone(),
            "accept_lens": step.result.accept_lens.clone(),
            "new_seq_lens": step.result.new_seq_lens.clone(),
            "bonus": draft_input.bonus_tokens.clone(),
            "draft_ids": draft_input.topk_index.clone(),
            "draft_p": draft_input.topk_p.clone(),
        }

    def observe(self, spec: StepSpec, *, poison=None, mapping_names=None):
        """Run one step from the initial state and return everything it did:
        outputs, the whole pool state, the fence.

        With ``poison`` the mappings are overwritten between the verify graph and
        the sampler, so strictly behind the marker on the forward stream, and
        restored after the step."""
        self.restore_state()
        before_sample = None
        if poison is not None:

            def before_sample():
                self.write_mappings(poison, mapping_names)

        torch.cuda.synchronize()
        step = self.run_step(spec, before_sample=before_sample)
        torch.cuda.synchronize()
        self.write_mappings(self.true_mappings)
        torch.cuda.synchronize()
        return SimpleNamespace(
            outputs=self.outputs_of(step),
            state=[self.live(t, len(spec.rows)).clone() for t in self.state],
            fence=step.fence,
        )

    # -- comparison -----------------------------------------------------------

    @staticmethod
    def differences(a, b) -> List[str]:
        """Names of what differs, bit for bit, between two observed steps."""
        out = [
            f"output {name}"
            for name in a.outputs
            if not torch.equal(a.outputs[name], b.outputs[name])
        ]
        for i, (x, y) in enumerate(zip(a.state, b.state)):
            if not torch.equal(x.view(torch.uint8), y.view(torch.uint8)):
                out.append(f"state {i} {tuple(x.shape)}")
        return out

    def live(self, tensor: torch.Tensor, num_reqs: int) -> torch.Tensor:
        """The part of a state tensor that a later step may read: without the dummy
        slots (KV page 0, conv and request slot 0), which padded rows write in no
        fixed order, and of verify's intermediate windows only the real rows."""
        axis = self.slot_axis(tensor)
        if tensor.data_ptr() in self.intermediate_windows:
            return tensor.narrow(axis, 0, num_reqs).contiguous()
        first = self.config.page_size if tensor.shape[axis] > 4096 else 1
        return tensor.narrow(axis, first, tensor.shape[axis] - first).contiguous()

    @staticmethod
    def slot_axis(tensor: torch.Tensor) -> int:
        # KV buffers and the stash: [slots, ...]; conv states: [layers, slots, ...].
        # Layers are few, slots are many.
        return 1 if tensor.dim() >= 4 and tensor.shape[0] <= 8 else 0

    def changed_slots(self, before: torch.Tensor, after: torch.Tensor) -> set:
        axis = self.slot_axis(before)
        a = before.movedim(axis, 0).reshape(before.shape[axis], -1)
        b = after.movedim(axis, 0).reshape(before.shape[axis], -1)
        return set((a != b).any(dim=1).nonzero().flatten().tolist())

    def digest(self, observed) -> str:
        """Order-free fingerprint of outputs and live state, equal across boots."""
        import hashlib

        h = hashlib.sha256()
        for name in sorted(observed.outputs):
            h.update(observed.outputs[name].cpu().numpy().tobytes())
        sums = sorted(
            (
                tuple(t.shape),
                int(t.view(torch.uint8).long().sum()),
                int((t.view(torch.uint8).flatten()[::7].long() ** 2).sum()),
            )
            for t in observed.state
        )
        h.update(repr(sums).encode())
        return h.hexdigest()[:16]
