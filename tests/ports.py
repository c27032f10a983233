"""Where ranks without MPI meet: a port of this host that no other process takes meanwhile."""

import random
import socket


def free_port() -> int:
    """With the next one free as well, for a restart. It is none of those that systems give to whoever asks for any."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as one, socket.socket() as other:
            try:
                one.bind(("127.0.0.1", port))
                other.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
        return port
