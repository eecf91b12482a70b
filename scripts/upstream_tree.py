"""The unpacked llama.cpp: where it comes from, where it lies, and how patches get into it.

``build/upstream/llama.cpp`` is a small git repository of its own: a commit tagged ``pristine`` and one commit per
patch. See upstream.py for the commands.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Iterator, Sequence
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
            f"{reason}, but {TREE} has {work}. Commit what is not committed there and write it back to patches/ with "
            "`make patches-refresh`, or delete that folder to throw it away"
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
        log(f"{len(files)} patches applied already" + (f", {work} kept" if work else ""))
        return
    with scratch_worktree() as worktree:
        apply_to(worktree, files)
        head = git_out("rev-parse", "HEAD", cwd=worktree)
    if tree_of(head) != tree_of("HEAD"):
        refuse_local_work("patches/ has changed")
    git("checkout", "-q", "-B", "dge", head)
    write_stamp(patches=digest, head=head)
    log(f"{len(files)} patches applied to {read_pin()}")


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
