"""A kernel's basic blocks as Python functions over all threads that run them: `Program(kernel)`.

A block is `block(c, s)`: `c` is the CTA (machine.py, whose methods touch memory), `s` its threads, a slice or indices. A register
is a row of one of the CTA's register files, P (predicates), H, W, D (16, 32, 64 bits). Inside a block it is a local variable, a
numpy array of an element a thread, or a scalar where all threads have the same. Only registers that other blocks read go back.

Which opcode does what is a table: a row, or a function below, names by a regular expression the opcodes that it knows, with every
modifier. What matches none, or has an operand more, raises `Unknown` by its name. Modifiers in IGNORED say nothing of values or
order; `Program.ignored` lists those that were met. Rounding is IEEE's to nearest even; approximations (ex2, rcp, ...) are exact;
`.ftz` flushes results, not operands.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from . import arithmetic, tensor_cores
from .clocks import WEAK, Order
from .parse import Instruction, Kernel, Memory, Operand, Vector

PARAMETERS = 1 << 30  # where the addresses of parameters begin, of 32 bits: only those of tensor descriptors are taken
SHARED = 1024  # where a CTA's shared memory begins, as on Hopper: the first KiB is the system's
IGNORED = re.compile(r"\.(L1::\w+|L2::(?!cache_hint)\w+|L2::cache_hint|nc|cg|ca|cs|cv|wb|wt|lu|uni|noftz)(?![\w:])")
DTYPES = {
    f"{kind}{bits}": f"{name}{bits}" for bits in (8, 16, 32, 64) for kind, name in (("b", "uint"), ("u", "uint"), ("s", "int"))
}
DTYPES |= {"f16": "float16", "f32": "float32", "f64": "float64", "bf16": "uint16", "pred": "bool"}
DTYPES |= {"f16x2": "uint32", "bf16x2": "uint32", "f32x2": "uint64", "s16x2": "uint32", "u16x2": "uint32"}
SCOPE = {**vars(arithmetic), "Order": Order, **{kind: getattr(np, dtype) for kind, dtype in DTYPES.items()}}  # what blocks may name
FILES = {"bool": "P", "uint16": "H", "uint32": "W", "uint64": "D"}
STORED = {"pred": "bool"} | {f"{kind}{bits}": f"uint{bits}" for bits in (16, 32, 64) for kind in "busf"}
SPECIAL = re.compile(
    r"%(tid|ntid|ctaid|nctaid|cluster_ctaid|cluster_nctaid)\.([xyz])|%(laneid|warpid|clusterid|cluster_ctarank)(\.x)?"
)
NUMBER = re.compile(r"-?(0[xX][0-9a-fA-F]+|\d+)U?|0[fFdD][0-9a-fA-F]+")
CONTROL = re.compile(
    r"bra(\.uni)?|brx\.idx(\.uni)?|ret|exit|trap|call\.__assertfail|wgmma\..*|bar(rier)?(\.cta)?\.(sync|arrive)(\.aligned)?"
)
ENDS = re.compile(
    r"ld\..*\b(acquire|relaxed|volatile)\b.*|atom\..*|mbarrier\.(try|test)_wait.*"
)  # a block: it may be in a loop of polls


class Unknown(NotImplementedError):
    """An opcode, a modifier or an operand without semantics here."""


TABLE: list[tuple[re.Pattern[str], Callable[..., None]]] = []


def semantics(pattern: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Enters a function (block, instruction, the named groups of the opcode) into the table."""

    def enter(function: Callable[..., None]) -> Callable[..., None]:
        TABLE.append((re.compile(pattern.replace(" ", "").replace("\n", "")), function))
        return function

    return enter


