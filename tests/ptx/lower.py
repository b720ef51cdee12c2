"""A kernel's basic blocks as Python functions over all threads that run them: `Program(kernel)`.

A block is `block(c, s)`: `c` is the CTA (machine.py, whose methods touch memory), `s` its threads, a slice or indices. A register
is a row of one of the CTA's register files, P (predicates), H, W, D (16, 32, 64 bits). Inside a block it is a local variable, a
numpy array of an element a thread, or a scalar where all threads have the same. Only registers that other blocks read go back.

Which opcode does what is a table: each function below names by a regular expression the opcodes that it knows, with every modifier.
What matches none raises `Unknown` by its name. Modifiers in IGNORED say nothing of values or order; `Program.ignored` lists those
that were met. Rounding is IEEE's to nearest even; approximations (ex2, rcp, ...) are exact; `.ftz` flushes results, not operands.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from . import arithmetic, tensor_cores
from .parse import Instruction, Kernel, Memory, Operand, Tensor, Vector, names

PARAMETERS = 1 << 30  # where the addresses of parameters begin, of 32 bits: only those of tensor descriptors are taken
SHARED = 1024  # where a CTA's shared memory begins, as on Hopper: the first KiB is the system's
IGNORED = re.compile(r"\.(L1::\w+|L2::(?!cache_hint)\w+|L2::cache_hint|nc|cg|ca|cs|cv|wb|wt|lu|uni|noftz)(?![\w:])")
DTYPES = {
    **{
        f"{kind}{8 * size}": f"{name}{8 * size}"
        for size in (1, 2, 4, 8)
        for kind, name in (("b", "uint"), ("u", "uint"), ("s", "int"))
    },
    **{"f16": "float16", "f32": "float32", "f64": "float64", "bf16": "uint16", "pred": "bool"},
    **{"f16x2": "uint32", "bf16x2": "uint32", "f32x2": "uint64", "s16x2": "uint32", "u16x2": "uint32"},
}
FILES = {"bool": "P", "uint16": "H", "uint32": "W", "uint64": "D"}
STORED = {"pred": "bool", "b16": "uint16", "b32": "uint32", "f32": "uint32", "b64": "uint64", "f64": "uint64"}
STORED |= {f"{kind}{size}": f"uint{size}" for kind in "us" for size in (16, 32, 64)}
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

    Beside it stand `registers[n]`, the names that it touches, and `starts[n]`, the number of its first instruction.
    Raises `Unknown` for what has no semantics here.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.ignored: set[str] = set()
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
        self.read_elsewhere = self._read_before_written(ranges)
        made = [_Block(self, range(*limits)) for limits in ranges]
        self.blocks: list[Any] = [block.function for block in made]

    def block_of(self, label: str) -> int:
        """The number of the block behind a label."""
        return self.number_at.get(self.kernel.labels[label], len(self.starts))

    def where(self, block: int) -> str:
        """The first instruction of a block, as errors name it."""
        return self.kernel.where(self.starts[block]) if block < len(self.starts) else "the end"

    def _registers(self, numbers: range) -> set[str]:
        return {name for number in numbers for name in self.kernel.instructions[number].registers()}

    def _read_before_written(self, ranges: list[tuple[int, int]]) -> set[str]:
        """Registers that some block reads before it writes them, or writes in some threads only: those live in the file."""
        found: set[str] = set()
        for limits in ranges:
            written: set[str] = set()
            for number in range(*limits):
                instruction = self.kernel.instructions[number]
                targets = set() if CONTROL.fullmatch(instruction.opcode) else _targets(instruction)
                reads = set(instruction.registers()) - targets
                for operand in instruction.operands[1:]:
                    reads |= set(names(operand))
                found |= (reads | targets if instruction.guard or CONTROL.fullmatch(instruction.opcode) else reads) - written
                if not instruction.guard:
                    written |= targets
        return found & self.rows.keys()

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


NO_TARGET = ("st", "red", "stmatrix", "cp", "bar", "fence", "membar", "prefetch", "setmaxnreg", "griddepcontrol", "nanosleep")


def _targets(instruction: Instruction) -> set[str]:
    """The registers that an instruction writes."""
    words = instruction.opcode.split(".")
    if not instruction.operands or words[0] in NO_TARGET or (words[0] == "mbarrier" and not words[1].endswith("wait")):
        return {str(x) for x in instruction.operands[:1] if words[0] == "mbarrier" and "arrive" in words and isinstance(x, str)}
    first = instruction.operands[0]
    two = words[0] in ("elect", "shfl", "setp") and isinstance(instruction.operands[1], str)
    listed = set() if isinstance(first, Memory | Tensor) else set(names(first))
    if two and (words[0] == "elect" or len(instruction.operands) > {"shfl": 5, "setp": 3 + (len(words) > 3)}[words[0]]):
        listed.add(str(instruction.operands[1]))
    return listed


class _Block:
    """Writes the Python of a block: `read`, `write`, `address`, `mask` and `line` are what the table's functions use."""

    def __init__(self, program: Program, numbers: range) -> None:
        self.program, self.kernel = program, program.kernel
        self.lines: list[str] = []
        self.scope: dict[str, Any] = {"np": np, **arithmetic.HELPERS}
        self.current: dict[str, str] = {}  # register -> the local that has its value
        self.views: dict[tuple[str, str], str] = {}  # (local, dtype) -> the local of its view
        self.alias: dict[str, str] = {}  # local -> the register whose row of the file it is
        self.dtype: dict[str, str] = {}  # local -> as which it stands
        self.written: dict[str, str] = {}  # register -> local
        self.made = 0
        self.number = numbers.start
        first = self.kernel.instructions[numbers.start]
        if CONTROL.fullmatch(first.opcode):
            self.function: Any = first
            return
        for self.number in numbers:
            self._instruction(self.kernel.instructions[self.number])
        self._store()
        name = f"block_{numbers.start}"
        source = "\n ".join([f"def {name}(c, s):", "n = c.tid[s].size", *self.lines])
        exec(compile(source, f"<{self.kernel.name}, PTX line {first.line}>", "exec"), self.scope)
        self.function = self.scope[name]

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
            found = pattern.fullmatch(opcode)
            if found:
                function(self, operands, **found.groupdict())
                return
        raise Unknown(f"no semantics for {self.kernel.where(self.number)}")

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
        """The local of a register, an immediate or a special register, as type `kind`."""
        if not isinstance(operand, str):
            raise Unknown(f"operand {operand} of {self.kernel.where(self.number)}")
        dtype = DTYPES[kind]
        if operand not in self.program.rows:
            return self._immediate(operand, dtype)
        if operand not in self.current:
            file, row = self.program.rows[operand]
            made = self.local(f"c.{file}[{row}, s]", STORED[self.kernel.types[operand]])
            self.current[operand], self.alias[made] = made, operand
        return self.as_dtype(self.current[operand], dtype)

    def as_dtype(self, local: str, dtype: str) -> str:
        """The same bits as another dtype of that width."""
        if self.dtype[local] == dtype:
            return local
        if np.dtype(dtype).itemsize != np.dtype(self.dtype[local]).itemsize:
            raise Unknown(f"a register of another width in {self.kernel.where(self.number)}")
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
        elif dtype == "bool":
            return self.constant(np.bool_(int(text, 0)))
        elif NUMBER.fullmatch(text):
            is_float = text[:2].lower() in ("0f", "0d")
            value = int(text[2:], 16) if is_float else int(text.rstrip("U"), 0)
        else:
            raise Unknown(f"operand {text} of {self.kernel.where(self.number)}")
        return self.constant(np.array(value & (1 << 8 * size) - 1, f"uint{8 * size}").view(dtype)[()])

    def write(self, register: Operand, kind: str, expression: str, *, alias: str = "") -> None:
        """A register's new value, in the threads of the guard. `alias`: the local that it only renames."""
        assert isinstance(register, str)
        if register == "_":
            return
        dtype, stored = DTYPES[kind], STORED[self.kernel.types[register]]
        if self.instruction.guard:
            old = self.read(register, kind)
            expression, alias = f"np.where({self.mask()}, {expression}, {old})", ""
        made = self.local(expression, dtype)
        if alias in self.alias:
            self.alias[made] = self.alias[alias]
        if np.dtype(dtype).itemsize != np.dtype(stored).itemsize:
            raise Unknown(f"a register of another width in {self.kernel.where(self.number)}")
        self.current[register] = self.written[register] = made

    def _store(self) -> None:
        """Puts back what other blocks read. A local that is another register's row is copied first."""
        kept = {register: local for register, local in self.written.items() if register in self.program.read_elsewhere}
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
        return f"pack(n, np.{DTYPES[kind]}, {', '.join(self.read(item, kind) for item in items)})"

    def unpack(self, targets: tuple[Operand, ...], kind: str, array: str) -> None:
        """The rows of an array [registers, threads] into registers, widened where those are wider."""
        made = self.local(array, "")
        signed = DTYPES[kind].startswith("int")
        for number, target in enumerate(targets):
            if target == "_":
                continue
            size, own = self.width(str(target)), int(re.sub(r"\D", "", DTYPES[kind]))
            if size == own:
                self.write(target, kind, f"{made}[{number}]")
            else:
                self.write(
                    target, f"{'s' if signed else 'u'}{size}", f"{made}[{number}].astype(np.{'int' if signed else 'uint'}{size})"
                )


