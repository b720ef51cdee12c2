"""Edits of our kernel for measurements: they change what they say, fit the template, and leave nothing behind."""

import pytest

from dash_inductor.hooks import cache_key
from dash_inductor.qualify import variants
from dash_inductor.templates import tiles

AS_IS = variants.Variant("as-is", "as it is")
KERNEL = AS_IS.source()


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