class Program:
    """`blocks[n]` is a compiled function, or the Instruction that the machine's loop executes itself.

    Beside it stand `registers[n]`, the names that it touches, and `starts[n]`, the number of its first instruction. Machines add to
    `reached` the blocks that they execute.
    Raises `Unknown` for what has no semantics here.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.ignored: set[str] = set()
        self.reached: set[int] = set()
        self.rows: dict[str, tuple[str, int]] = {}
        self.sizes = dict.fromkeys("PHWD", 0)
        for name, kind in kernel.types.items():
            file = FILES[STORED[kind]]
            self.rows[name] = file, self.sizes[file]
            self.sizes[file] += 1
        opcodes = [instruction.opcode for instruction in kernel.instructions]
        self.has_wgmma = any(opcode.startswith("wgmma") for opcode in opcodes)
        self.has_tcgen05 = any(opcode.startswith("tcgen05") for opcode in opcodes)
        self.granule = self._granule()
        words = [opcode_words(opcode) for opcode in opcodes]
        ordered = {"acquire", "release", "relaxed", "volatile"}
        self.communicates = any(
            {"atom", "red"} & w or (ordered & w and "global" in w) for w in words
        )  # whether CTAs may wait for each other
        leaders = {0, *kernel.labels.values()}
        for number, opcode in enumerate(opcodes):
            if CONTROL.fullmatch(opcode):
                leaders |= {number, number + 1}
            elif ENDS.fullmatch(opcode):
                leaders.add(number + 1)
        self.starts = sorted(leader for leader in leaders if leader < len(opcodes))
        self.number_at = {start: number for number, start in enumerate(self.starts)}
        ranges = list(zip(self.starts, [*self.starts[1:], len(opcodes)], strict=True))
        self.registers = [frozenset(self._registers(range(*limits))) & self.rows.keys() for limits in ranges]
        made = [_Block(self, range(*limits)) for limits in ranges]
        loaded = {register for block in made for register in block.loaded}
        self.blocks: list[Any] = [block.compiled(loaded) for block in made]

    def block_of(self, label: str) -> int:
        """The number of the block behind a label."""
        return self.number_at.get(self.kernel.labels[label], len(self.starts))

    def was_reached(self, number: int) -> bool:
        """Whether a thread has come to an instruction."""
        return bisect.bisect(self.starts, number) - 1 in self.reached

    def where(self, block: int) -> str:
        """The first instruction of a block, as errors name it."""
        return self.kernel.where(self.starts[block]) if block < len(self.starts) else "the end"

    def _registers(self, numbers: range) -> set[str]:
        return {name for number in numbers for name in self.kernel.instructions[number].registers()}

    def _granule(self) -> int:
        """Bytes of what the shadow tells apart: the narrowest write. To read a part of one is to read it."""
        widths = [4]
        for instruction in self.kernel.instructions:
            found = re.fullmatch(r"(?:st|atom|red)\b.*?(?:\.v(\d))?\.[a-z]+(\d+)(x2)?", instruction.opcode)
            if found:
                widths.append(int(found[2]) // 8 * int(found[1] or 1) * (2 if found[3] else 1))
        return min(widths)


def opcode_words(opcode: str) -> set[str]:
    """The parts of an opcode, `shared::cta` also as `shared`."""
    return {word for part in opcode.split(".") for word in (part, part.partition("::")[0])}


class _Block:
    """Writes the Python of a block: `read`, `write`, `address`, `mask` and `line` are what the table uses."""

    def __init__(self, program: Program, numbers: range) -> None:
        self.program, self.kernel = program, program.kernel
        self.lines: list[str] = []
        self.scope: dict[str, Any] = dict(SCOPE)
        self.current: dict[str, str] = {}  # register -> the local that has its value
        self.views: dict[tuple[str, str], str] = {}  # (local, dtype) -> the local of its view
        self.alias: dict[str, str] = {}  # local -> the register whose row of the file it is
        self.dtype: dict[str, str] = {}  # local -> as which it stands
        self.written: dict[str, str] = {}  # register -> local
        self.loaded: set[str] = set()  # registers that are read before they are written, or written in some threads only
        self.made = 0
        self.number = numbers.start
        self.first = self.kernel.instructions[numbers.start]
        if CONTROL.fullmatch(self.first.opcode):
            self.loaded.update(self.first.registers())
            return
        for self.number in numbers:
            self._instruction(self.kernel.instructions[self.number])

    def compiled(self, kept: set[str]) -> Any:
        """The block's function, which puts back the registers that others read; of control flow its instruction."""
        if CONTROL.fullmatch(self.first.opcode):
            return self.first
        self._store(kept)
        source = "\n ".join(["def block(c, s):", "n = c.tid[s].size", *self.lines])
        exec(compile(source, f"<{self.kernel.name}, PTX line {self.first.line}>", "exec"), self.scope)
        return self.scope["block"]

    def _instruction(self, instruction: Instruction) -> None:
        self.instruction = instruction
        opcode = instruction.opcode
        operands = list(instruction.operands)
        for ignored in IGNORED.finditer(opcode):
            self.program.ignored.add(f"{opcode.partition('.')[0]}{ignored[0]}")
            if ignored[1] == "L2::cache_hint":
                operands.pop()  # the policy
        opcode = IGNORED.sub("", opcode)
        for pattern, function in TABLE:
            if found := pattern.fullmatch(opcode):
                return function(self, operands, **found.groupdict())
        raise self.unknown()

    def unknown(self, what: str = "no semantics for") -> Unknown:
        return Unknown(f"{what} {self.kernel.where(self.number)}")

    # ---- locals

    def line(self, text: str) -> None:
        """One statement."""
        self.lines.append(text)

    def local(self, expression: str, dtype: str) -> str:
        """A new local variable with this value."""
        name = f"v{self.made}"
        self.made += 1
        self.dtype[name] = dtype
        self.lines.append(f"{name} = {expression}")
        return name

    def constant(self, value: Any) -> str:
        """A value of the block's own."""
        name = f"k{len(self.scope)}"
        self.scope[name] = value
        return name

    def read(self, operand: Operand, kind: str) -> str:
        """A register, the lower bits of a wider one, an immediate or a special register, as type `kind`."""
        if not isinstance(operand, str):
            raise self.unknown(f"operand {operand} of")
        dtype = DTYPES[kind]
        if operand not in self.program.rows:
            return self._immediate(operand, dtype)
        if operand not in self.current:
            file, row = self.program.rows[operand]
            made = self.local(f"c.{file}[{row}, s]", STORED[self.kernel.types[operand]])
            self.current[operand], self.alias[made] = made, operand
            self.loaded.add(operand)
        if self.width(operand) > 8 * np.dtype(dtype).itemsize:
            return f"{self.as_dtype(self.current[operand], f'uint{self.width(operand)}')}.astype({kind})"
        return self.as_dtype(self.current[operand], dtype)

    def as_dtype(self, local: str, dtype: str) -> str:
        """The same bits as another dtype of that width."""
        if self.dtype[local] == dtype:
            return local
        if np.dtype(dtype).itemsize != np.dtype(self.dtype[local]).itemsize:
            raise self.unknown("a register of another width in")
        if (local, dtype) not in self.views:
            made = self.local(f"{local}.view(np.{dtype})", dtype)
            self.views[local, dtype] = made
            self.views[made, self.dtype[local]] = local
            if local in self.alias:
                self.alias[made] = self.alias[local]
        return self.views[local, dtype]

    def width(self, register: str) -> int:
        """Bits of a register."""
        return 8 * np.dtype(STORED[self.kernel.types[register]]).itemsize

    def _immediate(self, text: str, dtype: str) -> str:
        special = SPECIAL.fullmatch(text)
        if special:
            name = special[1] or special[3]
            return f"c.special({name + (special[2] or '')!r}, s).astype(np.{dtype})"
        size = np.dtype(dtype).itemsize
        if text in self.kernel.parameters:
            value = PARAMETERS + 256 * list(self.kernel.parameters).index(text)
        elif text == "global_smem":
            value = SHARED
        elif text == "WARP_SZ":
            value = 32
        elif not NUMBER.fullmatch(text):
            raise self.unknown(f"operand {text} of")
        elif dtype == "bool":
            return self.constant(np.bool_(int(text, 0)))
        else:
            value = int(text[2:], 16) if text[:2].lower() in ("0f", "0d") else int(text.rstrip("U"), 0)
        return self.constant(np.array(value & (1 << 8 * size) - 1, f"uint{8 * size}").view(dtype)[()])

    def write(self, register: Operand, kind: str, expression: str, *, alias: str = "") -> None:
        """A register's new value, in the threads of the guard; an integer is extended. `alias`: the local that it only renames."""
        assert isinstance(register, str)
        if register == "_":
            return
        dtype, stored = np.dtype(DTYPES[kind]), STORED[self.kernel.types[register]]
        if dtype.kind in "iu" and dtype.itemsize < np.dtype(stored).itemsize:
            kind = f"{'s' if dtype.kind == 'i' else 'u'}{self.width(register)}"
            expression, dtype = f"({expression}).astype({kind})", np.dtype(DTYPES[kind])
        if dtype.itemsize != np.dtype(stored).itemsize:
            raise self.unknown("a register of another width in")
        if self.instruction.guard:
            old = self.read(register, kind)
            expression, alias = f"np.where({self.mask()}, {expression}, {old})", ""
        made = self.local(expression, dtype.name)
        if alias in self.alias:
            self.alias[made] = self.alias[alias]
        self.current[register] = self.written[register] = made

    def _store(self, registers: set[str]) -> None:
        """Puts back what other blocks read. A local that is another register's row is copied first."""
        kept = {register: local for register, local in self.written.items() if register in registers}
        for register, local in kept.items():
            if self.alias.get(local) in kept and self.alias[local] != register:
                kept[register] = self.local(f"np.array({local})", self.dtype[local])
        for register, local in kept.items():
            file, row = self.program.rows[register]
            stored = STORED[self.kernel.types[register]]
            self.line(f"c.{file}[{row}, s] = {local if self.dtype[local] == stored else f'{local}.view(np.{stored})'}")

    # ---- memory

    def mask(self) -> str:
        """The guard, or None."""
        if not self.instruction.guard:
            return "None"
        read = self.read(self.instruction.guard, "pred")
        return f"~{read}" if self.instruction.negated else read

    def address(self, operand: Operand) -> str:
        """An address of each thread, int64."""
        assert isinstance(operand, Memory)
        if operand.base in self.program.rows:
            bits = self.width(operand.base)
            base = self.read(operand.base, f"u{bits}")
            return f"wide({base}, n, np.int64, {operand.offset})"
        return f"wide({self._immediate(operand.base, 'int64')}, n, np.int64, {operand.offset})"

    def pack(self, items: tuple[Operand, ...], kind: str) -> str:
        """Registers as one array [registers, threads]."""
        return f"pack(n, {kind}, {', '.join(self.read(item, kind) for item in items)})"

    def unpack(self, targets: tuple[Operand, ...], kind: str, array: str) -> None:
        """The rows of an array [registers, threads] into registers."""
        made = self.local(array, "")
        for number, target in enumerate(targets):
            self.write(target, kind, f"{made}[{number}]")


