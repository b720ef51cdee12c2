"""Edits of our kernel for measurements: they change what they say, fit the template, and leave nothing behind."""

import pytest

from benchmarks.attention import variants
from dash_inductor import salt

KERNEL = variants.Variant("as-is", "as it is").source()


def functions(source: str) -> dict[str, str]:
    """Parts of a template by the name of the function that each defines; "" is what stands before the first."""
    parts = source.split("@triton.jit\ndef ")
    return {"": parts[0], **{part.split("(")[0]: part.rstrip() for part in parts[1:]}}


def test_without_order():
    before, after = functions(KERNEL), functions(variants.without_order(KERNEL))
    assert list(before) == list(after)
    assert {name for name in before if before[name] != after[name]} == {"wait", "release"}
    for name in ("wait", "release"):
        signature = before[name].split("\n")[0]
        assert after[name] == f"{signature}\n    pass"


def statements(source: str, *which: str) -> list[str]:
    """Which of the statements stand in the source, in their order, with how far they are indented."""
    lines = [line for line in source.split("\n") if line.strip().startswith(which)]
    return [f"{len(line) - len(line.lstrip())} {next(w for w in which if line.strip().startswith(w))}" for line in lines]


def test_where_a_step_is_released():
    which = (
        "s_t = tl.dot",
        "dv = tl.dot",
        "wait(",
        "add_in_order(ptrs" if "add_in_order(ptrs" in KERNEL else "add_in_order(",
        "release(",
    )
    which = ("s_t = tl.dot", "dv = tl.dot", "wait(", "add_in_order(", "release(")
    loop = KERNEL
    assert statements(loop, *which) == [
        "16 s_t = tl.dot", "16 release(", "16 dv = tl.dot", "16 wait(", "16 add_in_order(", "12 release(",
    ]  # fmt: skip
    assert statements(variants.release_at_end(loop), *which) == [
        "16 s_t = tl.dot", "16 dv = tl.dot", "16 wait(", "16 add_in_order(", "16 release(",
    ]  # fmt: skip
    assert statements(variants.release_after_dv(loop), *which) == [
        "16 s_t = tl.dot", "16 dv = tl.dot", "16 release(", "16 wait(", "16 add_in_order(", "12 release(",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("edit", "lacking"),
    [
        (variants.without_order, "def wait("),
        (variants.without_order, "def release("),
        (variants.release_at_end, "    add_in_order("),
        (variants.release_after_dv, "dv = tl.dot("),
        (variants.release_at_end, variants.RELEASE),
        (variants.release_after_dv, variants.RELEASE),
    ],
)
def test_a_template_that_the_edits_do_not_fit(edit, lacking):
    with pytest.raises(ValueError, match="template"):
        edit(KERNEL.replace(lacking, "other("))


def test_caches_keep_variants_apart():
    plain = salt.Salt().uuid()
    seen = [plain]
    for variant in variants.VARIANTS:
        with variant.applied():
            seen.append(salt.Salt().uuid())
    assert len(set(seen)) == len(seen)
    assert salt.Salt().uuid() == plain


def test_a_variant_is_gone_afterwards():
    from dash_inductor.lowering import kernels
    from dash_inductor.templates import tiles

    before = kernels.SDPA_BACKWARD, dict(tiles._TILES)
    for variant in variants.VARIANTS:
        with variant.applied():
            assert (kernels.SDPA_BACKWARD is not before[0], before[1] != tiles._TILES) == (
                variant.edit is not None,
                bool(variant.tiles),
            )
        assert (kernels.SDPA_BACKWARD, dict(tiles._TILES)) == before


def test_what_a_variant_changes():
    by_name = {variant.name: variant for variant in variants.VARIANTS}
    assert by_name["unordered"].changes("emulated", 16)
    assert by_name["two-per-sm"].changes(90, 16) and by_name["two-per-sm"].changes(90, 80)
    assert not by_name["two-per-sm"].changes(80, 64)
    assert by_name["half-q"].changes(90, 96) and not by_name["half-q"].changes(90, 64)
