"""Every place of torch that the package fills. A test holds that it fills no other, and that each is afterwards what it was.

Emulation and code for a GPU that is not there replace more, for as long as they last: see `emulation/` and `codegen/fake_gpu.py`.
"""

from __future__ import annotations

from .hook import Hook, around, around_entry, dispatched, first_entry, last_member

FLEX_BACKWARD = "torch:ops.higher_order.flex_attention_backward"

TESTED = "2.11", "2.15"  # the first and the last torch that the tests run with
SETTINGS = ("pattern_matcher", "use_joint_graph_passes")  # of Inductor: the pass is left out where one is off

RUNS_PASS = Hook(
    "torch._inductor.fx_passes.joint_graph",
    "pass_patterns",
    "runs the pass after Inductor's own patterns, which make SDPA of attention written by hand",
    last_member("dash_inductor.hooks.joint_pass:PASS"),
)
# For every compilation of the process. Overrides of Inductor's settings are a thread's own, and options of torch.compile override
# them in turn: so the setting in OFFERED reaches the graphs of backend="dash", and not those of everybody.
EVERYBODY = (
    RUNS_PASS,
    Hook(
        "torch._inductor.codegen.common",
        "custom_backend_passes",
        "puts settings and sources into the keys of Inductor's caches",
        first_entry("dash_inductor", "dash_inductor.hooks.cache_key:KEY"),
    ),
    Hook(
        "torch._dynamo.backends.common:AotAutograd",
        "__call__",
        "compiles a graph once more with stock kernels where it does not compile with ours",
        around("dash_inductor.hooks.failures:compile_graph"),
        needed=False,
    ),
)
COMPILATION = (
    Hook(
        "torch._inductor.compile_fx",
        "_recursive_joint_graph_passes",
        "names the attentions of graphs that the pass does not see, and marks what Inductor's patterns mistake",
        around("dash_inductor.hooks.joint_pass:around_joint_passes"),
    ),
    Hook(
        "torch._inductor.compile_fx",
        "compile_fx_backward",
        "compiles a late backward once more with stock kernels where it does not compile with ours",
        around("dash_inductor.hooks.failures:compile_late"),
        needed=False,
    ),
    Hook(
        "torch._inductor.output_code:CompiledFxGraph",
        "post_compile",
        "records what was decided, of graphs out of caches too",
        around("dash_inductor.hooks.recording:post_compile"),
    ),
)
# Where the package is off, DASH_INDUCTOR=0: other ranks' bits may be other ones.
OFF = (
    Hook(
        "torch.distributed.distributed_c10d",
        "init_process_group",
        "tells the ranks of a job that the package is off in this one",
        around("dash_inductor.hooks.told:after_begin"),
        needed=False,
    ),
    Hook(
        "torch.distributed",
        "init_process_group",
        "is the same function under its other name",
        around("dash_inductor.hooks.told:after_begin"),
        needed=False,
    ),
)
# When the first graph is met in deterministic mode: our lowerings need the whole of Inductor.
LOWERING = (
    Hook(
        "torch._inductor.lowering",
        "lowerings",
        "lowers FlexAttention's backward",
        around_entry(FLEX_BACKWARD, "dash_inductor.lowering.flex:lower_or_stock"),
        key=FLEX_BACKWARD,
    ),
)
# While backwards are compiled together with their forwards.
EAGER_BACKWARD = (
    Hook(
        "torch._functorch._aot_autograd.graph_compile",
        "collect_bw_donated_buffer_idxs",
        "keeps a backward, which may run again, from overwriting what its forward saved",
        around("dash_inductor.hooks.install:nothing_donated"),
    ),
)
# While settings ask for a word about attention that is not rewritten, or Dynamo skips a frame at its limit of recompilations.
FORWARDS = {
    "torch:ops.aten": (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    ),
    "torch.nn.attention.varlen:torch.ops.torch_attn": ("_varlen_attn",),
}
TELLS = "tells of attention that trains outside of compiled graphs"
OUTSIDE = (
    *(
        Hook(owner, name, TELLS, dispatched("dash_inductor.hooks.outside:attend", "AutogradCPU", "AutogradCUDA"), needed=False)
        for owner, names in FORWARDS.items()
        for name in names
    ),
    Hook(
        "torch._higher_order_ops.flex_attention:FlexAttentionAutogradOp",
        "apply",
        TELLS,
        around("dash_inductor.hooks.outside:attend_flex"),
        needed=False,
    ),
)
# While the package is on, or Dynamo keeps a graph of backend="dash".
LIMIT = (
    Hook(
        "torch._dynamo.convert_frame:ConvertFrame",
        "__call__",
        "knows of frames that Dynamo skips at its limit of recompilations",
        around("dash_inductor.hooks.outside:convert_frame"),
        needed=False,
    ),
)
OFFERED = (
    Hook("torch._inductor.config", "joint_custom_post_pass", "runs the pass, and keys caches, under backend='dash'"),
    Hook("torch.nn.attention", "register_flash_attention_impl", "lists DASH for eager training", needed=False),
)
HOOKS = (*EVERYBODY, *COMPILATION, *LOWERING, *EAGER_BACKWARD, *OUTSIDE, *LIMIT, *OFF, *OFFERED)