def items(operand: Operand) -> tuple[Operand, ...]:
    """The registers of a vector, or the one."""
    return operand.items if isinstance(operand, Vector) else (operand,)


# ------------------------------------------------ arithmetic

INTEGER, FLOAT = r"(?P<kind>[bsu](16|32|64))", r"(?P<kind>f32|f64|f16)"
SYMBOLS = {"add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^"}


@semantics(
    rf"(?P<op>add|sub)\.{INTEGER}|(?P<op2>mul)\.lo\.(?P<kind2>[su](16|32|64))|(?P<op3>and|or|xor)\.(?P<kind3>pred|b(16|32|64))"
)
def integer(b: _Block, o: list[Operand], **groups: str) -> None:
    op = groups["op"] or groups["op2"] or groups["op3"]
    kind = groups["kind"] or groups["kind2"] or groups["kind3"]
    b.write(o[0], kind, f"{b.read(o[1], kind)} {SYMBOLS[op]} {b.read(o[2], kind)}")


@semantics(rf"(?P<op>add|sub|mul)(\.rn)?(?P<ftz>\.ftz)?\.{FLOAT}")
def floating(b: _Block, o: list[Operand], op: str, ftz: str, kind: str) -> None:
    b.write(o[0], kind, flushed(f"{b.read(o[1], kind)} {SYMBOLS[op]} {b.read(o[2], kind)}", ftz))


