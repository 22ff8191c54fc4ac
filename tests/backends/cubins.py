"""What kernels for NVIDIA GPUs take that are compiled where there is none."""

from __future__ import annotations

import re
import subprocess
import tempfile
from typing import Any


def taken_by(module: Any) -> dict[str, Any]:
    """What a compiled kernel takes and uses."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(module.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        report = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    usage = {name: int(x) for name, x in re.findall(r"(REG|STACK|LOCAL):(\d+)", report)}
    return {
        "shared": module.metadata.shared, "registers": usage["REG"],
        "stack": usage["STACK"] + usage["LOCAL"],
        "ptx": "wgmma" if "wgmma" in module.asm["ptx"] else "mma",
        "copies": "cp.async.bulk.tensor" in module.asm["ptx"],
        "roles": "setmaxnreg" in module.asm["ptx"],
    }  # fmt: skip
