"""The text of one PTX kernel to its instructions: what Triton emits, inline assembly with scopes of its own included.

`parse(text)` gives a `Kernel`. Nothing here knows what an opcode means, only how statements are written: PTX ISA 4.2 to 4.5
(source, statements, identifiers, constants), 5.2 (types), 11.5 (.loc). A name declared in an inner scope `{ ... }` is renamed
`name@scope`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple


class Memory(NamedTuple):
    """`[base + offset]`, `base` a register, a parameter or a symbol."""

    base: str
    offset: int = 0


class Vector(NamedTuple):
    """`{a, b, ...}`."""

    items: tuple[str, ...]


class Tensor(NamedTuple):
    """`[descriptor, {coordinates}]`, as copies of tensors take it."""

    descriptor: str
    coordinates: tuple[str, ...]


Operand = str | Memory | Vector | Tensor  # str: a register, an immediate or a symbol


@dataclass
class Instruction:
    """One statement; mutants change `opcode` and `operands` in place."""

    opcode: str
    operands: list[Operand]
    guard: str = ""  # the predicate of `@p`
    negated: bool = False  # `@!p`
    line: int = 0  # in the PTX
    source: str = ""  # where Triton says that it comes from, "file:line"
    used_bytes: int = 0  # of a load: the mask of those that matter, 0 if all do

    def registers(self) -> Iterator[str]:
        """Every name that stands in the operands, and the guard."""
        if self.guard:
            yield self.guard
        for operand in self.operands:
            yield from names(operand)


def names(operand: Operand) -> Iterator[str]:
    """The names of an operand, immediates among them."""
    if isinstance(operand, str):
        yield operand
    elif isinstance(operand, Memory):
        yield operand.base
    elif isinstance(operand, Vector):
        yield from operand.items
    else:
        yield operand.descriptor
        yield from operand.coordinates


@dataclass
class Kernel:
    """The one entry of a module."""

    name: str
    threads: int  # of a CTA
    default_threads: int = 0  # of the default partition of a warp-specialised kernel; of others all
    cluster: int = 1  # CTAs of a cluster, side by side
    parameters: dict[str, int] = field(default_factory=dict)  # name -> bytes
    types: dict[str, str] = field(default_factory=dict)  # register -> b16, b32, b64, f32, f64, pred
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # -> the instruction that follows
    tables: dict[str, list[str]] = field(default_factory=dict)  # label of .branchtargets -> labels

    def where(self, number: int) -> str:
        """An instruction as errors name it."""
        found = self.instructions[number]
        return f"{found.opcode} (PTX line {found.line}{f', {found.source}' if found.source else ''})"


BYTES = {f"{kind}{bits}": bits // 8 for kind in "busf" for bits in (8, 16, 32, 64)}
STATEMENT = re.compile(
    r"""\s*(?:
    \.loc\s+(?P<file>\d+)\s+(?P<row>\d+)[^\n;]*\n |
    (?P<open>\{) | (?P<close>\}) |
    (?P<label>[A-Za-z_$][\w$]*)\s*:(?!:) |
    (?P<text>[^;{}]+(?:\{[^{}]*\}[^;{}]*)*;)
    )""",
    re.VERBOSE,
)
ASSERTION = re.compile(r"\{ // callseq (\d+),(?:(?!callseq)[\s\S])*?call\.uni __assertfail,[\s\S]*?\} // callseq \1")
PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)[^,)]*?([\w$]+)(?:\[(\d+)\])?\s*(?=[,)])")


def parse(text: str) -> Kernel:
    """Raises ValueError for what is not PTX of one kernel as Triton writes it."""
    files = {number: name.rpartition("/")[2] for number, name in re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', text)}
    text = ASSERTION.sub(lambda found: "call.__assertfail;" + "\n" * found[0].count("\n"), text)
    text = re.sub(r"//[^\n]*", "", text)
    head, opened, body = text.partition("\n{\n")
    entry, threads = re.search(r"\.entry\s+([\w$]+)", head), re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", head)
    if not (opened and entry and threads):
        raise ValueError("no PTX of a kernel: .entry, .reqntid or its body is missing")
    kernel = Kernel(entry[1], int(threads[1]))
    if clustered := re.search(r"\.reqnctapercluster\s+(\d+)", head):
        kernel.cluster = int(clustered[1])
    for kind, name, size in PARAMETER.findall(head[entry.end() :]):
        kernel.parameters[name] = int(size) if size else BYTES[kind]
    statements, declared = _scan(body, head.count("\n") + 3, files)
    _fill(kernel, statements, declared)
    kernel.default_threads = _default_threads(kernel)
    return kernel


def _default_threads(kernel: Kernel) -> int:
    """A warp-specialised kernel is known by changing its registers. Barrier 0 counts the threads of its default partition."""
    found = kernel.instructions
    if not any(instruction.opcode.startswith("setmaxnreg") for instruction in found):
        return kernel.threads
    counts = {str(i.operands[1]) for i in found if i.opcode == "bar.sync" and len(i.operands) == 2 and i.operands[0] == "0"}
    if len(counts) != 1:
        raise ValueError(f"{kernel.name}: partitions whose default one no barrier counts")
    return int(counts.pop(), 0)


class _Statement(NamedTuple):
    scope: tuple[int, ...]  # from the outermost in
    label: str
    text: str
    line: int
    source: str


def _scan(body: str, line: int, files: dict[str, str]) -> tuple[list[_Statement], dict[int, set[str]]]:
    """Statements with the scope they stand in, and the names that each inner scope declares."""
    statements: list[_Statement] = []
    declared: dict[int, set[str]] = {0: set()}
    scope: tuple[int, ...] = (0,)
    position, source, rest = 0, "", ""
    while True:
        found = STATEMENT.match(body, position)
        if not found:
            raise ValueError(f"PTX line {line}: not a statement: {body[position : position + 80].strip()!r}")
        start = found.end() - len(found[0].lstrip())
        line += body.count("\n", position, start)
        if found["open"]:
            declared[len(declared)] = set()
            scope = (*scope, len(declared) - 1)
        elif found["close"]:
            scope = scope[:-1]
            if not scope:
                return statements, declared
        elif found["file"]:
            source = f"{files.get(found['file'], found['file'])}:{found['row']}" if found["row"] != "0" else source
        elif found["label"]:
            declared[scope[-1]].add(found["label"])
            statements.append(_Statement(scope, found["label"], "", line, source))
        else:
            rest = " ".join(found["text"][:-1].split())
            if rest.startswith(".reg"):
                declared[scope[-1]].update(name.partition("<")[0].strip() for name in rest.split(None, 2)[2].split(","))
            statements.append(_Statement(scope, "", rest, line, source))
        line += body.count("\n", start, found.end())
        position = found.end()


def _fill(kernel: Kernel, statements: list[_Statement], declared: dict[int, set[str]]) -> None:
    last_label, used_bytes = "", 0
    for scope, label, text, line, source in statements:

        def local(name: str, scope: tuple[int, ...] = scope) -> str:
            inner = next((n for n in reversed(scope[1:]) if name in declared[n]), 0)
            return f"{name}@{inner}" if inner else name

        if label:
            last_label = local(label)
            kernel.labels[last_label] = len(kernel.instructions)
        elif text.startswith(".reg"):
            _, kind, listed = text.split(None, 2)
            for name in map(str.strip, listed.split(",")):
                ranged = re.fullmatch(r"(\S+)<(\d+)>", name)
                for each in [f"{ranged[1]}{n}" for n in range(int(ranged[2]))] if ranged else [local(name)]:
                    kernel.types[each] = kind[1:]
        elif text.startswith(".branchtargets"):
            kernel.tables[last_label] = [local(target.strip()) for target in text.split(None, 1)[1].split(",")]
        elif text.startswith(".pragma"):
            mask = re.search(r"used_bytes_mask (0x[0-9a-fA-F]+)", text)
            used_bytes = int(mask[1], 16) if mask else 0  # of the load that follows
        elif text.startswith("."):
            raise ValueError(f"PTX line {line}: unknown directive {text.split()[0]}")
        elif text:
            guard = re.match(r"@(!?)\s*(\S+)\s+", text)
            opcode, _, rest = text[guard.end() if guard else 0 :].partition(" ")
            operands = [_operand(part, local) for part in _split(rest)]
            made = Instruction(opcode, operands, line=line, source=source, used_bytes=used_bytes)
            if guard:
                made.guard, made.negated = local(guard[2]), bool(guard[1])
            kernel.instructions.append(made)
            used_bytes = 0


def _split(text: str) -> list[str]:
    """At the commas that stand in no bracket; `a|b`, a result and its predicate, are two."""
    return [part.strip() for part in re.split(r",(?![^\[{]*[\]}])(?![^\[]*\])|\|", text) if part.strip()]


def _operand(text: str, local) -> Operand:  # type: ignore[no-untyped-def]
    if text[0] == "{":
        return Vector(tuple(local(item.strip()) for item in text[1:-1].split(",")))
    if text[0] != "[":
        return local(text)
    inner = text[1:-1].strip()
    if "{" in inner:
        descriptor, _, coordinates = inner.partition("{")
        return Tensor(local(descriptor.strip(" ,")), tuple(local(item.strip()) for item in coordinates.strip("} ").split(",")))
    base, _, offset = inner.partition("+")
    return Memory(local(base.strip()), int(offset, 0) if offset.strip() else 0)
