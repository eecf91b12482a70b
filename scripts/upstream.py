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
import contextlib
import email
import email.policy
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PATCHES = ROOT / "patches"
PIN_FILE = PATCHES / "UPSTREAM"
WORK = ROOT / "build" / "upstream"
TREE = WORK / "llama.cpp"

# what libllama, libggml*, libmtmd (and, on request, upstream's own tests) are built from
KEEP = (
    "AUTHORS",
    "CMakeLists.txt",
    "LICENSE",
    "cmake/",
    "common/",
    "ggml/",
    "include/",
    "licenses/",
    "src/",
    "tests/",
    "tools/mtmd/",
    "vendor/",
)

# one author and one date, so that the same pin and patches give the same commits on every machine
IDENTITY = ("llama-dge", "llama-dge@localhost")
EPOCH = "2000-01-01T00:00:00+0000"

PATCH_NAME = re.compile(r"^(\d{4})-(.+)\.patch$")
MAX_ADDED = 300


class UpstreamError(Exception):
    """A failure that the user can act on; the message says how."""


class Pin(NamedTuple):
    """The pinned sdist: distribution name, version, sha256 of the archive."""

    name: str
    version: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def log(text: str) -> None:
    print(f"upstream: {text}", flush=True)


def read_pin() -> Pin:
    line = PIN_FILE.read_text(encoding="utf-8").strip()
    match = re.fullmatch(r"([\w.-]+)==([\w.]+) --hash=sha256:([0-9a-f]{64})", line)
    if match is None:
        raise UpstreamError(f"{PIN_FILE}: expected one line NAME==VERSION --hash=sha256:HEX, got {line!r}")
    return Pin(*match.groups())


def patch_files() -> list[Path]:
    files = sorted(PATCHES.glob("*.patch"))
    for file in files:
        if PATCH_NAME.match(file.name) is None:
            raise UpstreamError(f"{file.name}: patches are named NNNN-subject.patch, e.g. 0010-kv-cache.patch")
    return files


