"""Boots a virtual machine with a soft-RoCE device and two NUMA nodes, and runs its tests.

    python e2e/rdma/vm.py [--rebuild] [--accel kvm|tcg] [--bench] [-- PYTEST ARGUMENTS]

The image (Debian, its kernel with rdma_rxe, python3-pyverbs, perftest, our dependencies as wheels)
is built once and kept in the cache folder; it is built anew when what goes into it changes. The
code under test travels as a second disk, fresh each time. Needs root, debootstrap,
qemu-system-x86_64, mke2fs and network access for the build; the run itself needs none of the last.
`--bench` measures against perftest in place of testing. The exit code is that of what ran; 125
when there was none.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SUITE = "bookworm"
PYTHON = "3.11"  # the suite's
PACKAGES = (
    "linux-image-amd64",
    "initramfs-tools",
    "kmod",
    "udev",
    "iproute2",
    "python3",
    "python3-pyverbs",
    "ibverbs-providers",
    "ibverbs-utils",
    "perftest",
)
WHEELS = ("pydantic", "msgspec", "numpy", "xxhash", "pytest", "pytest-asyncio", "pytest-timeout")
MODULES = ("virtio_pci", "virtio_blk", "ext4")
CODE = ("pyproject.toml", "runtime", "tests/runtime/transfer", "e2e/rdma")
FIRST_PROCESS = """#!/bin/sh
mount -t devtmpfs dev /dev 2>/dev/null
mount -t tmpfs tmp /tmp
mkdir /tmp/code
tar -xf /dev/vdb -C /tmp/code
exec /tmp/code/e2e/rdma/init
"""
# no_timer_check: on a busy host an emulated timer is late, and the kernel would take it for broken
KERNEL_ARGS = (
    "console=ttyS0 root=/dev/vda rw quiet panic=-1 no_timer_check init=/sbin/kimistack-init"
)
IMAGE_MIB = 1536
MEMORY_MIB = 1536
BOOT_AND_RUN_S = 1500
VERDICT = re.compile(r"^KIMISTACK-EXIT (\d+)", re.MULTILINE)
NO_VERDICT = 125


def main() -> int:
    """Build the image if need be, boot it, and return pytest's exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rebuild", action="store_true", help="build the image anew")
    parser.add_argument(
        "--accel", choices=("tcg", "kvm"), default="tcg", help="kvm is faster, where it works"
    )
    parser.add_argument("--bench", action="store_true", help="measure in place of testing")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest in the machine")
    args = parser.parse_args()
    require("qemu-system-x86_64", "qemu-system-x86")
    image = cached_image(rebuild=args.rebuild)
    with tempfile.TemporaryDirectory(prefix="kimistack-rdma-") as folder:
        code = Path(folder) / "code.tar"
        pack_code(code, args.pytest, bench=args.bench)
        return boot(image, code, args.accel)


def require(command: str, package: str) -> None:
    """Exit unless a command is there."""
    if shutil.which(command) is None:
        sys.exit(f"{command} is missing; install it: apt-get install {package}")


def cached_image(*, rebuild: bool) -> Path:
    """The folder with kernel, initrd and disk."""
    recipe = repr((SUITE, PACKAGES, pinned_wheels(), MODULES, FIRST_PROCESS, IMAGE_MIB))
    digest = hashlib.sha256(recipe.encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kimistack" / "rdma-vm"
    image = cache / digest
    if image.exists() and not rebuild:
        return image
    require("debootstrap", "debootstrap")
    require("mke2fs", "e2fsprogs")
    if os.geteuid() != 0:
        sys.exit("building the image needs root, for debootstrap: run this once with sudo")
    cache.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix="building-", dir=cache))
    try:
        build(building)
        for old in cache.iterdir():
            if not old.name.startswith("building-"):
                shutil.rmtree(old, ignore_errors=True)
        building.rename(image)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return image


