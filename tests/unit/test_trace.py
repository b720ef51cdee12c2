"""What torch's structured trace has of a graph's attentions, as the real tlparse shows it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from dash_inductor.schedule.formulas import formula_for

SCRIPT = """
import dataclasses, json
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("bias", torch.zeros(40, 40).double())

    def forward(self, x):
        x = scaled_dot_product_attention(x, x, x, is_causal=True)
        return scaled_dot_product_attention(*[x.double()] * 3, attn_mask=self.bias).sum()

class Copy(Model):
    pass

torch.use_deterministic_algorithms(True)
x = torch.ones(1, 1, 40, 16, requires_grad=True)
for model in (Model(), Copy()):
    torch.compile(model)(x).backward()

import dash_inductor
from torch._dynamo.utils import counters

assert counters["aot_autograd"]["autograd_cache_hit"] == 1, counters
print(json.dumps([dataclasses.asdict(entry) for entry in dash_inductor.decisions()]))
"""
REPORTED = "op device dtype mask batch heads kv_heads q_len kv_len head_dim reason tile family roles heads_in_flight stride launch"
REPORTED += " sms guarantee predicted_us step_ns workspace_bytes source module"


def run(*command: str | Path, **environ: str) -> str:
    settings = {name: value for name, value in os.environ.items() if not name.startswith(("DASH_INDUCTOR", "TRITON_INTERPRET"))}
    done = subprocess.run(list(map(str, command)), env=settings | environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.nightly
def test_tlparse_shows_each_graph(tmp_path):
    """An entry under its compile id, of a graph that is compiled as of one that comes out of a cache."""
    (tmp_path / "train.py").write_text(SCRIPT)
    settings = {"DASH_INDUCTOR_EMULATE": "1", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    recorded = json.loads(run(sys.executable, tmp_path / "train.py", TORCH_TRACE=str(tmp_path / "trace"), **settings))
    (log,) = (tmp_path / "trace").iterdir()
    page = tmp_path / "page"
    run(Path(sysconfig.get_path("scripts"), "tlparse"), log, "-o", page, "--no-browser", "--strict")

    entries = re.findall(r'href="((-_0_\d_0)/dash_inductor_\d+\.json)"', (page / "index.html").read_text())
    assert [folder for _, folder in entries] == ["-_0_0_0", "-_0_1_0"]
    for index, (path, _) in enumerate(entries):
        report = json.loads((page / path).read_text())
        expected = recorded[2 * index : 2 * index + 2]
        assert report["graph"] == expected[0]["graph"] == expected[1]["graph"]
        assert (report["graph"]["compile_id"], report["graph"]["compiled"]) == (f"0/{index}", ("Model", "Copy")[index])
        for attention, decision in zip(report["attentions"], expected, strict=True):
            assert {name: attention[name] for name in REPORTED.split()} == {name: decision[name] for name in REPORTED.split()}
        declined, rewritten = sorted(report["attentions"], key=lambda attention: attention["rewritten"])
        assert declined["reason"] == "dtype torch.float64 is not one of bf16, fp16, fp32"
        assert "bf16" in declined["remedy"] and rewritten["remedy"] is None
        assert (declined["template"], declined["mask"], declined["candidates"]) == (None, "given", [])
        assert (rewritten["reason"], rewritten["template"], rewritten["mask"]) == (None, "one_pass", "causal")
        assert rewritten["source"] == f"{tmp_path}/train.py:13"
        best = min(row["predicted_us"] for row in rewritten["candidates"])
        taken = [row for row in rewritten["candidates"] if row["roles"] == rewritten["roles"]]
        assert rewritten["predicted_us"] == taken[0]["predicted_us"] == best
        assert {row["family"] for row in rewritten["candidates"]} == {
            "descending",
            "symmetric",
            "symmetric_round_robin",
            "two_pass",
        }
        for family, formula in report["formulas"]["causal"].items():
            known = formula_for(family, "causal")
            assert formula == {"ns": str(known), "applies_if": str(known and known.applies)}
