"""Which kernels of a captured CUDA graph were given an address inside a tensor.

Every 8-byte-aligned word of every parameter of every kernel node is compared with
the tensors' address ranges, so a pointer inside a by-value struct counts too. Copy
and memset nodes are checked by their addresses.
"""

import ctypes
from dataclasses import dataclass, field
from typing import Dict, List

import torch
from cuda.bindings import driver


def _check(result):
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"CUDA driver call failed: {status}")
    return values[0] if len(values) == 1 else values


def _nodes(graph):
    _, count = _check(driver.cuGraphGetNodes(graph, 0))
    nodes, _ = _check(driver.cuGraphGetNodes(graph, count))
    return nodes[:count]


def _kernel_name(params) -> str:
    function = params.func
    if int(function) == 0:
        return _check(driver.cuKernelGetName(params.kern)).decode()
    return _check(driver.cuFuncGetName(function)).decode()


def _parameter_words(params):
    """The 8-byte-aligned words of all kernel parameters; None if unreadable."""
    if int(params.kernelParams) == 0:
        return None
    pointers = ctypes.cast(int(params.kernelParams), ctypes.POINTER(ctypes.c_void_p))
    words, index = [], 0
    while True:
        if int(params.func) == 0:
            status, _, size = driver.cuKernelGetParamInfo(params.kern, index)
        else:
            status, _, size = driver.cuFuncGetParamInfo(params.func, index)
        if status != driver.CUresult.CUDA_SUCCESS:
            return words
        if not pointers[index]:
            return None
        raw = ctypes.string_at(pointers[index], size)
        words += [
            int.from_bytes(raw[offset : offset + 8], "little")
            for offset in range(0, size - 7, 8)
        ]
        index += 1


@dataclass
class Audit:
    """``readers``: "kernel <- tensor"; ``unreadable``: names of kernels whose
    parameters the driver does not hand out; ``nodes``: how many were looked at."""

    readers: List[str] = field(default_factory=list)
    unreadable: List[str] = field(default_factory=list)
    nodes: int = 0


def audit_graph(
    graph: torch.cuda.CUDAGraph, tensors: Dict[str, torch.Tensor], audit: Audit
) -> None:
    """Add what ``graph`` holds of ``tensors``' addresses to ``audit``. The graph must
    have been captured with ``keep_graph=True``."""
    ranges = {
        name: (t.data_ptr(), t.data_ptr() + t.numel() * t.element_size())
        for name, t in tensors.items()
    }

    def hits(address):
        return [n for n, (lo, hi) in ranges.items() if lo <= address < hi]

    for node in _nodes(driver.CUgraph(graph.raw_cuda_graph())):
        audit.nodes += 1
        kind = _check(driver.cuGraphNodeGetType(node))
        if kind == driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
            params = _check(driver.cuGraphKernelNodeGetParams(node))
            name, words = _kernel_name(params), _parameter_words(params)
            if words is None:
                audit.unreadable.append(name)
                continue
        elif kind == driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMCPY:
            params = _check(driver.cuGraphMemcpyNodeGetParams(node))
            name, words = "memcpy", [int(params.srcDevice), int(params.dstDevice)]
        else:
            continue
        for word in words:
            audit.readers += [f"{name} <- {n}" for n in hits(word)]