def flushed(expression: str, ftz: str | None) -> str:
    return f"ftz({expression})" if ftz else expression


@semantics(r"fma\.rn(?P<ftz>\.ftz)?\.(?P<kind>f32|f64)")
def fused(b: _Block, o: list[Operand], ftz: str, kind: str) -> None:
    b.write(o[0], kind, flushed(f"fma({', '.join(b.read(x, kind) for x in o[1:])})", ftz))


@semantics(r"(?P<op>fma|add|sub)(\.rn)?\.f32\.(?P<kind>f16|bf16)")
def mixed(b: _Block, o: list[Operand], op: str, kind: str) -> None:
    """The last operand is float32, as the result, and the others are of 16 bits: each is widened, which is exact."""
    narrow = [f"from_bf16({b.read(x, kind)})" if kind == "bf16" else f"{b.read(x, kind)}.astype(np.float32)" for x in o[1:-1]]
    given = [*narrow, b.read(o[-1], "f32")]
    b.write(o[0], "f32", f"fma({', '.join(given)})" if op == "fma" else f" {SYMBOLS[op]} ".join(given))


@semantics(r"fma\.rm(?P<ftz>\.ftz)?\.f32")
def fused_down(b: _Block, o: list[Operand], ftz: str) -> None:
    b.write(o[0], "f32", flushed(f"fma_down({', '.join(b.read(x, 'f32') for x in o[1:])})", ftz))


@semantics(r"(?P<op>add|sub|mul|fma|min|max)(\.rn)?(?P<ftz>\.ftz)?(?P<nan>\.NaN)?\.(?P<kind>f32x2|f16x2|bf16x2|bf16|s16x2|u16x2)")
def packed(b: _Block, o: list[Operand], op: str, ftz: str, nan: str, kind: str) -> None:
    if op in ("min", "max") and not nan:
        op = f"f{op}"
    given = ", ".join(b.read(x, kind) for x in o[1:])
    b.write(o[0], kind, f"by_elements({op!r}, {kind.removesuffix('x2')!r}, {given})")


@semantics(r"mul\.(?P<part>wide|hi)\.(?P<kind>[su](16|32|64))")
def product(b: _Block, o: list[Operand], part: str, kind: str) -> None:
    x, y = (b.read(operand, kind) for operand in o[1:3])
    if part == "hi":
        b.write(o[0], kind, f"high({x}, {y})")
    else:
        b.write(o[0], wider(kind), f"{x}.astype(np.{DTYPES[wider(kind)]}) * {y}")


def wider(kind: str) -> str:
    return f"{kind[0]}{2 * int(kind[1:])}"


@semantics(r"mad\.(?P<part>wide|lo)\.(?P<kind>[su](16|32|64))")
def multiply_add(b: _Block, o: list[Operand], part: str, kind: str) -> None:
    x, y = (b.read(operand, kind) for operand in o[1:3])
    wide = kind if part == "lo" else wider(kind)
    b.write(o[0], wide, f"{x}.astype(np.{DTYPES[wide]}) * {y} + {b.read(o[3], wide)}")


@semantics(r"(?P<op>div|rem)\.(?P<kind>[su](16|32|64))")
def integer_division(b: _Block, o: list[Operand], op: str, kind: str) -> None:
    b.write(o[0], kind, f"{op}({b.read(o[1], kind)}, {b.read(o[2], kind)})")


@semantics(r"div\.(full|rn|approx)(?P<ftz>\.ftz)?\.(?P<kind>f32|f64)")
def division(b: _Block, o: list[Operand], ftz: str, kind: str) -> None:
    b.write(o[0], kind, flushed(f"{b.read(o[1], kind)} / {b.read(o[2], kind)}", ftz))


@semantics(r"(?P<op>min|max)(?P<ftz>\.ftz)?(?P<nan>\.NaN)?\.(?P<kind>[su](16|32|64)|f32|f64|f16)")
def extremum(b: _Block, o: list[Operand], op: str, ftz: str, nan: str, kind: str) -> None:
    function = f"np.f{op}" if kind[0] == "f" and not nan else f"np.{op}imum"
    given = f"{b.read(o[1], kind)}, {b.read(o[2], kind)}"
    if len(o) > 3:
        given = f"{function}({given}), {b.read(o[3], kind)}"
    b.write(o[0], kind, f"{function}({given})")


