"""An attack on ranks without MPI: a stranger claims to be rank 1 before rank 1 comes, and sends a pickle.

    python tests/ext/gloo/stranger.py MARK [SECRET]

Starts rank 0 of two by hand, with or without FSDPX_SECRET, and joins its store and its Gloo as rank 1 by PyTorch alone.
Exits with 1 if the pickle was run, which makes the file MARK."""

import json
import os
import pickle
import platform
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

VICTIM = "import fsdpx; comm = fsdpx.init(); print(comm.all_gather_object('hello'))"
SECONDS, STARTS = 8, 120
"""That rank 0 waits for rank 1, and within which rank 0 itself has started, also on a busy machine."""


class Bad:
    def __reduce__(self) -> object:
        return os.mkdir, (sys.argv[1],)


def claim(port: int, pickled: bytes) -> None:
    """Everything that a rank does, as far as one can without the secret: then a pickle where an object is awaited."""
    store = dist.PrefixStore("fsdpx", dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=STARTS)))
    entry = json.dumps([1, 2, os.getpid(), platform.node(), None, "stranger"])
    store.set("came/1", f"{'00' * 32} {entry}" if len(sys.argv) > 2 else f" {entry}")
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("1", store), 1, 2, timedelta(seconds=SECONDS))
    size = torch.tensor([len(pickled)])
    gloo._allgather_base(torch.zeros(2, dtype=torch.int64).view(torch.uint8), size.view(torch.uint8)).wait()
    data = torch.frombuffer(bytearray(pickled), dtype=torch.uint8)
    while True:
        for root in (0, 1):
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = root, 0
            gloo.broadcast([data.clone()], options).wait()


def main() -> int:
    mark = Path(sys.argv[1])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "FSDPX_TIMEOUT": "20",
           "FSDPX_START_TIMEOUT": str(SECONDS), "FSDPX_NODE": "0"}  # fmt: skip
    if len(sys.argv) > 2:
        own["FSDPX_SECRET"] = sys.argv[2]
    victim = subprocess.Popen([sys.executable, "-c", VICTIM], env={**os.environ, **own}, stderr=subprocess.PIPE)
    threading.Thread(target=claim, args=(port, pickle.dumps(Bad())), daemon=True).start()
    print(victim.communicate()[1].decode(), end="", file=sys.stderr, flush=True)
    os._exit(int(mark.exists()))  # the stranger's thread may wait for ever


if __name__ == "__main__":
    main()
