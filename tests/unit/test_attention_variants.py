"""Edits of our kernel for measurements: they change what they say, fit the template, and leave nothing behind."""

from dataclasses import replace

import pytest
from jinja2 import Template

from dash_inductor.hooks import cache_key
from dash_inductor.qualify import variants
from dash_inductor.templates import tiles

AS_IS = variants.Variant("as-is", "as it is")
KERNEL = AS_IS.source()


def functions(source: str) -> dict[str, str]:
    """Parts of a template by the name of the function that each defines; "" is what stands before the first."""
    parts = source.split("@triton.jit\ndef ")
    return {"": parts[0], **{part.split("(")[0]: part.rstrip() for part in parts[1:]}}


@pytest.mark.parametrize("template", variants.TEMPLATES)
def test_without_order(template):
    before, after = (functions(variant.source(template)) for variant in (AS_IS, variants.UNORDERED))
    assert list(before) == list(after)
    assert {name for name in before if before[name] != after[name]} == {"wait", "release"}
    for name in ("wait", "release"):
        signature = before[name].split("\n")[0]
        assert after[name] == f"{signature}\n    pass"


def statements(source: str, *which: str) -> list[str]:
    """Which of the statements stand in the source, in their order, with how far they are indented."""
    lines = [line for line in source.split("\n") if line.strip().startswith(which)]
    return [f"{len(line) - len(line.lstrip())} {next(w for w in which if line.strip().startswith(w))}" for line in lines]


def rendered(release_after: int) -> str:
    """The template with RELEASE_AFTER as its only constant; what else it branches on is false."""
    hooks = dict.fromkeys(("def_kernel", "stride", "size", "store_output", "failed_wait"), lambda *args, **kwargs: "")
    return Template(KERNEL).render(RELEASE_AFTER=release_after, **hooks)


@pytest.mark.parametrize(
    ("release_after", "expected"),
    [
        (1, ["16 s_t = tl.dot", "16 release(", "16 dv = tl.dot", "16 wait(", "16 add_in_order(", "12 release("]),
        (0, ["16 release(", "16 s_t = tl.dot", "16 dv = tl.dot", "16 wait(", "16 add_in_order(", "12 release("]),
        (3, ["16 s_t = tl.dot", "16 dv = tl.dot", "16 release(", "16 wait(", "16 add_in_order(", "12 release("]),
    ],
)
def test_where_a_step_is_released(release_after, expected):
    """One step late, and then once more after the last."""
    which = ("s_t = tl.dot", "dv = tl.dot", "wait(", "add_in_order(", "release(")
    assert statements(rendered(release_after), *which) == expected
    assert release_after in {tiles.RELEASE_AFTER, *(variant.release_after for variant in variants.RELEASES)}


@pytest.mark.parametrize("lacking", ["def wait(", "def release("])
def test_a_template_that_the_edit_does_not_fit(lacking):
    with pytest.raises(ValueError, match="template"):
        variants.without_order(KERNEL.replace(lacking, "other("))


def test_caches_keep_variants_apart():
    plain = cache_key.CacheKey().uuid()
    seen = [plain]
    for variant in variants.VARIANTS:
        with variant.applied():
            seen.append(cache_key.CacheKey().uuid())
    assert len(set(seen)) == len(seen)
    assert cache_key.CacheKey().uuid() == plain


def test_a_variant_is_gone_afterwards():
    from dash_inductor.lowering import kernels

    before = kernels.ONE_PASS, kernels.BLOCK_MASK_ONE_PASS, dict(tiles._TILES), tiles.RELEASE_AFTER
    for variant in variants.VARIANTS:
        with variant.applied():
            now = kernels.ONE_PASS, kernels.BLOCK_MASK_ONE_PASS, dict(tiles._TILES), tiles.RELEASE_AFTER
            assert [one != other for one, other in zip(before, now, strict=True)] == [
                *[variant.edit is not None] * 2,
                bool(variant.tiles),
                variant.release_after is not None,
            ]
        assert (kernels.ONE_PASS, kernels.BLOCK_MASK_ONE_PASS, dict(tiles._TILES), tiles.RELEASE_AFTER) == before


@pytest.mark.parametrize(("name", "stages"), [("two-stages", 2), ("four-stages", 4)])
def test_stages(name, stages):
    """The tile of the table but for its stages."""
    (variant,) = (variant for variant in variants.VARIANTS if variant.name == name)
    for head_dim in (64, 128):
        plain = tiles.tile(90, "bf16", head_dim)
        with variant.applied():
            assert tiles.tile(90, "bf16", head_dim) == replace(plain, num_stages=stages)
        assert plain.num_stages != stages and variant.changes(90, head_dim)


def test_what_a_variant_changes():
    by_name = {variant.name: variant for variant in variants.VARIANTS}
    assert by_name["unordered"].changes("emulated", 16) and by_name["release-after-s"].changes("emulated", 16)
    assert by_name["two-per-sm"].changes(90, 16) and by_name["two-per-sm"].changes(90, 80)
    assert not by_name["two-per-sm"].changes(80, 64)
    assert by_name["half-q"].changes(90, 96) and not by_name["half-q"].changes(90, 64)