@semantics(r"(?P<op>neg|abs)(?P<ftz>\.ftz)?\.(?P<kind>s(16|32|64)|f32|f64|f16)|(?P<op2>not)\.(?P<kind2>pred|b(16|32|64))")
def unary(b: _Block, o: list[Operand], op: str, ftz: str, kind: str, op2: str, kind2: str) -> None:
    kind = kind or kind2
    b.write(o[0], kind, f"{ {'neg': '-', 'abs': 'np.abs', 'not': '~'}[op or op2] }({b.read(o[1], kind)})")


@semantics(r"(?P<op>neg|abs)(\.ftz)?\.(?P<kind>bf16|bf16x2|f16x2)")
def sign_bits(b: _Block, o: list[Operand], op: str, kind: str) -> None:
    bits = 0x80008000 if kind.endswith("x2") else 0x8000
    read, dtype = b.read(o[1], kind), DTYPES[kind]
    b.write(
        o[0],
        kind,
        f"{read} ^ np.{dtype}({bits})"
        if op == "neg"
        else f"{read} & np.{dtype}({bits ^ (0xFFFFFFFF if bits > 1 << 16 else 0xFFFF)})",
    )


@semantics(r"copysign\.f32")
def copysign(b: _Block, o: list[Operand]) -> None:
    b.write(o[0], "f32", f"np.copysign({b.read(o[2], 'f32')}, {b.read(o[1], 'f32')})")


FUNCTIONS = {"ex2": "np.exp2({})", "lg2": "np.log2({})", "rcp": "1 / {}", "sqrt": "np.sqrt({})", "rsqrt": "1 / np.sqrt({})"}
FUNCTIONS |= {"tanh": "np.tanh({})", "sin": "np.sin({})", "cos": "np.cos({})"}


@semantics(r"(?P<op>ex2|lg2|rcp|sqrt|rsqrt|tanh|sin|cos)\.(approx|rn)(?P<ftz>\.ftz)?\.(?P<kind>f32|f64)")
def function(b: _Block, o: list[Operand], op: str, ftz: str, kind: str) -> None:
    expression = FUNCTIONS[op].format(b.read(o[1], kind))
    b.write(o[0], kind, flushed(f"np.{DTYPES[kind]}({expression})", ftz))


@semantics(r"(?P<op>shl|shr)\.(?P<kind>[bsu](16|32|64))")
def shift(b: _Block, o: list[Operand], op: str, kind: str) -> None:
    value, symbol, bits = b.read(o[1], kind), "<<" if op == "shl" else ">>", int(kind[1:])
    if o[2] not in b.program.rows and int(str(o[2]), 0) < bits:
        b.write(o[0], kind, f"{value} {symbol} np.{DTYPES[kind]}({int(str(o[2]), 0)})")
    else:
        b.write(o[0], kind, f"shift({value}, {b.read(o[2], 'u32')}, {op == 'shl'})")


@semantics(r"shf\.(?P<way>[lr])\.(?P<mode>wrap|clamp)\.b32")
def funnel(b: _Block, o: list[Operand], way: str, mode: str) -> None:
    b.write(o[0], "b32", f"funnel({', '.join(b.read(x, 'u32') for x in o[1:])}, {way == 'l'}, {mode == 'wrap'})")


@semantics(r"bfe\.(?P<kind>[su](32|64))")
def extract(b: _Block, o: list[Operand], kind: str) -> None:
    b.write(o[0], kind, f"extract({b.read(o[1], kind)}, {b.read(o[2], 'u32')}, {b.read(o[3], 'u32')})")


@semantics(r"bfi\.(?P<kind>b32|b64)")
def insert(b: _Block, o: list[Operand], kind: str) -> None:
    b.write(o[0], kind, f"insert({b.read(o[1], kind)}, {b.read(o[2], kind)}, {b.read(o[3], 'u32')}, {b.read(o[4], 'u32')})")


@semantics(r"(?P<op>popc|clz|brev)\.b32")
def count_bits(b: _Block, o: list[Operand], op: str) -> None:
    b.write(o[0], "b32", f"{op}({b.read(o[1], 'b32')})")


@semantics(r"lop3\.b32")
def logic(b: _Block, o: list[Operand]) -> None:
    b.write(o[0], "b32", f"lop3({', '.join(b.read(x, 'b32') for x in o[1:4])}, {int(str(o[4]), 0)})")


@semantics(r"prmt\.b32")
def permute(b: _Block, o: list[Operand]) -> None:
    b.write(o[0], "b32", f"permute({', '.join(b.read(x, 'b32') for x in o[1:4])})")


@semantics(r"selp\.(?P<kind>[bsuf](16|32|64))")
def select(b: _Block, o: list[Operand], kind: str) -> None:
    b.write(o[0], kind, f"np.where({b.read(o[3], 'pred')}, {b.read(o[1], kind)}, {b.read(o[2], kind)})")


COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
OPPOSITE = {"equ": "!=", "neu": "==", "ltu": ">=", "leu": ">", "gtu": "<=", "geu": "<"}  # true also where an operand is NaN


@semantics(
    r"""setp\.(?P<compare>eq|ne|lt|le|gt|ge|lo|ls|hi|hs|equ|neu|ltu|leu|gtu|geu|num|nan)
    (\.(?P<combine>and|or|xor))?(\.ftz)?\.(?P<kind>[bsu](16|32|64)|f32|f64|f16|bf16)"""
)
def compare(b: _Block, o: list[Operand], compare: str, combine: str, kind: str) -> None:
    other = ["pred"] if combine else []
    first = len(o) - 2 - len(other)
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
    if combine:
        third = b.read(o[-1], "pred")
        value, negation = f"{value} {SYMBOLS[combine]} {third}", f"~{value} {SYMBOLS[combine]} {third}"
    else:
        negation = f"~{value}"
    b.write(o[0], "pred", value)
    if first == 2:
        b.write(o[1], "pred", negation)


@semantics(r"setp\.(?P<compare>eq|lt|le|gt|ge)(\.ftz)?\.(?P<kind>f16|bf16)x2")
def compare_halves(b: _Block, o: list[Operand], compare: str, kind: str) -> None:
    x, y = (b.read(v, "b32") for v in o[2:])  # the first predicate is that of the lower halves
    for target, low in zip(o[:2], (True, False), strict=True):
        b.write(target, "pred", f"half({x}, {low}, {kind == 'bf16'}) {COMPARE[compare]} half({y}, {low}, {kind == 'bf16'})")


@semantics(r"mov\.(?P<kind>pred|[bsuf](16|32|64))")
def move(b: _Block, o: list[Operand], kind: str) -> None:
    bits = 0 if kind == "pred" else int(kind[1:])
    if isinstance(o[0], Vector):
        wide, part = b.read(o[1], f"u{bits}"), f"u{bits // len(o[0].items)}"
        for number, target in enumerate(o[0].items):
            if target != "_":
                b.write(target, part, f"({wide} >> np.{DTYPES[f'u{bits}']}({number * int(part[1:])})).astype(np.{DTYPES[part]})")
    elif isinstance(o[1], Vector):
        dtype, step = DTYPES[f"u{bits}"], bits // len(o[1].items)
        parts = [f"({b.read(x, f'u{step}')}.astype(np.{dtype}) << np.{dtype}({n * step}))" for n, x in enumerate(o[1].items)]
        b.write(o[0], f"u{bits}", " | ".join(parts))
    else:
        read = b.read(o[1], kind)
        b.write(o[0], kind, read, alias=read)


@semantics(r"cvta(\.to)?\.(global|param)\.u64|cvta\.param\.u64")
def generic_address(b: _Block, o: list[Operand]) -> None:
    read = b.read(o[1], "u64")
    b.write(o[0], "u64", read, alias=read)


NARROW = r"[su](8|16|32|64)"


@semantics(rf"cvt(?P<sat>\.sat)?\.(?P<to>{NARROW})\.(?P<of>{NARROW})")
def resize(b: _Block, o: list[Operand], sat: str, to: str, of: str) -> None:
    register = b.width(str(o[1])) if o[1] in b.program.rows else int(of[1:])
    value = b.read(o[1], f"{of[0]}{register}")
    if register > int(of[1:]):
        value = f"{value}.astype(np.{DTYPES[of]})"
    if sat:
        value = f"saturated({value}, np.{DTYPES[to]})"
    wide = b.width(str(o[0]))
    kind = f"{to[0]}{wide}"
    b.write(o[0], kind, f"{value}.astype(np.{DTYPES[to]})" + (f".astype(np.{DTYPES[kind]})" if wide > int(to[1:]) else ""))


@semantics(rf"cvt(\.rn)?\.(?P<to>f16|f32|f64|bf16)\.(?P<of>{NARROW})")
def to_float(b: _Block, o: list[Operand], to: str, of: str) -> None:
    register = b.width(str(o[1]))
    value = b.read(o[1], f"{of[0]}{register}") + (f".astype(np.{DTYPES[of]})" if register > int(of[1:]) else "")
    b.write(o[0], to, f"to_bf16({value}.astype(np.float32))" if to == "bf16" else f"{value}.astype(np.{DTYPES[to]})")


@semantics(rf"cvt\.(?P<how>rni|rzi|rmi|rpi)(\.ftz)?(\.sat)?\.(?P<to>{NARROW}|f32|f64)\.(?P<of>f16|f32|f64)")
def to_whole(b: _Block, o: list[Operand], how: str, to: str, of: str) -> None:
    function = {"rni": "np.rint", "rzi": "np.trunc", "rmi": "np.floor", "rpi": "np.ceil"}[how]
    value = f"{function}({b.read(o[1], of)})"
    b.write(o[0], to, f"saturated({value}, np.{DTYPES[to]})" if to[0] != "f" else f"{value}.astype(np.{DTYPES[to]})")


