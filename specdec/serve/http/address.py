"""Take the address of a server, before anything large is imported or read."""

import socket


def listen(host: str, port: int) -> socket.socket:
    """Bind a socket; ValueError if the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends without delay (TCP_NODELAY) only where a socket names its protocol
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except (OSError, OverflowError) as error:
        found.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"host={host} and port={port}: {reason}; give another address") from error
    return found
