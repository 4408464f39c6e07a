"""What must be settled before any test module is imported."""

import os
import pathlib

# Triton reads this when it and the kernel files are first imported, which a test of any package
# may do. Without a GPU its interpreter is the only way to run a kernel; tests that compile or run
# on a GPU do so in a process of their own.
if not any(pathlib.Path(node).exists() for node in ("/dev/kfd", "/dev/nvidiactl")):
    os.environ["TRITON_INTERPRET"] = "1"