@semantics(r"cvt(\.ftz)?\.sat\.f32\.f32")
def to_unit(b: _Block, o: list[Operand]) -> None:
    b.write(o[0], "f32", f"np.fmin(np.fmax({b.read(o[1], 'f32')}, np.float32(0)), np.float32(1))")  # NaN: 0


@semantics(r"cvt(\.rn|\.rz)?(?P<ftz>\.ftz)?\.(?P<to>f16|bf16|f32|f64)\.(?P<of>f16|bf16|f32|f64)")
def between_floats(b: _Block, o: list[Operand], ftz: str, to: str, of: str) -> None:
    value = f"from_bf16({b.read(o[1], of)})" if of == "bf16" else b.read(o[1], of)
    b.write(o[0], to, f"to_bf16({value})" if to == "bf16" else f"{value}.astype(np.{DTYPES[to]})")


@semantics(r"cvt\.rn(?P<relu>\.relu)?\.(?P<to>f16|bf16)x2\.f32")
def two_halves(b: _Block, o: list[Operand], relu: str, to: str) -> None:
    high, low = (f"np.maximum({b.read(x, 'f32')}, np.float32(0))" if relu else b.read(x, "f32") for x in o[1:3])
    b.write(o[0], "b32", f"two_halves({high}, {low}, {to == 'bf16'})")


@semantics(r"cvt\.rna\.tf32\.f32")
def to_tf32(b: _Block, o: list[Operand]) -> None:
    b.write(o[0], "b32", f"to_tf32({b.read(o[1], 'b32')})")


@semantics(r"createpolicy\..*")
def policy(b: _Block, o: list[Operand]) -> None:
    b.program.ignored.add("createpolicy")
    b.write(o[0], "b64", b.constant(np.uint64(0)))


