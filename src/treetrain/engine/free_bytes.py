"""What a device has free, for a budget that nobody gave."""

import re
from pathlib import Path

import torch

CPU_SHARE, CUDA_SHARE = 0.8, 0.9
"""How much of it a plan may use: the prediction errs by up to a tenth, and a CPU's memory is shared with others."""
_CGROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int:
    """Bytes that a plan may use now: the device's free memory times `CPU_SHARE` or `CUDA_SHARE`.

    CPU: what the kernel calls available, or what the control group leaves where that is less. CUDA: free memory, and
    what PyTorch's allocator holds without using it.

    Raises:
        OSError: a CPU whose system does not tell (no /proc/meminfo); give a budget instead.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(CUDA_SHARE * (free + held))
    available = _available()
    for group in _groups():
        left = _left(group)
        available = available if left is None else min(available, left)
    return int(CPU_SHARE * max(available, 0))


def _available(path: Path = Path("/proc/meminfo")) -> int:
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", path.read_text(), re.MULTILINE)
    except OSError:
        found = None
    if found is None:
        raise OSError(f"{path} does not tell how much memory is available here; give a budget")
    return int(found.group(1)) * 1024


def _groups() -> list[Path]:
    """Folders of the control groups that this process is in, innermost first (version 2, then version 1)."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers in ("", "memory"):
            base = _CGROUP / controllers
            inner = base / name.lstrip("/")
            folders += [inner, *[parent for parent in inner.parents if parent.is_relative_to(base)]]
    return folders


def _left(group: Path) -> int | None:
    """Limit less use of a control group, file cache not counted as use; None where it has no limit."""
    for limit_name, use_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit, use = (group / limit_name).read_text().strip(), int((group / use_name).read_text())
            cache = re.search(rf"^{cache_name} (\d+)", (group / "memory.stat").read_text(), re.MULTILINE)
        except (OSError, ValueError):
            continue
        if not limit.isdigit() or int(limit) >= 1 << 60:  # version 1 writes "none" as a huge number
            return None
        return int(limit) - use + (int(cache.group(1)) if cache else 0)
    return None
