"""Open new connections to the job's key-value store, which torchrun or rank 0 serves.

torch's own connection cannot be used during a collective, because another thread may be blocked on
that connection. If the store does not answer, every operation on the store blocks for ever, even if
a time-out is set. So use a connection only in a separate thread, and never wait for that thread
without a time limit.
"""

import os
import socket
import time
from datetime import timedelta

from torch.distributed import (  # documented, but not in its `__all__`
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

from megatron import launcher


def connect(patience: float = 0.0, opens: bool = False) -> Store:
    """Open a new connection to the job's key-value store and return it.

    Args:
        patience: The seconds during which a failed connection is tried again.
        opens: Whether this process serves the store. If true, this call creates the store.

    Raises:
        ConnectionRefusedError: No process serves the store.
        OSError: The machine of the store cannot be reached.
        RuntimeError: The connection was opened, and then lost.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    until = time.monotonic() + patience
    while not opens:  # torch's own attempts print a page of warnings
        try:
            socket.create_connection((address, port), timeout=5).close()
            break
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)
    store = TCPStore(
        address, port, is_master=opens, timeout=timedelta(seconds=10), wait_for_workers=False
    )
    # torchrun's store survives a restart of the job, so there the key needs the restart count.
    # Other stores end with the job, and there each machine's agent may count differently.
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"] if launcher.launcher_has_store() else "only"
    # Another job may have been given the same port, and then reaches this job's store.
    return PrefixStore(f"failures/{os.environ.get('KERPLE_JOB', '')}/{attempt}", store)
