#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every relative link of the documents leads to a file that is there, and to a heading in it.

    doc_links.py ROOT
"""
import pathlib
import re
import subprocess
import sys

LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def anchor(heading):
    """What a link to the heading says behind its #, as GitHub and its like make it."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip().lower())
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(text):
    return {anchor(line.lstrip("#")) for line in FENCE.sub("", text).splitlines() if line.startswith("#")}


def check_document(path, root):
    """Lines of what is wrong with one document's links."""
    for target in LINK.findall(FENCE.sub("", path.read_text())):
        if re.match(r"[a-z]+:", target):
            continue  # Another site's.
        name, _, heading = target.partition("#")
        linked = (path.parent / name).resolve() if name else path
        if not linked.exists():
            yield f"{path.relative_to(root)}: the link to {target} leads nowhere"
        elif heading and linked.suffix == ".md" and heading not in anchors(linked.read_text()):
            yield f"{path.relative_to(root)}: {target} names no heading of {linked.relative_to(root)}"


def main():
    root = pathlib.Path(sys.argv[1]).resolve()
    listing = subprocess.run(["git", "-C", str(root), "ls-files", "-co", "--exclude-standard", "--", "*.md"],
                             check=True, capture_output=True, text=True).stdout
    problems = [problem for name in listing.splitlines() for problem in check_document(root / name, root)]
    print("\n".join(problems) or "every link leads somewhere")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
