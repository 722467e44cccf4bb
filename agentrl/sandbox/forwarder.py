"""Connects a port of a sandbox's loopback with a socket of the file system, behind which a server
outside answers: `python forwarder.py SOCKET PORT`.

It goes on in the background when it listens and the socket has answered; else it exits with what is
wrong. It runs in images, whose Python may be old and has nothing but the standard library.
"""

import os
import socket
import sys
import threading

_PIECE_BYTES = 1 << 16


def main(path: str, port: int) -> None:
    """Listen, see whether the server can be reached, and serve until the sandbox ends."""
    listener = socket.create_server(("127.0.0.1", port), backlog=128)
    _connect(path).close()
    # The parent's exit reports that the port is served; the child serves, detached from the command
    # that has started it.
    if os.fork():
        os._exit(0)
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    while True:
        inside, _ = listener.accept()
        try:
            outside = _connect(path)
        except OSError:
            inside.close()
            continue
        for here, there in ((inside, outside), (outside, inside)):
            threading.Thread(target=_copy, args=(here, there), daemon=True).start()


def _connect(path: str) -> socket.socket:
    server = socket.socket(socket.AF_UNIX)
    server.connect(path)
    return server


def _copy(here: socket.socket, there: socket.socket) -> None:
    """Copy one way until it ends; the other way may go on. Sockets close when both have ended."""
    try:
        while True:
            part = here.recv(_PIECE_BYTES)
            if not part:
                break
            there.sendall(part)
        there.shutdown(socket.SHUT_WR)
    except OSError:  # one of them is gone: the other way ends too
        for side in (here, there):
            try:
                side.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
