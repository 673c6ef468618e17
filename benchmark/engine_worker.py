"""A resident Engine with MTP that decodes what it is told and says how long it took."""

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import sides
import step_trace

TRACE_LIMIT_S = 60


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=int, required=True, help="file descriptor")
    parser.add_argument("--model", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--combined", type=int, choices=(0, 1), required=True)
    sides.add_attention_backend(parser)
    parser.add_argument("--batch", type=int, nargs="+", required=True)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--mem-fraction", type=float, default=0.8)
    parser.add_argument("--max-total-tokens", type=int, default=32768)
    parser.add_argument("--load-format", default="auto")
    return parser.parse_args()


def boot(args):
    os.environ["SGLANG_ENABLE_SINGLE_CG_DRAFT"] = str(args.combined)
    import sglang

    return sglang.Engine(
        model_path=args.model,
        load_format=args.load_format,
        skip_tokenizer_init=True,
        attention_backend=sides.backend_or_none(args.attention_backend),
        sampling_backend="pytorch",
        grammar_backend="none",
        speculative_algorithm="EAGLE",
        speculative_num_steps=args.steps,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=args.steps + 1,
        enable_multi_layer_eagle=True,
        tp_size=args.tp,
        mem_fraction_static=args.mem_fraction,
        max_total_tokens=args.max_total_tokens,
        max_mamba_cache_size=256,  # conv states of 32 requests and of cached prefixes
        swa_full_tokens_ratio=1.0,  # room for 32 requests in the window pool as well
        max_running_requests=32,
        page_size=1,
        context_length=8192,
        cuda_graph_bs_decode=sorted(args.batch),
        disable_prefill_cuda_graph=True,
        sleep_on_idle=True,
        log_level="info",
    )


def decode(engine, batch, tokens):
    """Greedy, the same 256-token prompts each time, so prefill is mostly cached."""
    prompts = [[(7 * i + 13 * j) % 400 + 5 for j in range(256)] for i in range(batch)]
    sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
    start = time.perf_counter()
    outputs = engine.generate(input_ids=prompts, sampling_params=sampling)
    seconds = time.perf_counter() - start
    verifies = [o["meta_info"]["spec_verify_ct"] for o in outputs]
    ids = json.dumps([o["output_ids"] for o in outputs])
    return {
        "seconds": seconds,
        "steps": max(verifies),
        "accept_length": round(tokens * batch / sum(verifies), 3),
        "md5": hashlib.md5(ids.encode()).hexdigest(),
    }


def profile(engine, batch, tokens):
    """Figures of the steps from a profiler's trace; see step_trace.py."""
    with tempfile.TemporaryDirectory() as folder:
        engine.start_profile(output_dir=folder, activities=["CPU", "GPU"])
        result = decode(engine, batch, tokens)
        engine.stop_profile()
        traces = []
        deadline = time.monotonic() + TRACE_LIMIT_S
        while not traces and time.monotonic() < deadline:
            time.sleep(1)
            traces = list(Path(folder).rglob("*.trace.json.gz"))
        if not traces:
            return {**result, "error": f"no trace within {TRACE_LIMIT_S} s"}
        time.sleep(2)  # the file appears before it is whole
        try:
            trace = step_trace.summary(step_trace.read(traces[0]))
        except (ValueError, EOFError) as error:
            return {**result, "error": str(error)}
    return {**result, "batch": batch, "trace": trace}


def main():
    args = parse_args()
    results = os.fdopen(args.results, "w")

    def say(result):
        results.write(json.dumps(result) + "\n")
        results.flush()

    start = time.perf_counter()
    engine = boot(args)
    import torch

    import sglang

    say(
        {
            "sglang": sglang.__version__,
            "torch": torch.__version__,
            "gpu": torch.cuda.get_device_name(),
            "attention_backend": sides.resolved_backend(
                engine.tokenizer_manager.server_args
            ),
            "start_s": round(time.perf_counter() - start, 1),
        }
    )
    jobs = {"decode": decode, "profile": profile}
    for line in sys.stdin:
        job = json.loads(line)
        say(jobs[job.pop("job")](engine, **job))
    engine.shutdown()


if __name__ == "__main__":
    main()
