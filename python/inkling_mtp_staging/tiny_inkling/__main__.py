"""Write a small Inkling checkpoint that SGLang's own weight loader loads."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from inkling_mtp_staging.tiny_inkling.checkpoint import write_checkpoint
from inkling_mtp_staging.tiny_inkling.recipe import Recipe
from inkling_mtp_staging.tiny_inkling.shape import Shape


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m inkling_mtp_staging.tiny_inkling",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=1024, help="multiple of 512")
    parser.add_argument(
        "--vocab",
        type=int,
        default=960,
        help="multiple of 64; with at most hidden - 16 no two tokens overlap",
    )
    parser.add_argument("--window", type=int, default=128, help="multiple of 128")
    parser.add_argument("--mtp-heads", type=int, default=8)
    parser.add_argument(
        "--mtp-local",
        type=int,
        nargs="*",
        default=[],
        metavar="DEPTH",
        help="draft depths with a sliding window",
    )
    parser.add_argument(
        "--accept-length",
        type=float,
        default=2.5,
        help="expected with greedy decoding and --draft-steps drafts",
    )
    parser.add_argument("--draft-steps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    start = time.monotonic()
    try:
        if 0 < args.mtp_heads < args.draft_steps:
            raise ValueError(
                f"{args.draft_steps} draft steps need as many MTP heads, not "
                f"{args.mtp_heads}"
            )
        recipe = Recipe(
            Shape(
                num_layers=args.layers,
                hidden_size=args.hidden,
                num_mtp_heads=args.mtp_heads,
                vocab_size=args.vocab,
                sliding_window=args.window,
                mtp_local_layer_ids=tuple(args.mtp_local),
            ),
            accept_length=args.accept_length,
            draft_steps=args.draft_steps,
            seed=args.seed,
        )
        expected = recipe.expected_accept_length()
        total = write_checkpoint(args.out_dir, recipe)
    except (ValueError, OSError) as error:
        print(f"tiny_inkling: {error}", file=sys.stderr)
        return 2
    print(
        f"{args.out_dir}: {total / 1e9:.2f} GB of weights in "
        f"{time.monotonic() - start:.1f} s; {args.draft_steps} draft steps should "
        f"accept {expected:.2f} tokens a step"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
