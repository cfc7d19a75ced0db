"""`treetrain doctor`: versions, devices and kernels, what is missing, and the command that installs it."""

import platform
import sys
import warnings
from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, TypedDict

from treetrain import __version__
from treetrain.cli.common import Parser, console, pairs, print_json, table
from treetrain.core.errors import shortened

if TYPE_CHECKING:
    import torch
    from packaging.requirements import Requirement

SUMMARY = (
    "Versions, devices and kernels of this environment. Compares each kernel with its reference on a small tree. Says "
    "what is missing and the command that installs it. Exit code 1 if something installed cannot be used."
)
UNUSABLE = 1
HEADS, KV_HEADS, HEAD_SIZE = 8, 2, 128
"""The layer whose attention is checked."""


class Package(TypedDict):
    """A package that treetrain's metadata names."""

    name: str
    needed: str
    """Its versions."""
    installed: str | None
    uses: list[str]
    """The extras that need it; without any, every use needs it."""


class Device(TypedDict):
    """A device, and the kernels that run on it."""

    device: str
    name: str
    memory_bytes: int
    kernels: dict[str, str]
    """"exact", or why one does not run."""


class Report(TypedDict):
    """The findings that the command prints."""

    treetrain: str
    python: str
    platform: str
    packages: list[Package]
    uses: dict[str, list[str]]
    """The packages that each use still lacks."""
    devices: list[Device]
    faults: list[str]


def make_parser() -> Parser:
    """The options of the command."""
    parser = Parser("doctor", SUMMARY)
    parser.json_option()
    return parser


def run(argv: Sequence[str]) -> int:
    """Examine the environment and print what was found; 1 if something installed cannot be used."""
    options = make_parser().parse_args(argv)
    packages, faults = find_packages()
    devices, more_faults = find_devices()
    faults += more_faults
    report: Report = {
        "treetrain": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "uses": uses_of(packages),
        "devices": devices,
        "faults": faults,
    }
    if options.json:
        print_json(report)
    else:
        _show(report)
    return UNUSABLE if faults else 0


# ---- Packages


def find_packages() -> tuple[list[Package], list[str]]:
    """Return the packages that treetrain's metadata names, and what is wrong with those that are installed."""
    from packaging.requirements import Requirement

    try:
        own = metadata.metadata("treetrain")
    except metadata.PackageNotFoundError:
        return [], ["treetrain itself is not installed, so what it needs is unknown: pip install -e . in its folder"]
    faults = []
    if own["Version"] != __version__:
        faults.append(
            f"the code is treetrain {__version__}, what is installed says {own['Version']}: run pip install -e . again"
        )
    if (python := own["Requires-Python"]) and not _within(python, platform.python_version()):
        faults.append(f"Python {platform.python_version()} runs, treetrain needs {python}")
    requirements = [Requirement(text) for text in own.get_all("Requires-Dist") or ()]
    packages: dict[str, Package] = {}
    for use in (None, *(own.get_all("Provides-Extra") or ())):
        for needed in _needed(requirements, use):
            if use is not None and needed.name in packages and not packages[needed.name]["uses"]:
                continue  # every use needs it
            installed = _installed(needed.name)
            fresh: Package = {"name": needed.name, "needed": str(needed.specifier), "installed": installed, "uses": []}
            package = packages.setdefault(needed.name, fresh)
            if use is not None:
                package["uses"].append(use)
    for package in packages.values():
        if package["installed"] is not None and not _within(package["needed"], package["installed"]):
            wanted = f"{package['name']}{package['needed']}"
            faults.append(f"{package['name']} {package['installed']} is installed: pip install '{wanted}'")
    return list(packages.values()), faults