@semantics(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32|nanosleep\.u32|prefetch.*|griddepcontrol\..*")
def no_effect(b: _Block, o: list[Operand]) -> None:
    b.program.ignored.add(b.instruction.opcode.partition(".")[0])


# ------------------------------------------------ warps


@semantics(r"shfl\.sync\.(?P<mode>bfly|idx|up|down)\.b32")
def shuffle(b: _Block, o: list[Operand], mode: str) -> None:
    first = len(o) - 4
    value, lane, clamp = (b.read(x, "u32") for x in o[first : first + 3])
    made = b.local(f"c.shuffle({b.number}, s, wide({value}, n, np.uint32), {mode!r}, {lane}, {clamp})", "")
    b.write(o[0], "b32", f"{made}[0]")
    if first == 2:
        b.write(o[1], "pred", f"{made}[1]")


@semantics(r"redux\.sync\.(?P<op>add|min|max|and|or|xor)\.(?P<kind>[bsu]32)")
def reduction(b: _Block, o: list[Operand], op: str, kind: str) -> None:
    b.write(o[0], kind, f"c.reduce({b.number}, s, wide({b.read(o[1], kind)}, n, np.{DTYPES[kind]}), {op!r})")


@semantics(r"vote\.sync\.(?P<op>ballot|any|all)\.(?P<kind>b32|pred)")
def vote(b: _Block, o: list[Operand], op: str, kind: str) -> None:
    predicate = str(o[1])
    read = b.read(predicate.lstrip("!"), "pred")
    b.write(o[0], kind, f"c.vote({b.number}, s, wide({'~' if predicate[0] == '!' else ''}{read}, n, bool), {op!r})")


@semantics(r"elect\.sync")
def elect(b: _Block, o: list[Operand]) -> None:
    b.write(o[1], "pred", "c.elect(s)")
    b.write(o[0], "b32", "c.elected(s)")


@semantics(r"activemask\.b32")
def active(b: _Block, o: list[Operand]) -> None:
    b.write(o[0], "b32", "c.active(s)")


@semantics(r"bar\.warp\.sync")
def warp_barrier(b: _Block, o: list[Operand]) -> None:
    b.line("c.races.warp_barrier(c, s)")


@semantics(r"mma\.sync\.aligned\..*")
def multiply(b: _Block, o: list[Operand]) -> None:
    tensor_cores.mma(b.instruction.opcode)
    given = ", ".join(b.pack(items(x), "b32") for x in o[1:4])
    b.unpack(items(o[0]), "b32", f"c.mma({b.number}, s, {b.instruction.opcode!r}, {given})")


@semantics(r"ldmatrix\.sync\.aligned\.m8n8\.x[124](\.trans)?\.shared(::cta)?\.b16")
def load_matrix(b: _Block, o: list[Operand]) -> None:
    b.unpack(items(o[0]), "b32", f"c.load_matrix({b.number}, s, {b.address(o[1])}, {b.instruction.opcode!r})")


@semantics(r"stmatrix\.sync\.aligned\.m8n8\.x[124](\.trans)?\.shared(::cta)?\.b16")
def store_matrix(b: _Block, o: list[Operand]) -> None:
    b.line(f"c.store_matrix({b.number}, s, {b.address(o[0])}, {b.pack(items(o[1]), 'b32')}, {b.instruction.opcode!r})")


# ------------------------------------------------ memory

ORDERS = ("weak", "volatile", "relaxed", "acquire", "release", "acq_rel")
SCOPES = (
    r"(?P<words>(\.(weak|volatile|relaxed|acquire|release|acq_rel|cta|cluster|gpu|sys|global|shared(::cta)?))+)"  # in any order
)
ELEMENTS = r"(\.v(?P<count>[248]))?\.(?P<kind>[bsu](8|16|32|64)|f32|f64)"


@semantics(r"ld\.param\.(?P<kind>[bsuf](8|16|32|64))")
def load_parameter(b: _Block, o: list[Operand], kind: str) -> None:
    assert isinstance(o[1], Memory)
    if o[1].base not in b.kernel.parameters or o[1].offset:
        raise Unknown(f"operand {o[1]} of {b.kernel.where(b.number)}")
    bits = b.width(str(o[0]))
    b.write(o[0], f"u{bits}", f"np.uint64(c.parameters[{list(b.kernel.parameters).index(o[1].base)}]).astype(np.uint{bits})")


def order_and_space(words: str, default: str) -> tuple[str, str]:
    found = opcode_words(words)
    return next((order for order in ORDERS if order in found), default), "shared" if "shared" in found else "global"


@semantics(rf"ld{SCOPES}{ELEMENTS}")
def load(b: _Block, o: list[Operand], words: str, count: str, kind: str) -> None:
    order, space = order_and_space(words, "weak")
    used = b.instruction.used_bytes.bit_length()
    size = int(kind[1:]) // 8
    given = f"{b.address(o[1])}, {b.mask()}, {size}, {int(count or 1)}, {order!r}, {used}"
    b.unpack(items(o[0]), f"{kind[0] if kind[0] == 's' else 'u'}{8 * size}", f"c.load_{space}({b.number}, s, {given})")


@semantics(rf"st{SCOPES}{ELEMENTS}")
def store(b: _Block, o: list[Operand], words: str, count: str, kind: str) -> None:
    order, space = order_and_space(words, "weak")
    bits = int(kind[1:])
    given = items(o[1])
    wide = max([b.width(str(x)) for x in given if x in b.program.rows], default=max(bits, 16))
    values = b.pack(given, f"u{wide}") + (f".astype(np.uint{bits})" if wide > bits else "")
    b.line(f"c.store_{space}({b.number}, s, {b.address(o[0])}, {b.mask()}, {values}, {order!r})")


@semantics(
    rf"""(?P<op>atom|red){SCOPES}\.(?P<what>add|cas|exch|max|min|and|or|xor)(\.noftz)?
    (\.v(?P<count>[248]))?\.(?P<kind>[bsu](16|32|64)|f32|f64|f16x2|bf16x2)"""
)
def atomic(b: _Block, o: list[Operand], op: str, words: str, what: str, count: str, kind: str) -> None:
    order, space = order_and_space(words, "relaxed")
    if space != "global":
        raise Unknown(f"no semantics for {b.kernel.where(b.number)}")
    first = 1 if op == "atom" else 0
    given = [b.pack(items(x), kind) for x in o[first + 1 :]]
    call = f"c.atomic({b.number}, s, {b.address(o[first])}, {b.mask()}, [{', '.join(given)}], {what!r}, {order!r}, {kind!r})"
    if op == "atom":
        b.unpack(items(o[0]), {"f32": "u32", "f64": "u64"}.get(kind, kind), call)
    else:
        b.line(call)


@semantics(r"cp\.async\.shared(::cta)?\.global")
def copy(b: _Block, o: list[Operand]) -> None:
    size = int(str(o[2]), 0)
    count = f"wide({b.read(o[3], 'u32')}, n, np.int64)" if len(o) > 3 else "None"
    b.line(f"c.copy({b.number}, s, {b.address(o[0])}, {b.address(o[1])}, {size}, {count}, {b.mask()})")


@semantics(r"cp\.async\.(?P<what>commit_group|wait_group|wait_all)")
def copy_groups(b: _Block, o: list[Operand], what: str) -> None:
    b.line(
        "c.commit_copies()" if what == "commit_group" else f"c.wait_copies({int(str(o[0]), 0) if o else 0}, {what == 'wait_all'})"
    )


@semantics(r"cp\.async\.bulk\.tensor\.[1-5]d\.shared::(cta|cluster)\.global(\.tile)?\.mbarrier::complete_tx::bytes")
def load_box(b: _Block, o: list[Operand]) -> None:
    assert isinstance(o[1], Tensor)
    at = b.pack(o[1].coordinates, "s32")
    given = f"{b.address(o[0])}, {b.read(o[1].descriptor, 'u64')}, {at}, {b.address(o[2])}, {b.mask()}"
    b.line(f"c.load_box({b.number}, s, {given})")


@semantics(r"cp(?P<reduce>\.reduce)?\.async\.bulk\.tensor\.[1-5]d\.global\.shared::cta(\.add)?(\.tile)?\.bulk_group")
def store_box(b: _Block, o: list[Operand], reduce: str) -> None:
    assert isinstance(o[0], Tensor)
    at = b.pack(o[0].coordinates, "s32")
    b.line(f"c.store_box({b.number}, s, {b.address(o[1])}, {b.read(o[0].descriptor, 'u64')}, {at}, {bool(reduce)}, {b.mask()})")


@semantics(r"cp\.async\.bulk\.(?P<what>commit_group|wait_group)(?P<read>\.read)?")
def bulk_groups(b: _Block, o: list[Operand], what: str, read: str) -> None:
    given = f"{b.number}, s, {b.mask()}"
    b.line(f"c.commit_bulk({given})" if what == "commit_group" else f"c.wait_bulk({given}, {int(str(o[0]), 0)}, {bool(read)})")


@semantics(r"fence\.proxy\.async(\.(?P<space>shared::cta|shared::cluster|global))?")
def proxy_fence(b: _Block, o: list[Operand], space: str) -> None:
    b.line(f"c.races.proxy_fence(c, s, {b.mask()})")


@semantics(r"fence\.mbarrier_init\.release\.cluster")
def init_fence(b: _Block, o: list[Operand]) -> None:
    b.line(f"c.races.proxy_fence(c, s, {b.mask()})")


@semantics(r"fence\.(acq_rel|sc)\.(cta|gpu|sys|cluster)|membar\.(gl|cta|sys)")
def fence(b: _Block, o: list[Operand]) -> None:
    b.line(f"c.races.fence(c, s, {b.mask()})")


@semantics(r"mbarrier\.(try_wait|test_wait)\.parity\.shared(::cta)?\.b64")
def wait_barrier(b: _Block, o: list[Operand]) -> None:
    b.write(o[0], "pred", f"c.wait_barrier({b.number}, s, {b.address(o[1])}, {b.mask()}, wide({b.read(o[2], 'u32')}, n, np.int64))")


@semantics(r"mbarrier\.init\.shared(::cta)?\.b64")
def init_barrier(b: _Block, o: list[Operand]) -> None:
    b.line(f"c.init_barrier({b.number}, s, {b.address(o[0])}, {b.mask()}, wide({b.read(o[1], 'u32')}, n, np.int64))")


@semantics(r"mbarrier\.inval\.shared(::cta)?\.b64")
def end_barrier(b: _Block, o: list[Operand]) -> None:
    b.line(f"c.end_barrier({b.number}, s, {b.address(o[0])}, {b.mask()})")


@semantics(
    r"mbarrier\.arrive(?P<expect>\.expect_tx)?\.shared(::cta)?\.b64|mbarrier\.(?P<only>expect_tx)(\.relaxed\.cta)?\.shared::cta\.b64"
)
def arrive_barrier(b: _Block, o: list[Operand], expect: str, only: str) -> None:
    at = next(n for n, x in enumerate(o) if isinstance(x, Memory))
    value = f"wide({b.read(o[at + 1], 'u32')}, n, np.int64)" if len(o) > at + 1 else "np.ones(n, np.int64)"
    arrivals = "np.zeros(n, np.int64)" if only else "np.ones(n, np.int64)" if expect else value
    added = value if expect or only else "np.zeros(n, np.int64)"
    b.line(f"c.arrive_barrier({b.number}, s, {b.address(o[at])}, {b.mask()}, {arrivals}, {added})")


# ------------------------------------------------ sm_100's tensor memory


@semantics(r"tcgen05\.alloc\.cta_group::1\.sync\.aligned\.shared::cta\.b32")
def allocate(b: _Block, o: list[Operand]) -> None:
    b.line(f"c.allocate_tensor_memory({b.number}, s, {b.address(o[0])}, {b.mask()})")


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


@semantics(r"tcgen05\.mma\.cta_group::1\.kind::(f16|tf32)")
def tensor_multiply(b: _Block, o: list[Operand]) -> None:
    a = f"{b.address(o[1])}, True" if isinstance(o[1], Memory) else f"wide({b.read(o[1], 'u64')}, n, np.uint64), False"
    right, flags, add = (
        f"wide({b.read(o[2], 'u64')}, n, np.uint64)",
        f"wide({b.read(o[3], 'u32')}, n, np.int64)",
        b.read(o[4], "pred"),
    )
    given = f"{b.number}, s, {b.instruction.opcode!r}, {b.address(o[0])}, {a}, {right}, {flags}, wide({add}, n, bool)"
    b.line(f"c.tensor_multiply({given}, {b.mask()})")


@semantics(r"tcgen05\.commit\.cta_group::1\.mbarrier::arrive::one(\.shared::cluster)?\.b64")
def tensor_commit(b: _Block, o: list[Operand]) -> None:
    """Without a state space the address is generic; Triton 3.6 gives one of shared memory there all the same."""
    b.line(f"c.tensor_commit({b.number}, s, {b.address(o[0])}, {b.mask()})")
