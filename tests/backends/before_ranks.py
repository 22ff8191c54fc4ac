"""Prepares the fork server of the test ranks, which imports this module last.

Torch reads the entry points of all installed packages each time that a process makes a group, and
when it first compiles. They are read here, once for all ranks, as nothing is installed while tests
run. Objects that exist by now are frozen: a rank's garbage collector skips them, which saves time
and keeps their memory shared.
"""

from __future__ import annotations

import atexit
import gc
import importlib.metadata
from functools import cache

import torch._dynamo

vars(importlib.metadata)["entry_points"] = cache(importlib.metadata.entry_points)
torch._dynamo.list_backends()
gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)  # otherwise Triton's bindings report all of their objects as leaked
