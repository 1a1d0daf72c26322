"""PyTorch's samples of its operators' arguments."""

import sys
import types
import unittest

# They import a package that only PyTorch's own tests need.
sys.modules.setdefault(
    "expecttest", types.ModuleType("expecttest")
).__dict__.setdefault("TestCase", unittest.TestCase)
from torch.testing._internal.common_methods_invocations import (  # noqa: E402, F401
    BinaryUfuncInfo,
    UnaryUfuncInfo,
    op_db,
)