def patches_digest(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


# --- git ------------------------------------------------------------------------------------------------------------


def git(*args: str, cwd: Path = TREE, check: bool = True, dates: bool = False) -> subprocess.CompletedProcess[str]:
    """Run git in the unpacked tree, blind to the user's settings and to the repository around it."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    env.update(
        GIT_CEILING_DIRECTORIES=str(cwd.parent),
        GIT_CONFIG_GLOBAL=os.devnull,
        GIT_CONFIG_NOSYSTEM="1",
        GIT_TERMINAL_PROMPT="0",
        GIT_COMMITTER_NAME=IDENTITY[0],
        GIT_COMMITTER_EMAIL=IDENTITY[1],
        LC_ALL="C",
    )
    if dates:
        env.update(GIT_AUTHOR_DATE=EPOCH, GIT_COMMITTER_DATE=EPOCH)
    # a container often builds as another user than the one who unpacked
    command = ["git", "-c", "safe.directory=*", "-c", "core.abbrev=12", *args]
    try:
        result = subprocess.run(command, cwd=cwd, env=env, text=True, capture_output=True, check=False)
    except FileNotFoundError:
        raise UpstreamError("git was not found on PATH; it is needed to apply patches/") from None
    if check and result.returncode != 0:
        raise UpstreamError(f"git {' '.join(args)} failed in {cwd}:\n{result.stdout}{result.stderr}".rstrip())
    return result


def git_out(*args: str, cwd: Path = TREE) -> str:
    return git(*args, cwd=cwd).stdout.strip()


def tree_of(rev: str) -> str:
    return git_out("rev-parse", f"{rev}^{{tree}}")


# --- stamp: what the unpacked tree was made from --------------------------------------------------------------------


def stamp_path() -> Path:
    return TREE / ".git" / "llama-dge.json"


def read_stamp() -> dict[str, str]:
    try:
        stamp = json.loads(stamp_path().read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def write_stamp(**fields: str) -> None:
    stamp_path().write_text(json.dumps({**read_stamp(), **fields}, indent=2) + "\n", encoding="utf-8")


def source_id(pin: Pin) -> str:
    return f"{pin.sha256} {' '.join(KEEP)}"


def local_work() -> str | None:
    """What the tree holds that neither the sdist nor the applied patches account for, or None."""
    stamp = read_stamp()
    if git_out("status", "--porcelain"):
        return "uncommitted changes"
    if "head" in stamp and tree_of("HEAD") != tree_of(stamp["head"]):
        return "commits that are not in patches/"
    return None


def refuse_local_work(reason: str) -> None:
    work = local_work()
    if work is not None:
        raise UpstreamError(
            f"{reason}, but {TREE} has {work}. Commit them there and run `make patches-refresh`, or throw them away: "
            f"git -C {TREE} reset -q --hard pristine && git -C {TREE} clean -fdq"
        )


# --- commands -------------------------------------------------------------------------------------------------------


def fetch() -> Path:
    """Return the path of the pinned sdist, downloading it when it is not there yet."""
    pin = read_pin()
    local = os.environ.get("LLAMA_DGE_UPSTREAM")
    if local:
        path = Path(local).expanduser()
        if not path.is_file():
            raise UpstreamError(f"LLAMA_DGE_UPSTREAM={local}: no such file")
        return verified(path, pin, "LLAMA_DGE_UPSTREAM")

    downloads = WORK / "downloads"
    path = downloads / f"{pin.name.replace('-', '_')}-{pin.version}.tar.gz"
    if path.is_file() and sha256_of(path) == pin.sha256:
        return path
    downloads.mkdir(parents=True, exist_ok=True)
    download(pin, downloads)
    if not path.is_file():
        raise UpstreamError(f"pip did not leave {path.name} in {downloads}")
    return verified(path, pin, "the downloaded file")


def verified(path: Path, pin: Pin, what: str) -> Path:
    digest = sha256_of(path)
    if digest != pin.sha256:
        raise UpstreamError(f"{what} is not {pin}: sha256 of {path} is {digest}, {PIN_FILE.name} says {pin.sha256}")
    return path


def download(pin: Pin, target: Path) -> None:
    if importlib.util.find_spec("pip") is None:
        raise UpstreamError(
            f"{sys.executable} has no pip to download {pin} with. Install pip, or download the sdist yourself and set "
            "LLAMA_DGE_UPSTREAM to its path"
        )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", pin.name]
    command += ["--require-hashes", "-r", str(PIN_FILE), "-d", str(target)]
    # pip asks even a bare sdist for its metadata, for which it sets up the build backend in a new environment;
    # inside a build of this package that backend is at hand already
    if importlib.util.find_spec("scikit_build_core") is not None:
        command.append("--no-build-isolation")
    # the tracker belongs to the pip that runs this build, if one does
    env = {k: v for k, v in os.environ.items() if k not in ("PIP_BUILD_TRACKER", "CMAKE_ARGS")}
    log(f"downloading the sdist of {pin}")
    result = subprocess.run(command, env=env, check=False)
    if result.returncode != 0:
        raise UpstreamError(
            f"pip could not download the sdist of {pin} (exit status {result.returncode}, see above). Without a "
            "network, set LLAMA_DGE_UPSTREAM to the path of that file"
        )


def unpack() -> None:
    """Unpack the part of llama.cpp that the build needs, unless the tree is there already."""
    pin = read_pin()
    if read_stamp().get("source") == source_id(pin):
        return
    if TREE.exists():
        if stamp_path().exists():
            refuse_local_work(f"{PIN_FILE.name} now pins {pin}")
        shutil.rmtree(TREE)
    sdist = fetch()
    log(f"unpacking {sdist.name}")
    # into a scratch folder first: an interrupted run leaves nothing that looks complete
    scratch = WORK / "llama.cpp.new"
    shutil.rmtree(scratch, ignore_errors=True)
    count = extract(sdist, scratch)
    if count == 0:
        raise UpstreamError(f"{sdist}: no vendor/llama.cpp in this archive")
    git("init", "-q", "-b", "dge", cwd=scratch)
    for key, value in (
        ("user.name", IDENTITY[0]),
        ("user.email", IDENTITY[1]),
        ("core.autocrlf", "false"),
        ("core.safecrlf", "false"),
        ("commit.gpgsign", "false"),
        ("gc.auto", "0"),
    ):
        git("config", key, value, cwd=scratch)
    git("add", "--force", "--all", cwd=scratch)
    author = f"{IDENTITY[0]} <{IDENTITY[1]}>"
    git("commit", "-q", "--no-verify", "--author", author, "-m", f"llama.cpp of {pin}", cwd=scratch, dates=True)
    git("tag", "pristine", cwd=scratch)
    scratch.rename(TREE)
    write_stamp(source=source_id(pin))
    log(f"{count} files in {TREE}")


def extract(sdist: Path, target: Path) -> int:
    """Write the kept files of the archive's vendor/llama.cpp below target; return their number."""
    count = 0
    with tarfile.open(sdist, "r:gz") as archive:
        for member in archive:
            parts = PurePosixPath(member.name).parts
            if parts[1:3] != ("vendor", "llama.cpp") or ".." in parts or not member.isfile():
                continue
            name = "/".join(parts[3:])
            if not any(name == keep or (keep.endswith("/") and name.startswith(keep)) for keep in KEEP):
                continue
            stream = archive.extractfile(member)
            if stream is None:
                continue
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            # time stamps stay "now": those of the archive would look older than objects built from another pin
            with path.open("wb") as file:
                shutil.copyfileobj(stream, file)
            if member.mode & 0o100:
                path.chmod(0o755)
            count += 1
    return count


@contextlib.contextmanager
def scratch_worktree() -> Iterator[Path]:
    """A second checkout of the pristine source, to apply patches in without touching the tree."""
    path = WORK / "apply"
    remove_worktree(path)
    git("worktree", "add", "-q", "--detach", str(path), "pristine")
    try:
        yield path
    finally:
        remove_worktree(path)


def remove_worktree(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    git("worktree", "prune")


def apply_to(worktree: Path, files: Sequence[Path]) -> list[str]:
    """Apply and commit the patches one by one; return a line for each hunk that was found at another place."""
    moved = []
    for file in files:
        # -C3, the default: all three lines of context must match, which is what "no fuzz" means
        result = git("apply", "--check", "--verbose", str(file), cwd=worktree, check=False)
        if result.returncode != 0:
            detail = "\n".join(line for line in result.stderr.splitlines() if not line.startswith("Checking"))
            raise UpstreamError(f"{file.name} does not apply to {read_pin()}:\n{detail}\nSee patches/README.md")
        moved += [f"{file.name}: {line}" for line in result.stderr.splitlines() if "offset" in line]
        git(
            "am", "-q", "--keep-cr", "--no-3way", "--whitespace=nowarn", "--committer-date-is-author-date", str(file),
            cwd=worktree,
        )  # fmt: skip
    return moved


def apply() -> None:
    """Bring the tree to the pristine source plus all patches; files that are right already are not touched."""
    files = patch_files()
    digest = patches_digest(files)
    stamp = read_stamp()
    if not stamp:
        raise UpstreamError(f"nothing is unpacked in {TREE}; run `unpack` first")
    if stamp.get("patches") == digest:
        work = local_work()
        log(f"{len(files)} patches are applied" + (f", {work} kept" if work else ""))
        return
    with scratch_worktree() as worktree:
        apply_to(worktree, files)
        head = git_out("rev-parse", "HEAD", cwd=worktree)
    if tree_of(head) != tree_of("HEAD"):
        refuse_local_work("patches/ has changed")
    git("checkout", "-q", "-B", "dge", head)
    write_stamp(patches=digest, head=head)
    log(f"applied {len(files)} patches to {read_pin()}")


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


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """One at a time: several build folders share the tree. Given up on after ten minutes."""
    WORK.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # Windows: builds that start at the same time are on their own
        yield
        return
    with (WORK / "lock").open("w") as file:
        for _ in range(6000):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.1)
        else:
            raise UpstreamError(f"another process has held {WORK / 'lock'} for ten minutes")
        yield


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
