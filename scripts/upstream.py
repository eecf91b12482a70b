#!/usr/bin/env python3
"""Fetch, unpack and patch the pinned llama.cpp source.

llama.cpp is never committed to this repository. It comes out of the llama-cpp-python sdist that
``patches/UPSTREAM`` pins by version and sha256, and is unpacked to ``build/upstream/llama.cpp``, one tree for all
build folders. That tree is a small git repository of its own: a ``pristine`` commit and one commit per patch, so
that patches are developed with plain git (edit, commit, rebase) and written back by ``refresh``.

Only the standard library is used and any Python >= 3.9 will do, because CMake runs this at configure time.

Environment
-----------
LLAMA_DGE_UPSTREAM : path of a local copy of the sdist; nothing is downloaded then. Its sha256 is checked, too.
"""

from __future__ import annotations

import argparse
import email
import email.policy
import re
import shutil
import sys
from collections.abc import Mapping, Sequence

from upstream_tree import (
    PATCH_NAME,
    PATCHES,
    TREE,
    WORK,
    UpstreamError,
    apply,
    apply_to,
    fetch,
    git,
    git_out,
    locked,
    log,
    patch_files,
    patches_digest,
    read_pin,
    read_stamp,
    scratch_worktree,
    tree_of,
    unpack,
    write_stamp,
)

MAX_ADDED = 150


def patch_subject(text: str) -> str:
    """Return the commit subject out of the text of a patch file."""
    subject = email.message_from_string(text, policy=email.policy.default).get("Subject", "")
    return re.sub(r"^(\[[^]]*\] *)+", "", " ".join(str(subject).split()))


