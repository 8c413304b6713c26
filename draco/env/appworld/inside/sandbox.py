"""What the kernel lets an episode's process do: compute, read the data without answers, write its output, no more.

Standard library alone; Linux on x86_64 or aarch64. Four layers, applied once after the fork and inherited by threads:
resource limits, no capabilities, Landlock (which files can be reached), seccomp (no new process, no program, no
network, no signal to another process). None needs privileges. `confine` says which layers it could apply; where the
kernel lacks one, the caller decides whether that is acceptable.

No library: pyseccomp needs the C library libseccomp on every machine, and there is no kept one for Landlock.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Sequence

__all__ = ["available", "confine", "die_with_parent"]

_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_EPERM, _ENOSYS = 1, 38
#: numbers by architecture: audit arch, then system calls
_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CALLS = {
    "x86_64": {
        "kill": 62, "tgkill": 234, "clone": 56, "clone3": 435, "fork": 57, "vfork": 58, "execve": 59, "execveat": 322,
        "socket": 41, "connect": 42, "bind": 49, "listen": 50, "accept": 43, "accept4": 288, "ptrace": 101,
        "process_vm_readv": 310, "process_vm_writev": 311, "tkill": 200, "rt_sigqueueinfo": 129,
        "rt_tgsigqueueinfo": 297, "pidfd_open": 434, "pidfd_getfd": 438, "pidfd_send_signal": 424, "mount": 165,
        "umount2": 166, "pivot_root": 155, "chroot": 161, "unshare": 272, "setns": 308, "bpf": 321,
        "perf_event_open": 298, "keyctl": 250, "add_key": 248, "request_key": 249, "io_uring_setup": 425,
        "userfaultfd": 323, "open_by_handle_at": 304, "memfd_create": 319, "shmget": 29, "init_module": 175,
        "finit_module": 313, "kexec_load": 246, "reboot": 169, "personality": 135, "mq_open": 240,
    },
    "aarch64": {
        "kill": 129, "tgkill": 131, "clone": 220, "clone3": 435, "execve": 221, "execveat": 281, "socket": 198,
        "connect": 203, "bind": 200, "listen": 201, "accept": 202, "accept4": 242, "ptrace": 117,
        "process_vm_readv": 270, "process_vm_writev": 271, "tkill": 130, "rt_sigqueueinfo": 138,
        "rt_tgsigqueueinfo": 240, "pidfd_open": 434, "pidfd_getfd": 438, "pidfd_send_signal": 424, "mount": 40,
        "umount2": 39, "pivot_root": 41, "chroot": 51, "unshare": 97, "setns": 268, "bpf": 280,
        "perf_event_open": 241, "keyctl": 219, "add_key": 217, "request_key": 218, "io_uring_setup": 425,
        "userfaultfd": 282, "open_by_handle_at": 265, "memfd_create": 279, "shmget": 194, "init_module": 105,
        "finit_module": 273, "kexec_load": 104, "reboot": 142, "personality": 92, "mq_open": 180,
    },
}  # fmt: skip
_CLONE_THREAD = 0x00010000
_NO_NEW_PRIVS, _GET_SECCOMP, _SET_SECCOMP, _PDEATHSIG, _CAPBSET_DROP = 38, 21, 22, 1, 24
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
# Landlock's file rights, by bit: execute 0, write 1, read 2, read a folder 3, remove folder 4, remove file 5, make …
# 6–12, refer 13 (version 2), truncate 14 (3), device ioctl 15 (5).
_READ = 1 << 2 | 1 << 3
_FILE_RIGHTS = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14  #: the rights that make sense on a file that is no folder
_WRITE = _READ | 1 << 1 | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 14

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """SIGKILL for this process when the thread that forked it ends."""
    _libc.prctl(_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def available() -> list[str]:
    """The layers that this kernel has; changes nothing."""
    if not sys.platform.startswith("linux"):
        return []
    found = ["limits", "capabilities"]
    if _libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1) >= 1:
        found.append("landlock")
    if platform.machine() in _CALLS and _libc.prctl(_GET_SECCOMP, 0, 0, 0, 0) >= 0:
        found.append("seccomp")
    return found


def confine(
    *, read: Sequence[str], write: Sequence[str], memory_mb: int, cpu_s: int, files: int, file_mb: int
) -> list[str]:
    """Apply every layer that this kernel has, for good; the names of those applied.

    Args:
        read: files and folders that may be read.
        write: folders that may be read and written.
        memory_mb: address space beyond what is mapped now.
        cpu_s: CPU seconds of the whole process; SIGXCPU beyond.
        files: open file descriptors.
        file_mb: size of any one file.
    """
    _limits(memory_mb, cpu_s, files, file_mb)
    done = ["limits"]
    if os.geteuid() != 0 or _drop_capabilities():
        done.append("capabilities")
    if _libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return done
    if _landlock(read, write):
        done.append("landlock")
    if _seccomp():
        done.append("seccomp")
    return done


def _limits(memory_mb: int, cpu_s: int, files: int, file_mb: int) -> None:
    with open("/proc/self/statm") as statm:
        mapped = int(statm.read().split()[0]) * resource.getpagesize()
    for what, limit in (
        (resource.RLIMIT_AS, mapped + (memory_mb << 20)),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_NOFILE, files),
        (resource.RLIMIT_FSIZE, file_mb << 20),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(what)[1]
        value = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(what, (value, value))


def _drop_capabilities() -> bool:
    for capability in range(64):
        _libc.prctl(_CAPBSET_DROP, capability, 0, 0, 0)
    header = ctypes.create_string_buffer(struct.pack("II", 0x20080522, 0))
    nothing = ctypes.create_string_buffer(24)
    return int(_libc.capset(header, nothing)) == 0


def _landlock(read: Sequence[str], write: Sequence[str]) -> bool:
    version = _libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return False
    files = (1 << 13) - 1
    for since, bit in ((2, 13), (3, 14), (5, 15)):
        files |= (1 << bit) if version >= since else 0
    network = 3 if version >= 4 else 0  # binding and connecting TCP
    scoped = 3 if version >= 6 else 0  # abstract sockets and signals of others
    attributes = struct.pack("QQQ", files, network, scoped)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    rules = _libc.syscall(_LANDLOCK_CREATE, ctypes.create_string_buffer(attributes, 24), ctypes.c_size_t(size), 0)
    if rules < 0:
        return False
    try:
        for paths, rights in ((read, _READ), (write, _WRITE)):
            for path in paths:
                if not os.path.exists(path):
                    continue
                allowed = rights & files if os.path.isdir(path) else rights & files & _FILE_RIGHTS
                parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
                rule = ctypes.create_string_buffer(struct.pack("=Qi", allowed, parent))
                added = _libc.syscall(_LANDLOCK_ADD, rules, 1, rule, 0)
                os.close(parent)
                if added != 0:
                    return False
        return int(_libc.syscall(_LANDLOCK_RESTRICT, rules, 0)) == 0
    finally:
        os.close(rules)


def _seccomp() -> bool:
    machine = platform.machine()
    if machine not in _CALLS:
        return False
    program = b"".join(_filter(_ARCH[machine], dict(_CALLS[machine]), os.getpid()))
    code = ctypes.create_string_buffer(program, len(program))
    pointer = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    return int(_libc.prctl(_SET_SECCOMP, 2, ctypes.create_string_buffer(pointer), 0, 0)) == 0


def _filter(arch: int, calls: dict[str, int], pid: int) -> list[bytes]:
    """A classic BPF program over struct seccomp_data: number at 0, architecture at 4, arguments from 16 on."""

    def op(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("HBBI", code, yes, no, value)

    def load(offset: int) -> bytes:
        return op(0x20, offset)

    def equal(value: int, no: int) -> bytes:
        return op(0x15, value, 0, no)

    def answer(value: int) -> bytes:
        return op(0x06, value)

    program = [load(4), op(0x15, arch, 1, 0), answer(_KILL), load(0)]
    if arch == _ARCH["x86_64"]:
        program += [op(0x35, 0x40000000, 0, 1), answer(_ERRNO | _ENOSYS)]  # the x32 table
    program += [equal(calls.pop("clone3"), 1), answer(_ERRNO | _ENOSYS)]  # glibc then uses clone, whose flags are seen
    program += [
        equal(calls.pop("clone"), 4), load(16), op(0x45, _CLONE_THREAD, 0, 1), answer(_ALLOW), answer(_ERRNO | _EPERM),
    ]  # fmt: skip
    for name in ("kill", "tgkill"):  # to oneself only
        program += [equal(calls.pop(name), 4), load(16), equal(pid, 1), answer(_ALLOW), answer(_ERRNO | _EPERM)]
    for number in calls.values():
        program += [equal(number, 1), answer(_ERRNO | _EPERM)]
    return [*program, answer(_ALLOW)]
