"""Run chosen tests against variants of the edited modules, one process a variant.

Usage: ``run_mutants.py JOBS.json RESULTS.json``. A job is ``{"modules": {module:
file}, "tests": [unittest name], "environment": {name: value}}``; its result ``{"import_error": text or null,
"failed": {unittest name: reason}}``. What costs most, importing what the modules
depend on, happens once: every job runs in a fork, with its files in their place.
"""

import importlib
import importlib.util
import json
import os
import select
import sys
import traceback
import unittest
from importlib.abc import MetaPathFinder
from pathlib import Path

# The costliest imports of SGLang that need none of the mutated modules.
COMMON = (
    "sglang.srt.managers.schedule_batch",
    "sglang.srt.layers.moe.fused_moe_triton",
    "sglang.srt.managers.io_struct",
    "sglang.srt.mem_cache.unified_radix_cache",
    "sglang.kernels.ops.mamba.triton_ops",
    "fastapi",
)


DIED = {"import_error": "the process died: see stderr", "failed": {}}


class ModulesFromFiles(MetaPathFinder):
    """Finds the modules of ``files`` there, whatever is installed."""

    def __init__(self, files):
        self.files = files

    def find_spec(self, fullname, path, target=None):
        if fullname in self.files:
            return importlib.util.spec_from_file_location(
                fullname, self.files[fullname]
            )
        return None


def run(job):
    imported = job["modules"].keys() & sys.modules.keys()
    assert not imported, f"imported before they were mutated: {imported}"
    sys.meta_path.insert(0, ModulesFromFiles(job["modules"]))
    os.environ.update(job["environment"])
    try:
        for module in sorted({test.split(".")[0] for test in job["tests"]}):
            importlib.import_module(module)
    except Exception:
        return {"import_error": traceback.format_exc(), "failed": {}}
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromNames(job["tests"]).run(result)
    # A subtest fails the test it belongs to.
    failed = {
        getattr(test, "test_case", test).id(): reason
        for test, reason in result.failures + result.errors
    }
    return {"import_error": None, "failed": failed}


def start(job):
    """Run ``job`` in a fork; returns the pipe that its result comes by."""
    read_end, write_end = os.pipe()
    if os.fork():
        os.close(write_end)
        return os.fdopen(read_end)
    status = 1
    try:
        os.close(read_end)
        with os.fdopen(write_end, "w") as pipe:
            json.dump(run(job), pipe)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def run_all(jobs):
    waiting = list(jobs)
    running = {}
    results = {}
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            name = waiting.pop(0)
            running[start(jobs[name])] = name
        for pipe in select.select(list(running), [], [])[0]:
            with pipe:
                # A job that died, say of a segfault in the interpreter, said nothing.
                text = pipe.read() or json.dumps(DIED)
            results[running.pop(pipe)] = json.loads(text)
            os.wait()
    return results


def main(jobs_file, results_file):
    sys.dont_write_bytecode = True
    from sglang.test.test_utils import maybe_stub_sgl_kernel

    maybe_stub_sgl_kernel()
    for module in COMMON:
        importlib.import_module(module)
    results = run_all(json.loads(Path(jobs_file).read_text()))
    Path(results_file).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