def items(operand: Operand) -> tuple[Operand, ...]:
    """The registers of a vector, or the one."""
    return operand.items if isinstance(operand, Vector) else (operand,)


# ------------------------------------------------ rows

READ: dict[str, Callable[[_Block, Any], str]] = {  # `{name:1}` in a row, other than a type: operand 1 as ...
    "address": _Block.address,
    "words": lambda b, x: b.pack(items(x), "b32"),
    "count": lambda b, x: f"wide({b.read(x, 'u32')}, n, np.int64)",
    "bits": lambda b, x: f"wide({b.read(x, 'u64')}, n, np.uint64)",
    "matrix": lambda b, x: f"{b.address(x)}, True" if isinstance(x, Memory) else f"{READ['bits'](b, x)}, False",
    "descriptor": lambda b, x: b.read(x.descriptor, "u64"),
    "place": lambda b, x: b.pack(x.coordinates, "s32"),
    "number": lambda b, x: str(int(x, 0)),
    "ignored": lambda b, x: "",  # which threads of a warp take part: all must
}


class _Fields(dict[str, Any]):
    """What a row may name: groups of its opcode, types, here, mask, opcode. `{name:1}` is operand 1, `{name:1+}` all from it on."""

    def __init__(self, block: _Block, operands: list[Operand], groups: dict[str, str | None]) -> None:
        self.block, self.operands, self.groups = block, operands, groups
        self.unused = set(range(len(operands)))

    def __missing__(self, name: str) -> Any:
        b = self.block
        if name in ("here", "mask", "opcode"):
            return {"here": f"{b.number}, s", "mask": b.mask(), "opcode": repr(b.instruction.opcode)}[name]
        if name == "double":  # the type of twice the width
            kind = str(self.groups["kind"])
            return _Field(self, f"{kind[0]}{2 * int(kind[1:])}")
        return _Field(self, self.groups.get(name, name) or "")


