"""Build `trefoil_lanes` into this environment: `python -m protocol.lanes_build`, after `pip install 'trefoil[lanes]'`.

No C is written. `cffi` generates the module from the declarations below, and the linker takes what they need out of two
static archives of `ipp-crypto-static` (Apache-2.0): 0.3 MB that depend on libc only. The shared wheel, `ipp-crypto`,
would need Intel's compiler runtime under a proprietary licence. The archives are pinned by their hashes.

Where it cannot be built, one line says why and what is lost, and the exit code is 0: the module is optional.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from protocol.cli.console import say

NAME = "trefoil_lanes"
ARCHIVES = {
    "libcrypto_mb.a": "fcf1870dc5fcb03dff876b3a0fb77fe689cb33b33d7edaca22514bacc2df7813",
    "libippcp.a": "6e3dd015c760d6c49eea0f7b92d3a12611eee7a1ad769f4ed7c6afd8c93baa44",
}
SECONDS = 120
DECLARATIONS = """
    unsigned int mbx_x25519_mb8(unsigned char *const shared[8],
        const unsigned char *const private_keys[8], const unsigned char *const public_keys[8]);
    unsigned int mbx_x25519_public_key_mb8(unsigned char *const public_keys[8],
        const unsigned char *const private_keys[8]);
    typedef struct _cpRijndael128 IppsAESSpec;
    int ippsAESGetSize(int *size);
    int ippsAESInit(const unsigned char *key, int key_size, IppsAESSpec *state, int state_size);
    int ippsAESEncryptCTR(const unsigned char *from, unsigned char *to, int size, const IppsAESSpec *state,
        unsigned char *counter, int counter_bits);
    typedef struct _cpHashMethod_rmf IppsHashMethod;
    const IppsHashMethod *ippsHashMethod_SHA256_NI(void);
    int ippsHMACMessage_rmf(const unsigned char *message, int size, const unsigned char *key, int key_size,
        unsigned char *mac, int mac_size, const IppsHashMethod *method);
"""
INCLUDES = "#include <crypto_mb/x25519.h>\n#include <ippcp.h>"
# In one object with what X25519 uses are conversions of OpenSSL's numbers, which nothing here calls.
UNUSED = ("BN_bn2lebinpad", "BN_num_bits")


class NotBuilt(Exception):
    """The module cannot be built here; the message says why."""


def build(folder: Path) -> Path:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise NotBuilt(f"{sys.platform} on {platform.machine()} is not Linux on x86-64")
    compiler = shutil.which("cc")
    if compiler is None:
        raise NotBuilt("there is no C compiler")
    archives = [_archive(name, digest) for name, digest in ARCHIVES.items()]
    header = _installed("ipp-crypto-include", "x25519.h")
    with tempfile.TemporaryDirectory(prefix="trefoil-lanes-") as name:
        work = Path(name)
        made = work / f"{NAME}.abi3.so"
        command = [compiler, *_arguments(work, header), *map(str, archives), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        if done.returncode:
            raise NotBuilt(f"the compiler failed: {_first_error(done.stderr)}")
        # Renamed into its place: a process that uses the old one keeps it.
        draft = folder / f".{made.name}.part"
        shutil.copyfile(made, draft)
        return draft.rename(folder / made.name)


def _arguments(work: Path, header: Path) -> list[str]:
    """Write what the compiler reads, and return its arguments before the archives."""
    from cffi import FFI  # comes with `cryptography`, and only this command needs it

    builder = FFI()
    builder.cdef(DECLARATIONS)
    builder.set_source(NAME, INCLUDES, compiler_verbose=0)
    builder.emit_c_code(str(work / f"{NAME}.c"))
    exports = work / "exports.map"
    exports.write_text(f"{{ global: PyInit_{NAME}; local: *; }};\n")
    aggregator = header.parents[1]
    include = [sysconfig.get_path("include"), str(aggregator.parent), str(aggregator)]
    link = ["--gc-sections", "--strip-all", "-z,relro,-z,now", "-z,noexecstack", f"--version-script={exports}"]
    return [
        *("-shared", "-fPIC", "-O2", str(work / f"{NAME}.c")),
        *(f"-I{folder}" for folder in include),
        *(f"-Wl,{option}" for option in (*link, *(f"--defsym={name}=0" for name in UNUSED))),
    ]


def _archive(name: str, digest: str) -> Path:
    path = _installed("ipp-crypto-static", name)
    if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
        raise NotBuilt(f"{path} is not the pinned version; install 'trefoil[lanes]'")
    return path


def _installed(package: str, name: str) -> Path:
    try:
        paths = [Path(str(file.locate())).resolve() for file in files(package) or () if file.name == name]
    except PackageNotFoundError:
        raise NotBuilt(f"{package} is not installed; install 'trefoil[lanes]'") from None
    if not paths:
        raise NotBuilt(f"{package} has no {name}")
    return paths[0]


def _first_error(text: str) -> str:
    lines = text.strip().splitlines() or ["no message"]
    return next((line for line in lines if "error" in line), lines[-1])


def main() -> None:
    try:
        path = build(Path(sysconfig.get_path("platlib")))
        outcome = f"built {path}: helpers open payloads eight at a time where the processor has AVX-512 IFMA"
    except (NotBuilt, OSError, subprocess.TimeoutExpired) as error:
        outcome = f"not built ({error}): helpers open payloads one at a time, at twice the cost of a report"
    say(f"{NAME}: {outcome}")


if __name__ == "__main__":
    main()