def _needed(requirements: "Iterable[Requirement]", use: str | None) -> "list[Requirement]":
    """The requirements of one use here, those of the uses that it includes too (`treetrain[train]`)."""
    found = []
    for requirement in requirements:
        marker = requirement.marker
        by_every_use = marker is None or marker.evaluate({"extra": ""})
        if by_every_use != (use is None) or (marker is not None and not marker.evaluate({"extra": use or ""})):
            continue
        if requirement.name == "treetrain":
            for included in sorted(requirement.extras):
                found += _needed(requirements, included)
        else:
            found.append(requirement)
    return found


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _within(wanted: str, version: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(wanted).contains(version, prereleases=True)


def uses_of(packages: Sequence[Package]) -> dict[str, list[str]]:
    """The packages that each use (extra) still lacks."""
    names = dict.fromkeys(use for package in packages for use in package["uses"])
    return {
        use: [package["name"] for package in packages if use in package["uses"] and package["installed"] is None]
        for use in names
    }


# ---- Devices


def find_devices() -> tuple[list[Device], list[str]]:
    """Return the devices with the kernels that run on each, and what is wrong with torch or with a device.

    A machine without a GPU has one more entry, whose kernels say what would be checked there.
    """
    if _installed("torch") is None:
        return [], []
    try:
        import psutil
        import torch

        import treetrain.core.head.lm_head  # noqa: F401  (whatever else a broken environment cannot import)
    except Exception as error:  # a package that does not load: wrong builds, missing libraries
        return [], [f"torch and what the engine needs cannot be imported: {type(error).__name__}: {shortened(error)}"]
    cores = f"{platform.machine()}, {psutil.cpu_count()} cores, {torch.get_num_threads()} threads"
    memory = psutil.virtual_memory().total
    found: list[Device] = [
        {"device": "cpu", "name": cores, "memory_bytes": memory, "kernels": check_kernels(torch.device("cpu"))}
    ]
    for number in range(torch.cuda.device_count()):
        device, facts = torch.device("cuda", number), torch.cuda.get_device_properties(number)
        name = f"{facts.name}, sm_{facts.major}{facts.minor}, CUDA {torch.version.cuda}"
        kernels = check_kernels(device)
        found.append({"device": str(device), "name": name, "memory_bytes": facts.total_memory, "kernels": kernels})
    faults = [
        f"{device['device']}: no attention kernel is exact here"
        for device in found
        if "exact" not in device["kernels"].values()
    ]
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = f"torch is built for CUDA {built} and sees no GPU" if built else "none; this torch is built without CUDA"
        found.append({"device": "cuda", "name": why, "memory_bytes": 0, "kernels": _kernels_of_a_gpu()})
    return found, faults


def check_kernels(device: "torch.device") -> dict[str, str]:
    """Compare each kernel of a device with its reference: "exact", or why it must not run.

    On a GPU the layer is in bfloat16, on a CPU in float32. These are the checks that a GPU runs before a kernel's first
    use; on a CPU they run only here.
    """
    import torch

    from treetrain.core.attention.schedule import PLAIN_ATTENTION
    from treetrain.core.head.lm_head import PlainChunk
    from treetrain.kernels.attention_check import failure_of_backend
    from treetrain.kernels.backends import BACKENDS, ORDER, why_not
    from treetrain.kernels.lm_head import TritonChunk, self_checked

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    query = torch.empty(1, HEADS, HEAD_SIZE, dtype=dtype, device=device)
    key = torch.empty(1, KV_HEADS, HEAD_SIZE, dtype=dtype, device=device)
    kernels = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a failure is reported as a value
        for name in ORDER[device.type]:
            failure = why_not(name, device)
            if failure is None:
                given = name, BACKENDS[name], query, key, key, PLAIN_ATTENTION
                failure = failure_of_backend(*given, sinks=False, below_path=False)
            kernels[name] = failure or "exact"
        if device.type == "cuda":
            failure = why_not("triton", device)
            if failure is None and self_checked(TritonChunk, dtype, device) is PlainChunk:
                failure = "differs from PyTorch's operations, which run instead"
            kernels["LM head"] = failure or "exact"
    return kernels


def _kernels_of_a_gpu() -> dict[str, str]:
    from treetrain.kernels.backends import ORDER

    return dict.fromkeys((*ORDER["cuda"], "LM head"), "compared with its reference before its first use")


# ---- Printing


def _show(report: Report) -> None:
    out = console()
    system = f"{report['python']} ({sys.executable}), {report['platform']}"
    out.print(pairs([("treetrain", report["treetrain"]), ("python", system)]), "")
    rows = [
        (package["name"], package["installed"] or "–", package["needed"] or "any", ", ".join(package["uses"]) or "all")
        for package in report["packages"]
    ]
    out.print(table(("package", "installed", "needed", "for"), rows), "")
    for device in report["devices"]:
        size = f", {device['memory_bytes'] / 2**30:.1f} GiB" if device["memory_bytes"] else ""
        out.print(pairs([(device["device"], f"{device['name']}{size}")]))
        out.print(pairs((f"  {name}", verdict) for name, verdict in device["kernels"].items()), "")
    if not report["devices"]:
        out.print(pairs([("devices", "unknown without torch")]), "")
    out.print(
        pairs(
            (use, f"lacks {', '.join(lacks)}: pip install 'treetrain[{use}]'" if lacks else "ready")
            for use, lacks in report["uses"].items()
        )
    )
    if report["faults"]:
        out.print("", pairs(("wrong", fault) for fault in report["faults"]))
