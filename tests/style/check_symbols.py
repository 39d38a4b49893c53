#!/usr/bin/env python3
"""Checks that every external symbol of foo.c starts with foo_ (or is foo), in all static libraries of a build tree.

A file that is one of several parts may use the name of the whole: options_value.c may define options_string().
usage: check_symbols.py BUILD_TREE
"""
import pathlib
import re
import subprocess
import sys

import rules


def allowed(object_name, symbol):
    """object_name: "options_value.c.o"; a leading part of the stem, cut at '_' or '-', begins the symbol."""
    if any(re.fullmatch(pattern, symbol) for pattern in rules.FREE_SYMBOLS):
        return True
    words = re.sub(r"\.cu?\.o$", "", object_name).replace("-", "_").split("_")
    prefixes = ["_".join(words[:n]) for n in range(1, len(words) + 1)]
    return any(symbol == prefix or symbol.startswith(prefix + "_") for prefix in prefixes)


def check_library(library):
    listing = subprocess.run(["nm", "--defined-only", "--extern-only", "--format=posix", library],
                             check=True, capture_output=True, text=True).stdout
    member = ""
    for line in listing.splitlines():
        header = re.fullmatch(r".*\[(.+)\]:", line)
        if header:
            member = header.group(1)
        elif line.strip():
            symbol, kind = line.split()[:2]
            if kind in "VW":  # weak: C++ made it of a header
                continue
            generated = any(re.fullmatch(pattern, member) for pattern in rules.GENERATED_OBJECTS)
            if not generated and not allowed(member, symbol):
                yield f"{library.name}: {member} defines {symbol}"


def main():
    libraries = sorted(pathlib.Path(sys.argv[1]).rglob("*.a"))
    if not libraries:
        print("no static libraries: build first")
        return 1
    problems = [problem for library in libraries for problem in check_library(library)]
    print("\n".join(problems) if problems else f"all symbols of {len(libraries)} libraries bear their file's name")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
