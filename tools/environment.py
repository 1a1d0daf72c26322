#!/usr/bin/env python3
"""Makes .venv, the environment in which every make target runs.

    environment.py                     # torch and what compiling needs
    environment.py demo|test|lint ...  # and what these targets need beside it

If the Python that runs this script (the active environment's) has torch, that
torch is used: .venv looks into the active environment behind its own packages,
what is missing is installed into .venv, and nothing outside it changes. Else
.venv gets exactly TORCH (the environment variable, or torch==2.13.0).

tools/requirements/ lists the packages: GROUP.txt, and GROUP.alone.txt of those
that are taken without dependencies. A second run changes nothing and takes a
tenth of a second. A .venv made for another torch is made anew.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
RECORD = VENV / "setup.json"  # what .venv was made from; newer means changed
REQUIREMENTS = ROOT / "tools" / "requirements"
TORCH = os.environ.get("TORCH", "torch==2.13.0")


def main() -> None:
    make_environment()
    for group in ["build", *sys.argv[1:]]:
        install_group(group)


def make_environment() -> None:
    """.venv with torch; `RECORD` says which."""
    active = None if in_venv() else active_torch()
    made = read_record()
    # Without a torch around, the .venv at hand stays, whatever torch it has.
    wanted = {"torch": active or (made or {}).get("torch") or {"install": TORCH}}
    if made == wanted:
        return
    need_compiler()
    make_venv(wanted["torch"])
    check(wanted["torch"])
    RECORD.write_text(json.dumps(wanted, indent=2) + "\n")


def install_group(group: str) -> None:
    """Once per content of its lists."""
    lists = [REQUIREMENTS / f"{group}{kind}.txt" for kind in ("", ".alone")]
    lists = [path for path in lists if path.exists()]
    if not lists:
        sys.exit(f"setup: there is no {REQUIREMENTS / group}.txt")
    if group == "test":  # the system's: it may be gone since
        need_gtest()
    record = VENV / f"setup-{group}.txt"
    wanted = hashlib.sha256(b"".join(p.read_bytes() for p in lists)).hexdigest()
    if record.exists() and record.read_text() == wanted:
        return
    say(f"installing what {group} needs")
    for path in lists:
        if path.stem.endswith(".alone"):
            pip("--requirement", path, "--ignore-installed", "--no-deps")
        else:
            pip("--requirement", path, *keep_torch())
    record.write_text(wanted)


def in_venv() -> bool:
    return Path(sys.prefix).resolve() == VENV.resolve()


def active_torch() -> dict | None:
    """Version and folders of the torch that this Python would import."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    home = str(Path(spec.origin).resolve().parents[1])
    folders = [
        p for p in sys.path if Path(p).name in ("site-packages", "dist-packages")
    ]
    return {
        "version": importlib.metadata.version("torch"),
        "folders": list(dict.fromkeys([*folders, home])),
        "python": str(Path(sys.base_prefix).resolve()),
    }


def read_record() -> dict | None:
    """What .venv was made from; None where there is none that works."""
    if not PYTHON.exists() or not RECORD.exists():
        return None
    record = json.loads(RECORD.read_text())
    folders = record["torch"].get("folders", [])
    return record if all(Path(f).exists() for f in folders) else None


def make_venv(torch: dict) -> None:
    need_venv_module()
    say(f"making {VENV.name} with Python {sys.version.split()[0]}")
    run(sys.executable, "-m", "venv", "--clear", VENV)
    if "install" in torch:
        say(f"installing {torch['install']}")
        pip(torch["install"])
        return
    say(f"using torch {torch['version']} of the active environment")
    site_packages = run(
        PYTHON, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"
    )
    link = "".join(f"import site; site.addsitedir({f!r})\n" for f in torch["folders"])
    (Path(site_packages.strip()) / "active_environment.pth").write_text(link)


def keep_torch() -> list[str]:
    """pip's options that hold the torch of .venv where it is."""
    constraint = VENV / "torch.txt"
    version = run(
        PYTHON, "-c", "from importlib.metadata import version; print(version('torch'))"
    )
    constraint.write_text(f"torch=={version.strip()}\n")
    return ["--constraint", str(constraint)]


def check(torch: dict) -> None:
    found = run(PYTHON, "-c", "import torch; print(torch.__version__)").strip()
    if "version" in torch and found != torch["version"]:
        sys.exit(f"setup: .venv imports torch {found}, not {torch['version']}")
    say(f"torch {found} in {VENV.name}")


# ---- what pip cannot install ------------------------------------------------


def need_compiler() -> None:
    if not (os.environ.get("CXX") or shutil.which("c++")):
        install_debian("g++", "a C++20 compiler")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        install_debian("python3-dev", "Python's C headers (Python.h)")


def need_venv_module() -> None:
    if importlib.util.find_spec("ensurepip") is None:
        install_debian("python3-venv", "Python's venv module")


def need_gtest() -> None:
    compiler = os.environ.get("CXX", "c++")
    program = "#include <gtest/gtest.h>\nint main() {}\n"
    options = ["-x", "c++", "-", "-o", os.devnull, "-lgtest", "-lgtest_main"]
    found = subprocess.run(
        [compiler, *options], input=program, text=True, capture_output=True
    )
    if found.returncode != 0:
        install_debian("libgtest-dev", "GoogleTest")


def install_debian(package: str, what: str) -> None:
    """Installs a Debian package where we may, else says which one is missing."""
    sudo = [] if os.geteuid() == 0 else ["sudo", "-n"]
    allowed = shutil.which("apt-get") and (
        not sudo
        or shutil.which("sudo")
        and subprocess.run([*sudo, "true"], capture_output=True).returncode == 0
    )
    if not allowed:
        sys.exit(
            f"setup: {what} is missing. On Debian or Ubuntu: "
            f"sudo apt-get install {package}"
        )
    say(f"installing {package} ({what})")
    apt = [*sudo, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq"]
    run(*apt, "update")
    run(*apt, "install", "--yes", "--no-install-recommends", package)


# ---- processes --------------------------------------------------------------


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


def run(*command: object) -> str:
    """A command's output; its failure ends the set-up with what it printed.
    Warnings (torch's of a missing numpy, say) are no part of the output."""
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    if done.returncode != 0:
        said = done.stdout + done.stderr
        sys.exit(f"setup: {' '.join(map(str, command))} failed:\n{said}")
    return done.stdout


def pip(*what: object) -> None:
    # What is never imported need not become bytecode: half of the time.
    run(PYTHON, *"-m pip install --quiet --no-input --no-compile".split(), *what)


if __name__ == "__main__":
    main()