class _Field:
    def __init__(self, fields: _Fields, name: str) -> None:
        self.fields, self.name = fields, name

    def __format__(self, at: str) -> str:
        if not at:
            return self.name
        operands = self.fields.operands
        numbers = range(int(at.rstrip("+")), len(operands) if at.endswith("+") else int(at) + 1)
        self.fields.unused -= set(numbers)
        read = READ.get(self.name, partial(_Block.read, kind=self.name))
        return ", ".join(read(self.fields.block, operands[n]) for n in numbers)


def row(pattern: str, template: str | dict[str, str], target: str = "{kind}") -> None:
    """Enters opcodes into the table: their Python, or that of each `op`, and the type of operand 0, in which the value goes.

    target: "words" for registers of 32 bits, "" if there is none.
    """

    @semantics(pattern)
    def enter(b: _Block, o: list[Operand], **groups: str | None) -> None:
        fields = _Fields(b, o, groups)
        value = (template if isinstance(template, str) else template[str(groups["op"])]).format_map(fields)
        if fields.unused - ({0} if target else set()):
            raise b.unknown("an operand too many in")
        if groups.get("ftz"):
            value = f"ftz({value})"
        if target == "words":
            b.unpack(items(o[0]), "b32", value)
        elif target:
            b.write(o[0], target.format_map(fields), value)
        else:
            b.line(value)


effect = partial(row, target="")  # of opcodes without a result
INTEGER, FLOAT, FTZ = r"(?P<kind>[bsu](16|32|64))", r"(?P<kind>f16|f32|f64)", r"(?P<ftz>\.ftz)?"
WHOLE = r"[su](8|16|32|64)"
SYMBOLS = {"add": "+", "sub": "-", "mul": "*", "mul.lo": "*", "and": "&", "or": "|", "xor": "^"}
INFIX = {op: f"{{kind:1}} {symbol} {{kind:2}}" for op, symbol in SYMBOLS.items()}
FUNCTIONS = {"ex2": "np.exp2({kind:1})", "lg2": "np.log2({kind:1})", "rcp": "{kind}(1) / {kind:1}", "tanh": "np.tanh({kind:1})"}
FUNCTIONS |= {"sqrt": "np.sqrt({kind:1})", "rsqrt": "{kind}(1) / np.sqrt({kind:1})"}
UNARY = {"neg": "-{kind:1}", "abs": "np.abs({kind:1})", "not": "~{kind:1}"}
MIXED = {"fma": "fma(number({kind:1}), number({kind:2}), {f32:3})"}  # each is widened, which is exact
MIXED |= {op: f"number({{kind:1}}).astype(f32) {SYMBOLS[op]} {{f32:2}}" for op in ("add", "sub")}
ROUNDED = {"rni": "np.rint({of:1})", "rzi": "np.trunc({of:1})", "rmi": "np.floor({of:1})", "rpi": "np.ceil({of:1})"}

