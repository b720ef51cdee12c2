"""What a user can change so that an attention that was declined is rewritten, told by the reason."""

from __future__ import annotations

import re

from .reasons import CAPTURED, CUDNN, NOT_COMPILED

IN_FUNCTION = "make the mask inside the compiled function, of positions and small tensors, or use is_causal or flex_attention"
DROPOUT = (
    "train with an attention dropout of 0 (configurations call it attention_dropout, attn_pdrop, attention_probs_dropout_prob or "
    "dropout_rate); dropout elsewhere in the model may stay"
)
STRICT = (
    "nothing here computes the gradient of a mask; under torch.use_deterministic_algorithms(True), without warn_only, "
    "PyTorch's kernel is deterministic"
)

# A pattern of reasons, and what to do; the first that is found counts.
REMEDIES: tuple[tuple[str, str], ...] = (
    (
        f"^{NOT_COMPILED}",
        "report it to dash_inductor with your versions; DASH_INDUCTOR=0 saves the first try",
    ),
    (r"^dropout_p=|dropout on the CPU", DROPOUT),
    (r"mask is learnt", STRICT),
    (
        r"neither 0 nor -inf",
        "give SDPA a boolean mask; a bias that is a function of positions goes to flex_attention as its score_mod",
    ),
    (r"is an input of the graph|mask comes from|mask depends on|the mask compares", IN_FUNCTION),
    (r"the mask computes", "compute the mask with comparisons and whole numbers of 32 or 64 bits"),
    (r"^a scale that", "pass scale as a Python number"),
    (r"^torch\._inductor\.config\.(?P<name>\S+) is on", "switch it off: torch._inductor.config.{name} = False"),
    (r"^torch\._inductor\.config\.(?P<name>\S+) is off", "switch it on: torch._inductor.config.{name} = True"),
    (r"deterministic on the CPU", "none needed: on a GPU it is rewritten; DASH_INDUCTOR_EMULATE=1 tries that on the CPU"),
    (r"^dtype torch|^dtype fp32", "compute attention in bf16 or fp16, for instance under torch.autocast"),
    (r"^dtypes differ", "cast query, key and value to one dtype"),
    (r"^head dims? .* of one pass, which", "leave template, schedule and kernel at their defaults: two passes take such head dims"),
    (
        r"^head dim .* of one pass",
        "under this mask head dims up to 128 are taken: use more heads, or is_causal or no mask, which take 256",
    ),
    (r"^head dim .* outside|^no tile for head dim|^head dims differ: ", "use heads of 1 to 256 columns, the same of query and key"),
    (r"^an empty tensor", "none needed: there is nothing to compute"),
    (
        r"do not divide the query heads",
        "use as many kv heads as query heads, or a number that divides it, the same of key and value",
    ),
    (r"^causal with S_q=", "give the mask as a boolean tensor made inside the compiled function, or use flex_attention"),
    (r"^BLOCK_SIZE", "make the BlockMask with BLOCK_SIZE=(128, 128)"),
    (r"too many (blocks or )?tiles|many tiles", "use shorter sequences"),
    (
        r"^(template|schedule|kernel)=|^family |^mask must|^the Gluon kernel|needs a triangle|takes at most",
        "leave the settings template, schedule and kernel at their defaults",
    ),
    (r"two passes, which are deterministic too, are faster", "none needed: template='one_pass' takes ours all the same"),
    (r"^BACKEND=", "leave BACKEND out of kernel_options"),
    (f"^{CAPTURED}", "detach the tensor, or add the bias outside of score_mod"),
    (r"shares its keys", "expand key and value to the batch of the query"),
    (
        f"^{CUDNN}",
        "call it under torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION); torch 2.14, which does not look at that, "
        "takes flash attention for a window_size as long as the sequences",
    ),
    (r"^offsets cu_seq", "give offsets as int32 tensors of one shape, [sequences + 1]"),
    (r"^a window to the left alone", "give both sides of window_size"),
    (r"^a window to the right of all keys", "give window_size a right side of -1, or of less than the keys"),
    (r"^jagged tensors", "use torch.nn.attention.varlen.varlen_attn, which takes packed sequences"),
    (r"^\d+ SMs are reserved", "reserve fewer: sm_reserve, torch's SM carve-out"),
    (r"^no tile for sm_|^no cost file for|^ROCm|^device ", "use an NVIDIA GPU of compute capability 8.0 to 10.3"),
    (r"math path: inputs of", "give query, key and value four dimensions: [batch, heads, length, head dim]"),
    (r"math path: head dims differ", "none needed: on a GPU another op takes such head dims"),
    (r"math path: the last stride", "make it contiguous in its last dimension"),
    (r"math path", "let torch take flash attention: bf16 or fp16, no sdpa_kernel(MATH), query, key and value of four dimensions"),
    (r"\(seen of ", "report it to dash_inductor with your versions, and take flash attention until then (sdpa_kernel)"),
    (r"^the op of another backend|on device ", "take flash or memory-efficient attention (torch.nn.attention.sdpa_kernel)"),
)


def remedy_of(reason: str) -> str | None:
    """What to change against a reason; None for one that is not known.

    >>> remedy_of("torch._inductor.config.cpp_wrapper is on")
    'switch it off: torch._inductor.config.cpp_wrapper = False'
    """
    for pattern, remedy in REMEDIES:
        if match := re.search(pattern, reason):
            return remedy.format(**match.groupdict())
    return None
