#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Rules over the text of the sources: what reviewers should not have to look for.

    source_rules.py ROOT
"""
import pathlib
import re
import subprocess
import sys

MAX_COLUMNS = 100
MAX_LINES = 600
CODE = {".h", ".cc", ".cu", ".cuh"}
PRODUCT = ("proto/", "cuda/", "client/", "daemon/")
TOP_LEVEL = {"CMakeLists.txt", "CMakePresets.json", "LICENSE", "Makefile", "README.md", "bench", "client",
             "cuda", "daemon", "deploy", "docs", "proto", "tests"}

# (pattern, what is wrong, exempted when this stands on the same or the line before)
BANNED = [
    (r"\bstd::shared_ptr\b|\bstd::make_shared\b", "shared ownership needs its reason in a comment "
     "`// shared: ...` in the file", None),
    (r"\bsleep_for\b|\busleep\(|\bnanosleep\(", "sleeping is no synchronisation", "// sleeps:"),
    (r"\bsource_location\b|\bviews::", "not in this toolchain", None),
    (r"\bthrow\b(?!\w)", "errors are absl::Status", "// throws:"),
    (r"\busing namespace\b", "name what is used", None),
]
TODO = re.compile(r"\b(TODO|FIXME|XXX)\b(?!\(#\d+\))")


def tracked_files(root):
    listing = subprocess.run(["git", "-C", str(root), "ls-files", "-co", "--exclude-standard"],
                             check=True, capture_output=True, text=True).stdout
    return [name for name in listing.splitlines() if (root / name).is_file()]


def strip_comment(line):
    return re.sub(r'"(\\.|[^"\\])*"', '""', line).split("//")[0]


def check_code(name, text):
    lines = text.splitlines()
    if len(lines) > MAX_LINES:
        yield f"{name}: {len(lines)} lines, at most {MAX_LINES}: split it by role"
    if name.endswith((".h", ".cuh")) and "#pragma once" not in text:
        yield f"{name}: a header without #pragma once"
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_COLUMNS:
            yield f"{name}:{number}: {len(line)} columns, at most {MAX_COLUMNS}"
        if TODO.search(line):
            yield f"{name}:{number}: a TODO needs an issue number: TODO(#12)"
        if not name.startswith(PRODUCT):
            continue
        for pattern, wrong, exemption in BANNED:
            if not re.search(pattern, strip_comment(line)):
                continue
            if "shared" in wrong and re.search(r"//.*\bshared:", text):
                continue
            near = lines[max(0, number - 3):number]
            if exemption and any(exemption in other for other in near):
                continue
            yield f"{name}:{number}: {wrong}"


def config_keys(root):
    """The keys of crumbd's configuration, as deploy/crumbd.toml lists them: {section: {key}}."""
    keys = {}
    for line in (root / "deploy/crumbd.toml").read_text().splitlines():
        if line.startswith("["):
            section = keys.setdefault(line.strip("[]"), set())
        elif match := re.match(r"# (\w+) = ", line):
            section.add(match[1])
    return keys


def check_messages(name, text, keys):
    """A message that sends someone to a key of the configuration names one that is there."""
    literals = re.sub(r'"\s*\n\s*"', "", text)  # As the compiler joins them.
    sections = "|".join(keys)
    for section, key in re.findall(rf"\[({sections})\] (\w+)", literals):
        if key not in keys[section]:
            yield f"{name}: says [{section}] {key}, which is no key of crumbd's configuration"
    known = set().union(*keys.values())
    for message in re.findall(r'"(?:\\.|[^"\\\n])*"', literals):
        for key in re.findall(r"\b(?:raise|lower|or) ([a-z]+(?:_[a-z]+)+)\b", message):
            if key not in known:
                yield f"{name}: says to change {key}, which is no key of crumbd's configuration"


def check(root):
    """Lines of what is wrong."""
    problems = []
    keys = config_keys(root)
    for name in tracked_files(root):
        top = name.split("/")[0]
        if top not in TOP_LEVEL and not top.startswith("."):
            problems.append(f"{name}: not one of the top-level names")
        path = root / name
        if path.suffix in CODE or path.suffix == ".py" or path.name == "CMakeLists.txt":
            text = path.read_text()
            head = "\n".join(text.splitlines()[:2])
            if "SPDX-License-Identifier: Apache-2.0" not in head:
                problems.append(f"{name}: no SPDX line at its top")
            if path.suffix in CODE:
                problems += check_code(name, text)
            if path.suffix in CODE and name.startswith("daemon/"):
                problems += check_messages(name, text, keys)
    return problems


def main():
    problems = check(pathlib.Path(sys.argv[1]))
    print("\n".join(problems) or "every file follows the rules")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
