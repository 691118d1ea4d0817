"""How many cores there are for this process. Knows no threads and no ranks."""

import psutil


def num_cores() -> int:
    """Cores that this process may use; all of them where the system cannot say which."""
    process = psutil.Process()
    allowed = process.cpu_affinity() if hasattr(process, "cpu_affinity") else None
    return len(allowed or ()) or psutil.cpu_count() or 1