row(r"(?P<op>add|sub|mul\.lo|and|or|xor)\.(?P<kind>pred|[bsu](16|32|64))", INFIX)
row(rf"(?P<op>add|sub|mul)(\.rn)?{FTZ}\.{FLOAT}", INFIX)
row(rf"fma\.rn{FTZ}\.(?P<kind>f32|f64)", "fma({kind:1+})")
row(rf"fma\.rm{FTZ}\.f32", "fma_down({f32:1+})", "f32")
row(r"(?P<op>fma|add|sub)(\.rn)?\.f32\.(?P<kind>f16|bf16)", MIXED, "f32")
row(
    r"(?P<op>(add|sub|mul|fma|neg|abs|(min|max)(\.NaN)?))(\.rn)?(\.ftz)?\.(?P<kind>f32x2|f16x2|bf16x2|bf16|s16x2|u16x2)",
    "by_elements('{op}', '{kind}', {kind:1+})",
)
row(rf"mul\.hi\.{INTEGER}", "high({kind:1}, {kind:2})")
row(rf"mul\.wide\.{INTEGER}", "{kind:1}.astype({double}) * {kind:2}", "{double}")
row(rf"mad\.lo\.{INTEGER}", "{kind:1} * {kind:2} + {kind:3}")
row(rf"mad\.wide\.{INTEGER}", "{kind:1}.astype({double}) * {kind:2} + {double:3}", "{double}")
row(rf"(?P<op>div|rem)\.{INTEGER}", "{op}({kind:1}, {kind:2})")
row(rf"div\.(full|rn|approx){FTZ}\.{FLOAT}", "{kind:1} / {kind:2}")
row(rf"(?P<op>min|max)(\.ftz)?(?P<nan>\.NaN)?\.(?P<kind>{WHOLE}|f16|f32|f64)", "reduce(OPERATIONS['{op}{nan}'], [{kind:1+}])")
row(r"(?P<op>neg|abs|not)(\.ftz)?\.(?P<kind>pred|[bs](16|32|64)|f16|f32|f64)", UNARY)
row(r"copysign\.f32", "np.copysign({f32:2}, {f32:1})", "f32")
row(rf"(?P<op>{'|'.join(FUNCTIONS)})\.(approx|rn){FTZ}\.(?P<kind>f32|f64)", FUNCTIONS)
row(rf"(?P<op>shl|shr)\.{INTEGER}", "shift({kind:1}, {u32:2}, '{op}')")
row(r"shf\.(?P<op>[lr])\.(?P<mode>wrap|clamp)\.b32", "funnel({u32:1}, {u32:2}, {u32:3}, '{op}', '{mode}')", "b32")
row(rf"bfe\.{INTEGER}", "extract({kind:1}, {u32:2}, {u32:3})")
row(r"lop3\.b32", "lop3({b32:1}, {b32:2}, {b32:3}, {number:4})", "b32")
row(r"popc\.(?P<kind>b32|b64)", "ones({kind:1})", "b32")
row(r"prmt\.b32", "permute({b32:1}, {b32:2}, {b32:3})", "b32")
row(r"selp\.(?P<kind>[bsuf](16|32|64))", "np.where({pred:3}, {kind:1}, {kind:2})")
row(rf"cvt(\.rn)?\.(?P<kind>{WHOLE}|f16|f32|f64)\.(?P<of>{WHOLE})", "{of:1}.astype({kind})")
row(rf"cvt\.sat\.(?P<kind>{WHOLE})\.(?P<of>{WHOLE})", "saturated({of:1}, {kind})")
row(
    rf"cvt\.(?P<op>{'|'.join(ROUNDED)})(\.ftz)?(\.sat)?\.(?P<kind>{WHOLE})\.(?P<of>f16|f32|f64)",
    {op: f"saturated({value}, {{kind}})" for op, value in ROUNDED.items()},
)
row(rf"cvt\.(?P<op>{'|'.join(ROUNDED)}){FTZ}\.(?P<kind>f32)\.(?P<of>f32)", ROUNDED)
row(r"cvt(\.ftz)?\.sat\.f32\.f32", "np.fmin(np.fmax({f32:1}, f32(0)), f32(1))", "f32")  # NaN: 0
row(r"cvt(\.rn)?(\.ftz)?\.(?P<kind>f16|f32|f64)\.(?P<of>f16|bf16|f32|f64)", "number({of:1}).astype({kind})")
row(rf"cvt\.rn(\.ftz)?\.(?P<kind>bf16)\.(?P<of>{WHOLE}|f16|f32)", "to_bf16({of:1}.astype(f32))")
row(r"cvt\.rn\.(?P<kind>f16|bf16)x2\.f32", "two_halves({f32:1}, {f32:2}, '{kind}')", "b32")
row(r"cvt\.rna\.tf32\.f32", "to_tf32({b32:1})", "b32")

