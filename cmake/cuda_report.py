#!/usr/bin/env python3
"""What `ptxas -v` said of the kernels of one file, as a table: registers, bytes of shared memory, stack and spills.

usage: cuda_report.py SOURCE.cu <what nvcc said >TABLE
Fails where a kernel marked CUDA_HOT spills registers, or where a marked one was not compiled.
"""
import re
import sys

ENTRY = re.compile(r"Compiling entry function '(\S+)' for 'sm_(\d+)'")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers(?:.*?, (\d+) bytes smem)?")
HOT = re.compile(r"\bCUDA_HOT\s+static\s+__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(")


def kernel_name(mangled):
    """"_ZN...6matvecILi2ELj4EE..." -> "matvec<2,4>": the last name of the ABI's mangling, and its numbers."""
    names, at = [], 0
    while at < len(mangled):
        length = re.match(r"(\d+)", mangled[at:])
        if not length:
            if names and mangled[at] in "IEvP":
                break
            at += 1
            continue
        start = at + length.end()
        names.append(mangled[start:start + int(length.group(1))])
        at = start + int(length.group(1))
    arguments = re.match(r"I((?:L[a-z]\d+E|[a-z]|6__half)+)E", mangled[at:])
    if not names or not arguments:
        return names[-1] if names else mangled
    words = re.findall(r"L[a-z](\d+)E|(6__half)|([a-z])", arguments.group(1))
    return f"{names[-1]}<{','.join(number or ('f16' if half else {'f': 'f32'}.get(letter, letter)) for number, half, letter in words)}>"


def kernels(lines):
    """(kernel, architecture, registers, shared, stack, spills) of each entry."""
    name = None
    for line in lines:
        if match := ENTRY.search(line):
            name, architecture = kernel_name(match.group(1)), int(match.group(2))
            stack = spills = 0
        elif name and (match := SPILLS.search(line)):
            stack, spills = int(match.group(1)), int(match.group(2)) + int(match.group(3))
        elif name and (match := USED.search(line)):
            yield name, architecture, int(match.group(1)), int(match.group(2) or 0), stack, spills
            name = None


def main():
    source = sys.argv[1]
    with open(source, encoding="utf-8") as file:
        hot = set(HOT.findall(file.read()))
    rows = sorted(set(kernels(sys.stdin)))
    problems = [f"{source}: {name} is CUDA_HOT, and spills {spills} bytes on sm_{architecture}"
                for name, architecture, _, _, _, spills in rows if spills and name.split("<")[0] in hot]
    problems += [f"{source}: {name} is CUDA_HOT, and was not compiled"
                 for name in sorted(hot - {row[0].split("<")[0] for row in rows})]
    for name, architecture, registers, shared, stack, spills in rows:
        mark = "hot" if name.split("<")[0] in hot else ""
        print(f"{name:36} sm_{architecture:<4} {registers:4} registers {shared:6} shared {stack:5} stack {spills:5} spilled {mark}".rstrip())
    print("\n".join(problems), file=sys.stderr, end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
