"""Boot one Engine on a small Inkling with MTP and time greedy decoding.

One process is one boot of one side; the caller interleaves sides. Prints one
JSON line: start-up seconds, seconds of each warm run by batch size, the md5 of
the token ids, the accept length, and the fences counted by fence_probe.

    python benchmark/engine_steps.py --side patched --combined 1 --batch 1 8 32
"""

import argparse
import hashlib
import json
import os
import tempfile
import time
from pathlib import Path


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", required=True, help="label in the output")
    parser.add_argument("--combined", type=int, choices=(0, 1), default=1)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--model", help="checkpoint folder; made if not there")
    parser.add_argument("--accept-length", type=float, default=2.5)
    return parser.parse_args()


def main():
    args = parse_args()
    os.environ["SGLANG_ENABLE_SINGLE_CG_DRAFT"] = str(args.combined)
    probe_out = tempfile.mktemp(suffix=".json")
    os.environ["FENCE_PROBE_OUT"] = probe_out

    import torch

    import sglang

    from inkling_mtp_staging.tiny_inkling import Recipe, Shape
    from inkling_mtp_staging.tiny_inkling.checkpoint import write_checkpoint

    model = Path(args.model or tempfile.mkdtemp(prefix="tiny-inkling-"))
    if not (model / "config.json").exists():
        shape = Shape(num_layers=args.layers, hidden_size=args.hidden)
        write_checkpoint(model, Recipe(shape, accept_length=args.accept_length))
    tic = time.perf_counter()
    engine = sglang.Engine(
        model_path=str(model),
        skip_tokenizer_init=True,
        attention_backend="fa4",
        sampling_backend="pytorch",
        grammar_backend="none",
        speculative_algorithm="EAGLE",
        speculative_num_steps=args.steps,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=args.steps + 1,
        enable_multi_layer_eagle=True,
        mem_fraction_static=0.6,
        page_size=args.page_size,
        context_length=8192,
        cuda_graph_bs_decode=[1, 2, 4, 8, 16, 32],
        disable_prefill_cuda_graph=True,
        log_level="info",
    )
    result = {
        "side": args.side,
        "combined": args.combined,
        "sglang": sglang.__version__,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
        "layers": args.layers,
        "hidden": args.hidden,
        "steps": args.steps,
        "page_size": args.page_size,
        "start_s": round(time.perf_counter() - tic, 1),
        "seconds": {},
        "md5": {},
        "accept_length": {},
    }
    for batch in args.batch:
        prompts = [
            [(7 * i + 13 * j) % 1000 + 5 for j in range(256)] for i in range(batch)
        ]
        sampling = {
            "temperature": 0.0,
            "max_new_tokens": args.tokens,
            "ignore_eos": True,
        }
        seconds = []
        for run in range(args.runs + 1):
            tic = time.perf_counter()
            outputs = engine.generate(input_ids=prompts, sampling_params=sampling)
            if run:
                seconds.append(round(time.perf_counter() - tic, 4))
        ids = [o["output_ids"] for o in outputs]
        assert all(len(o) == args.tokens for o in ids), [len(o) for o in ids]
        result["seconds"][batch] = seconds
        result["md5"][batch] = hashlib.md5(json.dumps(ids).encode()).hexdigest()
        meta = [o["meta_info"] for o in outputs]
        result["accept_length"][batch] = round(
            sum(
                m["completion_tokens"] / max(m.get("spec_verify_ct", 1), 1)
                for m in meta
            )
            / len(meta),
            3,
        )
    time.sleep(0.2)
    if os.path.exists(probe_out):
        result["fences"] = json.loads(Path(probe_out).read_text())
    print("RESULT " + json.dumps(result), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