row(
    r"redux\.sync\.(?P<op>add|min|max|and|or|xor)\.(?P<kind>[bsu]32)",
    "c.reduce({here}, wide({kind:1}, n, {kind}), '{op}'){ignored:2}",
)
effect(r"bar\.warp\.sync", "c.races.warp_barrier(c, c.tid[s]){ignored:0}")
row(
    r"ldmatrix\.sync\.aligned\.m8n8\.x[124](\.trans)?\.shared(::cta)?\.b16", "c.load_matrix({here}, {address:1}, {opcode})", "words"
)
effect(
    r"stmatrix\.sync\.aligned\.m8n8\.x[124](\.trans)?\.shared(::cta)?\.b16",
    "c.store_matrix({here}, {address:0}, {words:1}, {opcode})",
)

effect(r"cp\.async\.commit_group", "c.commit_copies()")
effect(r"cp\.async\.wait_group", "c.wait_copies({number:0})")
effect(r"cp\.async\.wait_all", "c.commit_copies(); c.wait_copies(0)")
effect(
    r"cp\.async\.bulk\.tensor\.[1-5]d\.shared::(cta|cluster)\.global(\.tile)?\.mbarrier::complete_tx::bytes",
    "c.load_box({here}, {address:0}, {descriptor:1}, {place:1}, {address:2}, {mask})",
)
effect(
    r"cp(?P<adds>\.reduce)?\.async\.bulk\.tensor\.[1-5]d\.global\.shared::cta(\.add)?(\.tile)?\.bulk_group",
    "c.store_box({here}, {address:1}, {descriptor:0}, {place:0}, bool('{adds}'), {mask})",
)
effect(
    r"cp\.reduce\.async\.bulk\.global\.shared::cta\.bulk_group\.add\.f32",
    "c.add_bulk({here}, {address:1}, {address:0}, {count:2}, {mask})",
)
effect(r"cp\.async\.bulk\.commit_group", "c.commit_bulk({here}, {mask})")
effect(r"cp\.async\.bulk\.wait_group(?P<reads>\.read)?", "c.wait_bulk({here}, {mask}, {number:0}, bool('{reads}'))")
effect(
    r"fence\.proxy\.async(\.(?P<space>shared::cta|shared::cluster|global))?|fence\.mbarrier_init\.release\.cluster",
    "c.races.proxy_fence(c, c.masked(s, {mask}), '{space}')",
)
effect(
    r"(fence\.(acq_rel|sc)(?!\.gl)|membar(?!\.(gpu|cluster)))\.(?P<scope>cta|cluster|gpu|gl|sys)",
    "c.races.fence(c, c.masked(s, {mask}), '{scope}')",
)
row(
    r"mbarrier\.(try_wait|test_wait)\.parity\.shared(::cta)?\.b64", "c.wait_barrier({here}, {address:1}, {mask}, {count:2})", "pred"
)
effect(r"mbarrier\.init\.shared(::cta)?\.b64", "c.init_barrier({here}, {address:0}, {mask}, {count:1})")
effect(r"mbarrier\.inval\.shared(::cta)?\.b64", "c.end_barrier({here}, {address:0}, {mask})")

effect(
    r"tcgen05\.alloc\.cta_group::1\.sync\.aligned\.shared::cta\.b32",
    "c.allocate_tensor_memory({here}, {address:0}, {mask}){ignored:1}",
)
effect(
    r"tcgen05\.mma\.cta_group::1\.kind::(f16|tf32)",
    "c.tensor_multiply({here}, {opcode}, {address:0}, {matrix:1}, {bits:2}, {count:3}, wide({pred:4}, n, bool), {mask})",
)
# Without a state space the address is generic; Triton 3.6 gives one of shared memory there all the same.
effect(
    r"tcgen05\.commit\.cta_group::1\.mbarrier::arrive::one(\.shared::cluster)?\.b64",
    "c.tensor_commit({here}, {address:0}, {mask})",
)

# ------------------------------------------------ functions

COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
OPPOSITE = {"equ": "!=", "neu": "==", "ltu": ">=", "leu": ">", "gtu": "<=", "geu": "<"}  # true also where an operand is NaN


