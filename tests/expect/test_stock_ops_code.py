"""The memory-efficient and the cuDNN op of an H100 that is not there, rewritten: the graph, the launch, the probe at load."""

import torch
from kernels import assert_expected, launch
from stock_ops import cudnn, efficient
from torch import Tensor
from torch._inductor.codecache import PyCodeCache

import dash_inductor
from benchmarks.machine_code.generate import Generated, generate
from dash_inductor.codegen.fake_gpu import fake_gpu
from dash_inductor.codegen.mode import deterministic
from dash_inductor.devices import target
from dash_inductor.rewrite import probe

EFFICIENT, CUDNN = (f"aten._scaled_dot_product_{name}_attention_backward.default" for name in ("efficient", "cudnn"))


def tensors(kv_len: int = 8200) -> list[Tensor]:
    """[B, H, S, D] views of [B, S, H, D]; 8200 is no multiple of 32."""
    lengths = (8200, kv_len, kv_len, 8200)
    return [torch.empty(2, n, 16, 128, dtype=torch.bfloat16, device="cuda").transpose(1, 2) for n in lengths]


def code(*attentions, inputs=tensors, dynamic: bool = False) -> Generated:
    """The code of them all in one graph."""

    def backward(query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor) -> list[Tensor]:
        return [gradient for attention in attentions for gradient in attention(query, key, value, grad_out)]

    with deterministic(), dash_inductor.enabled(kernel="triton", template="auto" if dynamic else "one_pass"):
        return generate(backward, inputs, "h100", dynamic_dims=(2,) if dynamic else ())


def causal_efficient(*inputs: Tensor) -> tuple[Tensor, ...]:
    return efficient(*inputs, is_causal=True)


def test_graphs_and_launches() -> None:
    """From where the forward ends: logsumexp is made [B, H, S_q]."""
    lines = []
    for generated in (code(efficient), code(causal_efficient, dynamic=True), code(cudnn)):
        nodes = generated.graph.splitlines()
        ours = next(n for n, line in enumerate(nodes) if line.startswith(("sym_size", "slice", "squeeze")))
        lines += [*nodes[ours:], launch(generated), ""]
    assert_expected("\n".join(lines).strip("\n"), "stock_ops_graphs_and_launches")


def test_logsumexp_is_not_copied() -> None:
    """The kernel that reads it takes the rows out of the padded ones."""
    for generated in (code(efficient), code(cudnn)):
        (source,) = (source for source in generated.kernels.values() if "everywhere" in source)
        assert len(generated.kernels) == 3 and "arg_LSE" in source  # the others multiply, and put dq into place


def test_what_is_recorded() -> None:
    generated = code(efficient, causal_efficient, cudnn)
    assert [(d.op, d.mask, d.reason) for d in generated.decisions] == [
        (EFFICIENT, "full", None),
        (EFFICIENT, "causal", None),
        (CUDNN, "full", None),
    ]


def test_generated_code_asks_when_it_is_loaded(monkeypatch) -> None:
    """Once of each kind of attention; not for a GPU that is not there."""
    generated = code(efficient, efficient, causal_efficient, cudnn)
    asked: list[tuple[str, ...]] = []
    lines = [line for line in generated.source.splitlines() if "_require" in line]
    PyCodeCache.load("\n".join(lines))
    monkeypatch.setattr(target, "is_there", lambda device: True)
    monkeypatch.setattr(probe, "_probed_once", lambda *question: asked.append(question))
    exec("\n".join(lines))
    last = ("bfloat16", "cuda:0", None)
    assert asked == [(EFFICIENT, "full", *last), (EFFICIENT, "causal", *last), (CUDNN, "full", *last)]


def test_a_gpu_that_is_there_is_not_asked_for_another(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert target.is_there(torch.device("cuda"))
    with fake_gpu("h100"):
        assert not target.is_there(torch.device("cuda"))
