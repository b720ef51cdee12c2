"""The benchmark of compile times: its command, and what it refuses to report."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from benchmarks.times import compilation
from benchmarks.times.compilation import EMPTY, FULL, WITH, WITHOUT, compiled


def child(**found: float) -> SimpleNamespace:
    return SimpleNamespace(stdout=json.dumps({"wall": 2.0, "cpu": 1.0} | found))


@pytest.mark.parametrize("package", [WITHOUT, WITH])
@pytest.mark.parametrize("caches", [EMPTY, FULL])
def test_a_child_that_compiled_something_else_is_refused(package, caches, monkeypatch):
    expected = {"rewritten": 8 if package == WITH else 0, "from_cache": int(caches == FULL)}
    children = [child(**expected), child(**expected | {"rewritten": 7}), child(**expected | {"from_cache": int(caches == EMPTY)})]
    asked = []

    def run(command, *, env, **_):
        asked.append(env)
        return children[len(asked) - 1]

    monkeypatch.setattr(compilation.subprocess, "run", run)
    monkeypatch.setenv("DASH_INDUCTOR_SCHEDULE", "descending")
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    assert compiled(8, package, caches, "/folder") == {"wall": 2.0, "cpu": 1.0}
    with pytest.raises(RuntimeError, match="other attentions were rewritten"):
        compiled(8, package, caches, "/folder")
    with pytest.raises(RuntimeError, match="out of one"):
        compiled(8, package, caches, "/folder")
    for env in asked:
        assert env["TORCH_DEVICE_BACKEND_AUTOLOAD"] == ("1" if package == WITH else "0")
        assert env["TORCHINDUCTOR_CACHE_DIR"] == "/folder" and env["TRITON_CACHE_DIR"].startswith("/folder/")
        assert not {"DASH_INDUCTOR_SCHEDULE", "TORCHINDUCTOR_FORCE_DISABLE_CACHES"} & set(env)