@semantics(
    r"""setp\.(?P<compare>eq|ne|lt|le|gt|ge|lo|ls|hi|hs|equ|neu|ltu|leu|gtu|geu|num|nan)
    (\.(?P<combine>and|or|xor))?(\.ftz)?\.(?P<kind>[bsu](16|32|64)|f32|f64|f16|bf16)"""
)
def compare(b: _Block, o: list[Operand], compare: str, combine: str, kind: str) -> None:
    first = len(o) - 3 if combine else len(o) - 2
    x, y = (f"from_bf16({b.read(v, kind)})" if kind == "bf16" else b.read(v, kind) for v in o[first : first + 2])
    if compare in ("num", "nan"):
        value = f"{'~' if compare == 'num' else ''}(np.isnan({x}) | np.isnan({y}))"
    elif compare in COMPARE and not (compare == "ne" and (kind[0] == "f" or kind == "bf16")):
        value = f"({x} {COMPARE[compare]} {y})"
    elif compare == "ne":  # ordered: false where an operand is NaN
        value = f"(({x} < {y}) | ({x} > {y}))"
    else:
        value = f"~({x} {OPPOSITE[compare]} {y})"
    value = b.local(f"np.asarray({value})", "bool")
    with_third = f" {SYMBOLS[combine]} {b.read(o[-1], 'pred')}" if combine else ""
    value, negation = f"{value}{with_third}", f"~{value}{with_third}"
    b.write(o[0], "pred", value)
    if first == 2:
        b.write(o[1], "pred", negation)


@semantics(r"setp\.(?P<compare>eq|lt|le|gt|ge)(\.ftz)?\.(?P<kind>f16|bf16)x2")
def compare_halves(b: _Block, o: list[Operand], compare: str, kind: str) -> None:
    x, y = (b.read(v, "b32") for v in o[2:])  # the first predicate is that of the lower halves
    for target, low in zip(o[:2], (True, False), strict=True):
        b.write(target, "pred", f"half({x}, {low}, {kind!r}) {COMPARE[compare]} half({y}, {low}, {kind!r})")


@semantics(r"mov\.(?P<kind>pred|[bsuf](16|32|64))|cvta(\.to)?(\.global|\.param)\.u64")
def move(b: _Block, o: list[Operand], kind: str | None) -> None:
    kind = kind or "u64"
    if isinstance(o[0], Vector):
        step = int(kind[1:]) // len(o[0].items)
        for number, target in enumerate(o[0].items):
            b.write(target, f"u{step}", f"({b.read(o[1], f'u{kind[1:]}')} >> u{kind[1:]}({number * step})).astype(u{step})")
    elif isinstance(o[1], Vector):
        wide, step = f"u{kind[1:]}", int(kind[1:]) // len(o[1].items)
        parts = [f"({b.read(x, f'u{step}')}.astype({wide}) << {wide}({n * step}))" for n, x in enumerate(o[1].items)]
        b.write(o[0], wide, " | ".join(parts))
    else:
        read = b.read(o[1], kind)
        b.write(o[0], kind, read, alias=read)


@semantics(r"createpolicy\..*|setmaxnreg\.(inc|dec)\.sync\.aligned\.u32|nanosleep\.u32|prefetch.*|griddepcontrol\..*")
def no_effect(b: _Block, o: list[Operand]) -> None:
    opcode = b.instruction.opcode.partition(".")[0]
    b.program.ignored.add(opcode)
    if opcode == "createpolicy":
        b.write(o[0], "b64", "np.uint64(0)")


@semantics(r"shfl\.sync\.(?P<mode>bfly|idx|up|down)\.b32")
def shuffle(b: _Block, o: list[Operand], mode: str) -> None:
    first = len(o) - 4
    value, lane, clamp = (b.read(x, "u32") for x in o[first : first + 3])
    made = b.local(f"c.shuffle({b.number}, s, wide({value}, n, np.uint32), {mode!r}, {lane}, {clamp})", "")
    b.write(o[0], "b32", f"{made}[0]")
    if first == 2:
        b.write(o[1], "pred", f"{made}[1]")


@semantics(r"elect\.sync")
def elect(b: _Block, o: list[Operand]) -> None:
    made = b.local("c.elect(s)", "")
    b.write(o[0], "b32", f"{made}[0]")
    b.write(o[1], "pred", f"{made}[1]")


@semantics(r"mma\.sync\.aligned\..*")
def multiply(b: _Block, o: list[Operand]) -> None:
    tensor_cores.mma(b.instruction.opcode)
    given = ", ".join(b.pack(items(x), "b32") for x in o[1:4])
    b.unpack(items(o[0]), "b32", f"c.mma({b.number}, s, {b.instruction.opcode!r}, {given})")


ORDERS = ("weak", "volatile", "relaxed", "acquire", "release", "acq_rel")
SCOPES = (
    r"(?P<words>(\.(weak|volatile|relaxed|acquire|release|acq_rel|cta|cluster|gpu|sys|global|shared(::cta)?))+)"  # in any order
)
ELEMENTS = r"(\.v(?P<count>[248]))?\.(?P<kind>[bsu](8|16|32|64)|f32|f64)"


@semantics(r"ld\.param\.(?P<kind>[bsuf](8|16|32|64))")
def load_parameter(b: _Block, o: list[Operand], kind: str) -> None:
    assert isinstance(o[1], Memory)
    if o[1].base not in b.kernel.parameters or o[1].offset:
        raise b.unknown(f"operand {o[1]} of")
    number = list(b.kernel.parameters).index(o[1].base)
    kind = f"{'s' if kind[0] == 's' else 'u'}{kind[1:]}"
    b.write(o[0], kind, f"np.uint64(c.parameters[{number}]).astype({kind})")


