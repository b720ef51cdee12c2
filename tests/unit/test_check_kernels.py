"""Kernels that a generated wrapper launches, which no dispatch mode sees."""

from __future__ import annotations

import importlib.util
from contextlib import ExitStack

import torch

from dash_inductor.reproduce import compiled
from dash_inductor.reproduce.trace import Recorder

WRAPPER = """
import torch

class async_compile:
    class triton:
        def __init__(self, name):
            self.name = name

        def run(self, x, y, stream):
            y.copy_(x + 1)

triton_poi_fused_add_0 = async_compile.triton("triton_poi_fused_add_0")
empty_strided_cpu = lambda size: torch.full(size, 7.0)

def call(x):
    y = empty_strided_cpu((2,))
    # [Provenance debug handles] triton_poi_fused_add_0:1
    triton_poi_fused_add_0.run(x, y, stream=12345)
    return y
"""
STACKS = {"triton_poi_fused_add_0:1": ['  File "/mine/train.py", line 12, in f\n  File "/mine/model.py", line 3, in g\n']}


def test_a_launch_is_written_down(tmp_path):
    """With its tensors before and after, memory that nothing has written as zeros, and without the stream's address."""
    path = tmp_path / "wrapper.py"
    path.write_text(WRAPPER)
    spec = importlib.util.spec_from_file_location("wrapper", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    stock = vars(module).copy()
    recorder = Recorder()
    with ExitStack() as stack:
        compiled._listen(recorder, module, STACKS, stack)
        with recorder:
            assert module.call(torch.ones(2)).tolist() == [2, 2]
    (operation,) = (each for each in recorder.operations if not each.name.startswith("aten."))
    assert (operation.name, operation.source, operation.backward) == ("triton_poi_fused_add_0", "/mine/model.py:3", False)
    (_, before), named = operation.inputs
    _, ((same, after), _) = operation.outputs
    assert before == "float32[2]:0000000000000000" != after and same == operation.inputs[0][0] and named == {}
    assert vars(module) == stock
