"""The kernels that run notebooks in tests listen on sockets in files.

A TCP port that was free when it was chosen may be taken before the kernel binds it: ranks of other
tests take hundreds.
"""

import tempfile
from pathlib import Path
from uuid import uuid4

from jupyter_client.manager import AsyncKernelManager, KernelManager


def own_sockets(_: KernelManager) -> str:
    """Give each kernel's sockets a name of their own.

    jupyter_client gives all kernels in one folder the same name.
    """
    return str(Path(tempfile.gettempdir()) / f"kernel-{uuid4().hex}")


KernelManager.transport.default_value = "ipc"
KernelManager._ip_default = AsyncKernelManager._ip_default = own_sockets
