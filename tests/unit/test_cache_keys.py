"""What a warm cache may answer: nothing once a source file, or a setting that decides, has changed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo import device_interface
from torch._dynamo.utils import counters
from torch._inductor.codegen import common
from torch.nn.attention import _registry

import dash_inductor
from dash_inductor import config
from dash_inductor.first_use.machine import digest_of, sources_digest
from dash_inductor.hooks import cache_key
from dash_inductor.hooks.cache_key import CacheKey
from dash_inductor.schedule.packing import as_if_long

ROOT = Path(dash_inductor.__file__).parents[1]
PACKAGES = ("dash_inductor", "lowering", "templates")
DECIDING = {
    "schedule": "ascending",
    "guarantee": "batch",
    "launch": "chained",
    "on_unsupported": "warn",
    "sms": 5,
    "sm_reserve": 1,
    "segment": 128,
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the three packages."""
    copy = tmp_path_factory.mktemp("tree")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"), symlinks=True)
    return copy


def digest(tree: Path) -> str:
    return digest_of([tree / package for package in PACKAGES])


def test_digest_is_of_the_contents(tree):
    assert digest(tree) == sources_digest() == digest(ROOT)


def test_digest_sees_each_file(tree):
    before = digest(tree)
    files = [path for path in tree.rglob("*") if path.suffix in (".py", ".jinja", ".toml", ".json")]
    assert {path.suffix for path in files} == {".py", ".jinja", ".toml", ".json"}
    seen = {before}
    for path in files:
        content = path.read_bytes()
        path.write_bytes(content + b"\n")
        seen.add(digest(tree))
        path.write_bytes(content)
    assert len(seen) == 1 + len(files)
    assert digest(tree) == before


def test_digest_sees_names_and_removals(tree):
    before = digest(tree)
    costs, new = tree / "dash_inductor/devices/h100.toml", tree / "dash_inductor/devices/new.toml"
    costs.rename(costs.with_stem("h101"))
    seen = {before, digest(tree)}
    costs.with_stem("h101").rename(costs)
    new.touch()
    seen.add(digest(tree))
    new.unlink()
    # The same bytes, split into files elsewhere.
    files = tree / "templates/a.jinja", tree / "templates/b.jinja"
    for parts in (("ab", "c"), ("a", "bc")):
        for file, text in zip(files, parts, strict=True):
            file.write_text(text)
        seen.add(digest(tree))
    for file in files:
        file.unlink()
    assert len(seen) == 5
    (tree / "templates/notes.txt").touch()
    assert digest(tree) == before


@pytest.fixture
def cached(switched_off: None) -> Iterator[None]:
    """The pass is on, and one attention, declined for want of a GPU, has been compiled into empty caches."""
    with dash_inductor.enabled():
        assert compiled() == (0, 2)
        assert compiled() == (2, 0)
        yield


def compiled() -> tuple[int, int]:
    """Compiles and trains; (hits, misses) of the FX graph cache for the forward and the backward."""
    torch._dynamo.reset()
    counters.clear()
    inputs = [torch.zeros(1, 1, 4, 8, requires_grad=True) for _ in range(3)]
    torch.compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v))(*inputs).sum().backward()
    hits, misses = (counters["inductor"][f"fxgraph_cache_{name}"] for name in ("hit", "miss"))
    assert counters["aot_autograd"]["autograd_cache_hit"] == (misses == 0)
    assert counters["aot_autograd"]["autograd_cache_miss"] == (misses != 0)
    return hits, misses


@pytest.mark.filterwarnings("ignore:dash_inductor leaves")
def test_settings_that_decide_miss(cached):
    for name, value in DECIDING.items():
        before = config.configure(**{name: value})
        assert compiled() == (0, 2), name
        config.configure(**{name: getattr(before, name)})
    assert compiled() == (2, 0)
    config.configure(seed=4)
    assert compiled() == (2, 0)