def build(folder: Path) -> None:
    """Kernel, initrd and root disk in `folder`."""
    root = folder / "root"
    say("building the machine's image; this takes some minutes, once")
    listed = ",".join(PACKAGES)
    private = ("unshare", "--mount")  # what is mounted below root goes with the command
    run(*private, "debootstrap", "--variant=minbase", f"--include={listed}", SUITE, str(root))
    config = root / "etc/initramfs-tools"
    (config / "initramfs.conf").write_text(
        "MODULES=list\nBUSYBOX=n\nCOMPRESS=gzip\nFSTYPE=ext4\nRUNSIZE=10%\n"
    )
    (config / "modules").write_text("\n".join(MODULES) + "\n")
    run("chroot", str(root), "update-initramfs", "-u")
    run(
        *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
        *("--target", str(root / "opt/wheels"), "--python-version", PYTHON),
        *("--only-binary=:all:", "--no-compile"),
        *pinned_wheels(),
    )
    (root / "sbin/kimistack-init").write_text(FIRST_PROCESS)
    (root / "sbin/kimistack-init").chmod(0o755)
    for name, pattern in (("vmlinuz", "vmlinuz-*"), ("initrd", "initrd.img-*")):
        shutil.copy2(next((root / "boot").glob(pattern)), folder / name)
    for junk in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "boot"):
        shutil.rmtree(root / junk, ignore_errors=True)
    disk = str(folder / "disk.ext4")
    run("mke2fs", "-q", "-t", "ext4", "-d", str(root), disk, f"{IMAGE_MIB}M")
    shutil.rmtree(root)


def pinned_wheels() -> list[str]:
    """What to install, at the versions of constraints.txt where it names them."""
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        name, equal, _ = line.partition("==")
        if equal:
            pins[name.strip().lower()] = line.partition(";")[0].strip()
    return [pins.get(name, name) for name in WHEELS]


def pack_code(target: Path, pytest_args: list[str], *, bench: bool) -> None:
    """The code under test and what to do with it, as a tar that the machine reads as a disk."""
    with tarfile.open(target, "w") as tar:
        for name in CODE:
            tar.add(ROOT / name, name, filter=without_caches)
    with tempfile.NamedTemporaryFile("w", suffix=".args") as args, tarfile.open(target, "a") as tar:
        args.write("\n".join(pytest_args))
        args.flush()
        tar.add(args.name, "bench" if bench else "pytest-args")
    os.truncate(target, -(-target.stat().st_size // 4096) * 4096)


def without_caches(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Leave compiled files and links out."""
    return None if "__pycache__" in entry.name or entry.issym() else entry


def boot(image: Path, code: Path, accel: str) -> int:
    """Run the machine to its end, passing on what it prints."""
    say(f"booting with {accel}")
    command = [
        *("nice", "qemu-system-x86_64", "-accel", accel, "-m", str(MEMORY_MIB), "-smp", "2"),
        *numa_nodes(),
        *("-cpu", "max" if accel == "tcg" else "host"),
        *("-nodefaults", "-no-reboot", "-display", "none", "-serial", "stdio"),
        *("-kernel", str(image / "vmlinuz"), "-initrd", str(image / "initrd")),
        *("-drive", f"file={image / 'disk.ext4'},format=raw,if=virtio,snapshot=on"),
        *("-drive", f"file={code},format=raw,if=virtio,readonly=on"),
        *("-append", KERNEL_ARGS),
    ]
    printed = []
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as machine:
        try:
            assert machine.stdout is not None
            deadline = threading.Timer(BOOT_AND_RUN_S, machine.kill)
            deadline.start()
            for line in machine.stdout:
                text = line.decode(errors="replace").replace("\r", "")
                printed.append(text)
                sys.stdout.write(text)
                sys.stdout.flush()
        finally:
            deadline.cancel()
            machine.kill()
    verdict = VERDICT.search("".join(printed))
    if verdict is None:
        say("the machine ended without a verdict: see what it printed above")
        return NO_VERDICT
    return int(verdict[1])


def numa_nodes() -> list[str]:
    """A core and half of the memory on each of two nodes."""
    arguments = []
    for node in range(2):
        memory = f"memory-backend-ram,id=memory{node},size={MEMORY_MIB // 2}M"
        arguments += ["-object", memory, "-numa", f"node,memdev=memory{node},cpus={node}"]
    return arguments


def run(*command: str) -> None:
    """Run a command; its output is shown only if it fails."""
    done = subprocess.run(["nice", *command], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command[:3])} … failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")


def say(text: str) -> None:
    """To the person who waits."""
    print(f"== {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