def order_and_space(words: str, default: str) -> tuple[Order, str]:
    """The scope of an atomic that names none is the GPU's, that of a volatile access the system's: atom, red, ld, st in 9.7."""
    found = opcode_words(words)
    order = next((order for order in ORDERS if order in found), default)
    scope = next((scope for scope in ("cta", "cluster", "gpu", "sys") if scope in found), "sys" if order == "volatile" else "gpu")
    return WEAK if order == "weak" else Order(order, scope), "shared" if "shared" in found else "global"


@semantics(rf"ld{SCOPES}{ELEMENTS}")
def load(b: _Block, o: list[Operand], words: str, count: str, kind: str) -> None:
    order, space = order_and_space(words, "weak")
    kind, used = f"{'s' if kind[0] == 's' else 'u'}{kind[1:]}", b.instruction.used_bytes.bit_length()
    given = f"{b.address(o[1])}, {b.mask()}, {DTYPES[kind]!r}, {int(count or 1)}, {space!r}, {order}, {used}"
    b.unpack(items(o[0]), kind, f"c.load({b.number}, s, {given})")


@semantics(rf"st{SCOPES}{ELEMENTS}")
def store(b: _Block, o: list[Operand], words: str, count: str, kind: str) -> None:
    order, space = order_and_space(words, "weak")
    values = b.pack(items(o[1]), f"u{kind[1:]}")
    b.line(f"c.store({b.number}, s, {b.address(o[0])}, {b.mask()}, {values}, {space!r}, {order})")


@semantics(
    rf"""(?P<op>atom|red){SCOPES}\.(?P<what>add|cas|exch|max|min|and|or|xor)(\.noftz)?
    (\.v(?P<count>[248]))?\.(?P<kind>[bsu](16|32|64)|f32|f64|f16x2|bf16x2)"""
)
def atomic(b: _Block, o: list[Operand], op: str, words: str, what: str, count: str, kind: str) -> None:
    order, space = order_and_space(words, "relaxed")
    if space != "global":
        raise b.unknown()
    first = 1 if op == "atom" else 0
    given = [b.pack(items(x), kind) for x in o[first + 1 :]]
    call = f"c.atomic({b.number}, s, {b.address(o[first])}, {b.mask()}, [{', '.join(given)}], {what!r}, {order}, {kind!r})"
    if op == "atom":
        b.unpack(items(o[0]), {"f32": "u32", "f64": "u64"}.get(kind, kind), call)
    else:
        b.line(call)


@semantics(r"cp\.async\.shared(::cta)?\.global")
def copy(b: _Block, o: list[Operand]) -> None:
    size = int(str(o[2]), 0)
    count = f"wide({b.read(o[3], 'u32')}, n, np.int64)" if len(o) > 3 else "None"
    b.line(f"c.copy({b.number}, s, {b.address(o[0])}, {b.address(o[1])}, {size}, {count}, {b.mask()})")


@semantics(
    r"mbarrier\.arrive(?P<expect>\.expect_tx)?\.shared(::cta)?\.b64|mbarrier\.(?P<only>expect_tx)(\.relaxed\.cta)?\.shared::cta\.b64"
)
def arrive_barrier(b: _Block, o: list[Operand], expect: str, only: str) -> None:
    at = next(n for n, x in enumerate(o) if isinstance(x, Memory))
    value = f"wide({b.read(o[at + 1], 'u32')}, n, np.int64)" if len(o) > at + 1 else "np.ones(n, np.int64)"
    arrivals = "np.zeros(n, np.int64)" if only else "np.ones(n, np.int64)" if expect else value
    added = value if expect or only else "np.zeros(n, np.int64)"
    b.line(f"c.arrive_barrier({b.number}, s, {b.address(o[at])}, {b.mask()}, {arrivals}, {added})")


@semantics(r"tcgen05\.(dealloc\..*|relinquish_alloc_permit\..*|wait::(ld|st)\.sync\.aligned|fence::(before|after)_thread_sync)")
def tensor_memory_order(b: _Block, o: list[Operand]) -> None:
    """Of values nothing: accesses are complete at once. Their races are not modelled."""


@semantics(r"tcgen05\.(?P<op>ld|st)\.sync\.aligned\.\w+\.x\d+\.b32")
def tensor_memory(b: _Block, o: list[Operand], op: str) -> None:
    vector = next(x for x in o if isinstance(x, Vector))
    place = next(x for x in o if isinstance(x, Memory))
    split = next((int(x, 0) for x in o if isinstance(x, str)), 0)
    given = f"{b.number}, s, {b.instruction.opcode!r}, {b.address(place)}, {split}"
    if op == "ld":
        b.unpack(vector.items, "b32", f"c.load_tensor_memory({given})")
    else:
        b.line(f"c.store_tensor_memory({given}, {b.pack(vector.items, 'b32')}, {b.mask()})")
