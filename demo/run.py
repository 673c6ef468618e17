"""``make demo``: the patched server where there is a GPU, one staged step where not."""

import torch

if __name__ == "__main__":
    if torch.cuda.is_available():
        from serve_small_inkling import main
    else:
        from staged_step import main
    main()