def name_patches(old: Mapping[str, str], subjects: Sequence[str]) -> list[str]:
    """Name patches so that known ones keep their file and new ones fall into the gaps between the numbers.

    Parameters
    ----------
    old : file names so far, by the subject of the patch
    subjects : subjects of the patches to name, in order

    Returns
    -------
    list of str
        One name per subject, ascending. All are numbered anew, 10 apart, where a gap is too small.
    """
    slugs = []
    fixed: list[int | None] = []
    last = 0
    for subject in subjects:
        match = PATCH_NAME.match(old.get(subject, ""))
        slugs.append(match.group(2) if match else re.sub(r"[^A-Za-z0-9._]+", "-", subject).strip("-.")[:52])
        # one that was moved ahead of its neighbours takes a new number
        number = int(match.group(1)) if match else 0
        fixed.append(number if number > last else None)
        last = max(last, number)

    numbers: list[int] = []
    while len(numbers) < len(fixed):
        start = len(numbers)
        known = fixed[start]
        if known is not None:
            numbers.append(known)
            continue
        stop = next((i for i in range(start, len(fixed)) if fixed[i] is not None), len(fixed))
        low = numbers[-1] if numbers else 0
        high = fixed[stop] if stop < len(fixed) else None
        step = 10 if high is None else (high - low) // (stop - start + 1)
        if step == 0:
            numbers = list(range(10, 10 * len(fixed) + 1, 10))
            break
        first = (low // 10 + 1) * 10 if high is None else low + step
        numbers += [first + step * i for i in range(stop - start)]
    return [f"{number:04d}-{slug}.patch" for number, slug in zip(numbers, slugs)]


def refresh() -> None:
    """Write patches/*.patch again from the commits of the tree."""
    if not read_stamp():
        raise UpstreamError(f"nothing is unpacked in {TREE}; run `prepare` first")
    if git_out("status", "--porcelain"):
        raise UpstreamError(
            f"{TREE} has uncommitted changes. Commit them as a patch of their own (git -C {TREE} commit), or into the "
            "patch they belong to (git commit --fixup=REV, git rebase -i --autosquash pristine)"
        )
    if git_out("rev-list", "--merges", "pristine..HEAD"):
        raise UpstreamError(f"{TREE} has merge commits; patches are a straight line on top of `pristine`")
    old = patch_files()
    target = WORK / "refresh"
    shutil.rmtree(target, ignore_errors=True)
    form = ("--zero-commit", "--no-signature", "--no-numbered", "--no-renames")
    git("format-patch", "-q", *form, "-o", str(target), "pristine..HEAD")
    texts = [file.read_bytes() for file in sorted(target.glob("*.patch"))] if target.is_dir() else []
    subjects = [patch_subject(text.decode("utf-8", "replace")) for text in texts]
    if not all(subjects):
        raise UpstreamError(f"{TREE} has an empty commit; drop it with git rebase -i pristine")
    names = name_patches({patch_subject(file.read_text(encoding="utf-8")): file.name for file in old}, subjects)
    for file in old:
        if file.name not in names:
            file.unlink()
            log(f"removed {file.name}")
    for name, data in zip(names, texts):
        path = PATCHES / name
        if not path.exists() or path.read_bytes() != data:
            path.write_bytes(data)
            log(f"wrote {name}")
    shutil.rmtree(target, ignore_errors=True)
    write_stamp(patches=patches_digest(patch_files()), head=git_out("rev-parse", "HEAD"))
    log(f"{len(names)} patches in {PATCHES}")


def check(max_added: int) -> None:
    """Apply the patches to a pristine tree and report their size.

    Raises
    ------
    UpstreamError
        A patch does not apply, has no reason in its header, or all of them add more than max_added lines; or the
        tree holds something else than what the patches make of it.
    """
    files = patch_files()
    problems = []
    with scratch_worktree() as worktree:
        moved = apply_to(worktree, files)
        result = git_out("rev-parse", "HEAD", cwd=worktree)
        count = int(git_out("rev-list", "--count", "pristine..HEAD", cwd=worktree))
        bodies = [git_out("log", "-1", "--format=%b", f"HEAD~{count - 1 - i}", cwd=worktree) for i in range(count)]
    total = 0
    for file, body in zip(files, bodies):
        rows = [line.split("\t") for line in git_out("apply", "--numstat", str(file)).splitlines()]
        added, removed = (sum(int(row[i]) for row in rows if row[i].isdigit()) for i in (0, 1))
        total += added
        print(f"{added:5d} added {removed:5d} removed in {len(rows)} files  {file.name}")
        if not body:
            problems.append(f"{file.name}: the header does not say why the patch is needed")
    print(f"{total:5d} added lines in {len(files)} patches on {read_pin()} (limit {max_added})")
    for line in moved:
        log(f"{line}; `make patches-refresh` would set it right")
    if total > max_added:
        problems.append(f"patches add {total} lines, more than {max_added}: code belongs into native/")
    if tree_of(result) != tree_of("HEAD") or git_out("status", "--porcelain"):
        problems.append(f"{TREE} has changes that are not in patches/: commit them, then `make patches-refresh`")
    if problems:
        raise UpstreamError("\n".join(problems))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("fetch", help="download the pinned sdist and check its sha256")
    commands.add_parser("unpack", help="fetch, then unpack what the build needs of llama.cpp")
    commands.add_parser("apply", help="apply patches/*.patch to the unpacked tree")
    commands.add_parser("prepare", help="fetch, unpack, apply: what CMake calls")
    commands.add_parser("refresh", help="write patches/*.patch again from the commits of the tree")
    checker = commands.add_parser("check", help="apply to a pristine tree, count the added lines")
    checker.add_argument("--max-added", type=int, default=MAX_ADDED, metavar="N", help="default: %(default)s")
    args = parser.parse_args(argv)
    try:
        with locked():
            if args.command == "fetch":
                log(str(fetch()))
            elif args.command == "unpack":
                unpack()
            elif args.command == "refresh":
                refresh()
            else:
                if args.command != "apply":
                    unpack()
                apply()
                if args.command == "check":
                    check(args.max_added)
    except UpstreamError as error:
        print(f"upstream: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