def test_another_sm_carve_out_misses(cached):
    """It is torch's, not ours: nothing is forgotten when it changes, and what is compiled afterwards is compiled for it."""
    for carve_out, expected in ((2, (0, 2)), (2, (2, 0)), (0, (2, 0)), (None, (2, 0)), (3, (0, 2))):
        torch._C._set_sm_carveout_experimental(carve_out)
        try:
            assert compiled() == expected, carve_out
        finally:
            torch._C._set_sm_carveout_experimental(None)


@pytest.mark.parametrize("sms", [(114,), (132, 114), (114, 132)])
def test_the_sms_of_gpus_are_in_the_key(sms, monkeypatch):
    """Which torch's own keys lack: they have the GPU's name."""

    class Gpus:
        is_available = staticmethod(lambda: True)
        device_count = staticmethod(lambda: len(counts))
        get_device_properties = staticmethod(lambda gpu: SimpleNamespace(multi_processor_count=counts[gpu]))

    without = cache_key.settings_key()
    monkeypatch.setitem(device_interface.device_interfaces, "cuda", Gpus)
    counts: tuple[int, ...] = (132,)
    one = cache_key.settings_key()
    counts = (132,) * 8
    assert cache_key.settings_key() == one != without, "how many GPUs there are decides nothing"
    counts = sms
    assert cache_key.settings_key() not in (one, without)


def test_a_fork_that_cannot_use_its_gpu_has_a_key(monkeypatch):
    def refuse(gpu: int) -> None:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    without = cache_key.settings_key()
    for name, answer in {"is_available": lambda: True, "device_count": lambda: 1, "get_device_properties": refuse}.items():
        monkeypatch.setattr(device_interface.get_interface_for_device("cuda"), name, staticmethod(answer))
    assert cache_key.settings_key() == without


def test_a_trial_of_what_long_sequences_take_has_a_key():
    """Its graph is that of another trial, and its code is not."""
    without = cache_key.settings_key()
    token = as_if_long.set(True)
    try:
        assert cache_key.settings_key() != without
    finally:
        as_if_long.reset(token)


def test_another_flash_attention_misses(cached, monkeypatch):
    """torch's registry says which is active: one that nobody knows may not be deterministic in strict mode. Ours puts nothing in
    the place of torch's own."""
    handle = SimpleNamespace(remove=lambda: None)
    for name, expected in (("FA4", (0, 2)), ("unknown", (0, 2)), ("DASH", (2, 0))):
        monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, name, lambda: handle)
        torch.nn.attention.activate_flash_attention_impl(name)
        try:
            assert compiled() == expected, name
        finally:
            torch.nn.attention.restore_flash_attention_impl()
        assert compiled() == (2, 0)


def test_another_driver_misses(cached, monkeypatch):
    """A kernel is tried anew with it before it is used."""
    monkeypatch.setattr(cache_key, "driver", lambda: "another")
    assert compiled() == (0, 2)


def test_sources_that_changed_miss(cached, monkeypatch):
    monkeypatch.setattr(cache_key, "sources_digest", lambda: "other sources")
    assert compiled() == (0, 2)
    monkeypatch.undo()


def test_every_setting_is_in_the_key():
    """A setting that a later version adds is in the key unless somebody says otherwise."""
    _, settings, *_ = cache_key.settings_key()
    in_key = {name for name, _ in settings}
    assert in_key == set(config.Config.__dataclass_fields__) - {"seed", "guard", "costs", "silence"}


@pytest.mark.parametrize("action", ["warn", "error"])
def test_a_graph_that_may_warn_or_raise_has_no_key_twice(monkeypatch, action):
    uuid = CacheKey().uuid
    assert uuid() == uuid()
    monkeypatch.setattr(config, "_current", config.Config(on_unsupported=action))
    assert uuid() != uuid()


def test_the_cache_key_stands_in_one_place(switched_off):
    """The order of `custom_backend_passes` is in the keys, and Inductor registers its own later, when it compiles."""
    common.custom_backend_passes["another"] = None
    try:
        with dash_inductor.enabled():
            assert next(iter(common.custom_backend_passes)) == "dash_inductor"
            assert "another" in common.custom_backend_passes
    finally:
        del common.custom_backend_passes["another"]
