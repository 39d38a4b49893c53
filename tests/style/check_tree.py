#!/usr/bin/env python3
"""Checks the source tree against rules.py: includes, file lengths, headers, and calls that belong to one file.

usage: check_tree.py ROOT
Prints one line per violation; exit status 1 if there is any.
"""
import pathlib
import re
import sys

import rules

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)
COMMENT = re.compile(r'/\*.*?\*/|//[^\n]*', re.DOTALL)


def matches(path, patterns):
    return any(re.fullmatch(pattern, path) for pattern in patterns)


def check_ours(path, folder, header, exists):
    """An include in quotes: written from the root, and of a folder that may be used."""
    target = header.split("/")[0]
    if header.endswith(".c"):
        yield f'includes a .c file: "{header}"'
    if "/" not in header or target not in rules.CODE_FOLDERS:
        yield f'"{header}" is not written from the repository root'
        return
    if not header.endswith(".pb-c.h") and not exists(header):
        yield f'"{header}" does not exist'
    if folder == "tests" or target == folder:
        return
    if target not in rules.OURS.get(folder, []):
        yield f'"{header}": {folder} may not include {target}'


def check_outside(path, header):
    for pattern, files in rules.OUTSIDE.items():
        if re.fullmatch(pattern, header) and not matches(path, files):
            yield f"<{header}> belongs to {', '.join(files) or 'tests'} only"


def check_messages(path, folder, header):
    if folder in rules.MESSAGE_FOLDERS and matches(header, rules.MESSAGE_HEADERS):
        if not matches(path, rules.MESSAGE_FILES):
            yield f'"{header}": messages stop at the server files of {folder}'


def check_file(path, text, exists):
    """All violations of one file. `path` is relative to the root, `exists` answers for such a path."""
    folder = path.split("/")[0]
    n_lines = text.count("\n") + (not text.endswith("\n"))
    if n_lines > rules.MAX_LINES:
        yield f"{n_lines} lines; at most {rules.MAX_LINES}"
    if not path.endswith((".c", ".h", ".cu", ".cuh", ".cpp")):
        return
    has_header = path.endswith((".c", ".cpp")) and exists(path.rsplit(".", 1)[0] + ".h")  # which then says it
    if not text.startswith("/*") and not has_header:
        yield "does not begin with a comment that says what the file is responsible for"
    if path.endswith((".h", ".cuh")) and "#pragma once" not in text:
        yield "no #pragma once"
    code = COMMENT.sub("", text)
    for ours, outside in INCLUDE.findall(code):
        if ours:
            yield from check_ours(path, folder, ours, exists)
            yield from check_messages(path, folder, ours)
        if folder != "tests":
            yield from check_outside(path, ours or outside)
    if folder != "tests":
        for pattern, files in rules.CALLS.items():
            if re.search(pattern, code) and not matches(path, files):
                yield f"uses {pattern}, which belongs to {', '.join(files)}"


def check_tree(root):
    for folder in rules.CODE_FOLDERS:
        for file in sorted((root / folder).rglob("*")):
            if file.suffix not in (".c", ".h", ".cu", ".cuh", ".cpp", ".proto", ".py") or not file.is_file():
                continue
            path = file.relative_to(root).as_posix()
            text = file.read_text(encoding="utf-8")
            for problem in check_file(path, text, lambda name: (root / name).is_file()):
                yield f"{path}: {problem}"


def main():
    problems = list(check_tree(pathlib.Path(sys.argv[1])))
    print("\n".join(problems) if problems else "the tree follows the rules")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
