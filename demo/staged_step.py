"""One staged draft-extension step without a GPU.

The real pools, attention backends, graph runner and spec worker run a decode step;
the FlashAttention metadata kernel runs in Triton's interpreter. Right where the
target's metadata marker would let the scheduler go, every shared mapping is
overwritten. The step must not notice.
"""

import sys
import warnings
from pathlib import Path

FIXTURES = Path(__file__).parent.parent / "test" / "registered" / "unit" / "speculative"
LENS = [129, 7, 64]


def main():
    print("No GPU here: running one staged draft-extension step on the CPU.")
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(FIXTURES))
    import draft_extend_staging_fixture as lab

    with lab.cpu_stand_ins(), lab.published_config() as server_args:
        tokens = {}
        for poisoned in (False, True):
            stack = lab.build_stack(server_args)
            batch = lab.fill_mappings(stack, LENS)
            seen = {}

            def scheduler_runs_ahead():
                seen["staged"] = lab.staged_buffers(stack, len(batch))
                seen["late read before"] = lab.unstaged_buffers(stack, batch)
                lab.poison_mappings(stack)
                seen["late read after"] = lab.unstaged_buffers(stack, batch)

            tokens[poisoned] = lab.run_decode_step(
                stack,
                batch,
                after_marker=scheduler_runs_ahead if poisoned else lambda: None,
            )
            if stack.worker.last_shared_read_runner is not (
                stack.worker._target_worker.model_runner
            ):
                sys.exit("demo: the step was not fenced by the target's marker")
        after = lab.staged_buffers(stack, len(batch))

    moved = [n for n in after if not after[n].equal(seen["staged"][n])]
    late = [
        n
        for n in seen["late read after"]
        if not seen["late read after"][n].equal(seen["late read before"][n])
    ]
    print(f"  requests of {LENS} tokens, {len(stack.backends)} draft depths")
    print("  fence: the target's metadata marker")
    print("  request -> KV, full -> SWA and request -> conv mappings overwritten there")
    print(f"  staged tables that moved: {len(moved)} of {len(after)}")
    print(f"  tables that a read after the fence would have got wrong: {len(late)}")
    for name in late[:4]:
        row = seen["late read after"][name].flatten()[:4].tolist()
        print(f"    {name}: staged {after[name].flatten()[:4].tolist()}, late {row}")
    same = tokens[False].equal(tokens[True])
    print(f"  proposed tokens {'unchanged' if same else 'CHANGED'}:")
    print(f"    {tokens[True].tolist()}")
    if moved or not late or not same:
        sys.exit("demo: a shared mapping was read after the fence")
    print("OK")


if __name__ == "__main__":
    main()
